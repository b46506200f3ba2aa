# SPDX-License-Identifier: Apache-2.0
"""Frame movement: both implementations against numpy, and the arena updated in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.frames import api, pallas_triton, reference
from pallas_kernels.frames.pallas_triton import Config

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
A, W = 12, 128


def case():
    rng = np.random.default_rng(0)
    arena = rng.integers(0, 2**32, (A, W), dtype=np.uint32)
    staged = rng.integers(0, 2**32, (5, W), dtype=np.uint32)
    frames = np.array([7, A, 0, 11, A + 3], np.int32)
    return arena, staged, frames


def expected(arena, staged, frames):
    gathered, scattered = np.zeros_like(staged), arena.copy()
    for n, frame in enumerate(frames):
        if frame < A:
            gathered[n] = arena[frame]
            scattered[frame] = staged[n]
    return gathered, scattered


def test_the_definition():
    arena, staged, frames = case()
    gathered, scattered = expected(arena, staged, frames)
    np.testing.assert_array_equal(api.gather_frames(jnp.asarray(arena), frames), gathered)
    np.testing.assert_array_equal(api.scatter_frames(jnp.asarray(arena), staged, frames), scattered)
    assert not np.array_equal(api.scatter_frames(jnp.asarray(arena), staged, np.roll(frames, 1)), scattered)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("words", [W, W // 4])
def test_kernels_equal_the_definition(words, interpret):
    arena, staged, frames = (jnp.asarray(x) for x in case())
    config = Config(words=words, num_warps=1)
    gathered = pallas_triton.gather_frames(arena, frames, config=config, interpret=interpret)
    np.testing.assert_array_equal(gathered, reference.gather_frames(arena, frames))
    scattered = pallas_triton.scatter_frames(arena, staged, frames, config=config, interpret=interpret)
    np.testing.assert_array_equal(scattered, reference.scatter_frames(arena, staged, frames))
    assert not np.array_equal(scattered, reference.scatter_frames(arena, staged, jnp.roll(frames, 1)))


def test_a_donated_arena_is_updated_in_place():
    arena, staged, frames = (jnp.asarray(x) for x in case())
    pointer = arena.unsafe_buffer_pointer()
    out = jax.jit(api.scatter_frames, donate_argnums=0)(arena, staged, frames)
    assert out.unsafe_buffer_pointer() == pointer


def test_wrong_arguments_are_refused():
    arena, staged, frames = case()
    with pytest.raises(ValueError, match="shapes disagree"):
        api.scatter_frames(arena, staged[:, :-1], frames)
    with pytest.raises(ValueError, match="'cuda' is not one of"):
        api.gather_frames(arena, frames, implementation="cuda")
