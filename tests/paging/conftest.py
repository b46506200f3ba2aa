# SPDX-License-Identifier: Apache-2.0
"""A small paged model: 2 layers, 3 experts, 2..5 bits; pages of 1 to 18 frames of 64 words."""

import numpy as np
import pytest

from pallas_kernels.bitplane import BlockLayout

NUM_LAYERS, NUM_EXPERTS = 2, 3


@pytest.fixture(scope="session")
def layouts():
    return BlockLayout(64, 64, True, 2, 5, 64), BlockLayout(64, 32, False, 2, 5, 64)


@pytest.fixture(scope="session")
def leaves(layouts):
    """Random words of every page: [(layer, kind, plane, uint32[E, page_frames, frame_words])]."""
    rng = np.random.default_rng(0)
    return [
        (layer, kind, plane, rng.integers(0, 2**32, (NUM_EXPERTS, layout.page_frames(plane), 64), np.uint32))
        for layer in range(NUM_LAYERS)
        for kind, layout in enumerate(layouts)
        for plane in range(layout.max_bits)
    ]


@pytest.fixture(scope="session")
def bits_LEU():
    return np.random.default_rng(1).integers(2, 6, (NUM_LAYERS, NUM_EXPERTS, 2))
