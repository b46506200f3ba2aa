# SPDX-License-Identifier: Apache-2.0
"""The plane word format: how any-precision codes and their look-up tables lie in a weight page.

A linear-block is a matrix of N rows and C columns. Its weights are any-precision codes of ``max_bits`` bits; the b-bit
code is the b most significant bits, and bit-plane p holds bit p of every code (p = 0 is the most significant). Every
bitwidth b in ``min_bits .. max_bits`` has its own look-up table (LUT) of 2^b float16 centroids per row.

The C/32 words of a row are cut into bands, the descending powers of two that add up to it, none above 64 (44 words are
bands of 32, 8 and 4; 448 words are seven times 64). A band is cut into tiles of R rows x T words; a tile covers 32 T
columns::

      column  =  first column of the tile  +  j T  +  w          bit j of word w

                  word 0      word 1           word T-1
      bit  0   [  0         | 1         | ... | T-1        ]
      bit  1   [  T         | T+1       | ... | 2T-1       ]
       ...
      bit 31   [  31T       | 31T+1     | ... | 32T-1      ]

so bit j of all T words of a row is one run of T columns: a kernel unpacks a row with 32 shifts and no reshape.
A plane is its bands one after another, widest first; a band is stored row group by row group, ``[N/R][tiles][R][T]``.
Tile sizes are powers of two that only shrink, hence a tile never crosses a frame and one table entry finds it.

gate_up holds F gate rows and F up rows, stored in turn: stored row 2f is gate row f, stored row 2f + 1 is up row f, so
that any run of stored rows holds all that ``act(gate) * up`` needs.

Page p of a block is plane p followed by the LUT that it completes (bitwidth p + 1, if that is at least ``min_bits``),
padded to whole frames::

      | plane p: N C / 32 words | gap to the LUT's alignment | LUT of p+1 bits: N rows x 2^(p+1) float16 | pad |

A block that runs at b bits has pages 0 .. b-1 resident.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

LAYOUT_VERSION = 1
"""Version of the word order on disk; a manifest that carries another one is refused."""

MAX_TILE_WORDS = 64
"""Long runs pay. On an H200 a 4-bit gate_up of Qwen1.5-MoE (four experts) took 20.7 us with runs of 64 words, 27.1 us
with 16; its down took 21.9 us in bands of 32, 8 and 4 words, 29.0 us in equal tiles of 4. That was a kernel that looks
every code up (benchmarks/README.md)."""

TILE_ROWS = 16
"""Kernels address single rows, so R only bounds the rows of a program and, with T, the smallest frame."""

WORD_BYTES = 4


def _power_of_two_divisor(n: int, limit: int) -> int:
    return min(n & -n, limit)


@dataclass(frozen=True)
class BlockLayout:
    """Where the words of one kind of linear-block lie. Static: two blocks of one kind share it.

    Attributes:
      rows: N, output rows.
      columns: C, input columns, a multiple of 32.
      interleaved: True for gate_up, whose gate and up rows are stored in turn.
      min_bits, max_bits: the supported bitwidths.
      frame_words: uint32 words of an arena frame, a power of two.
    """

    rows: int
    columns: int
    interleaved: bool
    min_bits: int
    max_bits: int
    frame_words: int

    def __post_init__(self):
        if self.columns % 32:
            raise ValueError(f"a bit-plane needs columns in multiples of 32, got {self.columns}")
        if self.interleaved and self.rows % 2:
            raise ValueError(f"gate_up needs an even number of rows, got {self.rows}")
        if not 1 <= self.min_bits <= self.max_bits <= 8:
            raise ValueError(f"bitwidths must lie in 1..8, got {self.min_bits}..{self.max_bits}")
        words = max(self.tile_rows * self.tile_words, 2**self.max_bits // 2)
        if self.frame_words & (self.frame_words - 1) or self.frame_words < words:
            raise ValueError(f"a frame must be a power of two of at least {words} words, got {self.frame_words}")

    @cached_property
    def tile_rows(self) -> int:
        """R: rows of a tile."""
        return _power_of_two_divisor(self.rows, TILE_ROWS)

    @cached_property
    def bands(self) -> tuple[tuple[int, int], ...]:
        """(T, tiles) of each band, widest first; the products add up to C/32."""
        words, bands, tile_words = self.columns // 32, [], MAX_TILE_WORDS
        while words:
            if words >= tile_words:
                bands.append((tile_words, words // tile_words))
                words %= tile_words
            tile_words //= 2
        return tuple(bands)

    @property
    def tile_words(self) -> int:
        """T of the widest band."""
        return self.bands[0][0]

    @property
    def plane_words(self) -> int:
        return self.rows * self.columns // 32

    def has_lut(self, page: int) -> bool:
        return page + 1 >= self.min_bits

    def lut_words(self, page: int) -> int:
        """Words of the LUT in ``page``: two float16 entries each."""
        return self.rows * 2 ** (page + 1) // 2 if self.has_lut(page) else 0

    def lut_offset_words(self, page: int) -> int:
        """First word of the LUT in ``page``, aligned so that no tile's LUT rows cross a frame needlessly."""
        alignment = min(self.frame_words, self.tile_rows * 2 ** (page + 1) // 2)
        return -(-self.plane_words // alignment) * alignment

    def page_frames(self, page: int) -> int:
        """Frames that ``page`` takes."""
        words = self.lut_offset_words(page) + self.lut_words(page) if self.has_lut(page) else self.plane_words
        return -(-words // self.frame_words)

    @cached_property
    def page_starts(self) -> tuple[int, ...]:
        """Where each page begins in a block's frame list; the last entry is the list's length."""
        return tuple(int(s) for s in np.cumsum([0] + [self.page_frames(p) for p in range(self.max_bits)]))

    @property
    def block_frames(self) -> int:
        """Frames of a whole block at ``max_bits``."""
        return self.page_starts[-1]

    def resident_bytes(self, bits: int) -> int:
        """M^b: device bytes of a block at ``bits`` bits, whole frames, LUTs min_bits..bits counted."""
        return self.page_starts[bits] * self.frame_words * WORD_BYTES

    def payload_bytes(self, bits: int) -> int:
        """M^b without the padding of frames."""
        words = bits * self.plane_words + sum(self.lut_words(p) for p in range(bits))
        return words * WORD_BYTES

    def own_lut_bytes(self, bits: int) -> int:
        """Bytes of a static block at ``bits`` bits that keeps its own LUT only."""
        return (bits * self.plane_words + self.lut_words(bits - 1)) * WORD_BYTES

    @cached_property
    def stored_rows(self) -> np.ndarray:
        """Source row of each stored row, int64[N]."""
        if not self.interleaved:
            return np.arange(self.rows)
        return np.arange(self.rows).reshape(2, -1).T.reshape(-1)


def pack_page(
    codes_ENC: np.ndarray | jax.Array, lut_ENK: np.ndarray | jax.Array | None, page: int, layout: BlockLayout
) -> np.ndarray | jax.Array:
    """Returns page ``page`` of E blocks as frames, uint32[E, page_frames, frame_words]; JAX's if the codes are.

    Args:
      codes_ENC: uint8, the ``max_bits``-bit codes, rows in source order (all gate rows, then all up rows).
      lut_ENK: float16[E, N, 2^(page+1)], the centroids of bitwidth page + 1, or None if that is below ``min_bits``.
      page: which plane, 0 = most significant.
      layout: the block's layout.
    """
    xp, num_blocks = (np if isinstance(codes_ENC, np.ndarray) else jnp), codes_ENC.shape[0]
    bits_ENC = (codes_ENC[:, layout.stored_rows] >> (layout.max_bits - 1 - page)) & 1
    parts, column = [], 0
    for tile_words, tiles in layout.bands:
        end = column + 32 * tile_words * tiles
        shape = (num_blocks, -1, layout.tile_rows, tiles, 32, tile_words)
        bits = bits_ENC[:, :, column:end].reshape(shape)
        words = sum(bits[..., j, :].astype(np.uint32) << np.uint32(j) for j in range(32))  # [E, N/R, R, tiles, T]
        parts.append(words.transpose(0, 1, 3, 2, 4).reshape(num_blocks, -1))
        column = end
    words = layout.plane_words
    if layout.has_lut(page):
        lut = xp.take(lut_ENK, layout.stored_rows, axis=1).view(np.uint32).reshape(num_blocks, -1)
        parts += [xp.zeros((num_blocks, layout.lut_offset_words(page) - words), np.uint32), lut]
        words = layout.lut_offset_words(page) + layout.lut_words(page)
    parts.append(xp.zeros((num_blocks, layout.page_frames(page) * layout.frame_words - words), np.uint32))
    return xp.concatenate(parts, axis=1).reshape(num_blocks, -1, layout.frame_words)


def _source_order(x_NC: jax.Array, layout: BlockLayout) -> jax.Array:
    if not layout.interleaved:
        return x_NC
    return x_NC.reshape(-1, 2, x_NC.shape[-1]).swapaxes(0, 1).reshape(x_NC.shape)


def unpack_codes(planes: list[jax.Array], layout: BlockLayout) -> jax.Array:
    """Returns the b-bit codes, uint32[N, C], stored row order.

    Args:
      planes: the b most significant planes, each uint32[plane_words] in stored order.
      layout: the block's layout.
    """
    shift_J1 = jnp.arange(32, dtype=jnp.uint32)[:, None]
    bands, word = [], 0
    for tile_words, tiles in layout.bands:
        end = word + layout.rows * tiles * tile_words
        codes = jnp.zeros((), jnp.uint32)
        for plane in planes:
            words = plane[word:end].reshape(-1, tiles, layout.tile_rows, 1, tile_words)
            codes = (codes << 1) | ((words >> shift_J1) & 1)  # [N/R, tiles, R, 32, T]
        bands.append(codes.transpose(0, 2, 1, 3, 4).reshape(layout.rows, -1))
        word = end
    return jnp.concatenate(bands, axis=1)


def unpack_lut(words: jax.Array, bits: int, layout: BlockLayout) -> jax.Array:
    """Returns the LUT of ``bits`` bits, float16[N, 2^bits], stored row order, from uint32[lut_words]."""
    pairs = jax.lax.bitcast_convert_type(words, jnp.float16)  # [lut_words, 2], low half first
    return pairs.reshape(layout.rows, 2**bits)


def dequantize_pages(pages: list[jax.Array], layout: BlockLayout) -> jax.Array:
    """Returns a block's weights at b = len(pages) bits, float32[N, C], rows in source order.

    W[n, c] = LUT_b[n, code_b[n, c]]. This is the definition that every kernel is held to.

    Args:
      pages: pages 0 .. b-1, each uint32[page_frames, frame_words].
      layout: the block's layout; b must be at least ``min_bits``.
    """
    bits = len(pages)
    flat = [page.reshape(prod(page.shape)) for page in pages]
    codes_NC = unpack_codes([page[: layout.plane_words] for page in flat], layout)
    start = layout.lut_offset_words(bits - 1)
    lut_NK = unpack_lut(flat[-1][start : start + layout.lut_words(bits - 1)], bits, layout)
    w_NC = jnp.take_along_axis(lut_NK, codes_NC.astype(jnp.int32), axis=1, mode="promise_in_bounds")
    return _source_order(w_NC.astype(jnp.float32), layout)
