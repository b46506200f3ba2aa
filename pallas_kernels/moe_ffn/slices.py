# SPDX-License-Identifier: Apache-2.0
"""Activations as bit-slices in the column order of the bit-planes, so that both are operands of ``binary_dot``.

A row x of C columns becomes integers of B bits, q_c = round(x_c 2^s) with the largest s at which none overflows; slice
n is bit n of all q_c, packed as a bit-plane is::

      q_c  =  - 2^(B-1) bit_(B-1)  +  sum_(n < B-1) 2^n bit_n              x_c  =  2^-s q_c

Words are read in chunks of 16: those of bands of 16 words and more, then the narrow bands together in one chunk.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.binary_dot import WORDS, slice_place

SLICES = 16
"""Slices that one ``binary_dot`` multiplies; float32 inputs take two runs of them."""

PROGRAM_SLICES = 4
"""Slices that a program packs."""

INFINITY = 0x7F800000
"""The bits of float32's."""


@dataclass(frozen=True)
class Run:
    """Chunks that lie alike in one band.

    Attributes:
      chunk, chunks: the first of them, and how many.
      position, width: which words of each chunk are the band's.
      band, tile_words: the band, and T.
      column: its first column.
    """

    chunk: int
    chunks: int
    position: int
    width: int
    band: int
    tile_words: int
    column: int

    def tile_and_word(self, chunk):
        """Returns (tile, first word in the tile's rows) of a chunk of the run."""
        per_tile = self.tile_words // self.width
        index = chunk - self.chunk
        return index >> (per_tile.bit_length() - 1), (index & (per_tile - 1)) * self.width


def runs(layout: BlockLayout, words: int = WORDS) -> list[Run]:
    """Returns the runs of a plane's row in chunks of so many words; those of narrower bands share the last chunk."""
    found, chunk, position, column = [], 0, 0, 0
    for band, (tile_words, tiles) in enumerate(layout.bands):
        width = min(tile_words, words)
        count = tiles * tile_words // width
        found.append(Run(chunk, count, position, width, band, tile_words, column))
        chunk, position = (chunk + count, 0) if width == words else (chunk, position + width)
        column += 32 * tile_words * tiles
    return found


def num_chunks(layout: BlockLayout, words: int = WORDS) -> int:
    """Returns the chunks of a plane's row."""
    last = runs(layout, words)[-1]
    return last.chunk + last.chunks


def num_slices(dtype) -> int:
    """Returns B: 16 bits for bfloat16 inputs, 32 for float32."""
    return SLICES if dtype == jnp.bfloat16 else 2 * SLICES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slices:
    """Bit-slices of X rows.

    Attributes:
      words: int32[X, B / 16, 16 W], W words of each of 16 slices in the order of ``runs``, each chunk's in that of
        ``slice_place``.
      unit_X: float32, 2^-s.
      square_X: float32, sum_c x_c^2.
    """

    words: jax.Array
    unit_X: jax.Array
    square_X: jax.Array


def _power_of_two(exponent):
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def slice_columns(
    x_XC: jax.Array,
    layout: BlockLayout,
    words: int,
    num_warps: int = 4,
    interpret: bool = False,
) -> Slices:
    """Returns the bit-slices of the rows of ``x_XC``.

    The unit of a row that holds an infinity or a NaN is NaN, and so is whatever comes of it.

    One program packs a few slices of one chunk of one row.

    Args:
      x_XC: bfloat16 or float32.
      layout: whose column order to take.
      words: words of a slice, at least those of all chunks; the rest are zeros.
      num_warps: of a program.
      interpret: runs on any backend, slowly.
    """
    num_rows, columns = x_XC.shape
    bits = num_slices(x_XC.dtype)
    most = 2 ** (bits - 1) - (1 if bits == SLICES else 128)  # the largest float32 below 2^(bits-1)

    def kernel(x, words_out, unit_out, square_out):
        row, chunk, group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        c = jnp.arange(pl.next_power_of_2(columns), dtype=jnp.int32)
        x_C = load(x.at[row, c], mask=c < columns, other=0.0).astype(jnp.float32)
        j, w = jnp.arange(32, dtype=jnp.int32)[:, None], jnp.arange(WORDS, dtype=jnp.int32)[None, :]
        column, exists = jnp.zeros((32, WORDS), jnp.int32), jnp.zeros((32, WORDS), jnp.bool_)
        for run in runs(layout):
            tile, word = run.tile_and_word(chunk)
            here = (chunk >= run.chunk) & (chunk < run.chunk + run.chunks)
            here = jnp.broadcast_to(here & (w >= run.position) & (w < run.position + run.width), exists.shape)
            first = run.column + tile * (32 * run.tile_words) + word - run.position
            column, exists = jnp.where(here, first + j * run.tile_words + w, column), exists | here
        x_JW = load(x.at[row, column], mask=exists, other=0.0).astype(jnp.float32)  # early: both loads at once
        # As integers, absolute values are in the same order and what is not finite is the largest: no maximum drops it.
        largest = jnp.max(lax.bitcast_convert_type(x_C, jnp.int32) & 0x7FFFFFFF)
        s = bits - 2 - (jnp.maximum(largest >> 23, 127 - 60) - 127)

        @pl.when((chunk == 0) & (group == 0))
        def _():
            unit_out[row] = jnp.where(largest < INFINITY, _power_of_two(-s), jnp.float32(jnp.nan))
            square_out[row] = jnp.sum(x_C * x_C)

        scaled = x_JW * _power_of_two(s)
        q = jnp.clip(scaled + jnp.where(scaled < 0, -0.5, 0.5), -most, most).astype(jnp.int32)
        n = group * PROGRAM_SLICES + jnp.arange(PROGRAM_SLICES, dtype=jnp.int32)
        at = n[:, None] // SLICES, chunk * (SLICES * WORDS) + slice_place(n[:, None] & (SLICES - 1), w)
        words_out[row, *at] = jnp.sum(((q[None] >> n[:, None, None]) & 1) << j[None], axis=1)

    any_space = pl.BlockSpec(memory_space=pl.ANY)
    words_out, unit_X, square_X = pl.pallas_call(
        kernel,
        grid=(num_rows, words // WORDS, bits // PROGRAM_SLICES),
        in_specs=[any_space],
        out_specs=[any_space] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, bits // SLICES, words * SLICES), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ],
        compiler_params=CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="slice_columns",
    )(x_XC)
    return Slices(words_out, unit_X, square_X)
