# SPDX-License-Identifier: Apache-2.0
"""Paged attention on NVIDIA GPUs: the Pallas-Triton kernels under the names of ``reference.py``, cut as measured."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.layout import SPLIT_TOKENS, KVLayout, require_powers_of_two
from pallas_kernels.paged_attention.pallas_triton_attend import Config, attend, combine
from pallas_kernels.paged_attention.pallas_triton_decode import DecodeConfig, attend_decode
from pallas_kernels.paged_attention.pallas_triton_parts import MIN_ROWS, operand_dtype, split_count
from pallas_kernels.paged_attention.pallas_triton_write import rotate_and_write_kv, write_kv

__all__ = ["decode_attention", "paged_attention", "rotate_and_write_kv", "write_kv"]

FULL_DEVICE = 132
"""Programs that keep an H200 busy."""

PREFILL_SPLIT_TOKENS = 1024
"""Keys of a split where a chunk has fewer programs than that."""

TILE_BYTES = 2**14
"""Of keys that a program of decoding takes at a time, at most. Rows are few while each multiprocessor has no more than
two such tiles to read."""

WHOLE_CONTEXT = 2**30
"""More tokens than any context has."""


def decode_config(layout: KVLayout, num_rows: int, num_blocks: int, window: int, operand) -> DecodeConfig:
    """Returns how one query per row is cut; ``benchmarks/kernels_attention.py --sweep`` measured the choices.

    Only what leaves the order of sums alone depends on the number of rows.
    """
    itemsize = jnp.dtype(operand).itemsize
    tile_tokens = max(64 // itemsize, min(64, TILE_BYTES // (layout.head_dim * itemsize)))
    programs = num_rows * layout.num_kv_heads * split_count(layout, num_blocks, 1, SPLIT_TOKENS, window)
    few = programs * tile_tokens * layout.head_dim * itemsize <= 2 * FULL_DEVICE * TILE_BYTES
    return DecodeConfig(
        tile_tokens=tile_tokens,
        tiles_in_flight=2 if few else 1,
        early_table=few and layout.head_dim <= 128 and itemsize == 2,
        num_warps=4 if itemsize == 2 else 8,
        max_registers=128 if not few and layout.head_dim <= 256 and itemsize == 2 else 255,
    )


def prefill_config(layout: KVLayout, group: int, num_tokens: int, operand) -> Config:
    """Returns how a chunk of queries is cut: long chunks fill the device by themselves, short ones by splits, too."""
    if operand == jnp.float32:  # no tensor cores: more rows only spill
        rows, tile_tokens, num_warps, num_stages = MIN_ROWS, 16, 4, 2
    elif layout.head_dim <= 128:
        rows, tile_tokens, num_warps, num_stages = 64, 64, 4, 3
    elif layout.head_dim <= 256:
        rows, tile_tokens, num_warps, num_stages = 128, 64, 8, 3
    else:
        rows, tile_tokens, num_warps, num_stages = 64, 16, 8, 3
    rows = max(rows, pl.next_power_of_2(group))
    programs = layout.num_kv_heads * pl.cdiv(num_tokens, rows // pl.next_power_of_2(group))
    split_tokens = WHOLE_CONTEXT if programs >= FULL_DEVICE else PREFILL_SPLIT_TOKENS
    return Config(
        rows=rows, tile_tokens=tile_tokens, split_tokens=split_tokens, num_warps=num_warps, num_stages=num_stages
    )


def decode_attention(
    arena_AW: jax.Array,
    q_BHM: jax.Array,
    k_BJM: jax.Array,
    v_BJM: jax.Array,
    cos_BR: jax.Array,
    sin_BR: jax.Array,
    positions_B: jax.Array,
    table_BGF: jax.Array,
    layout: KVLayout,
    scale: float,
    window: int,
    soft_cap: float,
    dtype,
    *,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.paged_attention.api.decode_attention``."""
    require_powers_of_two(layout)
    config = config or decode_config(
        layout, len(q_BHM), table_BGF.shape[1], window, operand_dtype(q_BHM.dtype, layout)
    )
    arena_AW, *splits = attend_decode(
        arena_AW,
        q_BHM,
        k_BJM,
        v_BJM,
        cos_BR,
        sin_BR,
        positions_B,
        table_BGF,
        layout,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        config=config,
        interpret=interpret,
    )
    out_BTHM = combine(
        *splits,
        positions_B[:, None],
        split_tokens=config.split_tokens,
        window=window,
        dtype=dtype,
        interpret=interpret,
    )
    return arena_AW, out_BTHM[:, 0]


def paged_attention(
    arena_AW: jax.Array,
    q_BTHM: jax.Array,
    positions_BT: jax.Array,
    table_BGF: jax.Array,
    layout: KVLayout,
    scale: float,
    window: int,
    soft_cap: float,
    dtype,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Args and result: see ``pallas_kernels.paged_attention.api.paged_attention``."""
    require_powers_of_two(layout)
    num_tokens, num_heads = q_BTHM.shape[1:3]
    if config is None:
        group, operand = num_heads // layout.num_kv_heads, operand_dtype(q_BTHM.dtype, layout)
        config = prefill_config(layout, group, num_tokens, operand)
    out_BTPHM, peak_BTPH, total_BTPH = attend(
        arena_AW,
        q_BTHM,
        positions_BT,
        table_BGF,
        layout,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        dtype=dtype,
        config=config,
        interpret=interpret,
    )
    if out_BTPHM.shape[2] == 1:
        return out_BTPHM[:, :, 0]
    return combine(
        out_BTPHM,
        peak_BTPH,
        total_BTPH,
        positions_BT,
        split_tokens=config.split_tokens,
        window=window,
        dtype=dtype,
        interpret=interpret,
    )
