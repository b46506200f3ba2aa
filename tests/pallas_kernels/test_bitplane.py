# SPDX-License-Identifier: Apache-2.0
"""The plane word format against the picture in its docstring, read bit by bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitplane import BlockLayout, dequantize_pages, pack_page


def smallest_frame(rows, columns, interleaved, min_bits, max_bits):
    """The smallest frame that a layout accepts, in words; tile sizes are the layout's own affair."""
    roomy = BlockLayout(rows, columns, interleaved, min_bits, max_bits, 1 << 20)
    return max(roomy.tile_rows * roomy.tile_words, 2**max_bits // 2)


def make_layout(rows, columns, interleaved, bits, frames=1):
    return BlockLayout(rows, columns, interleaved, *bits, frames * smallest_frame(rows, columns, interleaved, *bits))


def random_block(layout, num_blocks=1, seed=0):
    rng = np.random.default_rng(seed)
    codes_ENC = rng.integers(0, 2**layout.max_bits, (num_blocks, layout.rows, layout.columns), dtype=np.uint8)
    luts = {
        bits: np.sort(rng.standard_normal((num_blocks, layout.rows, 2**bits)).astype(np.float16), axis=-1)
        for bits in range(layout.min_bits, layout.max_bits + 1)
    }
    return codes_ENC, luts


def all_pages(codes_ENC, luts, layout):
    return [pack_page(codes_ENC, luts.get(page + 1), page, layout) for page in range(layout.max_bits)]


def expected_weights(codes_ENC, luts, layout, bits):
    codes = (codes_ENC >> (layout.max_bits - bits)).astype(int)
    return np.take_along_axis(luts[bits].astype(np.float32), codes, axis=2)


def stored_row(n, layout):
    """Where source row n is stored: gate and up rows in turn."""
    if not layout.interleaved:
        return n
    is_up, number = divmod(n, layout.rows // 2)
    return 2 * number + is_up


def tile_widths(layout):
    """T of each tile of a row: the binary digits of C/32, high to low, with 64 as the highest."""
    words = layout.columns // 32
    return [64] * (words // 64) + [T for T in (32, 16, 8, 4, 2, 1) if words % 64 & T]


def word_and_bit(n, c, layout):
    """Word of the plane and bit in it of weight (n, c): bands of equal T one after another, each [N/R][tiles][R][T]."""
    R, widths = layout.tile_rows, tile_widths(layout)
    t = 0
    while c >= 32 * widths[t]:
        c, t = c - 32 * widths[t], t + 1
    T = widths[t]
    j, w = divmod(c, T)
    group, r = divmod(stored_row(n, layout), R)
    band = widths.index(T)
    band_start = layout.rows * sum(widths[:band])
    return band_start + ((group * widths.count(T) + t - band) * R + r) * T + w, j


# The shapes of Qwen1.5-MoE (2816 x 2048, 2048 x 1408), Gemma (704 wide), and small and odd ones.
SHAPES = [
    (2816, 2048, True),
    (2048, 1408, False),
    (96, 704, False),
    (1408, 96, True),
    (512, 320, True),
    (320, 256, False),
    (4, 2208, False),
    (48, 160, True),
    (6, 32, True),
    (5, 96, False),
    (1, 32, False),
]
SMALL = [shape for shape in SHAPES if shape[0] * shape[1] < 20000]


@pytest.mark.parametrize(("rows", "columns", "interleaved"), SHAPES)
def test_pages_round_trip(rows, columns, interleaved):
    layout = make_layout(rows, columns, interleaved, (3, 4), frames=2)
    codes_ENC, luts = random_block(layout)
    pages = all_pages(codes_ENC, luts, layout)
    for bits in (3, 4):
        unpacked_NC = dequantize_pages([jnp.asarray(page[0]) for page in pages[:bits]], layout)
        np.testing.assert_array_equal(unpacked_NC, expected_weights(codes_ENC, luts, layout, bits)[0])


@pytest.mark.parametrize("bits", [(1, 8), (3, 8), (8, 8), (1, 1), (2, 4)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_range_of_bits_round_trips(bits, interleaved):
    layout = make_layout(12, 96, interleaved, bits)
    codes_ENC, luts = random_block(layout, num_blocks=2)
    pages = all_pages(codes_ENC, luts, layout)
    for e in range(2):
        for b in range(bits[0], bits[1] + 1):
            unpacked_NC = dequantize_pages([jnp.asarray(page[e]) for page in pages[:b]], layout)
            np.testing.assert_array_equal(unpacked_NC, expected_weights(codes_ENC, luts, layout, b)[e])


@pytest.mark.parametrize(("rows", "columns", "interleaved"), SMALL)
def test_words_lie_where_the_picture_says(rows, columns, interleaved):
    layout = make_layout(rows, columns, interleaved, (2, 3))
    codes_ENC, luts = random_block(layout)
    for page in range(3):
        words = pack_page(codes_ENC, luts.get(page + 1), page, layout).reshape(-1)
        plane = [0] * (rows * columns // 32)
        for n in range(rows):
            for c in range(columns):
                word, j = word_and_bit(n, c, layout)
                plane[word] |= (int(codes_ENC[0, n, c]) >> (2 - page) & 1) << j
        np.testing.assert_array_equal(words[: len(plane)], np.array(plane, np.uint32))


@pytest.mark.parametrize(("rows", "columns", "interleaved"), SMALL)
def test_luts_follow_their_plane_in_stored_row_order(rows, columns, interleaved):
    layout = make_layout(rows, columns, interleaved, (2, 4))
    codes_ENC, luts = random_block(layout)
    for page in range(4):
        words = pack_page(codes_ENC, luts.get(page + 1), page, layout).reshape(-1)
        if page + 1 < 2:
            assert not words[layout.plane_words :].any(), "no LUT below min_bits"
            continue
        start = layout.lut_offset_words(page)
        entries = 2 ** (page + 1)
        assert layout.plane_words <= start
        for n in range(rows):
            first = start + stored_row(n, layout) * entries // 2
            for k in range(entries):  # two float16 in a word, the even entry in the low half
                half = int(words[first + k // 2]) >> 16 * (k % 2) & 0xFFFF
                assert half == int(luts[page + 1][0, n].view(np.uint16)[k])
        used = np.zeros(len(words), bool)
        used[: layout.plane_words] = used[start : start + rows * entries // 2] = True
        assert not words[~used].any(), "gap and padding are zero"


def test_a_wrong_bit_is_seen():
    """Negative control: one flipped bit of a plane changes exactly its own weight."""
    layout = make_layout(6, 64, True, (2, 3))
    codes_ENC, luts = random_block(layout)
    pages = all_pages(codes_ENC, luts, layout)
    expected_NC = expected_weights(codes_ENC, luts, layout, 3)[0]
    for page in (0, 1, 2):
        flipped = [jnp.asarray(p[0]) for p in pages]
        flipped[page] = flipped[page].at[0, 0].set(flipped[page][0, 0] ^ 1)
        changed = np.argwhere(np.asarray(dequantize_pages(flipped, layout)) != expected_NC)
        np.testing.assert_array_equal(changed, [[0, 0]])


@pytest.mark.parametrize(("rows", "columns", "interleaved"), SHAPES)
@pytest.mark.parametrize("frames", [1, 4])
def test_tiles_and_lut_rows_stay_inside_a_frame(rows, columns, interleaved, frames):
    layout = make_layout(rows, columns, interleaved, (3, 8), frames)
    R, first_word = layout.tile_rows, 0
    assert layout.rows % R == 0
    assert sum(T * tiles for T, tiles in layout.bands) == layout.columns // 32
    for T, tiles in layout.bands:
        starts = first_word + np.arange(layout.rows // R * tiles) * R * T
        np.testing.assert_array_equal(starts // layout.frame_words, (starts + R * T - 1) // layout.frame_words)
        first_word += layout.rows * tiles * T
    assert first_word == layout.plane_words
    for page in range(2, 8):
        row_words = 2 ** (page + 1) // 2
        first_word = layout.lut_offset_words(page) + np.arange(rows) * row_words
        np.testing.assert_array_equal(
            first_word // layout.frame_words, (first_word + row_words - 1) // layout.frame_words
        )


@pytest.mark.parametrize(("rows", "columns", "interleaved"), SHAPES)
def test_byte_tables_count_the_pages_that_are_packed(rows, columns, interleaved):
    layout = make_layout(rows, columns, interleaved, (3, 6))
    codes_ENC, luts = random_block(layout)
    pages = all_pages(codes_ENC, luts, layout)
    assert layout.page_starts == tuple(np.cumsum([0] + [page.shape[1] for page in pages]))
    assert layout.block_frames == layout.page_starts[-1]
    for bits in range(3, 7):
        planes = bits * rows * columns // 8
        lut = {b: rows * 2**b * 2 for b in range(3, bits + 1)}
        resident = sum(page.nbytes for page in pages[:bits])
        assert layout.resident_bytes(bits) == resident
        assert layout.payload_bytes(bits) == planes + sum(lut.values())
        assert layout.own_lut_bytes(bits) == planes + lut[bits]
        assert layout.payload_bytes(bits) <= resident
    assert layout.resident_bytes(0) == 0


def test_qwen_blocks_cost_what_the_arithmetic_says():
    """2816 x 2048 at 4 bits: 2.75 MiB of planes and LUTs of 44 and 88 KiB; padding under 3 %."""
    layout = BlockLayout(2816, 2048, True, 3, 8, 4096)
    assert layout.own_lut_bytes(4) == 2.75 * 2**20 + 88 * 2**10
    assert layout.payload_bytes(4) == layout.own_lut_bytes(4) + 44 * 2**10
    assert layout.resident_bytes(4) < 1.03 * layout.payload_bytes(4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("columns", 48, "multiples of 32"),
        ("rows", 7, "even number of rows"),
        ("min_bits", 0, r"1\.\.8"),
        ("max_bits", 9, r"1\.\.8"),
        ("max_bits", 2, r"1\.\.8"),
        ("frame_words", 3 << 10, "power of two"),
        ("frame_words", 8, "at least"),
    ],
)
def test_impossible_layouts_are_refused(field, value, message):
    layout = BlockLayout(8, 64, True, 3, 6, 1 << 12)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(layout, **{field: value})


@pytest.mark.parametrize(("rows", "columns", "interleaved"), [(48, 96, True), (32, 1408, False)])
def test_jax_packs_the_same_pages(rows, columns, interleaved):
    layout = make_layout(rows, columns, interleaved, (2, 4))
    codes_ENC, luts = random_block(layout, num_blocks=2)
    on_device = [jnp.asarray(codes_ENC), {bits: jnp.asarray(lut_ENK) for bits, lut_ENK in luts.items()}]
    for page, expected in zip(all_pages(*on_device, layout), all_pages(codes_ENC, luts, layout)):
        assert isinstance(page, jax.Array)
        np.testing.assert_array_equal(page, expected)
        assert page.dtype == expected.dtype == np.uint32
