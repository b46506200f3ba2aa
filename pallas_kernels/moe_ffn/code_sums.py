# SPDX-License-Identifier: Apache-2.0
"""Products of a linear-block's rows by sums over codes: the inside of the kernels of ``pallas_triton``.

Names end in dimensions of their own: V, the 16 W rows of a program's W warps (``binary_dot``), K, the 16 words of a
chunk or the 16 slices of a sum, Q, the four threads that share a row.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import load
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.binary_dot import ROWS, WORDS, binary_dot, both, multiply_add, warp_and_row
from pallas_kernels.moe_ffn.slices import SLICES, Run, runs

INNER_BITS = 3
"""Planes whose codes are summed at once. More were fewer instructions, but registers decide how many programs run."""

HELD_BITS = 1
"""Planes before those that stay in registers; the ones before them are read again, from L1, for every value of them."""


def split(position, size: int):
    """Returns (position // size, position % size) for a power of two and a position >= 0."""
    return position >> (size.bit_length() - 1), position & (size - 1)


def choose(value: int | jax.Array, table: dict[int, int]) -> jax.Array:
    """Returns table[value] of a scalar, by selects: a look-up would wait for memory."""
    keys = sorted(table)
    chosen = jnp.int32(table[keys[0]])
    for key in keys[1:]:
        chosen = jnp.where(value >= key, jnp.int32(table[key]), chosen)
    return chosen


@dataclass(frozen=True)
class Block:
    """A program's view of its linear-block.

    Attributes:
      layout, num_warps: static.
      arena: ref int32[A, W].
      frames: ref int32[E, frames of a block].
      e, bits: expert and bitwidth b.
      first_row: of the program's 16 stored rows.
      max_bits: the largest that ``bits`` can be.
    """

    layout: BlockLayout
    num_warps: int
    arena: object
    frames: object
    e: jax.Array
    bits: jax.Array
    first_row: jax.Array
    max_bits: int

    @property
    def index_V1(self):
        return jnp.arange(ROWS * self.num_warps, dtype=jnp.int32)[:, None]

    @property
    def warp_V1(self):
        return warp_and_row(self.index_V1, self.num_warps)[0]

    @property
    def row_V1(self):
        return self.first_row + warp_and_row(self.index_V1, self.num_warps)[1]

    @property
    def inner(self) -> int:
        return min(INNER_BITS, self.max_bits)

    @property
    def held(self) -> int:
        return min(HELD_BITS, self.max_bits - self.inner)

    def lut_place(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (frame, word in it) where the LUTs of stored rows begin."""
        layout = self.layout
        starts = {
            b: layout.page_starts[b - 1] * layout.frame_words + layout.lut_offset_words(b - 1)
            for b in range(layout.min_bits, layout.max_bits + 1)
        }
        start = choose(self.bits, starts) + (row << (self.bits - 1))
        frame, word = split(start, layout.frame_words)  # a row's LUT lies in one frame
        return self.frames[self.e, frame], word

    def lut(self, outer, place) -> list[jax.Array]:
        """Returns the 2^inner entries of each row's LUT from code outer 2^inner on, float32[16 W, 1] each.

        Those past the LUT's end are zeros. ``place``: ``lut_place`` of the rows.
        """
        layout, inner = self.layout, self.inner
        frame_V1, offset_V1 = place
        offset_V1 += outer << (inner - 1)
        entries = []
        for i in range(2 ** (inner - 1)):
            if 2 * i < 2**layout.min_bits:
                pair_V1 = self.arena[frame_V1, offset_V1 + i]
            else:
                exists = jnp.broadcast_to((2 * i) >> self.bits == 0, offset_V1.shape) | (self.bits >= inner)
                pair_V1 = load(self.arena.at[frame_V1, offset_V1 + i], mask=exists, other=jnp.int32(0))
            for half_V1 in (pair_V1, pair_V1 >> 16):
                half_V1 = lax.bitcast_convert_type(half_V1.astype(jnp.int16), jnp.float16)
                entries.append(half_V1.astype(jnp.float32))
        return entries

    def places(self, step: int, last: int | None = None):
        """Returns [(position_V1, stride_V1, mask)]: where the words of a step's chunks lie in a plane, up to columns.

        Args:
          step: warp w takes chunk step W + w; may be an array if all chunks of steps up to ``last`` are of one run.
          last: see ``step``.
        """
        layout, num_warps = self.layout, self.num_warps
        chunk_V1 = step * num_warps + self.warp_V1
        first, end = (0, (last + 1) * num_warps) if last is not None else (step * num_warps, (step + 1) * num_warps)
        touched = [run for run in runs(layout) if run.chunk < end and run.chunk + run.chunks > first]
        group_V1, row_in_tile_V1 = split(self.row_V1, layout.tile_rows)
        col_1K = jnp.arange(WORDS, dtype=jnp.int32)[None, :]

        def place(run: Run):
            tile_V1, word_V1 = run.tile_and_word(chunk_V1)
            tiles = layout.bands[run.band][1]
            band_start = layout.rows * sum(width * count for width, count in layout.bands[: run.band])
            tile_start = band_start + (group_V1 * tiles + tile_V1) * (layout.tile_rows * run.tile_words)
            return tile_start, word_V1 + row_in_tile_V1 * run.tile_words

        found, wide = [], [run for run in touched if run.width == WORDS]
        for run in wide:
            here = chunk_V1 >= run.chunk
            tile_start, word = place(run)
            if found:
                tile_start, word = jnp.where(here, tile_start, found[0][0]), jnp.where(here, word, found[0][1])
            found = [(tile_start, word, None)]
        if wide and wide[-1].chunk + wide[-1].chunks < end:
            found = [(*found[0][:2], chunk_V1 < wide[-1].chunk + wide[-1].chunks)]
        for run in touched:
            if run.width < WORDS:
                tile_start, word = place(run)
                mask = (chunk_V1 == run.chunk) & (col_1K >= run.position) & (col_1K < run.position + run.width)
                found.append((tile_start, word - run.position, mask))
        return found

    def words(self, plane, planes: range, places) -> jax.Array:
        """Returns int32[16 W, 16], the words of a plane; zeros where ``places`` has none, or if the plane is negative.

        Args:
          plane: which; may be an array.
          planes: what it can be.
          places: see ``places``.
        """
        start = choose(plane, {p: self.layout.page_starts[p] for p in planes if p >= 0})
        present = plane >= 0 if planes[0] < 0 else None
        col_1K = jnp.arange(WORDS, dtype=jnp.int32)[None, :]
        found = None
        for tile_start_V1, word_V1, mask in places:
            frame_V1, offset_V1 = split(tile_start_V1, self.layout.frame_words)
            if all(width >= 4 for width, _ in self.layout.bands):
                offset_V1 = pl.multiple_of(offset_V1 + word_V1, (4, 1))  # runs of 16 bytes
            else:
                offset_V1 = offset_V1 + word_V1
            offset_VK = offset_V1 + col_1K
            frame_VK = jnp.broadcast_to(self.frames[self.e, start + frame_V1], offset_VK.shape)
            if present is not None:
                mask = present if mask is None else mask & present
            if mask is None:
                words_VK = self.arena[frame_VK, offset_VK]
            else:
                mask = jnp.broadcast_to(mask, offset_VK.shape)
                words_VK = load(self.arena.at[frame_VK, offset_VK], mask=mask, other=jnp.int32(0))
            found = words_VK if found is None else found | words_VK
        return found


@dataclass(frozen=True)
class Chunks:
    """What a warp takes of its rows at a time: G chunks of each plane.

    Attributes:
      places: of each chunk (``Block.places``).
      indices_V1: of each chunk, which one it is.
      planes: int32[16 W, 16] of each chunk, of each of the last planes, held and inner.
    """

    places: list
    indices_V1: list
    planes: list


def load_chunks(block: Block, first, count: int, last: int | None = None) -> Chunks:
    """Returns steps first .. first + count - 1 of ``Block.places``; ``last`` as there, if ``first`` is an array."""
    layout, kept = block.layout, block.held + block.inner
    places = [block.places(first + g, last) for g in range(count)]
    least, most = layout.min_bits - kept, block.max_bits - kept
    planes = [
        [block.words(block.bits - kept + i, range(least + i, most + i + 1), place) for i in range(kept)]
        for place in places
    ]
    return Chunks(places, [(first + g) * block.num_warps + block.warp_V1 for g in range(count)], planes)


def dot_chunks(block: Block, lut_place, chunks: Chunks, slices: tuple, x_row, y_VQ, interpret: bool) -> jax.Array:
    """Returns y_VQ plus the products of these chunks, float32[16 W, 4] (see ``slices_to_number``).

    Args:
      lut_place: ``Block.lut_place`` of the rows, which no program should wait for again and again.
      slices: refs of ``Slices.words_XBW`` and ``unit_X``.
      x_row: which row of them.
    """
    bits, inner, held = block.bits, block.inner, block.held
    words = slices[0]
    shape = ROWS * block.num_warps, WORDS
    slice_V1 = warp_and_row(block.index_V1, block.num_warps)[1]
    num_runs = words.shape[1] // SLICES

    def only(match, plane, bit):
        return match & (plane ^ (bit - 1))

    def add_codes(run, x, outer, y_VQ):
        entries = block.lut(outer, lut_place)
        matches = []
        for place, planes in zip(chunks.places, chunks.planes, strict=True):

            def reread(p, match, place=place):
                plane = block.words(p, range(block.max_bits - inner - held), place)
                return only(match, plane, (outer >> (bits - inner - 1 - p)) & 1)

            match = jnp.full(shape, -1, jnp.int32)
            if block.max_bits > inner + held:
                match = lax.fori_loop(0, bits - inner - held, reread, match)
            for i in range(held):  # those that are not there are zeros, and so are their bits of ``outer``
                match = only(match, planes[i], (outer >> (held - 1 - i)) & 1)
            matches.append(match)
        sums = []
        for subset in range(2**inner):
            members = [held + i for i in range(inner) if subset >> (inner - 1 - i) & 1]
            sum_VK = jnp.zeros(shape, jnp.int32)
            for match, planes, x_VK in zip(matches, chunks.planes, x, strict=True):
                for one, other in zip(members[::2], (members[1::2] + members[-1:])[: len(members[::2])], strict=True):
                    match = both(match, planes[one], planes[other], interpret)
                sum_VK = binary_dot(sum_VK, match, x_VK, interpret)
            sums.append(slices_to_number(sum_VK, signed=run == num_runs - 1))
        for bit in range(inner):  # from columns that have at least a code's ones to columns that have no others
            for code in range(2**inner):
                if not code >> bit & 1:
                    sums[code] -= sums[code | 1 << bit]
        for w_V1, sum_VQ in zip(entries, sums, strict=True):
            s_VQ = sum_VQ.astype(jnp.float32) * 2.0 ** (SLICES * run)
            y_VQ = multiply_add(jnp.broadcast_to(w_V1, s_VQ.shape), s_VQ, y_VQ, interpret)
        return y_VQ

    for run in range(num_runs):
        slice_VK = jnp.broadcast_to(SLICES * run + slice_V1, shape)
        col_1K = jnp.arange(WORDS, dtype=jnp.int32)[None, :]
        x = [words[x_row, slice_VK, chunk_V1 * WORDS + col_1K] for chunk_V1 in chunks.indices_V1]
        outer_codes = jnp.left_shift(1, jnp.maximum(bits - inner, 0))
        y_VQ = lax.fori_loop(0, outer_codes, partial(add_codes, run, x), y_VQ)
    return y_VQ


def slices_to_number(sum_VK: jax.Array, signed: bool) -> jax.Array:
    """Returns int32[V, 4]: the sums of slices 0 .. 15 as numbers, each of four parts still to be times 4^part.

    Args:
      sum_VK: int32[V, 16], a result of ``binary_dot``.
      signed: whether slice 15 is worth - 2^15.
    """

    def last_two(a):
        return (half.reshape(half.shape[:-1]) for half in jnp.split(a, 2, axis=a.ndim - 1))

    # Part q holds slices 2q, 2q + 1, 8 + 2q, 8 + 2q + 1.
    even, odd = last_two(sum_VK.reshape(-1, 4, 2, 2))
    q, high = (lax.broadcasted_iota(jnp.int32, even.shape, axis) for axis in (1, 2))
    worth = jnp.where((q == 3) & (high == 1), -2, 2) if signed else 2
    low, high = last_two(even + odd * worth)
    return low + high * 256


def finish_rows(block: Block, y_VQ: jax.Array, unit) -> jax.Array:
    """Returns float32[16], the program's stored rows, from what its threads hold of them."""
    part_1Q = jnp.left_shift(1, 2 * jnp.arange(4, dtype=jnp.int32)).astype(jnp.float32)[None, :]
    y_V = jnp.sum(y_VQ * part_1Q, axis=1)
    return jnp.sum(y_V.reshape(2, block.num_warps, 8), axis=1).reshape(ROWS) * unit
