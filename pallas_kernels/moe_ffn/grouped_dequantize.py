# SPDX-License-Identifier: Apache-2.0
"""Dequantizes the blocks whose LUTs are too large for a product's registers, once for all tokens of their experts.

The words of eight planes are transposed as 8 x 8 bit matrices (``look_up.transposed``), whose bytes are codes; the LUTs
of a program's rows lie in shared memory while it looks them up. Rows and columns are written in the order in which the
products read them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load, store
from pallas_kernels._triton_inside import gather_shared
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.api import LOOKED_UP_BITS
from pallas_kernels.moe_ffn.code_sums import choose, split
from pallas_kernels.moe_ffn.grouped_order import CHUNK, WORDS, num_chunks
from pallas_kernels.moe_ffn.grouped_weights import stack
from pallas_kernels.moe_ffn.look_up import transposed

ROWS, NUM_WARPS = 16, 4
"""Of a program."""

BLOCK_WORDS, MAX_UNIT_WORDS = 256, 64
"""Words of each plane that a program looks up at a time: few rows, whose LUTs are small, and long runs of memory."""

CODE_BITS = 8


def place_words(word, layout: BlockLayout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (words of a row group, place in the plane in row 0 of group 0, words between rows) of each ``word``.

    Args:
      word: int32, its index among a row's words, band after band and tile after tile.
    """
    found, first, start = None, 0, 0
    for width, tiles in layout.bands:
        tile, inside = split(word - first, width)
        here = tiles * width * layout.tile_rows, start + tile * (width * layout.tile_rows) + inside, width
        here = tuple(jnp.broadcast_to(jnp.int32(value), word.shape) for value in here)
        found = here if found is None else tuple(jnp.where(word >= first, new, old) for new, old in zip(here, found))
        first, start = first + tiles * width, start + layout.rows * width * tiles
    return found


def for_each(count: int, body) -> None:
    """Calls ``body(i, None)`` for i < ``count``; without a loop for one."""
    if count == 1:
        body(0, None)
    else:
        lax.fori_loop(0, count, body, None)


def dequantize(
    arena_AW: jax.Array,
    layout: BlockLayout,
    frames_EF: jax.Array,
    bits_EU: jax.Array,
    kind: int,
    count_E: jax.Array,
    experts: range,
    rows_Q: jax.Array,
    dtype,
    interpret: bool = False,
) -> jax.Array:
    """Returns weights [G, Q, 128 chunks] of ``dtype``, of the blocks above ``LOOKED_UP_BITS`` bits that have tokens.

    Columns are in the order of ``grouped_order.order_columns``. Positions without a column, and rows that are not
    there, hold some entry of a LUT; other blocks are not written.

    Args:
      arena_AW: uint32 frames.
      layout: of the blocks.
      frames_EF: int32, the blocks' frames.
      bits_EU, kind: bitwidths, and the column of them that belongs to these blocks.
      count_E: int32, the tokens of each expert.
      experts: the G neighbours whose blocks are wanted.
      rows_Q: int32, the stored rows in the order wanted, -1 where there is none; a multiple of 16 of them.
      interpret: runs on any backend, slowly.
    """
    num_words, columns, entries = layout.columns // 32, num_chunks(layout) * CHUNK, 2**layout.max_bits
    wide = range(max(layout.min_bits, LOOKED_UP_BITS + 1), layout.max_bits + 1)
    lut_places = {b: layout.page_starts[b - 1] * layout.frame_words + layout.lut_offset_words(b - 1) for b in wide}
    page_starts = {page: layout.page_starts[page] for page in range(layout.max_bits)}
    unit_words = min(MAX_UNIT_WORDS, pl.next_power_of_2(max(num_words, WORDS)))
    block_rows = min(ROWS, BLOCK_WORDS // unit_words)
    num_units = pl.cdiv(columns, 32 * unit_words)

    def kernel(arena, halves, frames, bits_ref, count, rows, out):
        program, g = pl.program_id(0), pl.program_id(1)
        e = experts.start + g
        bits = bits_ref[e, kind]

        def planes_of(unit, row_R):
            """Returns int32[R, words] of each plane, the least significant first; zeros where there is none."""
            word_1W = unit * unit_words + jnp.arange(unit_words, dtype=jnp.int32)[None]
            group_R1, inner_R1 = (part[:, None] for part in split(row_R, layout.tile_rows))
            group_words_1W, place_1W, row_words_1W = place_words(word_1W, layout)
            place_RW = place_1W + group_R1 * group_words_1W + inner_R1 * row_words_1W
            frame_RW, offset_RW = split(place_RW, layout.frame_words)
            planes = []
            for i in range(layout.max_bits):
                here_RW = jnp.broadcast_to(word_1W < num_words, place_RW.shape) & (bits - 1 - i >= 0)
                start = choose(bits - 1 - i, page_starts)
                table_RW = load(frames.at[e, start + frame_RW], mask=here_RW, other=jnp.int32(0))
                planes.append(load(arena.at[table_RW, offset_RW], mask=here_RW, other=jnp.int32(0)))
            return planes

        def lut_of(row_R):
            """Returns the rows' LUTs, [R, entries]; narrower ones again and again."""
            frame_R, word_R = split(choose(bits, lut_places) + (row_R << (bits - 1)), layout.frame_words)
            entry_1K = jnp.arange(entries, dtype=jnp.int32)[None] & ((1 << bits) - 1)
            lut_RK = halves[frames[e, frame_R][:, None], 2 * word_R[:, None] + entry_1K]
            return lut_RK.astype(jnp.float32).astype(dtype)

        def add_block(block, _):
            r_R = program * ROWS + block * block_rows + jnp.arange(block_rows, dtype=jnp.int32)
            row_R = jnp.maximum(rows[r_R], 0)
            lut = lut_of(row_R).reshape(-1)
            # Threads read different copies of a LUT that is there more than once: from different banks.
            copy_1W = (jnp.arange(unit_words, dtype=jnp.int32)[None] << bits) & (entries - 1)
            base_RW = entries * jnp.arange(block_rows, dtype=jnp.int32)[:, None] + copy_1W

            def add_unit(unit, _):
                planes = planes_of(unit, row_R)
                codes = transposed(planes + [jnp.zeros_like(planes[0])] * (CODE_BITS - len(planes)))

                # Byte n of word s + 4 half is the code of bit j = s + 4 (2 n + half), of position 8 (4 s + n) + half.
                def code(s, n, half):
                    return (codes[s + 4 * half] >> 8 * n) & 0xFF

                order = [(s, n, half) for s in range(4) for n in range(4) for half in range(2)]
                index = stack([base_RW + code(*place) for place in order]).reshape(-1)
                w = lut[index] if interpret else gather_shared(lut, index)
                w = w.reshape(block_rows, unit_words // WORDS, WORDS, 16, 2).transpose(0, 1, 3, 2, 4)
                column_1C = unit * (32 * unit_words) + jnp.arange(32 * unit_words, dtype=jnp.int32)[None]
                inside_RC = jnp.broadcast_to(column_1C < columns, (block_rows, column_1C.size))
                store(out.at[g, r_R[:, None], column_1C], w.reshape(inside_RC.shape), mask=inside_RC)

            for_each(num_units, add_unit)

        pl.when((bits > LOOKED_UP_BITS) & (count[e] > 0))(lambda: for_each(ROWS // block_rows, add_block))

    ints = lax.bitcast_convert_type(arena_AW, jnp.int32)  # views: no copies
    halves = lax.bitcast_convert_type(arena_AW, jnp.float16).reshape(arena_AW.shape[0], -1)
    return pl.pallas_call(
        kernel,
        grid=(rows_Q.shape[0] // ROWS, len(experts)),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 6,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((len(experts), rows_Q.shape[0], columns), dtype),
        compiler_params=CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="dequantize_gate_up" if layout.interleaved else "dequantize_down",
    )(ints, halves, frames_EF, bits_EU, count_E, rows_Q)
