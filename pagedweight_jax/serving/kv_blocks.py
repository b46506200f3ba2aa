# SPDX-License-Identifier: Apache-2.0
"""The KV cache's blocks on the host: which frames each decode row holds."""

import numpy as np

from pagedweight_jax.paging.arena import KV, FrameAllocator
from pagedweight_jax.serving.state import Geometry


class KVBlocks:
    """Block tables of all rows, over frames that come from the arena's one allocator.

    Attributes:
      table_BGLF: int32, the frames of each row's blocks per layer; ``num_frames`` where a row has no block.
      num_blocks_B: blocks that each row holds.
      changed: True when the table on the device is out of date.
    """

    def __init__(self, geometry: Geometry, allocator: FrameAllocator):
        self.geometry = geometry
        self.allocator = allocator
        rows, blocks = geometry.max_num_seqs, geometry.blocks_per_row
        shape = (rows, blocks, geometry.num_layers, geometry.kv.layer_frames)
        self.table_BGLF = np.full(shape, allocator.num_frames, np.int32)
        self.num_blocks_B = np.zeros(rows, np.int64)
        self.changed = False

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a context of ``tokens`` tokens takes."""
        return -(-tokens // self.geometry.kv.block_tokens)

    def missing_blocks(self, row: int, tokens: int) -> int:
        """Blocks that ``row`` still needs for a context of ``tokens`` tokens."""
        return max(0, self.blocks_for(tokens) - int(self.num_blocks_B[row]))

    @property
    def free_blocks(self) -> int:
        return self.allocator.num_free // self.geometry.frames_per_block

    @property
    def used_blocks(self) -> int:
        return int(self.num_blocks_B.sum())

    def grow(self, row: int, tokens: int) -> bool:
        """Gives ``row`` the blocks of a context of ``tokens`` tokens; False, taking nothing, if too few are free."""
        missing = self.missing_blocks(row, tokens)
        if missing > self.free_blocks:
            return False
        if missing:
            held = int(self.num_blocks_B[row])
            frames = self.allocator.take(missing * self.geometry.frames_per_block, KV)
            self.table_BGLF[row, held : held + missing] = frames.reshape(missing, *self.table_BGLF.shape[2:])
            self.num_blocks_B[row] += missing
            self.changed = True
        return True

    def release(self, row: int) -> None:
        """Frees all blocks of ``row`` at once: calls in flight that still use them run before any of a new owner."""
        held = int(self.num_blocks_B[row])
        if held:
            self.allocator.give(self.table_BGLF[row, :held].reshape(-1))
            self.table_BGLF[row] = self.allocator.num_frames
            self.num_blocks_B[row] = 0
            self.changed = True

    def frames(self) -> np.ndarray:
        """Every frame that a row holds, for the invariants."""
        return self.table_BGLF[self.table_BGLF < self.allocator.num_frames]
