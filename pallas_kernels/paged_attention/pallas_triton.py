# SPDX-License-Identifier: Apache-2.0
"""Paged attention as Pallas-Triton kernels that read and write KV blocks in the arena.

One program takes a tile of query rows of one KV head, all of that head's queries for a few tokens, and one split of the
keys; it runs an online softmax over the split's key tiles on tensor cores, K and V loaded through the block table
straight into the pipeline's buffers. A second kernel adds the splits of each row in their order. Splits and tiles lie
at absolute positions, and a tile that a row does not see leaves its sums exactly as they were: a row's result depends
on no other row. A program without a visible key returns at once, so rows that are not in use cost nothing.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load, store
from pallas_kernels.paged_attention.layout import SPLIT_TOKENS, KVLayout

LOG2_E = 1.4426950408889634

MIN_ROWS = 16
"""Rows of a matrix instruction: fewer queries are padded."""

COMBINE_SPLITS = 16
"""Splits that the combining kernel reads at once."""

FULL_DEVICE = 132
"""Programs that keep an H200 busy."""

PREFILL_SPLIT_TOKENS = 1024
"""Keys of a split where a chunk has fewer programs than that."""

WHOLE_CONTEXT = FAR = 2**30
"""More tokens, and a later position, than any context has."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How attention is cut into programs.

    Attributes:
      rows: query rows of a program (tokens times the KV head's padded query heads), a power of two, at least 16.
      tile_tokens: keys of a step, a power of two, at least 16.
      split_tokens: keys of a program, a power of two. This and ``tile_tokens`` decide the order of sums.
      num_warps, num_stages: a power of two, and the depth of the pipeline of loads.
    """

    rows: int
    tile_tokens: int
    split_tokens: int
    num_warps: int = 4
    num_stages: int = 3


def _divmod(position, size: int):
    """Returns (position // size, position % size) for a power of two and a position >= 0."""
    return position >> (size.bit_length() - 1), position & (size - 1)


def _dot(x, y, contract: tuple[int, int]):
    """Returns the float32 product of two tiles; exact products, also of float32 operands."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = ((contract[:1], contract[1:]), ((), ()))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _shift(peak):
    """Returns what to subtract before ``exp2``: the peak, or 0 where nothing was seen."""
    return jnp.where(peak == -jnp.inf, 0.0, peak)


def operand_dtype(q_dtype, layout: KVLayout):
    """Returns what tiles are multiplied in: the dtype of queries and cache where they agree, else float32."""
    return jnp.dtype(q_dtype) if q_dtype == layout.dtype else jnp.dtype("float32")


def split_count(layout: KVLayout, num_blocks: int, queries: int, split_tokens: int, window: int) -> int:
    """Returns P, the most splits that ``queries`` neighbouring queries see."""
    num_splits = pl.cdiv(num_blocks * layout.block_tokens, split_tokens)
    return min(num_splits, pl.cdiv(window + queries - 1, split_tokens) + 1) if window else num_splits


def attend(
    arena_AW: jax.Array,
    q_BTHM: jax.Array,
    positions_BT: jax.Array,
    table_BGF: jax.Array,
    layout: KVLayout,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    dtype,
    config: Config,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (out_BTPHM, peak_BTPH, total_BTPH): each split's attention, its largest score, its sum of 2^score.

    Scores are in units of log 2. Split s of a row is entry s % P; what a row does not see is not written.
    """
    num_rows, num_tokens, num_heads, head_dim = q_BTHM.shape
    num_kv_heads, block_tokens = layout.num_kv_heads, layout.block_tokens
    group = num_heads // num_kv_heads
    padded_group = pl.next_power_of_2(group)
    queries = config.rows // padded_group
    num_tiles = pl.cdiv(num_tokens, queries)
    tile, split_tokens = config.tile_tokens, config.split_tokens
    num_splits = split_count(layout, table_BGF.shape[1], queries, split_tokens, window)
    operand = operand_dtype(q_BTHM.dtype, layout)

    def kernel(arena, q, positions, table, out, peak_ref, total_ref):
        j, part, b = pl.program_id(0), pl.program_id(1), pl.program_id(3)
        token_R, head_R = _divmod(jnp.arange(config.rows, dtype=jnp.int32), padded_group)
        token_R += (num_tiles - 1 - pl.program_id(2)) * queries  # the longest first
        there_R = (token_R < num_tokens) & (head_R < group)
        head_R += j * group
        position_R = load(positions.at[b, token_R], mask=there_R, other=-1)
        last, first = jnp.max(position_R), jnp.int32(0)
        if window:
            first_R = jnp.where(position_R < 0, FAR, jnp.maximum(position_R - window + 1, 0))
            first = jnp.min(first_R)
        split = jnp.int32(0)
        if num_splits > 1:
            first_split, _ = _divmod(first, split_tokens)
            split = first_split + (part + num_splits - first_split % num_splits) % num_splits
        start = split * split_tokens
        frame, head = _divmod(j, layout.heads_per_frame)
        column_1M = jnp.arange(head_dim, dtype=jnp.int32)[None]

        def add_tiles():
            there_RM = jnp.broadcast_to(there_R[:, None], (config.rows, head_dim))
            q_RM = load(q.at[b, token_R[:, None], head_R[:, None], column_1M], mask=there_RM, other=0.0).astype(operand)

            def read(tokens_S, inside_S, half):
                block_S, slot_S = _divmod(tokens_S, block_tokens)
                frame_S = load(table.at[b, block_S, half * layout.half_frames + frame], mask=inside_S, other=0)
                offset_SM = (head * block_tokens + slot_S)[:, None] * head_dim + column_1M
                inside_SM = jnp.broadcast_to(inside_S[:, None], offset_SM.shape)
                return load(arena.at[frame_S[:, None], offset_SM], mask=inside_SM, other=0.0).astype(operand)

            def add_tile(i, carry):
                peak_R, total_R, out_RM = carry
                key_S = start + i * tile + jnp.arange(tile, dtype=jnp.int32)
                inside_S = key_S <= last
                seen_RS = key_S[None] <= position_R[:, None]
                if window:
                    inside_S &= key_S >= first
                    seen_RS &= key_S[None] > position_R[:, None] - window
                score_RS = _dot(q_RM, read(key_S, inside_S, 0), (1, 1))
                if soft_cap:
                    score_RS = soft_cap * LOG2_E * jnp.tanh(score_RS * (scale / soft_cap))
                else:
                    score_RS *= scale * LOG2_E
                score_RS = jnp.where(seen_RS, score_RS, -jnp.inf)
                new_peak_R = jnp.maximum(peak_R, jnp.max(score_RS, axis=1))
                shift_R = _shift(new_peak_R)
                p_RS = jnp.exp2(score_RS - shift_R[:, None])
                keep_R = jnp.exp2(peak_R - shift_R)
                added_RM = _dot(p_RS.astype(operand), read(key_S, inside_S, 1), (1, 0))
                return new_peak_R, total_R * keep_R + jnp.sum(p_RS, axis=1), out_RM * keep_R[:, None] + added_RM

            carry = (
                jnp.full(config.rows, -jnp.inf, jnp.float32),
                jnp.zeros(config.rows, jnp.float32),
                jnp.zeros((config.rows, head_dim), jnp.float32),
            )
            first_tile, _ = _divmod(jnp.maximum(first - start, 0), tile)
            last_tile, _ = _divmod(jnp.minimum(last - start, split_tokens - 1), tile)
            peak_R, total_R, out_RM = lax.fori_loop(first_tile, last_tile + 1, add_tile, carry)
            out_RM = out_RM / jnp.where(total_R == 0.0, 1.0, total_R)[:, None]
            slot = split % num_splits
            at_R1 = (b, token_R[:, None], slot, head_R[:, None])
            store(out.at[(*at_R1, column_1M)], out_RM.astype(out.dtype), mask=there_RM)
            store(peak_ref.at[b, token_R, slot, head_R], peak_R, mask=there_R)
            store(total_ref.at[b, token_R, slot, head_R], total_R, mask=there_R)

        if num_splits == 1:  # the result itself: zeros, too, must be written
            add_tiles()
        else:
            pl.when(start <= last)(add_tiles)

    shape = (num_rows, num_tokens, num_splits, num_heads)
    out_shape = jax.ShapeDtypeStruct((*shape, head_dim), dtype if num_splits == 1 else jnp.float32)
    scalars = jax.ShapeDtypeStruct(shape, jnp.float32)
    return pl.pallas_call(
        kernel,
        grid=(num_kv_heads, num_splits, num_tiles, num_rows),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 4,
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 3,
        out_shape=(out_shape, scalars, scalars),
        compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="attend",
    )(cached_values(arena_AW, layout), q_BTHM, positions_BT, table_BGF)


def cached_values(arena_AW: jax.Array, layout: KVLayout) -> jax.Array:
    """Returns the arena as values of the cache's dtype, [A, values of a frame]: a view, no copy."""
    return lax.bitcast_convert_type(arena_AW, jnp.dtype(layout.dtype)).reshape(arena_AW.shape[0], -1)


def combine(
    out_BTPHM: jax.Array,
    peak_BTPH: jax.Array,
    total_BTPH: jax.Array,
    positions_BT: jax.Array,
    *,
    split_tokens: int,
    window: int,
    dtype,
    interpret: bool = False,
) -> jax.Array:
    """Returns softmax attention from that of its splits, [B, T, H, M] of ``dtype``; zeros where a position is negative.

    Args:
      out_BTPHM, peak_BTPH, total_BTPH: of ``attend``.
    """
    num_rows, num_tokens, num_splits, num_heads, head_dim = out_BTPHM.shape
    chunk = min(COMBINE_SPLITS, pl.next_power_of_2(num_splits))

    def kernel(out, peak, total, positions, result):
        h, t, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        position = positions[b, t]
        first_split = jnp.maximum(position - window + 1, 0) // split_tokens if window else jnp.int32(0)
        end_split = jnp.where(position < 0, 0, position // split_tokens + 1)
        column_1M = jnp.arange(head_dim, dtype=jnp.int32)[None]

        def add_chunk(i, carry):
            top, sum_, sum_M = carry
            split_P = first_split + i * chunk + jnp.arange(chunk, dtype=jnp.int32)
            there_P = split_P < end_split
            slot_P = split_P % num_splits
            peak_P = load(peak.at[b, t, slot_P, h], mask=there_P, other=-jnp.inf)
            total_P = load(total.at[b, t, slot_P, h], mask=there_P, other=0.0)
            there_PM = jnp.broadcast_to(there_P[:, None], (chunk, head_dim))
            out_PM = load(out.at[b, t, slot_P[:, None], h, column_1M], mask=there_PM, other=0.0)
            new_top = jnp.maximum(top, jnp.max(peak_P))
            shift = _shift(new_top)
            weight_P = total_P * jnp.exp2(peak_P - shift)
            keep = jnp.exp2(top - shift)
            return new_top, sum_ * keep + jnp.sum(weight_P), sum_M * keep + jnp.sum(weight_P[:, None] * out_PM, axis=0)

        carry = (jnp.float32(-jnp.inf), jnp.float32(0), jnp.zeros(head_dim, jnp.float32))
        _, sum_, sum_M = lax.fori_loop(0, pl.cdiv(end_split - first_split, chunk), add_chunk, carry)
        result[b, t, h, :] = (sum_M / jnp.where(sum_ == 0.0, 1.0, sum_)).astype(result.dtype)

    return pl.pallas_call(
        kernel,
        grid=(num_heads, num_tokens, num_rows),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 4,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_tokens, num_heads, head_dim), dtype),
        compiler_params=CompilerParams(num_warps=max(1, min(4, head_dim * chunk // 256)), num_stages=1),
        interpret=interpret,
        name="combine",
    )(out_BTPHM, peak_BTPH, total_BTPH, positions_BT)


def decode_config(layout: KVLayout, group: int, operand) -> Config:
    """Returns how one query per row is cut; ``benchmarks/kernels_attention.py --sweep`` measured the choices."""
    kv_bytes = 2 * layout.head_dim * jnp.dtype(operand).itemsize
    tile_tokens = max(16, min(64, 2**15 // kv_bytes))
    rows = max(MIN_ROWS, pl.next_power_of_2(group))
    return Config(rows=rows, tile_tokens=tile_tokens, split_tokens=SPLIT_TOKENS, num_warps=4, num_stages=3)


def prefill_config(layout: KVLayout, group: int, num_tokens: int, operand) -> Config:
    """Returns how a chunk of queries is cut: long chunks fill the device by themselves, short ones by splits, too."""
    if operand == jnp.float32:  # no tensor cores: more rows only spill
        rows, tile_tokens, num_warps, num_stages = MIN_ROWS, 16, 4, 2
    else:
        rows, num_warps = (128, 8) if layout.head_dim <= 128 else (64, 4 if layout.head_dim <= 256 else 8)
        tile_tokens, num_stages = max(16, 2**13 // layout.head_dim), 2
    rows = max(rows, pl.next_power_of_2(group))
    programs = layout.num_kv_heads * pl.cdiv(num_tokens, rows // pl.next_power_of_2(group))
    split_tokens = WHOLE_CONTEXT if programs >= FULL_DEVICE else PREFILL_SPLIT_TOKENS
    return Config(
        rows=rows, tile_tokens=tile_tokens, split_tokens=split_tokens, num_warps=num_warps, num_stages=num_stages
    )


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
    num_tokens, num_heads = q_BTHM.shape[1:3]
    if config is None:
        group, operand = num_heads // layout.num_kv_heads, operand_dtype(q_BTHM.dtype, layout)
        decode = num_tokens == 1
        config = (
            decode_config(layout, group, operand) if decode else prefill_config(layout, group, num_tokens, operand)
        )
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
