# SPDX-License-Identifier: Apache-2.0
"""Decoding over the paged cache as one Pallas-Triton kernel: rotary embedding, KV write and attention of one token.

One program takes a KV head of a row, all its queries, and one split of the keys. It turns its queries itself. A row's
own key and value never come from memory: the program whose split they belong to turns and rounds them, writes them into
the arena, and adds them after the split's other keys. So no program waits for another's write. Splits and tiles lie at
absolute positions: a row's result depends on no other row.

For a few rows most of the time goes by between a program's start and its first keys. Hence all that does not need the
position is asked for together with it, and what only the own key needs is read behind the loop.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load, store
from pallas_kernels._triton_inside import limit_registers
from pallas_kernels.paged_attention.layout import SPLIT_TOKENS, KVLayout, to_words
from pallas_kernels.paged_attention.pallas_triton_parts import (
    MIN_ROWS,
    add_keys,
    divmod_power,
    dot,
    no_keys,
    operand_dtype,
    scaled,
    split_at,
    split_count,
)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How decoding is cut into programs.

    Attributes:
      tile_tokens: keys of a step, a power of two, at least 16.
      split_tokens: keys of a program, a power of two. This and ``tile_tokens`` decide the order of sums.
      tiles_in_flight: tiles of keys and values that a program has room for.
      early_table: a program asks for its part of the block table before it knows the position, not tile by tile.
      num_warps: a power of two.
      max_registers: of a thread.
      max_programs: where rows may have more splits, programs visit several: an idle program costs 0.5 ns.
    """

    tile_tokens: int
    split_tokens: int = SPLIT_TOKENS
    tiles_in_flight: int = 1
    early_table: bool = False
    num_warps: int = 4
    max_registers: int = 255
    max_programs: int = 4096


def attend_decode(
    arena_AW: jax.Array,
    q_BHM: jax.Array,
    k_BJM: jax.Array,
    v_BJM: jax.Array,
    cos_BR: jax.Array,
    sin_BR: jax.Array,
    positions_B: jax.Array,
    table_BGF: jax.Array,
    layout: KVLayout,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    config: DecodeConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (arena, out_BTPHM, peak_BTPH, total_BTPH), T = 1: the last three as ``attend`` returns them.

    Args: see ``pallas_kernels.paged_attention.api.decode_attention``.
    """
    num_rows, num_heads, head_dim = q_BHM.shape
    num_frames, num_kv_heads, block_tokens = arena_AW.shape[0], layout.num_kv_heads, layout.block_tokens
    group, half_dim = num_heads // num_kv_heads, head_dim // 2
    rows = max(MIN_ROWS, pl.next_power_of_2(group))
    tile, split_tokens = config.tile_tokens, config.split_tokens
    num_blocks = table_BGF.shape[1]
    num_splits = split_count(layout, num_blocks, 1, split_tokens, window)
    num_parts = min(num_splits, pl.next_power_of_2(pl.cdiv(config.max_programs, num_rows * num_kv_heads)))
    asks_early = config.early_table and not window and num_parts == num_splits
    num_stages = 1 + config.tiles_in_flight * (1 if asks_early else 2)  # a table in the loop is a stage of its own
    operand = operand_dtype(q_BHM.dtype, layout)
    # NaN of other frames must pass as they are: a CPU that interprets turns some of bfloat16 into others.
    bits = jnp.dtype("uint16") if jnp.dtype(layout.dtype).itemsize == 2 else jnp.dtype(layout.dtype)

    def kernel(arena_in, q, k, v, cos, sin, positions, table, arena, out, peak_ref, total_ref):
        j, b, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)  # each row's last split, a short one, last
        position = positions[b]
        if not interpret:
            position = limit_registers(position, config.max_registers)
        row_R, column_1M = (jnp.arange(size, dtype=jnp.int32) for size in (rows, head_dim))
        column_1M = column_1M[None]
        there_R, head_R = row_R < group, row_R + j * group
        there_RM, column_RM = (jnp.broadcast_to(x, (rows, head_dim)) for x in (there_R[:, None], column_1M))
        other_RM, angle_RM = lax.rem(column_RM + half_dim, head_dim), lax.rem(column_RM, half_dim)

        def turned(x, head_R, **masked):
            """Returns heads after rope: one layout for all loads, so that nothing goes through shared memory."""
            x_RM, pair_RM = (load(x.at[b, head_R[:, None], at_RM], **masked) for at_RM in (column_RM, other_RM))
            cos_RM, sin_RM = (load(of.at[b, angle_RM], **masked) for of in (cos, sin))
            sin_RM = jnp.where(column_RM < half_dim, -sin_RM, sin_RM)
            return (x_RM.astype(jnp.float32) * cos_RM + pair_RM.astype(jnp.float32) * sin_RM).astype(x.dtype)

        def queries():
            return turned(q, head_R, mask=there_RM, other=0.0)

        frame, head = divmod_power(j, layout.heads_per_frame)

        def place(token):
            """Returns (block of the row, offset in its frames) of a token's head."""
            block, slot = divmod_power(token, block_tokens)
            return block, (head * block_tokens + slot) * head_dim

        def frames_of(block_S, half, mask):
            return load(table.at[b, block_S, half * layout.half_frames + frame], mask=mask, other=0)

        def table_part(start):
            """Returns the frames of keys and of values of each tile of a split."""
            tiles = [start + at + jnp.arange(tile, dtype=jnp.int32) for at in range(0, split_tokens, tile)]
            blocks = [place(key_S)[0] for key_S in tiles]
            return [[frames_of(block_S, half, block_S < num_blocks) for block_S in blocks] for half in range(2)]

        early = table_part(part * split_tokens) if asks_early else None
        q_RM = queries().astype(operand)
        first = jnp.maximum(position - window + 1, 0) if window else jnp.int32(0)

        def attend_to(split):
            start = split * split_tokens

            def read(i, key_S, inside_S, half):
                block_S, offset_S = place(key_S)
                if early is None:
                    frame_S = frames_of(block_S, half, inside_S)
                else:
                    frame_S = early[half][0]
                    for at, later_S in enumerate(early[half][1:], 1):
                        frame_S = jnp.where(i == at, later_S, frame_S)
                inside_SM = jnp.broadcast_to(inside_S[:, None], (tile, head_dim))
                x_SM = load(arena_in.at[frame_S[:, None], offset_S[:, None] + column_1M], mask=inside_SM, other=0)
                return lax.bitcast_convert_type(x_SM, jnp.dtype(layout.dtype)).astype(operand)

            def add_tile(i, carry):
                key_S = start + i * tile + jnp.arange(tile, dtype=jnp.int32)
                inside_S = key_S < position
                if window:
                    inside_S &= key_S >= first
                score_RS = scaled(dot(q_RM, read(i, key_S, inside_S, 0), (1, 1)), scale, soft_cap)
                score_RS = jnp.where(inside_S[None], score_RS, -jnp.inf)
                return add_keys(carry, score_RS, lambda: read(i, key_S, inside_S, 1))

            def add_own_key(carry):
                peak_R, total_R, out_RM = carry
                k_RM = turned(k, jnp.full_like(row_R, j)).astype(layout.dtype)
                v_RM = v[b, j, column_RM].astype(layout.dtype)
                block, offset = place(position)
                for half, x_RM in enumerate((k_RM, v_RM)):  # all rows write the same
                    at = table[b, block, half * layout.half_frames + frame]
                    exists_RM = jnp.broadcast_to(at < num_frames, (rows, head_dim))
                    store(arena.at[at, offset + column_RM], lax.bitcast_convert_type(x_RM, bits), mask=exists_RM)
                product_RM = queries().astype(jnp.float32) * k_RM.astype(jnp.float32)
                score_R = scaled(jnp.sum(product_RM, axis=1), scale, soft_cap)
                new_peak_R = jnp.maximum(peak_R, score_R)
                p_R, keep_R = jnp.exp2(score_R - new_peak_R), jnp.exp2(peak_R - new_peak_R)
                out_RM = out_RM * keep_R[:, None] + p_R[:, None] * v_RM.astype(jnp.float32)
                return new_peak_R, total_R * keep_R + p_R, out_RM

            first_tile, _ = divmod_power(jnp.maximum(first - start, 0), tile)
            end_tile, _ = divmod_power(jnp.minimum(position - start, split_tokens) + tile - 1, tile)
            carry = lax.fori_loop(first_tile, end_tile, add_tile, no_keys(rows, head_dim))
            own = position < start + split_tokens
            peak_R, total_R, out_RM = lax.cond(own, add_own_key, lambda carry: carry, carry)
            slot = split % num_splits
            store(out.at[b, 0, slot, head_R[:, None], column_1M], out_RM / total_R[:, None], mask=there_RM)
            store(peak_ref.at[b, 0, slot, head_R], peak_R, mask=there_R)
            store(total_ref.at[b, 0, slot, head_R], total_R, mask=there_R)

        def visit(i, _):
            slot = part + i * num_parts
            split = split_at(slot, divmod_power(first, split_tokens)[0], num_splits)
            seen = (split * split_tokens <= position) & (slot < num_splits)
            pl.when(seen)(lambda: attend_to(split))

        if num_parts == num_splits:
            visit(0, None)
        else:
            lax.fori_loop(0, pl.cdiv(num_splits, num_parts), visit, None)

    view = lax.bitcast_convert_type(arena_AW, bits).reshape(num_frames, -1)
    shape = (num_rows, 1, num_splits, num_heads)
    out_shape = [jax.ShapeDtypeStruct(view.shape, bits)]
    out_shape += [jax.ShapeDtypeStruct((*shape, *columns), jnp.float32) for columns in ((head_dim,), (), ())]
    view, *splits = pl.pallas_call(
        kernel,
        grid=(num_kv_heads, num_rows, num_parts),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 8,
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 4,
        out_shape=out_shape,
        input_output_aliases={0: 0},
        compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=num_stages),
        interpret=interpret,
        name="attend_decode",
    )(view, q_BHM, k_BJM, v_BJM, cos_BR, sin_BR, positions_B, table_BGF)
    return to_words(view), *splits
