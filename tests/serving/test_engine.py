# SPDX-License-Identifier: Apache-2.0
"""The engine: what must hold whatever the traffic and the budget."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pagedweight_jax.checkpoint.policy import load_calibration
from pagedweight_jax.config import PlannerConfig, ServeConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.policy import Policy
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.events import EventLog, write_events
from pagedweight_jax.serving.request import SamplingParams

PLANNER = PlannerConfig(low_watermark_blocks=2, high_watermark_blocks=4, hysteresis_boundaries=2)
AMPLE_BYTES = 6 << 20
CONFIG = ServeConfig(
    memory_bytes=AMPLE_BYTES,
    max_num_seqs=4,
    max_model_len=256,
    prefill_chunk_tokens=32,
    steps_per_call=4,
    planner=PLANNER,
)


def run(engine):
    """Steps until all is done, checking every invariant of memory at every boundary."""
    while engine.has_work:
        engine.step()
        engine.check_invariants()


def load(seed=0, count=6):
    """Returns (prompt, params) of a few requests of uneven lengths."""
    rng = np.random.default_rng(seed)
    return [
        (
            tuple(rng.integers(1, 128, rng.integers(2, 160)).tolist()),
            SamplingParams(max_tokens=int(rng.integers(5, 96)), temperature=float(i % 2), seed=i, ignore_eos=True),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def engines(tiny):
    """The function ``engines(**changes of CONFIG) -> Engine``: one for each configuration, idle between tests."""
    built = {}

    def get(**changes) -> Engine:
        config = replace(CONFIG, **changes)
        if config not in built:
            built[config] = Engine(tiny.checkpoint, config)
        return built[config]

    yield get
    for engine in built.values():
        engine.close()


def tight_budget(engine):
    """A budget whose arena holds the experts at the top width and a fifth of the full contexts."""
    geometry = engine.state.geometry
    full_kv_bytes = 4 * geometry.blocks_per_row * geometry.block_bytes
    weight_bytes = engine.residency.table.bytes_UQ[:, -1].sum() * engine.residency.table.committed_LEU[..., 0].size
    fixed_bytes = engine.ledger.total_bytes - engine.ledger.arena_bytes
    return int(1.03 * fixed_bytes + weight_bytes + full_kv_bytes // 5)


@pytest.fixture(scope="module")
def tight_bytes(engines):
    return tight_budget(engines())


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="small"),
        # chunks that go through the grouped kernels, and more rows than the kernels of few take
        pytest.param({"prefill_chunk_tokens": 128, "max_num_seqs": 20}, id="large", marks=pytest.mark.gpu),
    ],
)
def test_frozen_tokens_do_not_depend_on_other_requests(engines, sizes):
    engine = engines(mode="frozen", bits=4, **sizes)
    work = load()
    alone = []
    for prompt, params in work:
        request = engine.add_request(prompt, params)
        run(engine)
        alone.append(request.generated)
    together = [engine.add_request(prompt, params) for prompt, params in work]
    run(engine)
    assert [r.generated for r in together] == alone
    staggered = []
    for prompt, params in reversed(work):  # other rows, other neighbours, other times
        staggered.append(engine.add_request(prompt, params))
        for _ in range(3):
            engine.step()
    run(engine)
    assert [r.generated for r in reversed(staggered)] == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_different_bits_give_different_tokens(engines):
    """The negative control of the equalities here: precision does reach the tokens."""
    outputs = []
    for bits in (4, 3):
        engine = engines(mode="frozen", bits=4)
        engine.lower_to(bits)
        request = engine.add_request(tuple(range(1, 100)), SamplingParams(max_tokens=60, ignore_eos=True))
        run(engine)
        outputs.append(request.generated)
    assert outputs[0] != outputs[1]


def test_movement_without_pressure_changes_nothing(engines):
    outputs = []
    for planner in (PLANNER, replace(PLANNER, page_movement=False)):
        engine = engines(planner=planner)
        requests = [engine.add_request(prompt, params) for prompt, params in load(1)]
        run(engine)
        assert not any(event.lowered or event.raised for event in engine.events)
        outputs.append([r.generated for r in requests])
    assert outputs[0] == outputs[1]


def test_bits_give_way_to_the_cache_and_come_back(engines, tight_bytes, tmp_path):
    engine = engines(memory_bytes=tight_bytes)
    start = engine.residency.mean_bits
    begin = len(engine.events)
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compilations.append(name) if "backend_compile" in name else None
    )
    work = [(tuple(range(1, 101)), SamplingParams(max_tokens=150, ignore_eos=True)) for _ in range(4)]
    requests = [engine.add_request(prompt, params) for prompt, params in work]
    run(engine)
    for _ in range(100_000):  # transfers take as long as they take; a step never waits for one
        if engine.residency.mean_bits >= start - 0.1:
            break
        engine.step()
    engine.check_invariants()
    events = engine.events[begin:]
    assert all(len(r.generated) == 150 for r in requests)
    assert min(e.mean_bits for e in events) <= start - 1
    assert engine.residency.mean_bits >= start - 0.1
    assert any(len(e.blocks_by_bits) > 1 and e.rows for e in events)
    assert all(e.device_bytes <= e.budget_bytes == tight_bytes for e in events)
    arena_bytes = engine.ledger.arena_bytes
    assert all(e.kv_bytes + e.weight_bytes + e.releasing_bytes + e.free_bytes == arena_bytes for e in events)
    assert any(e.raised for e in events)
    assert sum(e.pages_landed for e in events) > 0
    assert not compilations
    write_events(tmp_path / "events.jsonl", events)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == json.loads(json.dumps(asdict(events[0])))


def test_after_any_run_all_frames_are_accounted_for(engines, tight_bytes):
    engine = engines(memory_bytes=tight_bytes)
    for seed in range(3):
        requests = [engine.add_request(prompt, params) for prompt, params in load(seed + 10, count=9)]
        run(engine)
        assert all(len(r.generated) == r.params.max_tokens for r in requests)
        assert engine.blocks.used_blocks == 0


def test_preempted_requests_end_with_the_same_tokens(engines):
    """In float32, also on a GPU: a preempted request is read again as a prompt, which rounds otherwise in bfloat16."""
    work = [(prompt[:40], replace(params, max_tokens=120)) for prompt, params in load(3)]
    config = {"mode": "frozen", "bits": 6, "kv_tokens": 16, "dtype": "float32"}
    ample = engines(**config)
    outputs, preemptions = [], []
    for engine in (ample, engines(**config, memory_bytes=tight_budget(ample))):
        requests = [engine.add_request(prompt, params) for prompt, params in work]
        run(engine)
        outputs.append([r.generated for r in requests])
        preemptions.append(sum(r.num_preemptions for r in requests))
    assert outputs[0] == outputs[1]
    assert preemptions[0] == 0 < preemptions[1]


def test_scoring_requests_give_the_log_probabilities_of_their_prompts(engines):
    engine = engines(mode="frozen", bits=4)
    rng = np.random.default_rng(8)
    prompts = [tuple(rng.integers(0, 128, n).tolist()) for n in (2, 33, 100, 256)]
    alone = []
    for prompt in prompts:
        alone.append(engine.add_request(prompt, None))
        run(engine)
    together = [engine.add_request(prompt, None) for prompt in prompts]
    generating = engine.add_request(prompts[1], SamplingParams(max_tokens=20))
    run(engine)
    assert [r.logprobs for r in together] == [r.logprobs for r in alone]
    assert [len(r.logprobs) for r in together] == [len(p) - 1 for p in prompts]
    assert all(value < 0 for r in together for value in r.logprobs)
    assert generating.finish_reason


def test_a_cancelled_request_frees_its_memory_and_disturbs_nobody(engines):
    engine = engines(mode="frozen", bits=4)
    (kept_prompt, kept_params), (prompt, params), *_ = load(5)
    alone = engine.add_request(kept_prompt, kept_params)
    run(engine)
    for steps_before in range(5):
        kept = engine.add_request(kept_prompt, kept_params)
        dropped = [engine.add_request(prompt, params), engine.add_request((7,) * 256, None)]
        for _ in range(steps_before):
            engine.step()
        for request in dropped * 2:
            engine.cancel(request)
            engine.check_invariants()
        run(engine)
        assert kept.generated == alone.generated
        assert [r.finish_reason for r in dropped] == ["cancelled"] * 2
        assert engine.blocks.used_blocks == 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), SamplingParams(), "at least 1 token, got 0"),
        ((1, 2.5), SamplingParams(), "a prompt must be a list of token ids .'float' object cannot be interpreted"),
        ("text", SamplingParams(), "a prompt must be a list of token ids .'str' object cannot be interpreted"),
        ((5,), None, "at least 2 tokens, got 1"),
        ((1, 128), SamplingParams(), r"prompt token 1 is 128, the vocabulary is 0\.\.127"),
        ((1, -1), SamplingParams(), "prompt token 1 is -1"),
        ((1,) * 200, SamplingParams(max_tokens=57), "make 257, max_model_len is 256"),
        ((1,), SamplingParams(stop_token_ids=tuple(range(1, 9))), "at most 8 stop tokens, got 9"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(engines, prompt, params, message):
    engine = engines()
    with pytest.raises(UserError, match=message):
        engine.add_request(prompt, params)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 100_000}, "a budget of 97.7 KiB is too small.*longest context that fits is 0 tokens"),
        ({"max_model_len": 4096}, "max_model_len 4096 exceeds the model's context of 2048"),
        ({"max_model_len": 16}, "prefill_chunk_tokens 32 exceeds max_model_len 16"),
        ({"mode": "frozen", "bits": 7}, r"bits 7: the checkpoint has 3\.\.6"),
    ],
)
def test_bad_configurations_are_refused(tiny, changes, message):
    with pytest.raises(UserError, match=message):
        Engine(tiny.checkpoint, replace(CONFIG, **changes))


def test_a_budget_beyond_the_device_is_refused(tiny):
    device = SimpleNamespace(device_kind="H200", memory_stats=lambda: {"bytes_limit": AMPLE_BYTES - 1})
    with pytest.raises(UserError, match=r"a budget of 6\.00 MiB exceeds the 6\.00 MiB that JAX may take of the H200"):
        Engine(tiny.checkpoint, CONFIG, device)


def test_a_budget_is_refused_for_what_the_policy_lets_the_experts_give_way(tiny):
    calibration = replace(load_calibration(tiny.checkpoint), policy=Policy(floors=(5,)))
    for mode, bits in (("dynamic", 5), ("frozen", 3)):
        with pytest.raises(UserError, match=f"for the experts at {bits} bits, the least"):
            Engine(tiny.checkpoint, replace(CONFIG, memory_bytes=100_000, mode=mode), calibration=calibration)


def test_every_event_is_told_and_the_newest_are_kept(engines):
    engine, seen = engines(mode="frozen", bits=4), []
    events, on_event = engine.events, engine.on_event
    engine.events, engine.on_event = EventLog(kept=3), seen.append
    for _ in range(5):
        engine.step()
    log, engine.events, engine.on_event = engine.events, events, on_event
    assert len(seen) == len(log) == 5
    assert list(log) == log[0:] == log[:] == seen[2:]
    assert (log[2], log[-1], log[3:4], log[5:]) == (seen[2], seen[4], seen[3:4], [])
    with pytest.raises(IndexError, match="boundary 1: only those from 2 on are kept"):
        log[1]
    with pytest.raises(IndexError):
        log[5]


def test_bad_options_are_refused():
    with pytest.raises(UserError, match="needs mode='frozen'"):
        replace(CONFIG, bits=4)
    with pytest.raises(UserError, match="steps_per_call must be a whole number, at least 1, got 0"):
        replace(CONFIG, steps_per_call=0)
    with pytest.raises(UserError, match=r"memory_bytes must be a whole number, at least 1, got 48000000\.0"):
        replace(CONFIG, memory_bytes=48e6)
    with pytest.raises(UserError, match="kv_tokens must be a whole number, at least 0, got -1"):
        replace(CONFIG, kv_tokens=-1)
    with pytest.raises(UserError, match="kv_dtype must be one of float32, bfloat16, float16, got 'int8'"):
        replace(CONFIG, kv_dtype="int8")
    with pytest.raises(UserError, match="dtype must be one of float32, bfloat16, float16, None, got 'int32'"):
        replace(CONFIG, dtype="int32")
    for temperature in (-0.5, float("nan"), float("inf"), "hot"):
        with pytest.raises(UserError, match=f"must be 0 .greedy. or a positive number, got {temperature!r}"):
            SamplingParams(temperature=temperature)
    with pytest.raises(UserError, match=r"bits must be a whole number, at least 1, got 4\.5"):
        replace(CONFIG, mode="frozen", bits=4.5)
    with pytest.raises(UserError, match="low_watermark_blocks must be a whole number, at least 0, got '8'"):
        PlannerConfig(low_watermark_blocks="8")
    for max_tokens in (0, 2.5, "3"):
        with pytest.raises(UserError, match=f"max_tokens must be a whole number, at least 1, got {max_tokens!r}"):
            SamplingParams(max_tokens=max_tokens)
    for seed in (-1, 1.5):
        with pytest.raises(UserError, match=rf"seed must be a whole number in 0\.\.2\^32-1, got {seed}"):
            SamplingParams(seed=seed)
    for token in (-1, 2**31, 2.5):
        with pytest.raises(UserError, match=rf"stop tokens must be whole numbers in 0\.\.2\^31-1, got {token}"):
            SamplingParams(stop_token_ids=[7, token])
    with pytest.raises(UserError, match="stop_token_ids must be a list of tokens, got 5"):
        SamplingParams(stop_token_ids=5)
