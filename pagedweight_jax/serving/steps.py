# SPDX-License-Identifier: Apache-2.0
"""Every jitted function of the server. Pure: weights and state in, state and results out; the state is donated.

The steps that run the model also return the ``RoutingSums`` of the tokens that they read, which are nobody's input.
They may be called inside a ``jit`` of one's own. Who compiles decode steps ahead of time, as the engine does, gives
``COMPILER_OPTIONS``, which JAX takes where a program is compiled and nowhere within one.
``implementation`` is static: ``xla``, the definition, or ``triton``, kernels for NVIDIA GPUs; None takes ``triton``
where JAX's default backend is a GPU.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pagedweight_jax.models import transformer
from pagedweight_jax.models.weights import Weights
from pagedweight_jax.paging.page_map import PageMap
from pagedweight_jax.serving.implementation import default_implementation
from pagedweight_jax.serving.paged_forward import layer_tables, paged_forward
from pagedweight_jax.serving.state import DecodeState
from pagedweight_jax.serving.trace import ExpertTrace, RoutingSums, routing_sums, row_sums, trace_shape
from pallas_kernels.frames.api import scatter_frames
from pallas_kernels.tokens.api import Rows, advance, choose

COMPILER_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""For ``decode_loop.lower(..).compile(COMPILER_OPTIONS)``: kernels that do not read each other's run side by side."""


def _decode(
    weights: Weights, state: DecodeState, num_steps: int, implementation: str | None
) -> tuple[DecodeState, jax.Array, RoutingSums]:
    """Returns what ``decode_loop`` does.

    What a step leaves behind its kernels write in place. ``lax.scan`` would copy it between kernels, which makes two
    CUDA graphs of a step.
    """
    config, num_rows, implementation = weights.config, len(state.lengths_B), implementation or default_implementation()
    tables = layer_tables(state.block_tables_BGLF)  # no step changes them
    positions_B = jnp.where(state.remaining_B > 0, state.lengths_B, -1)
    trace = jnp.zeros((num_steps, *trace_shape(config, num_rows)), jnp.int32)
    tokens_NB = jnp.zeros((num_steps, num_rows), jnp.int32)

    def step(carry):
        n, arena, rows, tokens_NB, trace = carry
        arena, hidden_BTD, trace = paged_forward(
            weights, state.replace(arena_AW=arena), tables, rows.last_tokens_B[:, None], rows.positions_B[:, None],
            implementation, (trace, n),
        )  # fmt: skip
        of_rows = state.temperature_B, state.seed_B, rows.positions_B
        best = transformer.best_of_blocks(weights, hidden_BTD[:, 0], *of_rows, implementation)
        rows, tokens_NB = advance(*best, rows, state.stop_ids_BS, tokens_NB, n, implementation=implementation)
        return n + 1, arena, rows, tokens_NB, trace

    rows = Rows(state.last_tokens_B, positions_B, state.lengths_B, state.remaining_B)
    carry = jnp.int32(0), state.arena_AW, rows, tokens_NB, trace
    _, arena, rows, tokens_NB, trace = lax.while_loop(lambda carry: carry[0] < num_steps, step, carry)
    state = state.replace(
        arena_AW=arena,
        lengths_B=rows.lengths_B,
        last_tokens_B=rows.last_tokens_B,
        remaining_B=rows.remaining_B,
    )
    return state, tokens_NB, row_sums(ExpertTrace.of_packed(trace), config.num_experts)


@partial(jax.jit, static_argnames="implementation", donate_argnames="state")
def decode_step(
    weights: Weights, state: DecodeState, *, implementation: str | None = None
) -> tuple[DecodeState, jax.Array, RoutingSums]:
    """Returns (state, tokens int32[B], sums [B, ..]): one token for every row that is decoding, -1 for the others.

    A row's step reads its last token, writes its KV at position ``lengths_B``, and draws the next. A row that draws one
    of its stop ids, or its last allowed token, stops decoding; the token itself is returned. The sums count the token
    that was read.
    """
    state, tokens_NB, sums = _decode(weights, state, 1, implementation)
    return state, tokens_NB[0], sums


@partial(jax.jit, static_argnames=("num_steps", "implementation"), donate_argnames="state")
def decode_loop(
    weights: Weights, state: DecodeState, num_steps: int, *, implementation: str | None = None
) -> tuple[DecodeState, jax.Array, RoutingSums]:
    """Returns (state, tokens int32[N, B], sums [B, ..]) of N = ``num_steps`` steps without the host in between.

    Between two calls lies a safe boundary: only there may bits, frames and rows change. Each row needs KV blocks for
    ``lengths_B + num_steps`` tokens.
    """
    return _decode(weights, state, num_steps, implementation)


def _prefill(weights: Weights, state: DecodeState, row, tokens_T, num_tokens, implementation):
    """Runs a chunk through row ``row``; returns (state with its KV and length, hidden_TD, the chunk's sums)."""
    start = state.lengths_B[row]
    offsets_T = jnp.arange(tokens_T.shape[0])
    positions_T = jnp.where(offsets_T < num_tokens, start + offsets_T, -1)
    tokens_RT, positions_RT = tokens_T[None], positions_T[None]
    tables = layer_tables(state.block_tables_BGLF[row][None])
    arena, hidden_RTD, trace = paged_forward(weights, state, tables, tokens_RT, positions_RT, implementation)
    state = state.replace(arena_AW=arena, lengths_B=state.lengths_B.at[row].add(num_tokens))
    return state, hidden_RTD[0], routing_sums(ExpertTrace.of_packed(trace), weights.config.num_experts)


@partial(jax.jit, static_argnames="implementation", donate_argnames="state")
def prefill_step(
    weights: Weights,
    state: DecodeState,
    row: jax.Array,
    tokens_T: jax.Array,
    num_tokens: jax.Array,
    max_tokens: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[DecodeState, jax.Array, RoutingSums]:
    """Returns (state, token int32, sums): a row's next chunk of prompt is in the cache, the token after it is drawn.

    Args:
      weights: dense weights.
      state: donated. The row was cleared by ``assign_row`` before its first chunk.
      row: int32 scalar.
      tokens_T: int32, one chunk, padded; its shape decides the compiled program.
      num_tokens: int32, how many of them count.
      max_tokens: int32, tokens that the row may generate after this chunk; 0 for all chunks but the last. The drawn
        token is the first of them.
    """
    implementation = implementation or default_implementation()
    state, hidden_TD, sums = _prefill(weights, state, row, tokens_T, num_tokens, implementation)
    of_row = (a[row][None] for a in (state.temperature_B, state.seed_B, state.lengths_B - 1))
    last_1D = hidden_TD[num_tokens - 1][None]
    token = choose(*transformer.best_of_blocks(weights, last_1D, *of_row, implementation))[0]
    remaining = jnp.where(jnp.any(token == state.stop_ids_BS[row]), 0, jnp.maximum(max_tokens - 1, 0))
    state = state.replace(
        last_tokens_B=state.last_tokens_B.at[row].set(token),
        remaining_B=state.remaining_B.at[row].set(remaining),
    )
    return state, token, sums


@partial(jax.jit, static_argnames="implementation", donate_argnames="state")
def score_step(
    weights: Weights,
    state: DecodeState,
    row: jax.Array,
    tokens_T: jax.Array,
    targets_T: jax.Array,
    num_tokens: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[DecodeState, jax.Array, jax.Array, RoutingSums]:
    """Returns (state, log-probabilities float32[T] of ``targets_T``, hidden_TD, sums) for a row's teacher-forced chunk.

    Args: as ``prefill_step``; ``targets_T`` holds the token after each token of ``tokens_T``.
    """
    implementation = implementation or default_implementation()
    state, hidden_TD, sums = _prefill(weights, state, row, tokens_T, num_tokens, implementation)
    logp_TV = jax.nn.log_softmax(transformer.logits(weights, hidden_TD, implementation), axis=-1)
    return state, jnp.take_along_axis(logp_TV, targets_T[:, None], axis=-1)[:, 0], hidden_TD, sums


@partial(jax.jit, donate_argnames="state")
def assign_row(
    state: DecodeState, row: jax.Array, temperature: jax.Array, seed: jax.Array, stop_ids_S: jax.Array
) -> DecodeState:
    """Returns the state with ``row`` empty, not decoding, and set to sample as asked. Also ends a row's work."""
    return state.replace(
        lengths_B=state.lengths_B.at[row].set(0),
        remaining_B=state.remaining_B.at[row].set(0),
        temperature_B=state.temperature_B.at[row].set(temperature),
        seed_B=state.seed_B.at[row].set(seed),
        stop_ids_BS=state.stop_ids_BS.at[row].set(stop_ids_S),
    )


@partial(jax.jit, static_argnames="implementation", donate_argnames="arena_AW")
def land_pages(
    arena_AW: jax.Array,
    pages: list[jax.Array] | jax.Array,
    frames_NF: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the arena with N pages written into their frames.

    Args:
      arena_AW: donated.
      pages: N staged pages uint32[F, W], as a list or stacked.
      frames_NF: int32; frames of A or more are dropped (pages that fill up a batch, or stay on the host).
    """
    pages_NFW = jnp.stack(pages) if isinstance(pages, (list, tuple)) else pages
    staged_NW = pages_NFW.reshape(-1, arena_AW.shape[1])
    implementation = implementation or default_implementation()
    return scatter_frames(arena_AW, staged_NW, frames_NF.reshape(-1), implementation=implementation)


@partial(jax.jit, donate_argnames="page_map")
def publish_frames(page_map: PageMap, gate_up_4S: jax.Array, down_4S: jax.Array) -> PageMap:
    """Returns the page map with the frame lists of landed pages.

    Args:
      page_map: donated.
      gate_up_4S, down_4S: int32 rows layer, expert, column, frame of ``page_map_update``; layers out of range are
        dropped.
    """

    def put(table_LEF, update_4S):
        layer, expert, column, frame = update_4S
        return table_LEF.at[layer, expert, column].set(frame, mode="drop")

    return PageMap(
        bits_LEU=page_map.bits_LEU,
        gate_up_frames_LEF=put(page_map.gate_up_frames_LEF, gate_up_4S),
        down_frames_LEF=put(page_map.down_frames_LEF, down_4S),
    )
