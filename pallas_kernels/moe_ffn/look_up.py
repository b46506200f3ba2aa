# SPDX-License-Identifier: Apache-2.0
"""Products of a linear-block's rows by look-up, for bitwidths whose codes are too many for ``code_sums``.

A block of rows x 32 words is one word a lane, all lanes of an instruction in one row. The words of B planes are a
B x B bit matrix in each field of B bits, B = 8 or 4; transposed, in three or two rounds of masked swaps, fields are
codes::

      bit i of field k of word q, afterwards   =   bit q of field k of plane i, counted from the least significant

A code's centroid is loaded from the row's LUT, through L1, and multiplied with one input of every pair at hand. Work
does not depend on the bitwidth; planes that are not there are zeros and are not read.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton import load
from pallas_kernels._triton_inside import load_from
from pallas_kernels.moe_ffn.binary_dot import ROWS, multiply_add
from pallas_kernels.moe_ffn.code_sums import Block, choose, split
from pallas_kernels.moe_ffn.slices import num_chunks, runs
from pallas_kernels.moe_ffn.staged import look_up as look_up_shared

LANES = 32
"""Words of a block: a warp's."""

FIELD_BITS = 4, 8
"""Bits of a code's place; a code has the smallest that is enough."""

SWAPS = {4: 0x0F0F0F0F, 2: 0x33333333, 1: 0x55555555}
"""By how far bits move, and the ones of a word that stay."""


def transposed(planes: list[jax.Array]) -> list[jax.Array]:
    """Returns B words of 32 / B codes each from B planes' words, the least significant plane first."""
    words = list(planes)
    for distance, mask in SWAPS.items():
        for i in range(len(words)):
            if distance < len(words) and not i & distance:
                a, b = words[i], words[i + distance]
                words[i] = (a & mask) | ((b & mask) << distance)
                words[i + distance] = (lax.shift_right_logical(a, jnp.int32(distance)) & mask) | (b & ~mask)
    return words


def dot_rows(
    block: Block, rows: int, first, x, x_rows: list, field_bits: int, interpret: bool, luts: jax.Array | None = None
) -> list[jax.Array]:
    """Returns [W x], float32[rows] of each of ``x_rows``: ``rows`` of the block's rows from its row ``first`` on.

    Args:
      x: ref of the inputs, bfloat16 or float32 [X, C].
      x_rows: which of them.
      field_bits: B, at least the bitwidth.
      luts: where those of the program's rows begin in shared memory (``staged.stage_luts``).
    """
    layout, bits, arena, frames, e = block.layout, block.bits, block.arena, block.frames, block.e
    row_R1 = block.first_row + first + jnp.arange(rows, dtype=jnp.int32)[:, None]
    group, first_in_tile = split(block.first_row + first, layout.tile_rows)  # all of them are of one tile
    row_in_tile_R1 = first_in_tile + jnp.arange(rows, dtype=jnp.int32)[:, None]
    k_1K = jnp.arange(LANES, dtype=jnp.int32)[None, :]
    if luts is None:
        frame_R1, lut_R1 = block.lut_place(row_R1)
    else:
        shared_R1 = luts + jnp.left_shift(2 * (row_R1 - block.first_row), block.bits)

    def look_up(code_RK):
        if luts is not None:
            return look_up_shared(shared_R1 + 2 * code_RK)
        if not interpret:
            return load_from(arena.at[frame_R1, lut_R1], code_RK, jnp.float16)
        pair_RK = arena[jnp.broadcast_to(frame_R1, code_RK.shape), lut_R1 + (code_RK >> 1)]
        half_RK = (pair_RK >> (16 * (code_RK & 1))).astype(jnp.int16)
        return lax.bitcast_convert_type(half_RK, jnp.float16).astype(jnp.float32)

    def add_chunk(chunk, sums):
        word_1K, tile_1K, stride_1K, column_1K, exists_1K = places(chunk)
        frame_1K, offset_1K = split(tile_1K, layout.frame_words)
        offset_RK = offset_1K + word_1K + row_in_tile_R1 * stride_1K
        exists_RK = jnp.broadcast_to(exists_1K, (rows, LANES))
        planes = []
        for i in range(min(field_bits, layout.max_bits)):
            plane = bits - 1 - i
            start = choose(plane, {p: layout.page_starts[p] for p in range(layout.max_bits)})
            here_RK = exists_RK & (plane >= 0)
            frame_RK = jnp.broadcast_to(frames[e, start + frame_1K], offset_RK.shape)
            planes.append(load(arena.at[frame_RK, offset_RK], mask=here_RK, other=jnp.int32(0)))
        planes += [jnp.zeros_like(planes[0])] * (field_bits - len(planes))
        words = transposed(planes)

        def add_field(k, sums):
            for q, word_RK in enumerate(words):
                w_RK = look_up(lax.shift_right_logical(word_RK, jnp.int32(k * field_bits)) & (2**field_bits - 1))
                sums = [
                    multiply_add(w_RK, input_of(x_row, column_1K, (k * field_bits + q) * stride_1K), sum_RK, interpret)
                    for x_row, sum_RK in zip(x_rows, sums, strict=True)
                ]
            return sums

        if interpret:
            added = lax.fori_loop(0, 32 // field_bits, add_field, sums)
        else:  # shifts by constants cost one instruction less
            added = reduce(lambda sums, k: add_field(k, sums), range(32 // field_bits), sums)
        return [jnp.where(exists_RK, after, before) for after, before in zip(added, sums, strict=True)]

    def input_of(x_row, column_1K, distance_1K):
        shape = rows, LANES
        if not interpret:
            return load_from(x.at[x_row, jnp.broadcast_to(column_1K, shape)], distance_1K, x.dtype)
        return jnp.broadcast_to(x[x_row, column_1K + distance_1K].astype(jnp.float32), shape)

    def places(chunk):
        """Where lanes lie: first word in the tile's row 0, tile's first word, T, column of bit 0, whether at all."""
        word = tile = stride = column = jnp.zeros((1, LANES), jnp.int32)
        exists = jnp.zeros((1, LANES), jnp.bool_)
        for run in runs(layout, LANES):
            here = (chunk >= run.chunk) & (chunk < run.chunk + run.chunks)
            here = jnp.broadcast_to(here, exists.shape) & (k_1K >= run.position) & (k_1K < run.position + run.width)
            run_tile, run_word = run.tile_and_word(chunk)
            width, tiles = layout.bands[run.band]
            band_start = layout.rows * sum(width * count for width, count in layout.bands[: run.band])
            run_word += k_1K - run.position
            word = jnp.where(here, run_word, word)
            tile = jnp.where(here, band_start + (group * tiles + run_tile) * (layout.tile_rows * width), tile)
            stride = jnp.where(here, width, stride)
            column = jnp.where(here, run.column + run_tile * 32 * width + run_word, column)
            exists |= here
        return word, tile, stride, column, exists

    sums = [jnp.zeros((rows, LANES), jnp.float32)] * len(x_rows)
    sums = lax.fori_loop(0, num_chunks(layout, LANES), add_chunk, sums)
    return [jnp.sum(sum_RK, axis=1) for sum_RK in sums]


WARP_ROWS = 4
"""Rows of a block for each warp: few, so that their LUTs stay in L1."""


def row_blocks(num_warps: int, tile_rows: int) -> tuple[int, int]:
    """Returns (blocks of a program's 8 W rows, rows of each)."""
    rows = min(WARP_ROWS * num_warps, tile_rows)
    return ROWS * num_warps // rows, rows
