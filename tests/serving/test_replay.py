# SPDX-License-Identifier: Apache-2.0
"""A recorded run, done again: the same tokens, whatever the timing of page movement."""

from dataclasses import replace

import numpy as np
import pytest

from pagedweight_jax.config import PlannerConfig, ServeConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.paging.arena import KV
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.events import read_events, write_events
from pagedweight_jax.serving.replay import replay
from pagedweight_jax.serving.request import SamplingParams

CONFIG = ServeConfig(  # the sizes of ``flat_engine``: one compilation for both
    memory_bytes=8 << 20,
    max_num_seqs=4,
    max_model_len=96,
    prefill_chunk_tokens=16,
    steps_per_call=4,
    dtype="float32",
    kv_dtype="float32",
    planner=PlannerConfig(low_watermark_blocks=1, high_watermark_blocks=2, hysteresis_boundaries=1),
)
FLOOR_BLOCKS = 14  # of KV cache beside weights at their floor: not enough for three contexts of six


def make_work():
    rng = np.random.default_rng(3)
    work = []
    for i in range(14):
        prompt = tuple(rng.integers(1, 128, rng.integers(2, 48)).tolist())
        params = SamplingParams(max_tokens=96 - len(prompt), temperature=float(i % 2), seed=i, ignore_eos=True)
        work.append((prompt, params))
    work[5] = (work[5][0] * 2, None)  # scored, not continued
    return work


def new_engine(tiny, mode):
    """An engine whose arena lacks frames, as if its budget were smaller."""
    engine = Engine(tiny.checkpoint, replace(CONFIG, mode=mode))
    engine.lower_to(3)
    engine.residency.retire()
    kv_frames = FLOOR_BLOCKS * engine.state.geometry.frames_per_block
    return engine, engine.allocator.take(engine.allocator.num_free - kv_frames, KV)


@pytest.fixture(scope="module")
def recorded(tiny, late_mover, tmp_path_factory):
    """(events, requests) of a run in which requests come late and go early, and pages arrive when they like."""
    engine, held = new_engine(tiny, "dynamic")
    engine.residency.mover = late_mover(engine.residency.mover, chance=0.3, seed=1)
    rng, work, requests, events = np.random.default_rng(4), make_work(), [], []
    engine.on_event = events.append
    while len(requests) < len(work) or engine.has_work:
        while len(requests) < len(work) and rng.random() < 0.2:
            requests.append(engine.add_request(*work[len(requests)]))
        if len(requests) > 4 and rng.random() < 0.03:
            engine.cancel(requests[rng.integers(len(requests))])
        if len(events) == 30:
            engine.lower_to(5)
        engine.step()
        assert len(events) < 2000
    engine.allocator.give(held)
    engine.residency.mover.chance = 1.0
    while engine.residency.mean_bits < 6:
        engine.step()
    ample = [engine.add_request(*one) for one in work]
    while engine.has_work:
        engine.step()
    same = [a.generated == b.generated for a, b in zip(ample, requests) if b.finish_reason != "cancelled"]
    assert not all(same), "tokens do not depend on the bits: a replay of them would show nothing"
    engine.close()
    path = tmp_path_factory.mktemp("record") / "events.jsonl"
    last = max(e.boundary for e in events if any(number < len(work) for number in (*e.finished, *e.cancelled)))
    write_events(path, events[: last + 1])
    return read_events(path), requests


@pytest.fixture(scope="module")
def again(tiny, recorded):
    """(engine, requests) of the replay."""
    engine, _ = new_engine(tiny, "replay")
    yield engine, replay(engine, recorded[0], make_work())
    engine.close()


def test_a_record_holds_all_that_happened(recorded):
    events, requests = recorded
    assert [number for event in events for number in event.arrived] == list(range(len(requests)))
    cancelled = {number for event in events for number in event.cancelled}
    assert cancelled == {r.number for r in requests if r.finish_reason == "cancelled"}
    for name in ("cancelled", "preempted", "lowered", "raised", "pages_landed", "lower_to"):
        assert any(getattr(event, name) for event in events), f"a run without {name} tries too little"
    assert any(event.rows and not event.chunks and not event.decode_steps for event in events), "nobody ever waited"


def test_tokens_and_scores_are_those_of_the_record(recorded, again):
    _, requests = recorded
    _, repeated = again
    assert [r.generated for r in repeated] == [r.generated for r in requests]
    assert [r.logprobs for r in repeated] == [r.logprobs for r in requests]
    assert [r.finish_reason for r in repeated] == [r.finish_reason for r in requests]


def test_bits_change_at_the_recorded_boundaries(recorded, again):
    events, _ = recorded
    engine, _ = again
    assert [e.blocks_by_bits for e in engine.events] == [e.blocks_by_bits for e in events]
    assert [e.mean_bits for e in engine.events] == [e.mean_bits for e in events]
    assert all(e.weight_bytes <= r.weight_bytes for e, r in zip(engine.events, events, strict=True))


def test_what_is_not_the_record_of_this_work_is_refused_at_the_first_sign(tiny, recorded, again):
    events, _ = recorded
    engine, _ = again
    work, done = make_work(), len(events)
    with pytest.raises(RuntimeError, match="a step takes a record in replay mode and only there"):
        engine.step()
    first = next(event for event in events if event.arrived)
    with pytest.raises(UserError, match=f"replay of boundary {done}: request 0 arrives, 0 of 0 have"):
        replay(engine, [replace(first, boundary=done)], [])
    lowering = next(event for event in events if event.lowered)
    nothing = dict.fromkeys(("arrived", "cancelled", "admitted", "preempted", "raised"), ())
    wrong = replace(lowering, boundary=done, lowered=((1, 2, 0, 8, 3),), lower_to=None, **nothing)
    with pytest.raises(UserError, match=r"the record changes block \[1, 2, 0\] at 8 bits, it runs at"):
        replay(engine, [wrong], work)
    assert len(engine.events) == done


def test_a_record_that_is_not_whole_is_refused(tiny, recorded):
    """Its requests would be too few, or unfinished, without a sign."""
    events, _ = recorded
    engine, _ = new_engine(tiny, "replay")
    with pytest.raises(UserError, match="replay of boundary 5: boundary 0 is next"):
        replay(engine, events[5:], make_work())
    assert len(engine.events) == 0
    arrived = [event.boundary for event in events if event.arrived]
    stop = arrived[1]
    with pytest.raises(UserError, match=r"ends after boundary \d+, when [1-9]\d* of 14 requests have come and [1-9]"):
        replay(engine, events[: stop + 1], make_work())
    engine.close()
