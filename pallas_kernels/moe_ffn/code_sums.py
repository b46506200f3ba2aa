# SPDX-License-Identifier: Apache-2.0
"""Products of a linear-block's rows by sums over codes: the inside of the kernels of ``pallas_triton``.

Names end in dimensions of their own: V, the 8 W rows of a program's W warps (or 8 slices for each of them), K, the 16
words of a chunk, Q, the four threads that share a row.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton import load
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.binary_dot import HALVES, ROWS, WORDS, binary_dot, both, multiply_add, per_row
from pallas_kernels.moe_ffn.slices import SLICES, Run, num_chunks, runs

INNER_BITS = 4
"""Planes whose codes are summed at once: 2^4 sums of 16 slices for each of 8 rows are 64 registers a thread."""


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
      e: expert.
      bits: bitwidth b; an int if it is known.
      first_row: of the program's 8 W stored rows, all of one tile.
      max_bits: the largest that ``bits`` can be.
    """

    layout: BlockLayout
    num_warps: int
    arena: object
    frames: object
    e: jax.Array
    bits: int | jax.Array
    first_row: jax.Array
    max_bits: int

    @property
    def inner(self) -> int:
        return min(INNER_BITS, self.max_bits)

    @property
    def outer(self) -> int:
        """Planes before the inner ones, whose bits all sums of a turn share."""
        return self.max_bits - self.inner

    @property
    def planes(self) -> list:
        """[(its first frame in the table, whether it is there; None for always)] of planes b - max_bits .. b - 1."""
        least, found = self.bits if isinstance(self.bits, int) else self.layout.min_bits, []
        for i in range(self.max_bits):
            widths = range(least, self.max_bits + 1)
            starts = {b: self.layout.page_starts[max(b - self.max_bits + i, 0)] for b in widths}
            there = None if least + i >= self.max_bits else self.bits + i >= self.max_bits
            found.append((choose(self.bits, starts), there))
        return found

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

    def lut(self, turn, place) -> list[jax.Array]:
        """Returns two entries at a time of each row's LUT from code turn 2^inner on, int32 of the rows' shape.

        Those past the LUT's end are zeros. ``place``: ``lut_place`` of the rows.
        """
        frame, offset = place
        offset += turn << (self.inner - 1)
        pairs = []
        for i in range(2 ** (self.inner - 1)):
            exists = None if isinstance(self.bits, int) else jnp.broadcast_to((2 * i) >> self.bits == 0, offset.shape)
            pairs.append(load(self.arena.at[frame, offset + i], mask=exists, other=None if exists is None else 0))
        return pairs

    def tile_places(self, run: Run, tile) -> list:
        """Returns [(frame, word in it)] where the program's rows of a tile begin in each plane."""
        layout = self.layout
        group, row_in_tile = split(self.first_row, layout.tile_rows)
        band_start = layout.rows * sum(width * count for width, count in layout.bands[: run.band])
        tile_start = band_start + (group * layout.bands[run.band][1] + tile) * (layout.tile_rows * run.tile_words)
        frame, word = split(tile_start + row_in_tile * run.tile_words, layout.frame_words)
        return [(self.frames[self.e, first + frame], word) for first, _ in self.planes]

    def words(self, chunk: int) -> list[jax.Array]:
        """Returns int32[8 W, 16] of each plane, a chunk's words; zeros where there are none."""
        shape = ROWS * self.num_warps, WORDS
        row_V1 = jnp.arange(shape[0], dtype=jnp.int32)[:, None]
        col_1K = jnp.arange(WORDS, dtype=jnp.int32)[None, :]
        found = [jnp.zeros(shape, jnp.int32)] * self.max_bits
        for run in runs(self.layout):
            if not run.chunk <= chunk < run.chunk + run.chunks:
                continue
            tile, word = run.tile_and_word(chunk)
            offset_VK = row_V1 * run.tile_words + word - run.position + col_1K
            for i, (frame, start) in enumerate(self.tile_places(run, tile)):
                here_VK = jnp.broadcast_to((col_1K >= run.position) & (col_1K < run.position + run.width), shape)
                there = self.planes[i][1]
                here_VK = here_VK if there is None else here_VK & there
                place = self.arena.at[jnp.broadcast_to(frame, shape), start + offset_VK]
                found[i] |= load(place, mask=here_VK, other=jnp.int32(0))
        return found


def matches(planes: list, match: jax.Array | None, interpret: bool) -> list:
    """Returns for each subset of the planes the columns that have all its ones, of those of ``match``."""
    found = [jnp.full_like(planes[0], -1) if match is None else match]
    for subset in range(1, 2 ** len(planes)):
        last = [i for i in range(len(planes)) if subset >> (len(planes) - 1 - i) & 1][-2:]
        rest = subset - sum(1 << (len(planes) - 1 - i) for i in last)
        ones = [planes[i] for i in last] + ([found[rest]] if rest or match is not None else [])
        found.append(ones[0] if len(ones) == 1 else ones[0] & ones[1] if len(ones) == 2 else both(*ones, interpret))
    return found


def load_slices(words, x_row, run: int, chunk, num_warps: int) -> list[jax.Array]:
    """Returns the chunk's 16 slices of one run of a row for ``binary_dot``, both halves, int32[8 W, 16]."""
    slice_V1 = jnp.arange(ROWS * num_warps, dtype=jnp.int32)[:, None] & (ROWS - 1)
    place_VK = slice_V1 * WORDS + jnp.arange(WORDS, dtype=jnp.int32)[None, :] + chunk * (SLICES * WORDS)
    return [words[x_row, run, place_VK + half * (ROWS * WORDS)] for half in range(HALVES)]


def add_chunk(block: Block, turn, planes: list, slices: list, sums: list, interpret: bool) -> list:
    """Returns the sums of each subset of the inner planes with a chunk's added.

    Args:
      turn: the outer planes' bits of the columns that count.
      planes: a chunk's words of each plane.
      slices: ``load_slices`` of it.
      sums: int32[8 W, 16] each.
    """
    match = None
    for i in range(block.outer):
        of_plane = planes[i] ^ (((turn >> (block.outer - 1 - i)) & 1) - 1)
        match = of_plane if match is None else match & of_plane
    found = matches(planes[block.outer :], match, interpret)
    for half in range(HALVES):  # the second of a subset's would wait for the first
        sums = [binary_dot(s, m, slices[half], half, interpret) for s, m in zip(sums, found, strict=True)]
    return sums


def add_turn(block: Block, run: int, runs_of_slices: int, sums: list, luts: list, ys: list, interpret: bool) -> list:
    """Returns ``ys`` plus what a turn's sums are with their centroids, float32[8 W, 4] of rows 2q and of rows 2q + 1.

    Args:
      run, runs_of_slices: which 16 slices, and how many.
      sums: of all columns (``add_chunk``).
      luts: ``Block.lut`` of rows 2q, and of rows 2q + 1.
    """
    numbers = [slices_to_number(s, signed=run == runs_of_slices - 1) for s in sums]
    for bit in range(block.inner):  # from columns that have at least a code's ones to columns that have no others
        for code in range(2**block.inner):
            if not code >> bit & 1:
                numbers[code] = [a - b for a, b in zip(numbers[code], numbers[code | 1 << bit], strict=True)]
    added = []
    for y_VQ, pairs, of_rows in zip(ys, luts, zip(*numbers, strict=True), strict=True):
        for code, number_VQ in enumerate(of_rows):
            half_VQ = (pairs[code >> 1] >> (16 * (code & 1))).astype(jnp.int16)
            w_VQ = lax.bitcast_convert_type(half_VQ, jnp.float16).astype(jnp.float32)
            s_VQ = number_VQ.astype(jnp.float32) * 2.0 ** (SLICES * run)
            y_VQ = multiply_add(w_VQ, s_VQ, y_VQ, interpret)
        added.append(y_VQ)
    return added


def slices_to_number(sums: jax.Array, signed: bool) -> list[jax.Array]:
    """Returns int32[8 W, 4] of rows 2q and of rows 2q + 1: slices g and g + 8 as numbers, still to be times 2^g.

    Args:
      sums: int32[8 W, 16], a result of ``binary_dot``.
      signed: whether slice 15 is worth - 2^15.
    """
    g_V1 = jnp.arange(sums.shape[0], dtype=jnp.int32)[:, None] & (ROWS - 1)
    worth = jnp.where(g_V1 == ROWS - 1, -256, 256) if signed else 256
    return [low + high * worth for low, high in per_row(sums)]


def lut_rows(num_warps: int, odd: int) -> jax.Array:
    """Returns which of the program's rows are 2q + ``odd`` of each warp, int32[8 W, 4]."""
    index_V1 = jnp.arange(ROWS * num_warps, dtype=jnp.int32)[:, None]
    return (index_V1 & -ROWS) + 2 * jnp.arange(4, dtype=jnp.int32)[None, :] + odd


def dot_rows(block: Block, words, x_row, interpret: bool, staged=None) -> jax.Array:
    """Returns W x of the program's rows, float32[8 W], still to be times the input's unit.

    Args:
      words: ref of ``Slices.words``.
      x_row: which row of them.
      staged: the rows in shared memory (``staged.Staged``), which have been asked for.
    """
    layout, runs_of_slices, places = block.layout, words.shape[1], None
    slices_of = partial(load_slices, words, x_row, num_warps=block.num_warps)
    if not (staged and staged.has_lut):
        places = [block.lut_place(block.first_row + lut_rows(block.num_warps, odd)) for odd in range(2)]

    def add(run: int, early: list, turn, ys: list) -> list:
        luts = [block.lut(turn, place) for place in places or ()]
        sums = [jnp.zeros((ROWS * block.num_warps, WORDS), jnp.int32)] * 2**block.inner
        if staged and staged.looped:
            sums = staged.add_tiles(turn, sums, partial(slices_of, run))
        else:
            for chunk in range(num_chunks(layout)):
                slices = early[chunk] if early else slices_of(run, chunk)
                planes = staged.words(chunk, slices[0]) if staged else block.words(chunk)
                sums = add_chunk(block, turn, planes, slices, sums, interpret)
        luts = luts or [staged.lut(turn, lut_rows(block.num_warps, odd)) for odd in range(2)]
        return add_turn(block, run, runs_of_slices, sums, luts, ys, interpret)

    ys = [jnp.zeros((ROWS * block.num_warps, 4), jnp.float32)] * 2
    for run in range(runs_of_slices):
        early = []
        if staged and not staged.looped:
            if not block.outer:  # while the planes are on their way
                early = [slices_of(run, chunk) for chunk in range(num_chunks(layout))]
            staged.wait()
        turn = partial(add, run, early)
        ys = lax.fori_loop(0, 2**block.outer, turn, ys) if block.outer else turn(0, ys)
    slice_V1 = jnp.arange(ROWS * block.num_warps, dtype=jnp.int32)[:, None] & (ROWS - 1)
    worth_V1 = jnp.left_shift(1, slice_V1).astype(jnp.float32)
    even, odd = (jnp.sum((y_VQ * worth_V1).reshape(-1, ROWS, 4), axis=1) for y_VQ in ys)
    return jnp.stack([even, odd], axis=2).reshape(-1)
