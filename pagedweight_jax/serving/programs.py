# SPDX-License-Identifier: Apache-2.0
"""The engine's programs, compiled before anything is allocated, so that their temporaries are in the ledger."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp

from pagedweight_jax.checkpoint.paged import Progress, no_progress
from pagedweight_jax.config import KINDS, ServeConfig
from pagedweight_jax.models.weights import Weights
from pagedweight_jax.serving import steps
from pagedweight_jax.serving.state import MAX_STOP_IDS, DecodeState


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Compiled steps. Each is compiled once; a call with other shapes is an error, not a recompilation.

    Attributes:
      prefill: ``steps.prefill_step`` for the engine's chunk.
      score: ``steps.score_step`` for the same chunk.
      decode: ``steps.decode_loop`` for the engine's steps per call.
      assign_row: ``steps.assign_row``.
      publish: ``steps.publish_frames``.
      land: ``steps.land_pages`` for a batch of pages of each (kind, page index) that can leave the device.
    """

    prefill: Callable
    score: Callable
    decode: Callable
    assign_row: Callable
    publish: Callable
    land: dict[tuple[int, int], Callable]

    @property
    def temporary_bytes(self) -> int:
        """The largest program's temporaries and the results that do not alias its arguments."""

        def own(program) -> int:
            memory = program.memory_analysis()
            return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

        programs = (self.prefill, self.score, self.decode, self.assign_row, self.publish, *self.land.values())
        return max(own(program) for program in programs)


def compile_programs(
    weights: Weights,
    state: DecodeState,
    config: ServeConfig,
    batch_pages: int,
    update_frames: int,
    progress: Progress = no_progress,
) -> Programs:
    """Returns the programs for weights and state of these shapes.

    Args:
      weights, state: abstract (``jax.ShapeDtypeStruct``) or real.
      config: chunk size, steps per call and implementation.
      batch_pages: pages that land together.
      update_frames: entries of a frame-list update of one kind (see ``page_map_update``).
      progress: called with the stage "compile".
    """
    geometry, which = state.geometry, {"implementation": config.implementation}
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    chunk = jax.ShapeDtypeStruct((config.prefill_chunk_tokens,), jnp.int32)
    update = jax.ShapeDtypeStruct((4, update_frames), jnp.int32)
    sampling = (
        jax.ShapeDtypeStruct((), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.uint32),
        jax.ShapeDtypeStruct((MAX_STOP_IDS,), jnp.int32),
    )
    lowered = {
        "prefill": lambda: steps.prefill_step.lower(weights, state, scalar, chunk, scalar, scalar, **which),
        "score": lambda: steps.score_step.lower(weights, state, scalar, chunk, chunk, scalar, **which),
        "decode": lambda: steps.decode_loop.lower(weights, state, config.steps_per_call, **which),
        "assign_row": lambda: steps.assign_row.lower(state, scalar, *sampling),
        "publish": lambda: steps.publish_frames.lower(state.page_map, update, update),
    }

    def land(kind: int, page: int):
        layout = (geometry.gate_up, geometry.down)[kind]
        one = jax.ShapeDtypeStruct((layout.page_frames(page), layout.frame_words), jnp.uint32)
        frames = jax.ShapeDtypeStruct((batch_pages, layout.page_frames(page)), jnp.int32)
        return steps.land_pages.lower(state.arena_AW, [one] * batch_pages, frames, **which)

    pages = product(range(len(KINDS)), range(geometry.gate_up.min_bits, geometry.gate_up.max_bits))
    lowered |= {place: partial(land, *place) for place in pages}
    progress("compile", 0, len(lowered))
    options = {"decode": steps.COMPILER_OPTIONS}
    with ThreadPoolExecutor() as pool:  # compiling needs no interpreter, lowering does
        try:
            compiling = {name: pool.submit(lower().compile, options.get(name)) for name, lower in lowered.items()}
            compiled = {}
            for name, program in compiling.items():
                compiled[name] = program.result()
                progress("compile", len(compiled), len(lowered))
        except BaseException:  # after an error or Ctrl-C nobody wants the others
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    landing = {name: program for name, program in compiled.items() if isinstance(name, tuple)}
    compiled = {name: program for name, program in compiled.items() if isinstance(name, str)}
    return Programs(**compiled, land=landing)
