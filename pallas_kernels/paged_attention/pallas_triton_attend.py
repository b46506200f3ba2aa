# SPDX-License-Identifier: Apache-2.0
"""Paged attention as Pallas-Triton kernels that read KV blocks in the arena; decoding has a kernel of its own.

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
from pallas_kernels.paged_attention.layout import KVLayout
from pallas_kernels.paged_attention.pallas_triton_parts import (
    add_keys,
    divmod_power,
    dot,
    no_keys,
    operand_dtype,
    scaled,
    shift_of,
    split_at,
    split_count,
)

COMBINE_SPLITS = 16
"""Splits that the combining kernel reads at once."""

COMBINE_COLUMNS = 128
"""Columns of a head that one of its programs, of one warp, adds."""

FAR = 2**30
"""A position that no context reaches."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How attention is cut into programs.

    Attributes:
      rows: query rows of a program (tokens times the KV head's padded query heads), a power of two, at least 16.
      tile_tokens: keys of a step, a power of two, at least 16.
      split_tokens: keys of a program, a power of two. This and ``tile_tokens`` decide the order of sums.
      num_warps, num_stages: a power of two, and the depth of the pipeline of loads; 3 keeps one tile in flight, 5 two.
      max_programs: where a row may have more splits, programs visit several: an idle program costs 0.5 ns.
    """

    rows: int
    tile_tokens: int
    split_tokens: int
    num_warps: int = 4
    num_stages: int = 3
    max_programs: int = 4096


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
    num_splits = split_count(layout, table_BGF.shape[1], min(queries, num_tokens), split_tokens, window)
    num_parts = min(num_splits, pl.next_power_of_2(pl.cdiv(config.max_programs, num_rows * num_tiles * num_kv_heads)))
    operand = operand_dtype(q_BTHM.dtype, layout)

    def kernel(arena, q, positions, table, out, peak_ref, total_ref):
        j, part, b = pl.program_id(0), pl.program_id(1), pl.program_id(3)
        token_R, head_R = divmod_power(jnp.arange(config.rows, dtype=jnp.int32), padded_group)
        token_R += (num_tiles - 1 - pl.program_id(2)) * queries  # the longest first
        there_R = (token_R < num_tokens) & (head_R < group)
        head_R += j * group
        position_R = load(positions.at[b, token_R], mask=there_R, other=-1)
        last, first = jnp.max(position_R), jnp.int32(0)
        if window:
            first_R = jnp.where(position_R < 0, FAR, jnp.maximum(position_R - window + 1, 0))
            first = jnp.min(first_R)
        frame, head = divmod_power(j, layout.heads_per_frame)
        column_1M = jnp.arange(head_dim, dtype=jnp.int32)[None]

        def attend_to(split):
            start = split * split_tokens
            there_RM = jnp.broadcast_to(there_R[:, None], (config.rows, head_dim))
            q_RM = load(q.at[b, token_R[:, None], head_R[:, None], column_1M], mask=there_RM, other=0.0).astype(operand)

            def read(tokens_S, inside_S, half):
                block_S, slot_S = divmod_power(tokens_S, block_tokens)
                frame_S = load(table.at[b, block_S, half * layout.half_frames + frame], mask=inside_S, other=0)
                offset_SM = (head * block_tokens + slot_S)[:, None] * head_dim + column_1M
                inside_SM = jnp.broadcast_to(inside_S[:, None], offset_SM.shape)
                return load(arena.at[frame_S[:, None], offset_SM], mask=inside_SM, other=0.0).astype(operand)

            def add_tile(i, carry):
                key_S = start + i * tile + jnp.arange(tile, dtype=jnp.int32)
                inside_S = key_S <= last
                seen_RS = key_S[None] <= position_R[:, None]
                if window:
                    inside_S &= key_S >= first
                    seen_RS &= key_S[None] > position_R[:, None] - window
                score_RS = scaled(dot(q_RM, read(key_S, inside_S, 0), (1, 1)), scale, soft_cap)
                score_RS = jnp.where(seen_RS, score_RS, -jnp.inf)
                return add_keys(carry, score_RS, lambda: read(key_S, inside_S, 1))

            first_tile, _ = divmod_power(jnp.maximum(first - start, 0), tile)
            last_tile, _ = divmod_power(jnp.minimum(last - start, split_tokens - 1), tile)
            peak_R, total_R, out_RM = lax.fori_loop(first_tile, last_tile + 1, add_tile, no_keys(config.rows, head_dim))
            out_RM = out_RM / jnp.where(total_R == 0.0, 1.0, total_R)[:, None]
            slot = split % num_splits
            at_R1 = (b, token_R[:, None], slot, head_R[:, None])
            store(out.at[(*at_R1, column_1M)], out_RM.astype(out.dtype), mask=there_RM)
            store(peak_ref.at[b, token_R, slot, head_R], peak_R, mask=there_R)
            store(total_ref.at[b, token_R, slot, head_R], total_R, mask=there_R)

        def visit(i, _):
            slot = part + i * num_parts
            first_split, _ = divmod_power(first, split_tokens)
            split = split_at(slot, first_split, num_splits)
            seen = (split * split_tokens <= last) & (slot < num_splits)
            pl.when(seen)(lambda: attend_to(split))

        if num_splits == 1:  # the result itself: zeros, too, must be written
            attend_to(jnp.int32(0))
        elif num_parts == num_splits:
            visit(0, None)
        else:
            lax.fori_loop(0, pl.cdiv(num_splits, num_parts), visit, None)

    shape = (num_rows, num_tokens, num_splits, num_heads)
    out_shape = jax.ShapeDtypeStruct((*shape, head_dim), dtype if num_splits == 1 else jnp.float32)
    scalars = jax.ShapeDtypeStruct(shape, jnp.float32)
    return pl.pallas_call(
        kernel,
        grid=(num_kv_heads, num_parts, num_tiles, num_rows),
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
    chunk, columns = min(COMBINE_SPLITS, pl.next_power_of_2(num_splits)), min(COMBINE_COLUMNS, head_dim)

    def kernel(out, peak, total, positions, result):
        h, block = divmod_power(pl.program_id(0), head_dim // columns)
        t, b = pl.program_id(1), pl.program_id(2)
        position = positions[b, t]
        first_split = jnp.maximum(position - window + 1, 0) // split_tokens if window else jnp.int32(0)
        end_split = jnp.where(position < 0, 0, position // split_tokens + 1)
        column_M = block * columns + jnp.arange(columns, dtype=jnp.int32)

        def add_chunk(i, carry):
            top, sum_, sum_M = carry
            slot_P = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
            exists_P = slot_P < num_splits
            exists_PM = jnp.broadcast_to(exists_P[:, None], (chunk, columns))
            # All entries are read, also those that were not written: so no load waits for the position.
            peak_P = load(peak.at[b, t, slot_P, h], mask=exists_P, other=0.0)
            total_P = load(total.at[b, t, slot_P, h], mask=exists_P, other=0.0)
            out_PM = load(out.at[b, t, slot_P[:, None], h, column_M[None]], mask=exists_PM, other=0.0)
            split_P = split_at(slot_P, first_split, num_splits)
            seen_P = exists_P & (split_P < end_split)
            peak_P = jnp.where(seen_P, peak_P, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(peak_P))
            shift = shift_of(new_top)
            weight_P = jnp.where(seen_P, total_P, 0.0) * jnp.exp2(peak_P - shift)
            keep = jnp.exp2(top - shift)
            added_M = jnp.sum(weight_P[:, None] * jnp.where(seen_P[:, None], out_PM, 0.0), axis=0)
            return new_top, sum_ * keep + jnp.sum(weight_P), sum_M * keep + added_M

        carry = (jnp.float32(-jnp.inf), jnp.float32(0), jnp.zeros(columns, jnp.float32))
        if num_splits <= chunk:
            _, sum_, sum_M = add_chunk(0, carry)
        else:
            used_slots = num_splits if window else end_split
            _, sum_, sum_M = lax.fori_loop(0, pl.cdiv(used_slots, chunk), add_chunk, carry)
        result[b, t, h, column_M] = (sum_M / jnp.where(sum_ == 0.0, 1.0, sum_)).astype(result.dtype)

    return pl.pallas_call(
        kernel,
        grid=(num_heads * head_dim // columns, num_tokens, num_rows),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 4,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_tokens, num_heads, head_dim), dtype),
        compiler_params=CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="combine",
    )(out_BTPHM, peak_BTPH, total_BTPH, positions_BT)
