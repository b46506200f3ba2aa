# SPDX-License-Identifier: Apache-2.0
"""The first MoE kernel, which looks every code up in its LUT: what ``layout.py`` compares layouts under.

One program computes a few stored rows of one linear-block for one (token, expert) pair p = t K + k. From the words of
planes 0, 1, 2, ... it assembles the codes of several columns at once, in fields of one word::

    fields  =  ((w0 >> s & 0x11111111) << 1  |  (w1 >> s & 0x11111111)) << 1  |  ...        bits s, s + 4, .. s + 28

looks each code up in its row's LUT (a pointer load that stays in L1) and accumulates in float32. Bitwidths up to 4 use
fields of 4 bits, the others fields of 8. Planes that are not resident are masked to zero, so that one body serves every
bitwidth of its field width and the run-time choice is between two. Nothing is added across programs: the result of a
pair depends on no other pair.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load
from pallas_kernels.bitplane import BlockLayout

FIELD_BITS = 4, 8


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a kernel is cut into programs; no result depends on it beyond rounding.

    Attributes:
      rows: stored rows of a program, at most R of the layout; a power of two, at least 2.
      num_warps: a power of two.
    """

    rows: int = 8
    num_warps: int = 4


def _split(position, size: int):
    """Returns (position // size, position % size) for a power of two and a position >= 0."""
    return position >> (size.bit_length() - 1), position & (size - 1)


def _by_bits(layout: BlockLayout, bits, value: Callable[[int], int]):
    """Returns value(bits) for a run-time bitwidth, as a chain of scalar selects."""
    chosen = jnp.int32(value(layout.max_bits))
    for b in range(layout.min_bits, layout.max_bits):
        chosen = jnp.where(bits == b, jnp.int32(value(b)), chosen)
    return chosen


def _fields(words, field_bits: int, s):
    """Returns the codes of bits s, s + field_bits, ... of the planes' words, each in its field."""
    mask = jnp.uint32(sum(1 << i for i in range(0, 32, field_bits)))
    fields = (words[0] >> s) & mask
    for word in words[1:]:
        fields = (fields << 1) | ((word >> s) & mask)
    return fields


def load_words(layout: BlockLayout, num_rows: int, arena, frames, e, bits, row, band: int, t, num_planes: int):
    """Returns the words of tile ``t`` of a band, rows row .. row + num_rows - 1: one uint32[num_rows, T] per plane.

    Planes >= ``bits`` are zeros and are not read. Args: see ``dot_rows``.
    """
    tile_words, tiles = layout.bands[band]
    tile_rows, band_word = layout.tile_rows, sum(width * count for width, count in layout.bands[:band])
    group, row_in_tile = _split(row, tile_rows)
    frame, offset = _split(layout.rows * band_word + (group * tiles + t) * (tile_rows * tile_words), layout.frame_words)
    offset = pl.multiple_of(offset + row_in_tile * tile_words, num_rows * tile_words)
    offset_R1 = offset + jnp.arange(num_rows, dtype=jnp.int32)[:, None] * tile_words
    offset_RT = offset_R1 + jnp.arange(tile_words, dtype=jnp.int32)
    return [
        load(
            arena.at[frames[e, layout.page_starts[p] + frame], offset_RT],
            mask=jnp.broadcast_to(p < bits, offset_RT.shape),
            other=jnp.uint32(0),
        )
        for p in range(num_planes)
    ]


def dot_rows(layout: BlockLayout, num_rows: int, arena, halves, frames, e, bits, row, x, x_row, field_bits: int):
    """Returns W_b[row : row + num_rows] x in stored row order, float32[num_rows].

    Args:
      layout: of the block.
      num_rows: divides R; ``row`` is a multiple of it.
      arena, halves: refs uint32[A, W] and, the same memory, float16[A, 2W].
      frames: ref int32[E, frames of a block].
      e, bits: the expert and its bitwidth b.
      row: first stored row.
      x, x_row: ref [any, C], and which row of it.
      field_bits: 4 or 8, at least b.
    """
    num_planes = min(field_bits, layout.max_bits)
    absent_planes = (num_planes - bits).astype(jnp.uint32)
    lut_start = _by_bits(
        layout, bits, lambda b: 2 * (layout.page_starts[b - 1] * layout.frame_words + layout.lut_offset_words(b - 1))
    )
    row_R1 = row + jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    lut_frame_R1, lut_R1 = _split(lut_start + (row_R1 << bits), 2 * layout.frame_words)
    lut_frame_R1 = frames[e, lut_frame_R1]

    def dot_tile(band, column, t, acc_RT):
        tile_words = acc_RT.shape[1]
        words = load_words(layout, num_rows, arena, frames, e, bits, row, band, t, num_planes)

        def dot_fields(s, acc_RT):
            fields_RT = _fields(words, field_bits, s.astype(jnp.uint32)) >> absent_planes
            for i in range(0, 32, field_bits):
                code_RT = (fields_RT >> i) & jnp.uint32(2**field_bits - 1)
                w_RT = halves[lut_frame_R1, lut_R1 + code_RT.astype(jnp.int32)].astype(jnp.float32)
                run = column + (32 * t + s + i) * tile_words
                acc_RT += w_RT * x[x_row, pl.ds(run, tile_words)].astype(jnp.float32)
            return acc_RT

        return lax.fori_loop(0, field_bits, dot_fields, acc_RT)

    y_R, column = jnp.zeros(num_rows, jnp.float32), 0
    for band, (tile_words, tiles) in enumerate(layout.bands):
        acc_RT = jnp.zeros((num_rows, tile_words), jnp.float32)
        y_R += jnp.sum(lax.fori_loop(0, tiles, partial(dot_tile, band, column), acc_RT), axis=1)
        column += 32 * tile_words * tiles
    return y_R


def linear_block(
    arena_AW: jax.Array,
    layout: BlockLayout,
    frames_EF: jax.Array,
    bits_EU: jax.Array,
    kind: int,
    ids_P: jax.Array,
    x: jax.Array,
    out: jax.ShapeDtypeStruct,
    config: Config,
    finish: Callable[[jax.Array], jax.Array] = lambda y_R: y_R,
    interpret: bool = False,
) -> jax.Array:
    """Returns finish(W x_p) of every pair p, ``out`` [P, rows that ``finish`` leaves].

    Args:
      arena_AW: uint32 frames.
      layout: of the blocks.
      frames_EF: int32, the blocks' frames.
      bits_EU, kind: bitwidths, and the column of them that belongs to these blocks.
      ids_P: int32, the pairs' experts; rows of pairs with an id of E or more are not written.
      x: [P / K, C]; pair p reads row p // K.
      out: shape and dtype of the result.
      config: size of a program.
      finish: from the program's stored rows to what it stores.
      interpret: runs on any backend, slowly.
    """
    num_pairs, num_rows = ids_P.shape[0], min(config.rows, layout.tile_rows)
    pairs_per_row = num_pairs // x.shape[0]
    narrow, wide = FIELD_BITS

    def kernel(arena, halves, frames, bits_ref, ids, x_ref, out_ref):
        program, pair = pl.program_id(0), pl.program_id(1)
        e = ids[pair]

        @pl.when(e < frames.shape[0])
        def _():
            bits, row, x_row = bits_ref[e, kind], program * num_rows, pair // pairs_per_row
            dot = partial(dot_rows, layout, num_rows, arena, halves, frames, e, bits, row, x_ref, x_row)
            if layout.min_bits <= narrow < layout.max_bits:
                y_R = lax.cond(bits <= narrow, lambda: dot(narrow), lambda: dot(wide))
            else:
                y_R = dot(narrow if layout.max_bits <= narrow else wide)
            y_R = finish(y_R)
            out_ref[pair, pl.ds(program * y_R.shape[0], y_R.shape[0])] = y_R.astype(out_ref.dtype)

    halves = lax.bitcast_convert_type(arena_AW, jnp.float16).reshape(arena_AW.shape[0], -1)  # a view: no copy
    return pl.pallas_call(
        kernel,
        grid=(layout.rows // num_rows, num_pairs),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 6,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=out,
        compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gate_up" if layout.interleaved else "down",
    )(arena_AW, halves, frames_EF, bits_EU, ids_P, x)
