# SPDX-License-Identifier: Apache-2.0
"""The sums that steps return, against a recount in numpy of what a dense forward pass routes where."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.config import PlannerConfig, ServeConfig
from pagedweight_jax.models import transformer
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.moe import dense_experts
from pagedweight_jax.planning.policy import Policy
from pagedweight_jax.planning.signals import request_weights
from pagedweight_jax.serving import engine as engine_module
from pagedweight_jax.serving import steps
from pagedweight_jax.serving.calls import collect, dispatch
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.request import SamplingParams
from pagedweight_jax.serving.trace import ExpertTrace, routing_sums, row_sums, sums_bytes

CHUNK = 16


@jax.jit
def dense_routing(weights, tokens_T):
    """Returns (m_TD, ids_TK, weights_TK, residual behind it) of every layer, by the dense forward pass."""
    config = weights.config

    def attend(seen, layer, q, k, v):
        return seen, dense_attention(q, k, v, config.head_dim**-0.5, config.windows[layer])

    def experts(seen, layer, m_TD, ids_TK, weights_TK):
        y_TD, _ = dense_experts(m_TD, ids_TK, weights_TK, weights.layers[layer].mlp.experts, jax.nn.silu)
        return [*seen, (m_TD, ids_TK, weights_TK)], y_TD

    seen, x_TD, positions_T = [], weights.embed_VD[tokens_T], jnp.arange(len(tokens_T))
    for layer, w in enumerate(weights.layers):
        seen, x_TD = transformer.decoder_layer(config, layer, w, x_TD, positions_T, seen, attend, experts)
        seen[-1] = (*seen[-1], x_TD)
    return seen


def routed(weights, tokens):
    """Returns the routing of a sequence as float64 arrays; what follows it changes nothing."""
    seen = dense_routing(weights, np.pad(np.array(tokens, np.int32), (0, 64 - len(tokens))))
    return [[np.asarray(x, np.float64) for x in layer] for layer in seen]


def recount(weights, layers, begin, end):
    """Returns the sums of tokens begin .. end - 1, one token and one expert at a time."""
    L, E, F = len(layers), weights.config.num_experts, weights.config.moe_intermediate_size
    sums = {name: np.zeros((L, E, *kinds)) for name, kinds in SHAPES.items()}
    for layer, (m_TD, ids_TK, r_TK, x_TD) in enumerate(layers):
        gate_up_ENC = np.asarray(weights.layers[layer].mlp.experts.gate_up_ENC, np.float64)
        for t in range(begin, end):
            for e, r in zip(ids_TK[t].astype(int), r_TK[t], strict=True):
                gate, up = gate_up_ENC[e, :F] @ m_TD[t], gate_up_ENC[e, F:] @ m_TD[t]
                sums["mass_LE"][layer, e] += r
                sums["count_LE"][layer, e] += 1
                h_norm = np.linalg.norm(gate / (1 + np.exp(-gate)) * up)
                for kind, norm in enumerate((1.0, h_norm)):
                    size = r * norm / np.linalg.norm(x_TD[t])
                    sums["norm_LEU"][layer, e, kind] += size
                    sums["square_LEU"][layer, e, kind] += size**2
                    sums["max_LEU"][layer, e, kind] = max(sums["max_LEU"][layer, e, kind], size)
    return sums


SHAPES = {"mass_LE": (), "count_LE": (), "norm_LEU": (2,), "square_LEU": (2,), "max_LEU": (2,)}


def same(sums, expected):
    """Whether sums and their recount agree in every entry."""
    arrays = {name: np.asarray(getattr(sums, name)) for name in SHAPES}
    assert all(array.dtype == np.float32 for array in arrays.values())
    return all(np.allclose(arrays[name], expected[name], rtol=1e-4, atol=1e-6) for name in SHAPES)


@pytest.mark.parametrize("score", [False, True])
def test_a_chunk_counts_its_own_tokens(tiny, stepping, score):
    bits = stepping.random_bits(4)
    dense = tiny.dequantized(bits)
    tokens = np.random.default_rng(4).integers(0, 128, 37).tolist()
    layers = routed(dense, tokens)
    state = stepping.start(stepping.state(bits), 1)
    for begin in range(0, len(tokens), CHUNK):
        part = tokens[begin : begin + CHUNK]
        chunk = np.zeros(CHUNK, np.int32)  # the last one is padded
        chunk[: len(part)] = part
        if score:
            state, _, _, sums = steps.score_step(tiny.dense, state, np.int32(1), chunk, chunk, np.int32(len(part)))
        else:
            state, _, sums = steps.prefill_step(
                tiny.dense, state, np.int32(1), chunk, np.int32(len(part)), np.int32(0)
            )
        assert same(sums, recount(dense, layers, begin, begin + len(part)))
        assert not same(sums, recount(dense, layers, begin, begin + len(part) - 1))
    other = tiny.dequantized(np.roll(bits, 1, axis=1))
    assert not same(sums, recount(other, layers, 32, 37))


def test_a_decode_call_counts_each_row_alone_as_far_as_it_ran(tiny, stepping):
    bits = stepping.random_bits(5)
    dense = tiny.dequantized(bits)
    rng = np.random.default_rng(6)
    prompts = {0: rng.integers(0, 128, 5).tolist(), 2: rng.integers(0, 128, 21).tolist()}
    most = {0: 3, 2: 30}  # row 0 ends within the call, row 1 never begins
    state, first = stepping.state(bits), {}
    for row, prompt in prompts.items():
        state, first[row] = stepping.prefill(tiny.dense, stepping.start(state, row), row, prompt, most[row])
    state, tokens_NB, sums = steps.decode_loop(tiny.dense, state, 4)
    for row, prompt in prompts.items():
        drawn = [int(t) for t in np.asarray(tokens_NB)[:, row] if t >= 0]
        assert len(drawn) == {0: 2, 2: 4}[row]
        layers = routed(dense, [*prompt, first[row], *drawn[:-1]])
        of_row = jax.tree.map(lambda leaf, row=row: leaf[row], sums)
        assert same(of_row, recount(dense, layers, len(prompt), len(prompt) + len(drawn)))
        assert not same(of_row, recount(dense, layers, len(prompt), len(prompt) + len(drawn) - 1))
    for leaf in jax.tree.leaves(sums):
        assert leaf.shape[0] == 3
        assert not np.asarray(leaf)[1].any()
    before = sums
    state, _, once = steps.decode_step(tiny.dense, state)
    assert np.asarray(once.count_LE).sum(axis=(1, 2)).tolist() == [0, 0, once.mass_LE.shape[1] * 2]
    assert np.asarray(before.count_LE).sum() == 6 * before.mass_LE.shape[1] * 2, "a later call took the sums away"


def test_the_unquantized_baseline_returns_the_same_sums(tiny, stepping):
    bits = stepping.random_bits(7)
    dense, chunk, five = tiny.dequantized(bits), np.arange(CHUNK, dtype=np.int32), np.int32(5)
    _, _, paged = steps.prefill_step(tiny.dense, stepping.state(bits), np.int32(0), chunk, five, np.int32(0))
    low = stepping.state(np.full_like(bits, 3))
    _, _, unpaged = steps.prefill_step(dense, low, np.int32(0), chunk, five, np.int32(0))
    assert same(unpaged, {name: np.asarray(getattr(paged, name)) for name in SHAPES})


def test_what_a_token_that_is_not_there_holds_counts_nothing():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, (6, 3, 2, 2))  # steps, rows, layers, experts per token
    ids[2:, 1] = 5
    values = [rng.random(shape).astype(np.float32) for shape in (ids.shape, ids.shape[:3], ids.shape)]
    poisoned = [value.copy() for value in values]
    for value in poisoned:
        value[2:, 1] = np.nan
    clean, dirty = (
        row_sums(ExpertTrace(ids_TLK=ids, weights_TLK=r, residual_square_TL=x, h_square_TLK=h), num_experts=5)
        for r, x, h in (values, poisoned)
    )
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    alone = [value[:2, 1] for value in (ids, *values)]
    names = [field.name for field in dataclasses.fields(ExpertTrace)]
    expected = routing_sums(ExpertTrace(**dict(zip(names, alone, strict=True))), num_experts=5)
    jax.tree.map(lambda rows, one: np.testing.assert_allclose(rows[1], one, rtol=1e-6), clean, expected)
    assert sum(leaf[0].nbytes for leaf in jax.tree.leaves(clean)) == sums_bytes(2, 5)


# What the engine makes of them


@pytest.fixture(scope="module")
def engine(tiny):
    """Dynamic and with room for all, so at 6 bits; float32 on a GPU, too, for a recount."""
    config = ServeConfig(  # the sizes of ``flat_engine``: one compilation for both
        memory_bytes=8 << 20,
        max_num_seqs=4,
        max_model_len=96,
        prefill_chunk_tokens=CHUNK,
        steps_per_call=4,
        dtype="float32",
        kv_dtype="float32",
    )
    engine = Engine(tiny.checkpoint, config)
    two = Policy(
        edges=(1.0,), multipliers=(0.5, 2.0), floors=(0, 0), depth_caps=(None, None), half_life_tokens=30.0
    )
    mass_LE = np.full(engine.calibration.sensitivity_LEUQ.shape[:2], 0.25)
    engine.calibration = dataclasses.replace(engine.calibration, mass_LE=mass_LE, policy=two)
    yield engine
    engine.close()


@pytest.fixture
def serve(engine, monkeypatch):
    """The function ``serve(*work) -> requests, each with the signals that it had at its end``; drains the engine."""
    at_end, finish = {}, engine.scheduler.finish
    monkeypatch.setattr(
        engine.scheduler, "finish", lambda request: (at_end.__setitem__(request, request.signals), finish(request))
    )

    def run(*work):
        requests = [engine.add_request(*one) for one in work]
        while engine.has_work:
            engine.step()
        assert all(request.signals is None for request in requests)
        return [(request, at_end[request]) for request in requests] if work else list(at_end.items())

    return run


def forgotten(weights, tokens, calls):
    """Returns what signals must be after ``calls``, the numbers of tokens that each read: newest whole, older faded."""
    layers, begin = routed(weights, tokens), 0
    expected = {name: np.zeros((len(layers), 4, *kinds)) for name, kinds in SHAPES.items()}
    for count in calls:
        seen = recount(weights, layers, begin, begin + count)
        for name in SHAPES:
            if name == "max_LEU":
                expected[name] = np.maximum(expected[name], seen[name])
            else:
                expected[name] = 0.5 ** (count / 30) * expected[name] + seen[name]
        begin += count
    return expected


def assert_signals(signals, expected):
    for name in ("mass_LE", "norm_LEU", "square_LEU", "max_LEU"):
        np.testing.assert_allclose(getattr(signals, name), expected[name], rtol=1e-4, atol=1e-7, err_msg=name)
    tokens_per_layer = expected["count_LE"].sum(axis=1) / 2
    np.testing.assert_allclose(signals.tokens, tokens_per_layer, rtol=1e-6)


def test_what_a_call_showed_is_read_one_boundary_later_behind_the_next_calls(engine, serve, monkeypatch):
    started, read, order = [], [], []

    def dispatching(*args, **more):
        state, calls = dispatch(*args, **more)
        started.append(calls)
        order.append("start")
        return state, calls

    def collecting(calls, half_life_tokens):
        read.append(calls)
        order.append("read")
        return collect(calls, half_life_tokens)

    monkeypatch.setattr(engine_module, "dispatch", dispatching)
    monkeypatch.setattr(engine_module, "collect", collecting)
    serve((tuple(range(1, 31)), SamplingParams(max_tokens=12, ignore_eos=True)))
    assert order == ["start", "read"] * len(started)
    assert read[0] == ()
    assert all(now is before for now, before in zip(read[1:], started[:-1], strict=True))
    assert all(call.sums is not None for calls in started for call in calls)
    assert sum(map(len, started)) >= 4


def test_a_request_gathers_what_its_own_tokens_showed(engine, tiny, serve):
    weights = tiny.dequantized(engine.residency.table.committed_LEU)
    rng = np.random.default_rng(8)
    prompt, scored = (tuple(rng.integers(1, 128, n).tolist()) for n in (21, 40))
    params = SamplingParams(max_tokens=11, ignore_eos=True)
    (long, of_long), (_, of_scored), (short, of_short) = serve((prompt, params), (scored, None), (scored[:7], params))
    assert_signals(of_long, forgotten(weights, long.tokens[:-1], [16, 5, 4, 4, 2]))
    assert_signals(of_scored, forgotten(weights, scored, [16, 16, 8]))
    assert_signals(of_short, forgotten(weights, short.tokens[:-1], [7, 4, 4, 2]))
    with pytest.raises(AssertionError):
        assert_signals(of_short, forgotten(weights, short.tokens[:-1], [7, 4, 4, 1]))


def test_a_preempted_request_counts_its_tokens_once(engine, tiny, serve, monkeypatch):
    weights = tiny.dequantized(engine.residency.table.committed_LEU)
    request = engine.add_request(tuple(range(1, 20)), SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    before, counted = request.num_tokens, request.signals.tokens
    with monkeypatch.context() as patch:
        patch.setattr(engine.blocks, "grow", lambda row, tokens: False)
        patch.setattr(engine, "_frames_will_come", lambda: False)
        engine.step()
    assert request.num_preemptions == 1
    assert request.num_tokens > before, "tokens in flight are kept"
    assert counted
    assert request.signals is None, "their sums are not: they will be read again"
    known, left = request.num_tokens, 38 - request.num_tokens
    [(request, signals)] = serve()
    assert_signals(signals, forgotten(weights, request.tokens[:-1], [16, known - 16, *[4] * (left // 4), left % 4]))


def test_the_planner_sees_the_running_requests_and_their_blocks(engine, serve, monkeypatch):
    seen, plan_step = [], engine_module.plan_step
    monkeypatch.setattr(engine_module, "plan_step", lambda *args: (seen.append(args[1]), plan_step(*args))[1])
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    serve((tuple(range(1, 31)), params), (tuple(range(1, 5)), params))
    assert max(len(observation.requests) for observation in seen) == 2
    both = next(observation for observation in seen if all(request.tokens for request in observation.requests))
    assert [request.tokens for request in both.requests] == [CHUNK, pytest.approx(4 * 0.5 ** (4 / 30) + 4)]
    block_tokens = engine.state.geometry.kv.block_tokens
    assert both.kv_blocks == (-(-(30 + 4) // block_tokens), -(-(4 + 5 + 2 * 4) // block_tokens))


def test_requests_that_have_shown_nothing_yet_hold_their_share_of_the_blocks(engine, serve, monkeypatch):
    seen, plan_step = [], engine_module.plan_step
    monkeypatch.setattr(engine_module, "plan_step", lambda *args: (seen.append(args[1]), plan_step(*args))[1])
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.add_request(tuple(range(1, 5)), params)
    for _ in range(3):
        engine.step()
    engine.add_request(tuple(range(1, 41)), params)
    engine.step()
    alone, beside = seen[-2:]
    assert [len(observation.requests) for observation in seen] == [1, 1, 1, 2]
    assert [request.tokens > 0 for request in beside.requests] == [True, False]
    assert beside.kv_blocks[1] > 0
    weight, silent = request_weights(beside.kv_blocks, [request.tokens for request in beside.requests], 256.0)
    [before] = request_weights(alone.kv_blocks, [request.tokens for request in beside.requests[:1]], 256.0)
    assert silent == 0
    assert weight == pytest.approx(before * beside.kv_blocks[0] / sum(beside.kv_blocks))
    for name in SHAPES.keys() - {"count_LE"}:
        assert not getattr(beside.requests[1], name).any()
    serve()


def test_nothing_is_read_or_kept_where_nobody_asks(engine, serve):
    config, calibration = engine.config, engine.calibration
    neutral = dataclasses.replace(calibration, policy=Policy())  # as of a checkpoint without policy.json
    for planner, known in (
        (PlannerConfig(routing_statistics=False, prompt_residual=False), calibration),
        (PlannerConfig(page_movement=False), calibration),
        (PlannerConfig(), neutral),
    ):
        engine.config, engine.calibration = dataclasses.replace(config, planner=planner), known
        [(_, signals)] = serve((tuple(range(1, 9)), SamplingParams(max_tokens=5)))
        assert signals is None
    engine.config, engine.calibration = config, calibration
    engine.add_request((1, 2, 3), SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    held_bytes = sum(array.nbytes for call in engine._in_flight for array in call.arrays)
    assert 2 * sums_bytes(2, 4) < held_bytes <= engine.ledger.result_bytes
    serve()
