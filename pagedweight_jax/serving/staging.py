# SPDX-License-Identifier: Apache-2.0
"""How much device memory waits for pages on their way from the host: a small share of the weights, whatever the model.

Pages land at a boundary only and count until the next one, so that half of it can come back per boundary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.bitplane import WORD_BYTES, BlockLayout

STAGED_SHARE = 0.03
"""Of the routed experts' bytes at the smallest bitwidth."""

STAGED_BATCHES = 4
"""Two under way, two landing."""

MOST_BATCH_PAGES = 64
"""More pages together do not cross faster."""


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Room for pages in transfer.

    Attributes:
      batch_pages: pages that cross from the host, and land, together.
      page_frames: of the largest page.
      frame_bytes: of a frame.
    """

    batch_pages: int
    page_frames: int
    frame_bytes: int

    @property
    def total_pages(self) -> int:
        return STAGED_BATCHES * self.batch_pages

    @property
    def total_bytes(self) -> int:
        return self.total_pages * self.page_frames * self.frame_bytes

    @property
    def batch_frames(self) -> int:
        return self.batch_pages * self.page_frames


def plan_staging(layouts: Sequence[BlockLayout], num_experts: int) -> Staging:
    """Returns the staging memory of a model: at most ``STAGED_SHARE`` of its experts, but a page per batch at least.

    Args:
      layouts: of gate_up and down blocks.
      num_experts: routed experts of all layers.
    """
    page_frames = max(layout.page_frames(plane) for layout in layouts for plane in range(layout.max_bits))
    frame_bytes = WORD_BYTES * layouts[0].frame_words
    floor_bytes = num_experts * sum(layout.resident_bytes(layout.min_bits) for layout in layouts)
    batch_pages = int(STAGED_SHARE * floor_bytes) // (STAGED_BATCHES * page_frames * frame_bytes)
    return Staging(
        batch_pages=min(max(1, batch_pages), MOST_BATCH_PAGES), page_frames=page_frames, frame_bytes=frame_bytes
    )
