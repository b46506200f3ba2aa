# SPDX-License-Identifier: Apache-2.0
"""Frames between the arena and staging arrays: the two copies of page movement."""

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import module_of


def gather_frames(arena_AW: jax.Array, frames_N: jax.Array, *, implementation: str = "xla") -> jax.Array:
    """Returns the named frames, uint32[N, W].

    Args:
      arena_AW: uint32 frames.
      frames_N: int32, not negative; a frame of A or more is zeros.
      implementation: "xla", the definition, or "triton", Pallas kernels for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation.
    """
    return module_of(__package__, implementation).gather_frames(arena_AW, frames_N.astype(jnp.int32))


def scatter_frames(
    arena_AW: jax.Array, staged_NW: jax.Array, frames_N: jax.Array, *, implementation: str = "xla"
) -> jax.Array:
    """Returns the arena with N staged frames in their places; donate the arena and it is updated in place.

    Args:
      arena_AW: uint32 frames.
      staged_NW: uint32, what to write.
      frames_N: int32, not negative, where to; no frame twice. Frames of A or more are dropped.
      implementation: "xla", the definition, or "triton", Pallas kernels for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, or staged frames of another size.
    """
    if staged_NW.shape != (*frames_N.shape, arena_AW.shape[1]):
        raise ValueError(
            f"shapes disagree: {frames_N.shape} frames, staged {staged_NW.shape}, arena {arena_AW.shape}"
        )
    return module_of(__package__, implementation).scatter_frames(arena_AW, staged_NW, frames_N.astype(jnp.int32))
