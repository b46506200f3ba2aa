# SPDX-License-Identifier: Apache-2.0
"""The memory ledger: everything that lives on the device is an entry, and the sum never exceeds the budget."""

from dataclasses import dataclass

import jax

from pagedweight_jax.errors import UserError
from pagedweight_jax.serving.state import Geometry
from pagedweight_jax.units import format_size


def tree_bytes(tree) -> int:
    """Bytes of all arrays (or abstract arrays) of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_memory_bytes(device: jax.Device) -> int | None:
    """Returns the device memory that JAX may take, None where it does not say: a CPU's, or some allocator's."""
    return (device.memory_stats() or {}).get("bytes_limit") or None


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What the device holds, in bytes. ``arena`` is what the rest of the budget leaves, in whole frames.

    Attributes:
      budget_bytes: the user's number.
      dense_bytes: weights that are not paged.
      table_bytes: page tables, block tables and sampling state, twice: a step's new tables exist beside the old ones.
      temporary_bytes: the largest compiled program's own temporaries and results.
      result_bytes: results of calls that wait for the host to read them, at most.
      staging_bytes: pages on their way from the host that have not landed yet, at most.
      arena_bytes: weight pages, KV blocks, frames being released and free frames.
    """

    budget_bytes: int
    dense_bytes: int
    table_bytes: int
    temporary_bytes: int
    result_bytes: int
    staging_bytes: int
    arena_bytes: int

    def __post_init__(self):
        if self.total_bytes > self.budget_bytes:
            raise ValueError(f"ledger of {self.total_bytes} bytes exceeds its budget of {self.budget_bytes} bytes")

    @property
    def total_bytes(self) -> int:
        fixed_bytes = self.dense_bytes + self.table_bytes + self.temporary_bytes + self.result_bytes
        return fixed_bytes + self.staging_bytes + self.arena_bytes

    def rows(self) -> list[tuple[str, int]]:
        """Returns (what, bytes) for the start-up table."""
        return [
            ("dense weights", self.dense_bytes),
            ("tables and sampling state", self.table_bytes),
            ("compiled programs' temporaries", self.temporary_bytes),
            ("results to be read, at most", self.result_bytes),
            ("pages in transfer, at most", self.staging_bytes),
            ("arena: weight pages and KV cache", self.arena_bytes),
            ("not used", self.budget_bytes - self.total_bytes),
        ]


def plan_ledger(
    *,
    budget_bytes: int,
    dense_bytes: int,
    table_bytes: int,
    temporary_bytes: int,
    result_bytes: int,
    staging_bytes: int,
    floor_bits: str,
    floor_bytes: int,
    geometry: Geometry,
) -> Ledger:
    """Returns the ledger whose arena takes what the other entries leave.

    Args:
      budget_bytes .. staging_bytes: see ``Ledger``.
      floor_bits, floor_bytes: the bitwidths to which the routed experts can give way, and their pages' bytes at them.
      geometry: the engine's shapes; the arena must also hold the KV cache of one request of ``max_model_len`` tokens.

    Raises:
      UserError: the budget does not hold the model at the floor and that one request, with the numbers.
    """
    fixed_bytes = dense_bytes + table_bytes + temporary_bytes + result_bytes + staging_bytes
    left_bytes = budget_bytes - fixed_bytes
    block_bytes, block_tokens = geometry.block_bytes, geometry.kv.block_tokens
    one_request_bytes = geometry.blocks_per_row * block_bytes
    if left_bytes < floor_bytes + one_request_bytes:
        kv_tokens = max(0, (left_bytes - floor_bytes) // block_bytes) * block_tokens
        raise UserError(
            f"a budget of {format_size(budget_bytes)} is too small: {format_size(fixed_bytes)} for dense weights, "
            f"tables and temporaries, {format_size(floor_bytes)} for the experts at {floor_bits} bits, the least, and "
            f"{format_size(one_request_bytes)} for one request of {geometry.max_model_len} tokens make "
            f"{format_size(fixed_bytes + floor_bytes + one_request_bytes)}; the longest context that fits is "
            f"{kv_tokens} tokens"
        )
    return Ledger(
        budget_bytes=budget_bytes,
        dense_bytes=dense_bytes,
        table_bytes=table_bytes,
        temporary_bytes=temporary_bytes,
        result_bytes=result_bytes,
        staging_bytes=staging_bytes,
        arena_bytes=left_bytes // geometry.frame_bytes * geometry.frame_bytes,
    )
