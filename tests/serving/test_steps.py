# SPDX-License-Identifier: Apache-2.0
"""The jitted steps as a JAX user calls them, held to the dense model and to their promises."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.config import GATE_UP
from pagedweight_jax.models import transformer
from pagedweight_jax.serving import steps

CONTEXT, CHUNK = 128, 16  # of stepping
DENSE_FORWARD = jax.jit(transformer.dense_forward)


def relative_error(out, ref):
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return np.linalg.norm(out - ref) / np.linalg.norm(ref)


def dense_greedy(weights, prompt, count):
    """Greedy continuation by recomputing the whole dense model for each token."""
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros(CONTEXT, np.int32)
        padded[: len(tokens)] = tokens
        tokens.append(int(jnp.argmax(DENSE_FORWARD(weights, padded)[len(tokens) - 1])))
    return tokens[len(prompt) :]


def test_scores_equal_the_dense_model_at_any_mix_of_bitwidths(tiny, stepping):
    rng = np.random.default_rng(1)
    bits = stepping.random_bits()
    state = stepping.state(bits)
    tokens = rng.integers(0, 128, 45).astype(np.int32)
    logprobs = []
    state = stepping.start(state, 1)
    for begin in range(0, 44, CHUNK):
        part, target = tokens[begin : begin + CHUNK][: 44 - begin], tokens[begin + 1 : begin + 1 + CHUNK]
        chunk, targets = (np.pad(x, (0, CHUNK - len(x))) for x in (part, target))
        state, out, _, _ = steps.score_step(tiny.dense, state, np.int32(1), chunk, targets, np.int32(len(part)))
        logprobs += np.asarray(out)[: len(target)].tolist()
    for layer_bits, tolerance_met in ((bits, True), (np.roll(bits, 1, axis=1), False)):
        dense = jax.nn.log_softmax(DENSE_FORWARD(tiny.dequantized(layer_bits), tokens))
        expected = np.take_along_axis(np.asarray(dense)[:-1], tokens[1:, None], axis=-1)[:, 0]
        assert (relative_error(logprobs, expected) < 1e-5) == tolerance_met


def test_prefill_and_decode_loop_continue_like_the_dense_model(tiny, stepping):
    rng = np.random.default_rng(2)
    bits = stepping.random_bits(1)
    prompts = [rng.integers(0, 128, n).tolist() for n in (5, 37)]
    state = stepping.state(bits)
    out = {}
    for row, prompt in zip((0, 2), prompts, strict=True):
        state, first = stepping.prefill(tiny.dense, stepping.start(state, row), row, prompt, budget=10)
        out[row] = [first]
    for _ in range(3):
        state, tokens_NB, _ = steps.decode_loop(tiny.dense, state, 4)
        assert np.all(np.asarray(tokens_NB)[:, 1] == -1)
        for row in out:
            out[row] += [int(t) for t in np.asarray(tokens_NB)[:, row] if t >= 0]
    dequantized = tiny.dequantized(bits)
    for row, prompt in zip((0, 2), prompts, strict=True):
        assert out[row] == dense_greedy(dequantized, prompt, 10)
    assert np.asarray(state.lengths_B).tolist() == [5 + 9, 0, 37 + 9]


def test_a_stop_token_ends_a_row_on_the_device(tiny, stepping):
    state = stepping.state(stepping.random_bits())
    prompt = [3, 1, 4, 1, 5]

    def run(state, stops=()):
        state, first = stepping.prefill(tiny.dense, stepping.start(state, 0, stops=stops), 0, prompt, budget=30)
        out = [first]
        for _ in range(2):
            state, tokens_NB, _ = steps.decode_loop(tiny.dense, state, 4)
            out += np.asarray(tokens_NB)[:, 0].tolist()
        return state, out

    state, free_run = run(state)
    stop = next(t for t in free_run[1:] if t != free_run[0])
    place = free_run.index(stop)
    state, stopped_run = run(state, stops=(stop,))
    assert stopped_run == free_run[: place + 1] + [-1] * (8 - place)
    assert int(state.remaining_B[0]) == 0


def test_a_decode_loop_is_as_many_decode_steps(tiny, stepping):
    runs = []
    for step, calls in ((steps.decode_step, 4), (partial(steps.decode_loop, num_steps=4), 1)):
        state, tokens = stepping.start(stepping.state(stepping.random_bits()), 1), []
        state, _ = stepping.prefill(tiny.dense, state, 1, [9, 8, 7], budget=4)  # the row ends a step before the loop
        for _ in range(calls):
            state, drawn, _ = step(tiny.dense, state)
            tokens += np.asarray(drawn).reshape(-1, 3).tolist()
        runs.append((tokens, np.asarray(state.last_tokens_B).tolist(), np.asarray(state.lengths_B).tolist()))
    assert runs[0] == runs[1]
    assert [row[1] >= 0 for row in runs[0][0]] == [True, True, True, False]


def test_dense_experts_in_the_weights_are_used_instead_of_pages(tiny, stepping):
    bits = stepping.random_bits(3)
    weights = tiny.dequantized(bits)
    prompt = list(range(20))
    state = stepping.state(np.full_like(bits, 3))
    state, first = stepping.prefill(weights, stepping.start(state, 0), 0, prompt, budget=6)
    state, tokens, _ = steps.decode_loop(weights, state, 4)
    assert [first, *np.asarray(tokens)[:, 0].tolist()] == dense_greedy(weights, prompt, 5)


def test_a_loop_within_a_jit_of_ones_own_gives_the_same_tokens(tiny, stepping):
    def start():
        return stepping.prefill(tiny.dense, stepping.start(stepping.state(bits), 0), 0, [5, 3, 9], budget=9)[0]

    bits = stepping.random_bits()
    within = jax.jit(lambda weights, state: steps.decode_loop(weights, state, 4)[1][:, 0])
    np.testing.assert_array_equal(within(tiny.dense, start()), steps.decode_loop(tiny.dense, start(), 4)[1][:, 0])


def test_no_step_copies_the_arena_and_bit_changes_do_not_recompile(tiny, stepping):
    bits = stepping.random_bits()
    chex.clear_trace_counter()
    traced_once = chex.assert_max_traces(n=1)
    decode = jax.jit(traced_once(steps.decode_loop.__wrapped__), static_argnames="num_steps", donate_argnames="state")
    large = stepping.state(bits, spare_frames=100_000)
    assert large.arena_AW.nbytes > 100_000_000
    for jitted, arguments in (
        (steps.decode_loop, (4,)),
        (steps.prefill_step, (np.int32(0), np.zeros(CHUNK, np.int32), np.int32(1), np.int32(1))),
        (steps.score_step, (np.int32(0), *[np.zeros(CHUNK, np.int32)] * 2, np.int32(1))),
    ):
        memory = jitted.lower(tiny.dense, large, *arguments).compile(steps.COMPILER_OPTIONS).memory_analysis()
        assert memory.alias_size_in_bytes >= large.arena_AW.nbytes
        assert memory.temp_size_in_bytes + memory.output_size_in_bytes < memory.alias_size_in_bytes + 4_000_000
    state, _ = stepping.prefill(tiny.dense, stepping.start(stepping.state(bits), 0), 0, [1, 2, 3], budget=100)
    for bits_now in range(6, 2, -1):
        lowered = np.minimum(bits, bits_now)
        state = state.replace(page_map=_with_bits(state.page_map, lowered))
        pointer = state.arena_AW.unsafe_buffer_pointer()
        state, *_ = decode(tiny.dense, state, 4)
        assert state.arena_AW.unsafe_buffer_pointer() == pointer
    with pytest.raises(AssertionError, match="traced"):
        decode(tiny.dense, state, 5)


def test_a_negative_control_for_the_arena_copy_check(tiny, stepping):
    """A step that keeps the old arena does copy it, and the same figures show it."""
    state = stepping.state(stepping.random_bits(), 20_000)
    kept = jax.jit(steps.decode_loop.__wrapped__, static_argnames="num_steps")
    memory = kept.lower(tiny.dense, state, 4).compile().memory_analysis()
    assert memory.alias_size_in_bytes < state.arena_AW.nbytes


def _with_bits(pages, bits_LEU):
    return type(pages)(
        bits_LEU=jnp.array(bits_LEU, jnp.int32),
        gate_up_frames_LEF=pages.gate_up_frames_LEF,
        down_frames_LEF=pages.down_frames_LEF,
    )


def test_land_pages_drops_frames_out_of_range(tiny):
    layout = tiny.checkpoint.manifest.layouts()[GATE_UP]
    arena = jnp.zeros((8, layout.frame_words), jnp.uint32)
    page = jnp.ones((layout.page_frames(0), layout.frame_words), jnp.uint32)
    frames = np.stack([np.arange(page.shape[0]), np.full(page.shape[0], 8)])
    landed = steps.land_pages(arena, [page, page + 1], frames)
    assert np.asarray(landed).sum() == page.size
