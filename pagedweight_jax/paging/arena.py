# SPDX-License-Identifier: Apache-2.0
"""The arena, one array that all elastic device memory lives in, and who owns each of its frames."""

import jax
import jax.numpy as jnp
import numpy as np

FREE, WEIGHT, KV, RETIRED = range(4)
"""Owners of a frame: the free list, a weight page, a KV block, or something that gave it up but may still be read."""

OWNER_NAMES = ("the free list", "a weight page", "a KV block", "a page being retired")


def make_arena(num_frames: int, frame_words: int, device: jax.Device | None = None) -> jax.Array:
    """Returns the device words of an arena of zeros, uint32[num_frames, frame_words]."""
    return jnp.zeros((num_frames, frame_words), jnp.uint32, device=device)


class FrameAllocator:
    """Hands out the frames of an arena and takes them back.

    A frame is FREE, or it is taken for a WEIGHT page or a KV block; ``retire`` marks what is given up but may still be
    read by a running step (released, not yet reusable), and ``give`` makes it FREE again. Frame order means nothing:
    pages and blocks find their frames through tables, so there is no fragmentation.

    This is the one mutable class of the paging room: an arena has millions of frames, and a pure version would copy
    the free list and the owners at each move, where this one touches only the frames that move.

    Every misuse is a bug of the caller and raises RuntimeError before anything changes.
    """

    def __init__(self, num_frames: int):
        self.num_frames = num_frames
        self._owner_A = np.full(num_frames, FREE, np.uint8)
        self._stack = np.arange(num_frames, dtype=np.int32)[::-1].copy()  # the top is the end: low frames go first
        self._counts = [num_frames, 0, 0, 0]

    @property
    def num_free(self) -> int:
        return self._counts[FREE]

    def count(self, owner: int) -> int:
        """Frames that ``owner`` (FREE, WEIGHT, KV or RETIRED) has."""
        return self._counts[owner]

    @property
    def free_frames(self) -> np.ndarray:
        """The free list, int32."""
        return self._stack[: self.num_free].copy()

    def owners(self, frames: np.ndarray) -> np.ndarray:
        """Returns who owns each of ``frames``, uint8."""
        return self._owner_A[frames]

    def take(self, num_frames: int, owner: int) -> np.ndarray:
        """Returns ``num_frames`` free frames, int32, now owned by ``owner`` (WEIGHT or KV)."""
        if owner not in (WEIGHT, KV):
            raise RuntimeError(f"frames are taken for WEIGHT or KV, not for {OWNER_NAMES[owner]}")
        top = self.num_free
        if not 0 <= num_frames <= top:
            raise RuntimeError(f"{num_frames} frames taken with {top} of {self.num_frames} free")
        frames = self._stack[top - num_frames : top][::-1].copy()
        self._move(frames, owner)
        return frames

    def retire(self, frames: np.ndarray) -> None:
        """Marks owned ``frames`` as given up but not yet reusable."""
        self._check(frames, "retired", (WEIGHT, KV))
        self._move(frames, RETIRED)

    def give(self, frames: np.ndarray) -> None:
        """Puts owned ``frames`` back on the free list."""
        self._check(frames, "given back", (WEIGHT, KV, RETIRED))
        top = self.num_free
        self._stack[top : top + frames.size] = frames[::-1]
        self._move(frames, FREE)

    def _check(self, frames: np.ndarray, verb: str, legal: tuple[int, ...]) -> None:
        if frames.size and not 0 <= frames.min() <= frames.max() < self.num_frames:
            raise RuntimeError(f"frames {frames.min()}..{frames.max()} {verb}, the arena has {self.num_frames}")
        unique, counts = np.unique(frames, return_counts=True)
        if unique.size != frames.size:
            raise RuntimeError(f"frame {unique[counts > 1][0]} is {verb} twice in one call")
        illegal = ~np.isin(self._owner_A[frames], legal)
        if illegal.any():
            frame = frames[illegal.argmax()]
            raise RuntimeError(f"frame {frame} is {verb} but belongs to {OWNER_NAMES[self._owner_A[frame]]}")

    def _move(self, frames: np.ndarray, owner: int) -> None:
        for old, count in enumerate(np.bincount(self._owner_A[frames], minlength=len(OWNER_NAMES))):
            self._counts[old] -= int(count)
        self._counts[owner] += frames.size
        self._owner_A[frames] = owner
