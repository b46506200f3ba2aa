# SPDX-License-Identifier: Apache-2.0
"""Staging memory follows the size of the model: hand-computed pages, and laws over many shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedweight_jax.serving.staging import MOST_BATCH_PAGES, STAGED_SHARE, plan_staging
from pallas_kernels.bitplane import BlockLayout


def layouts(expert_width: int, width: int, max_bits: int, frame_words: int) -> tuple[BlockLayout, BlockLayout]:
    return tuple(
        BlockLayout(
            rows=rows,
            columns=columns,
            interleaved=interleaved,
            min_bits=3,
            max_bits=max_bits,
            frame_words=frame_words,
        )
        for rows, columns, interleaved in ((2 * expert_width, width, True), (width, expert_width, False))
    )


def test_by_hand():
    """gate_up is [64, 32]: 64 words a plane; LUTs of 3, 4 bits take 256, 512 words. down is [32, 32], half as much."""
    pair = layouts(32, 32, 4, 256)
    gate_up_frames = [1, 1, 2, 3]  # 64, 64, 64 + 256 and 64 + 512 words in frames of 256, LUTs at a tile's border
    assert [pair[0].page_frames(p) for p in range(4)] == gate_up_frames
    page_bytes = 3 * 1024
    floor_bytes = (1 + 1 + 2 + 1 + 1 + 1) * 1024
    assert sum(layout.resident_bytes(3) for layout in pair) == floor_bytes

    small = plan_staging(pair, num_experts=10)
    assert (small.batch_pages, small.total_pages, small.batch_frames) == (1, 4, 3)
    assert small.total_bytes == 4 * page_bytes

    large = plan_staging(pair, num_experts=1000)  # 3 % of 7000 KiB are 210 KiB: 70 pages, 17 a batch
    assert (large.batch_pages, large.total_bytes) == (17, 4 * 17 * page_bytes)


@pytest.mark.parametrize(
    ("shape", "experts", "pages"),
    [((1408, 2048), 24 * 60, 16), ((14336, 4096), 32 * 8, 4), ((704, 2816), 30 * 128, 39)],
    ids=["qwen1.5-moe", "mixtral", "gemma"],
)
def test_full_size_models_move_many_megabytes_at_once(shape, experts, pages):
    pair = layouts(*shape, 8, 4096)
    staging = plan_staging(pair, experts)
    weights = experts * sum(layout.rows * layout.columns for layout in pair)
    assert staging.batch_pages == pages
    assert 30e6 < staging.total_bytes / 4 < 120e6
    assert 8 * staging.total_bytes / weights < 0.1  # bits a weight


@given(
    width=st.integers(1, 8).map(lambda n: 64 * n),
    expert_width=st.integers(1, 8).map(lambda n: 32 * n),
    max_bits=st.integers(3, 8),
    experts=st.integers(1, 1 << 14),
    more=st.integers(1, 1 << 14),
)
def test_laws(width, expert_width, max_bits, experts, more):
    pair = layouts(expert_width, width, max_bits, 1024)
    staging = plan_staging(pair, experts)
    floor_bytes = experts * sum(layout.resident_bytes(3) for layout in pair)
    assert 1 <= staging.batch_pages <= MOST_BATCH_PAGES
    assert staging.batch_pages == 1 or staging.total_bytes <= STAGED_SHARE * floor_bytes
    assert staging.page_frames == max(layout.page_frames(p) for layout in pair for p in range(max_bits))
    assert plan_staging(pair, experts + more).total_bytes >= staging.total_bytes
