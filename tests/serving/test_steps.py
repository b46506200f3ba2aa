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
from pagedweight_jax.paging.arena import KV, FrameAllocator, make_arena
from pagedweight_jax.paging.page_map import page_map
from pagedweight_jax.paging.table import initial_table
from pagedweight_jax.serving import steps
from pagedweight_jax.serving.state import MAX_STOP_IDS, init_state, make_geometry

ROWS, CONTEXT, CHUNK = 3, 128, 16
DENSE_FORWARD = jax.jit(transformer.dense_forward)


def relative_error(out, ref):
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return np.linalg.norm(out - ref) / np.linalg.norm(ref)


def paged_state(tiny, bits_LEU, spare_frames=0, kv_dtype="float32"):
    """Returns a state with the pages of the given bits resident and every row's KV blocks taken."""
    layouts = tiny.checkpoint.manifest.layouts()
    config = tiny.checkpoint.manifest.config
    geometry = make_geometry(config, layouts, kv_dtype, ROWS, CONTEXT)
    kv_frames = ROWS * geometry.blocks_per_row * geometry.frames_per_block
    weight_frames = config.num_sparse_layers * config.num_experts * sum(layout.block_frames for layout in layouts)
    allocator = FrameAllocator(kv_frames + weight_frames + spare_frames)
    table = initial_table(layouts, config.num_sparse_layers, config.num_experts, bits_LEU, allocator)
    arena = make_arena(allocator.num_frames, geometry.kv.frame_words) + jnp.uint32(0x7FC07FC0)  # NaN everywhere
    for layer in range(config.num_sparse_layers):
        for kind, layout in enumerate(layouts):
            for page in range(layout.max_bits):
                start, stop = layout.page_starts[page : page + 2]
                frames = table.frames[layer][kind][:, start:stop]
                frames = np.where(frames < 0, allocator.num_frames, frames)
                arena = steps.land_pages(arena, tiny.checkpoint.load_pages(layer, kind, page), frames)
    state = init_state(geometry, arena, jax.tree.map(jnp.array, page_map(table)))
    tables = allocator.take(kv_frames, KV).reshape(state.block_tables_BGLF.shape)
    return state.replace(block_tables_BGLF=jnp.array(tables))


def random_bits(tiny, seed=0):
    rng = np.random.default_rng(seed)
    config = tiny.checkpoint.manifest.config
    return rng.integers(3, 7, (config.num_sparse_layers, config.num_experts, 2))


def start(state, row, temperature=0.0, seed=0, stops=()):
    stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
    stop_ids[: len(stops)] = stops
    return steps.assign_row(state, np.int32(row), np.float32(temperature), np.uint32(seed), stop_ids)


def prefill(weights, state, row, prompt, budget):
    for begin in range(0, len(prompt), CHUNK):
        part = prompt[begin : begin + CHUNK]
        padded = np.zeros(CHUNK, np.int32)
        padded[: len(part)] = part
        last = begin + CHUNK >= len(prompt)
        state, token = steps.prefill_step(
            weights, state, np.int32(row), padded, np.int32(len(part)), np.int32(budget if last else 0)
        )
    return state, int(token)


def dense_greedy(weights, prompt, count):
    """Greedy continuation by recomputing the whole dense model for each token."""
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros(CONTEXT, np.int32)
        padded[: len(tokens)] = tokens
        tokens.append(int(jnp.argmax(DENSE_FORWARD(weights, padded)[len(tokens) - 1])))
    return tokens[len(prompt) :]


def test_scores_equal_the_dense_model_at_any_mix_of_bitwidths(tiny):
    rng = np.random.default_rng(1)
    bits = random_bits(tiny)
    state = paged_state(tiny, bits)
    tokens = rng.integers(0, 128, 45).astype(np.int32)
    logprobs = []
    state = start(state, 1)
    for begin in range(0, 44, CHUNK):
        part, target = tokens[begin : begin + CHUNK][: 44 - begin], tokens[begin + 1 : begin + 1 + CHUNK]
        chunk, targets = (np.pad(x, (0, CHUNK - len(x))) for x in (part, target))
        state, out = steps.score_step(tiny.dense, state, np.int32(1), chunk, targets, np.int32(len(part)))
        logprobs += np.asarray(out)[: len(target)].tolist()
    for layer_bits, tolerance_met in ((bits, True), (np.roll(bits, 1, axis=1), False)):
        dense = jax.nn.log_softmax(DENSE_FORWARD(tiny.dequantized(layer_bits), tokens))
        expected = np.take_along_axis(np.asarray(dense)[:-1], tokens[1:, None], axis=-1)[:, 0]
        assert (relative_error(logprobs, expected) < 1e-5) == tolerance_met


def test_prefill_and_decode_loop_continue_like_the_dense_model(tiny):
    rng = np.random.default_rng(2)
    bits = random_bits(tiny, 1)
    prompts = [rng.integers(0, 128, n).tolist() for n in (5, 37)]
    state = paged_state(tiny, bits)
    out = {}
    for row, prompt in zip((0, 2), prompts, strict=True):
        state, first = prefill(tiny.dense, start(state, row), row, prompt, budget=10)
        out[row] = [first]
    for _ in range(3):
        state, tokens_NB = steps.decode_loop(tiny.dense, state, 4)
        assert np.all(np.asarray(tokens_NB)[:, 1] == -1)
        for row in out:
            out[row] += [int(t) for t in np.asarray(tokens_NB)[:, row] if t >= 0]
    dequantized = tiny.dequantized(bits)
    for row, prompt in zip((0, 2), prompts, strict=True):
        assert out[row] == dense_greedy(dequantized, prompt, 10)
    assert np.asarray(state.lengths_B).tolist() == [5 + 9, 0, 37 + 9]


def test_a_stop_token_ends_a_row_on_the_device(tiny):
    state = paged_state(tiny, random_bits(tiny))
    prompt = [3, 1, 4, 1, 5]
    state, first = prefill(tiny.dense, start(state, 0), 0, prompt, budget=30)
    state, tokens = steps.decode_loop(tiny.dense, state, 8)
    free_run = [first, *np.asarray(tokens)[:, 0].tolist()]
    stop = next(t for t in free_run[1:] if t != first)
    place = free_run.index(stop)
    state, first = prefill(tiny.dense, start(state, 0, stops=(stop,)), 0, prompt, budget=30)
    state, tokens = steps.decode_loop(tiny.dense, state, 8)
    stopped_run = [first, *np.asarray(tokens)[:, 0].tolist()]
    assert stopped_run == free_run[: place + 1] + [-1] * (8 - place)
    assert int(state.remaining_B[0]) == 0


def test_decode_step_is_decode_loop_of_one(tiny):
    runs = []
    for step in (steps.decode_step, partial(steps.decode_loop, num_steps=1)):
        state, _ = prefill(tiny.dense, start(paged_state(tiny, random_bits(tiny)), 1), 1, [9, 8, 7], budget=4)
        state, tokens = step(tiny.dense, state)
        runs.append((np.asarray(tokens).reshape(-1).tolist(), np.asarray(state.last_tokens_B).tolist()))
    assert runs[0] == runs[1]


def test_dense_experts_in_the_weights_are_used_instead_of_pages(tiny):
    bits = random_bits(tiny, 3)
    weights = tiny.dequantized(bits)
    prompt = list(range(20))
    state = paged_state(tiny, np.full_like(bits, 3))
    state, first = prefill(weights, start(state, 0), 0, prompt, budget=6)
    state, tokens = steps.decode_loop(weights, state, 4)
    assert [first, *np.asarray(tokens)[:, 0].tolist()] == dense_greedy(weights, prompt, 5)


def test_no_step_copies_the_arena_and_bit_changes_do_not_recompile(tiny):
    bits = random_bits(tiny)
    chex.clear_trace_counter()
    traced_once = chex.assert_max_traces(n=1)
    decode = jax.jit(traced_once(steps.decode_loop.__wrapped__), static_argnames="num_steps", donate_argnames="state")
    small, large = (paged_state(tiny, bits, spare_frames) for spare_frames in (0, 20_000))
    for jitted, arguments in (
        (steps.decode_loop, (4,)),
        (steps.prefill_step, (np.int32(0), np.zeros(CHUNK, np.int32), np.int32(1), np.int32(1))),
        (steps.score_step, (np.int32(0), *[np.zeros(CHUNK, np.int32)] * 2, np.int32(1))),
    ):
        memory = [jitted.lower(tiny.dense, s, *arguments).compile().memory_analysis() for s in (small, large)]
        grown_bytes = large.arena_AW.nbytes - small.arena_AW.nbytes
        assert grown_bytes > 20_000_000
        assert memory[1].alias_size_in_bytes - memory[0].alias_size_in_bytes == grown_bytes
        assert memory[1].temp_size_in_bytes == memory[0].temp_size_in_bytes
    state, _ = prefill(tiny.dense, start(small, 0), 0, [1, 2, 3], budget=100)
    for bits_now in range(6, 2, -1):
        lowered = np.minimum(bits, bits_now)
        state = state.replace(page_map=_with_bits(state.page_map, lowered))
        pointer = state.arena_AW.unsafe_buffer_pointer()
        state, _ = decode(tiny.dense, state, 4)
        assert state.arena_AW.unsafe_buffer_pointer() == pointer
    with pytest.raises(AssertionError, match="traced"):
        decode(tiny.dense, state, 5)


def test_a_negative_control_for_the_arena_copy_check(tiny):
    """A step that keeps the old arena does copy it, and the same figures show it."""
    state = paged_state(tiny, random_bits(tiny), 20_000)
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
