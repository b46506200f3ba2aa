# SPDX-License-Identifier: Apache-2.0
"""The page map: what kernels see of the page table."""

from dataclasses import dataclass

import jax
import numpy as np

from pagedweight_jax.paging.table import PageTable, frame_slots, page_frames


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PageMap:
    """Bitwidths and frame lists of all routed experts; F is a block's frame list of that kind, all planes in order.

    Only the frames of planes 0 .. bits-1 are looked at. The others hold some valid frame (0, or where the page was
    last), never -1: a kernel may compute an address before it masks the load. So lowering sends ``bits_LEU`` alone.

    Attributes:
      bits_LEU: int32.
      gate_up_frames_LEF, down_frames_LEF: int32.
    """

    bits_LEU: jax.Array
    gate_up_frames_LEF: jax.Array
    down_frames_LEF: jax.Array


def page_map(table: PageTable) -> PageMap:
    """Returns the whole map of ``table`` as numpy arrays, for start-up: ``jax.device_put`` it once."""
    gate_up_frames_LEF, down_frames_LEF = (np.maximum(np.stack(of_kind), 0) for of_kind in zip(*table.frames))
    return PageMap(
        bits_LEU=table.committed_LEU.astype(np.int32),
        gate_up_frames_LEF=gate_up_frames_LEF,
        down_frames_LEF=down_frames_LEF,
    )


def page_map_update(table: PageTable, pages: np.ndarray, size_frames: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns what to scatter into the device's map once ``pages`` have landed, for gate_up and for down.

    Each is int32[4, size_frames]: the rows layer, expert, column and frame, for
    ``frames_LEF.at[layer, expert, column].set(frame, mode="drop")``. Both have one fixed size, so that the scatter
    compiles once; what is left over is filled with a layer that does not exist.

    Args:
      table: after ``land``.
      pages: int[n, 4], landed.
      size_frames: room for the frames of one kind.

    Raises:
      ValueError: the pages of one kind have more than ``size_frames`` frames.
    """
    slots_S4, frames_S = frame_slots(table.layouts, pages), page_frames(table, pages)
    updates = []
    for kind in range(len(table.layouts)):
        of_kind = slots_S4[:, 2] == kind
        count = int(of_kind.sum())
        if count > size_frames:
            raise ValueError(f"{count} frames landed, a page-map update has room for {size_frames}")
        update = np.zeros((4, size_frames), np.int32)
        update[0] = len(table.frames)
        update[:3, :count] = slots_S4[of_kind][:, [0, 1, 3]].T
        update[3, :count] = frames_S[of_kind]
        updates.append(update)
    return tuple(updates)
