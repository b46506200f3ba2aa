# SPDX-License-Identifier: Apache-2.0
"""What a decode call takes and returns: one explicit pytree, donated through every step."""

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.paging.page_map import PageMap
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.paged_attention.layout import KVLayout

MAX_STOP_IDS = 8


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Static shapes of an engine: how blocks and KV lie in frames, and how many of them a row has."""

    gate_up: BlockLayout
    down: BlockLayout
    kv: KVLayout
    num_layers: int
    max_num_seqs: int
    max_model_len: int

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_model_len // self.kv.block_tokens)

    @property
    def frames_per_block(self) -> int:
        """Frames of one KV block: all layers, K and V."""
        return self.num_layers * self.kv.layer_frames

    @property
    def frame_bytes(self) -> int:
        return 4 * self.kv.frame_words

    @property
    def block_bytes(self) -> int:
        """B_KV of eq. 7."""
        return self.frames_per_block * self.frame_bytes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeState:
    """All that a step reads and writes besides the dense weights.

    Attributes:
      arena_AW: uint32 frames: weight pages and KV blocks.
      page_map: bitwidths and frame lists of the routed experts.
      block_tables_BGLF: int32, frames of each row's KV blocks, per layer; an entry of A means "no block".
      lengths_B: int32, tokens of each row whose KV is in the cache.
      last_tokens_B: int32, the token that each row's next step reads.
      remaining_B: int32, tokens each row may still produce; 0 for a row that is not decoding.
      temperature_B: float32, 0 for greedy.
      seed_B: uint32, each row's sampling seed.
      stop_ids_BS: int32, tokens that end a row, padded with -1.
      geometry: static.
    """

    arena_AW: jax.Array
    page_map: PageMap
    block_tables_BGLF: jax.Array
    lengths_B: jax.Array
    last_tokens_B: jax.Array
    remaining_B: jax.Array
    temperature_B: jax.Array
    seed_B: jax.Array
    stop_ids_BS: jax.Array
    geometry: Geometry = field(metadata={"static": True})

    def replace(self, **changes) -> "DecodeState":
        return dataclasses.replace(self, **changes)


def init_state(geometry: Geometry, arena_AW: jax.Array, page_map: PageMap) -> DecodeState:
    """Returns a state with every row empty."""
    rows = geometry.max_num_seqs
    shape = (rows, geometry.blocks_per_row, geometry.num_layers, geometry.kv.layer_frames)
    return DecodeState(
        arena_AW=arena_AW,
        page_map=page_map,
        block_tables_BGLF=jnp.full(shape, arena_AW.shape[0], jnp.int32),
        lengths_B=jnp.zeros(rows, jnp.int32),
        last_tokens_B=jnp.zeros(rows, jnp.int32),
        remaining_B=jnp.zeros(rows, jnp.int32),
        temperature_B=jnp.zeros(rows, jnp.float32),
        seed_B=jnp.zeros(rows, jnp.uint32),
        stop_ids_BS=jnp.full((rows, MAX_STOP_IDS), -1, jnp.int32),
        geometry=geometry,
    )


def make_geometry(
    config: ModelConfig,
    layouts: tuple[BlockLayout, BlockLayout],
    kv_dtype: str,
    max_num_seqs: int,
    max_model_len: int,
) -> Geometry:
    """Returns the static shapes of an engine that serves ``config`` from pages of ``layouts``."""
    gate_up, down = layouts
    kv = KVLayout(
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_dtype,
        frame_words=gate_up.frame_words,
    )
    return Geometry(
        gate_up=gate_up,
        down=down,
        kv=kv,
        num_layers=config.num_layers,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
