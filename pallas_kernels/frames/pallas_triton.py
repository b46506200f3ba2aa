# SPDX-License-Identifier: Apache-2.0
"""Frame movement as Pallas-Triton kernels: one program copies one piece of one frame."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, store

ANY = pl.BlockSpec(memory_space=pl.ANY)


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a copy is cut into programs: words of a program, at most (a power of two), and its warps."""

    words: int = 1024
    num_warps: int = 4

    def pieces(self, frame_words: int) -> tuple[int, int]:
        """Returns (pieces of a frame, words of a piece)."""
        words = min(self.words, frame_words)
        return frame_words // words, words


def gather_frames(
    arena_AW: jax.Array, frames_N: jax.Array, *, config: Config = Config(), interpret: bool = False
) -> jax.Array:
    """Args and result: see ``pallas_kernels.frames.api.gather_frames``."""
    (num_frames, frame_words), (count,) = arena_AW.shape, frames_N.shape
    pieces, words = config.pieces(frame_words)

    def kernel(arena, frames, staged):
        n, piece = pl.program_id(0), pl.ds(pl.program_id(1) * words, words)
        frame = frames[n]

        @pl.when(frame < num_frames)
        def _():
            staged[n, piece] = arena[frame, piece]

        @pl.when(frame >= num_frames)
        def _():
            staged[n, piece] = jnp.zeros(words, jnp.uint32)

    return pl.pallas_call(
        kernel,
        grid=(count, pieces),
        in_specs=[ANY, ANY],
        out_specs=ANY,
        out_shape=jax.ShapeDtypeStruct((count, frame_words), arena_AW.dtype),
        compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gather_frames",
    )(arena_AW, frames_N)


def scatter_frames(
    arena_AW: jax.Array,
    staged_NW: jax.Array,
    frames_N: jax.Array,
    *,
    config: Config = Config(),
    interpret: bool = False,
) -> jax.Array:
    """Args and result: see ``pallas_kernels.frames.api.scatter_frames``."""
    (num_frames, frame_words), (count,) = arena_AW.shape, frames_N.shape
    pieces, words = config.pieces(frame_words)

    def kernel(_, staged, frames, arena):
        n, piece = pl.program_id(0), pl.ds(pl.program_id(1) * words, words)
        frame = frames[n]

        @pl.when(frame < num_frames)
        def _():
            store(arena.at[frame, piece], staged[n, piece])

    return pl.pallas_call(
        kernel,
        grid=(count, pieces),
        in_specs=[ANY, ANY, ANY],
        out_specs=ANY,
        out_shape=jax.ShapeDtypeStruct(arena_AW.shape, arena_AW.dtype),
        input_output_aliases={0: 0},
        compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="scatter_frames",
    )(arena_AW, staged_NW, frames_N)
