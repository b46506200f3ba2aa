# SPDX-License-Identifier: Apache-2.0
"""Weights of a tile from its planes and LUTs: look-ups in registers by byte permutes.

Bits s, s + 4, .. s + 28 of a word of three planes, side by side in fields of four bits, are selectors of ``prmt``,
which picks four of eight bytes: those of the entries 8 g .. 8 g + 7 of the row's LUT, whose low and high bytes lie
apart. Each further plane picks between two results by the same instruction: field n of the one, or field n + 4 of both,
which is field n of the other. That is 2^(b-3) instructions a weight, and 2^(b-1) registers a row for its LUT.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton import elementwise_inline_asm, load
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.code_sums import choose, split
from pallas_kernels.moe_ffn.grouped_order import WORDS, narrow_bands, order_weights, whole_chunks

FIELDS = 0x11111111
"""The lowest bit of each field of four bits."""

KEEP = 0x32103210
"""Selectors of ``low`` byte n at field n; with a field's third bit set, of ``high`` byte n."""

LOW_BYTES, HIGH_BYTES = 0x6420, 0x7531
"""Selectors of the low and of the high bytes of two pairs of 16-bit entries."""

FIRST_PAIR, SECOND_PAIR = 0x5140, 0x7362
"""Selectors that put low and high bytes together: entries 0 and 1, and entries 2 and 3."""


def stack(blocks: list[jax.Array]) -> jax.Array:
    """Returns [.., 2, .., 2] of 2^n blocks: their index in binary, highest bit first (Triton joins two at a time)."""
    while len(blocks) > 1:
        half = len(blocks) // 2
        blocks = [jnp.stack([blocks[i], blocks[half + i]], axis=-1) for i in range(half)]
    return blocks[0]


def permute_bytes(low: jax.Array, high: jax.Array, selectors: jax.Array | int, interpret: bool) -> jax.Array:
    """Returns int32 of four bytes of ``low`` (0..3) and ``high`` (4..7), picked by the four lowest fields of 4 bits."""
    selectors = jnp.broadcast_to(jnp.int32(selectors), jnp.broadcast_shapes(low.shape, jnp.shape(selectors)))
    low, high = jnp.broadcast_to(low, selectors.shape), jnp.broadcast_to(high, selectors.shape)
    if interpret:
        n = jnp.arange(4, dtype=jnp.int32)
        field = (selectors[..., None] >> 4 * n) & 7
        word = jnp.where(field < 4, low[..., None], high[..., None])
        return jnp.sum(((word >> 8 * (field & 3)) & 0xFF) << 8 * n, axis=-1, dtype=jnp.int32)
    [picked] = elementwise_inline_asm(
        "prmt.b32 $0, $1, $2, $3;",
        args=[low, high, selectors],
        constraints="=r,r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(selectors.shape, jnp.int32)],
    )
    return picked


@dataclass(frozen=True)
class Rows:
    """A program's rows of its linear-block, looked up with ``planes`` planes, at least b of them.

    Attributes:
      layout, planes, num_warps: static; planes before the first are zeros.
      arena: ref int32[A, W].
      frames: ref int32[E, frames of a block].
      e, bits: expert and bitwidth b.
      row_R4: int32, stored rows, as they are loaded (``grouped_order.loaded_rows``), for each word of a chunk: Triton
        would lay whatever is loaded as [R, 1] out differently, and move all weights between threads to meet that.
      dtype: of the weights.
      interpret: whether to run on any backend.
    """

    layout: BlockLayout
    planes: int
    num_warps: int
    arena: object
    frames: object
    e: jax.Array
    bits: jax.Array
    row_R4: jax.Array
    dtype: object
    interpret: bool

    def lut(self):
        """Returns the rows' LUTs as ``look_up`` wants them.

        Pairs of 16-bit entries, int32[R, 4] each, split by ``split_bytes``; zeros past the LUT's end.
        """
        layout = self.layout
        starts = {
            b: layout.page_starts[b - 1] * layout.frame_words + layout.lut_offset_words(b - 1)
            for b in range(layout.min_bits, min(layout.max_bits, self.planes) + 1)
        }
        frame_R4, word_R4 = split(choose(self.bits, starts) + (self.row_R4 << (self.bits - 1)), layout.frame_words)
        frame_R4 = self.frames[self.e, frame_R4]  # a row's LUT lies in one frame

        def pair(i):
            exists = jnp.broadcast_to((2 * i) >> self.bits == 0, word_R4.shape)
            return self._as_dtype(load(self.arena.at[frame_R4, word_R4 + i], mask=exists, other=jnp.int32(0)))

        pairs = [pair(i) for i in range(max(2 ** (self.planes - 1), 4))]
        return jnp.stack([pair[:, 0] for pair in pairs], axis=1) if self.interpret else split_bytes(pairs)

    def _as_dtype(self, pair: jax.Array) -> jax.Array:
        """Returns two float16 entries of a word as bfloat16, if that is what is multiplied."""
        if self.dtype != jnp.bfloat16:
            return pair
        low, high = (
            lax.bitcast_convert_type(half.astype(jnp.int16), jnp.float16).astype(jnp.float32).astype(jnp.bfloat16)
            for half in (pair, pair >> 16)
        )
        low, high = (lax.bitcast_convert_type(half, jnp.int16).astype(jnp.int32) for half in (low, high))
        return (low & 0xFFFF) | (high << 16)

    def places(self, chunk) -> list[tuple]:
        """Returns [(tile_R4, word_R4, inside_14)]: where a chunk's words are in a plane, and which of them if not all.

        Args:
          chunk: of the whole ones, may be an array; the last one, if narrow bands share it, is an int.
        """
        layout = self.layout
        group_R4, row_R4 = split(self.row_R4, layout.tile_rows)
        starts = [0]
        for width, tiles in layout.bands:
            starts.append(starts[-1] + layout.rows * width * tiles)
        if isinstance(chunk, int) and chunk >= whole_chunks(layout):
            word_14, places = jnp.arange(WORDS, dtype=jnp.int32)[None], []
            for band, first in narrow_bands(layout):
                width, _ = layout.bands[band]
                inside = (word_14 >= first) & (word_14 < first + width)
                tile_R4 = starts[band] + group_R4 * (layout.tile_rows * width)
                places.append((tile_R4, row_R4 * width - first, inside))
            return places
        place, first = None, 0
        for (width, tiles), start in zip(layout.bands, starts):
            if width >= WORDS:
                tile, word = split(chunk - first, width // WORDS)
                tile_words = layout.tile_rows * width
                found = (start + tile * tile_words, tiles * tile_words, word * WORDS, width)
                found = [jnp.int32(a) for a in found]
                place = [jnp.where(chunk >= first, a, b) for a, b in zip(found, place)] if place else found
                first += tiles * width // WORDS
        start, stride, word, width = place
        return [(start + group_R4 * stride, row_R4 * width + word, None)]

    def frames_of(self, chunk) -> list[list[jax.Array]]:
        """Returns the frames of a chunk's words, int32[R, 4] of each place of each plane."""
        tiles = [split(tile_R4, self.layout.frame_words)[0] for tile_R4, *_ in self.places(chunk)]
        return [[self.frames[self.e, start + tile_R4] for tile_R4 in tiles] for start in self._plane_starts()]

    def _plane_starts(self) -> list[jax.Array]:
        layout, starts = self.layout, []
        for i in range(self.planes):
            least, most = layout.min_bits - self.planes + i, min(layout.max_bits, self.planes) - self.planes + i
            pages = {p: layout.page_starts[p] for p in range(max(least, 0), max(most, 0) + 1)}
            starts.append(choose(self.bits - self.planes + i, pages))
        return starts

    def words(self, chunk, frames) -> list[jax.Array]:
        """Returns int32[R, 4] of each plane: the words of a chunk, whose frames were found by ``frames_of``."""
        word_14, planes = jnp.arange(WORDS, dtype=jnp.int32)[None], []
        for i in range(self.planes):
            total = None
            for (tile_R4, word_R4, inside), frame_R4 in zip(self.places(chunk), frames[i]):
                offset_R4 = split(tile_R4, self.layout.frame_words)[1] + word_R4 + word_14
                mask = inside
                if self.layout.min_bits < self.planes - i:  # a plane that may be missing
                    exists = self.bits >= self.planes - i
                    mask = exists if mask is None else mask & exists
                if mask is None:
                    words = self.arena[frame_R4, offset_R4]
                else:
                    mask = jnp.broadcast_to(mask, offset_R4.shape)
                    words = load(self.arena.at[frame_R4, offset_R4], mask=mask, other=jnp.int32(0))
                total = words if total is None else total | words
            planes.append(total)
        return planes

    def look_up(self, words: list[jax.Array], lut) -> jax.Array:
        """Returns the weights of a chunk, [R, 128], rows and columns in the order of ``grouped_order``."""
        look_up = look_up_plainly if self.interpret else look_up_bytes
        pairs = look_up(words, lut)
        entry = jnp.bfloat16 if self.dtype == jnp.bfloat16 else jnp.float16
        halves = [lax.bitcast_convert_type(half.astype(jnp.int16), entry) for half in (pairs, pairs >> 16)]
        return order_weights(stack(halves), self.num_warps).astype(self.dtype)


def split_bytes(pairs: list[jax.Array], interpret: bool = False) -> list[tuple[jax.Array, jax.Array]]:
    """Returns (low bytes, high bytes) of four entries each, in order, from words of two 16-bit entries."""
    return [
        tuple(permute_bytes(*pairs[i : i + 2], picks, interpret) for picks in (LOW_BYTES, HIGH_BYTES))
        for i in range(0, len(pairs), 2)
    ]


def look_up_bytes(words: list[jax.Array], lut: list, interpret: bool = False) -> jax.Array:
    """Returns words of two entries, int32[R, 4, 2, 2, 2, 2]: of bits j = s + 8 n and j + 4, by s and n in binary.

    Args:
      words: int32[R, 4] of each plane.
      lut: of ``split_bytes``, int32[R, 4] each.
      interpret: whether to emulate the instruction.
    """
    last, found = len(words) - 1, []
    for s in range(4):

        def fields(plane, bit, s=s):
            word = words[plane] << (bit - s) if bit >= s else words[plane] >> (s - bit)
            return word & jnp.int32(FIELDS << bit)

        index = fields(last, 0) | fields(last - 1, 1)
        if last > 1:
            index |= fields(last - 2, 2)
        picks = [fields(plane, 2) | jnp.int32(KEEP) for plane in range(last - 3, -1, -1)]
        for shift in (0, 16):  # four fields at a time
            low_and_high = []
            for part in range(2):
                fours = [four[part] for four in lut]
                for selectors in (index, *picks):
                    pairs = zip(fours[::2], fours[1::2])
                    fours = [permute_bytes(low, high, selectors >> shift, interpret) for low, high in pairs]
                low_and_high += fours
            found += [permute_bytes(*low_and_high, picks, interpret) for picks in (FIRST_PAIR, SECOND_PAIR)]
    return stack(found)


def look_up_plainly(words: list[jax.Array], lut: jax.Array) -> jax.Array:
    """Returns what ``look_up_bytes`` does, as interpreting kernels want it: few operations, and gathers.

    Args:
      words: int32[R, 4] of each plane.
      lut: int32[R, entries / 2], words of two entries.
    """
    j, codes = jnp.arange(32, dtype=jnp.int32), 0
    for word in words:
        codes = (codes << 1) | ((word[..., None] >> j) & 1)
    codes = codes.reshape(-1, WORDS, 4, 2, 4).transpose(0, 1, 4, 2, 3)  # bit j = s + 8 n + 4 half
    lut_R2 = jnp.stack([lut & 0xFFFF, (lut >> 16) & 0xFFFF], axis=-1).reshape(lut.shape[0], -1)
    entries = jnp.take_along_axis(lut_R2, codes.reshape(lut.shape[0], -1), axis=1).reshape(codes.shape)
    return (entries[..., 0] | (entries[..., 1] << 16)).reshape(-1, WORDS, 2, 2, 2, 2)
