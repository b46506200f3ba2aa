# SPDX-License-Identifier: Apache-2.0
"""The host's copy of every weight page, in pinned memory so that the device can fetch it by itself."""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pallas_kernels.bitplane import BlockLayout

PINNED_TOGETHER = 4
"""Leaves that are on their way into pinned memory: one thread alone copied half as fast as a disk reads."""


@dataclass(frozen=True)
class HostPool:
    """Every page as an array of its own: slices of a larger pinned array move twenty times slower.

    Attributes:
      pages: by (layer, kind, plane), one ``pinned_host`` array uint32[page_frames, frame_words] per expert.
    """

    pages: dict[tuple[int, int, int], tuple[jax.Array, ...]]

    def get(self, layer: int, expert: int, kind: int, plane: int) -> jax.Array:
        """Returns the words of one page, uint32[page_frames, frame_words], in pinned memory."""
        return self.pages[layer, kind, plane][expert]

    @property
    def host_bytes(self) -> int:
        """Pinned bytes that the pool holds."""
        return sum(page.nbytes for experts in self.pages.values() for page in experts)


def fill_host_pool(
    leaves: Iterable[tuple[int, int, int, np.ndarray]], layouts: tuple[BlockLayout, BlockLayout], device: jax.Device
) -> HostPool:
    """Returns a pool of the pages in ``leaves``, pinned for ``device``; a few leaves at a time are in memory besides.

    Args:
      leaves: (layer, kind, plane, uint32[E, page_frames, frame_words]), each taken over: the CPU backend pins it
        where it lies, so it must not be written to afterwards.
      layouts: of gate_up and down blocks.
      device: that will fetch the pages.

    Raises:
      ValueError: a leaf has another dtype or shape than its layout says, or comes twice.
    """
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")

    def pin(leaf: np.ndarray) -> tuple[jax.Array, ...]:
        return tuple(jax.block_until_ready(jax.device_put(list(leaf), pinned)))

    copies, under_way = {}, deque()
    with ThreadPoolExecutor(PINNED_TOGETHER) as pool:
        for layer, kind, plane, leaf in leaves:
            _check(leaf, layer, kind, plane, layouts)
            if (layer, kind, plane) in copies:
                raise ValueError(f"pages of layer {layer} kind {kind} plane {plane} come twice")
            copies[layer, kind, plane] = pool.submit(pin, leaf)
            under_way.append(copies[layer, kind, plane])
            if len(under_way) > PINNED_TOGETHER:  # lets go of a leaf before the next one is asked for
                under_way.popleft().result()
    return HostPool({place: copy.result() for place, copy in copies.items()})


def _check(leaf: np.ndarray, layer: int, kind: int, plane: int, layouts: tuple[BlockLayout, BlockLayout]) -> None:
    shape = (layouts[kind].page_frames(plane), layouts[kind].frame_words)
    if leaf.dtype != np.uint32 or leaf.ndim != 3 or leaf.shape[1:] != shape:
        raise ValueError(
            f"pages of layer {layer} kind {kind} plane {plane} must be uint32[E, {shape[0]}, {shape[1]}], "
            f"got {leaf.dtype}{list(leaf.shape)}"
        )
