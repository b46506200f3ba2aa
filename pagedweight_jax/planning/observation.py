# SPDX-License-Identifier: Apache-2.0
"""What the engine saw up to a boundary: O_t of Algorithm 1."""

from dataclasses import dataclass

from pagedweight_jax.planning.signals import RequestSignals


@dataclass(frozen=True, kw_only=True)
class KVPressure:
    """The state of the KV cache's share of the arena.

    Attributes:
      free_blocks: KV blocks that could be handed out now.
      pending_blocks: of those, blocks that growth already promised will take.
      releasing_blocks: blocks' worth of bytes that are released but cannot be handed out yet.
      block_bytes: B_KV, device bytes of one KV block.
    """

    free_blocks: int
    pending_blocks: int
    releasing_blocks: int
    block_bytes: int


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Everything the planner knows of the run so far.

    Attributes:
      boundary: number of the safe boundary, counted from the start of serving.
      kv: pressure of the KV cache.
      requests: what the tokens of all running requests showed; nothing yet, of those that are new.
      kv_blocks: KV blocks that each of them holds, in the same order.
    """

    boundary: int
    kv: KVPressure
    requests: tuple[RequestSignals, ...] = ()
    kv_blocks: tuple[int, ...] = ()

    def __post_init__(self):
        if len(self.requests) != len(self.kv_blocks):
            raise ValueError(f"signals of {len(self.requests)} requests, KV blocks of {len(self.kv_blocks)}")
