# SPDX-License-Identifier: Apache-2.0
"""Frame movement in plain JAX. The definition."""

import jax
from jax import lax


def gather_frames(arena_AW: jax.Array, frames_N: jax.Array) -> jax.Array:
    """Args and result: see ``pallas_kernels.frames.api.gather_frames``."""
    # Fused into a later reader, the gather would need the arena after its next write: a copy of all of it.
    return lax.optimization_barrier(arena_AW.at[frames_N].get(mode="fill", fill_value=0))


def scatter_frames(arena_AW: jax.Array, staged_NW: jax.Array, frames_N: jax.Array) -> jax.Array:
    """Args and result: see ``pallas_kernels.frames.api.scatter_frames``."""
    # Fused with what made the staged frames, a concatenation say, the scatter runs at a hundredth of the copy rate.
    return arena_AW.at[frames_N].set(lax.optimization_barrier(staged_NW), mode="drop")
