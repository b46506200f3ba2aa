# SPDX-License-Identifier: Apache-2.0
"""What the frame kernels are held to their definition on."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import KernelCase
from pallas_kernels.frames import reference

FRAME_WORDS = {"qwen1.5-moe": 4096, "gemma-4-26b": 2048}
NUM_FRAMES, NUM_MOVED = 4096, 1000


def make_args(seed: int, frame_words: int, num_frames: int, num_moved: int) -> tuple:
    """Returns (arena, staged, frames): random words; frames in random order, some beyond the arena."""
    rng = np.random.default_rng(seed)
    arena, staged = (rng.integers(0, 2**32, (n, frame_words), dtype=np.uint32) for n in (num_frames, num_moved))
    frames = rng.permutation(num_frames + num_moved // 4)[:num_moved]
    return jnp.asarray(arena), jnp.asarray(staged), jnp.asarray(frames, jnp.int32)


def cases(interpret: bool) -> list[KernelCase]:
    """Returns both copies; not a bit may differ."""
    from pallas_kernels.frames import pallas_triton  # JAX may be without Triton: ask only when it is wanted

    sizes = {"tiny": 128} if interpret else FRAME_WORDS
    num_frames, num_moved = (16, 9) if interpret else (NUM_FRAMES, NUM_MOVED)

    def gather(run, **options):
        return lambda arena, _, frames: run(arena, frames, **options)

    def scatter(run, **options):
        return lambda arena, staged, frames: run(arena, staged, frames, **options)

    found = []
    for name, words in sizes.items():
        for what, ends in (("gather_frames", gather), ("scatter_frames", scatter)):
            found.append(
                KernelCase(
                    kernel="frames",
                    name=f"{what}, {name}, {num_moved} of {4 * words} bytes",
                    make_args=lambda seed, words=words: make_args(seed, words, num_frames, num_moved),
                    run=ends(getattr(pallas_triton, what), interpret=interpret),
                    reference=ends(getattr(reference, what)),
                    tolerance=0.0,
                )
            )
    return found
