# SPDX-License-Identifier: Apache-2.0
"""The engine under random traffic while weights give way: right tokens, right pages, an end, nothing lost.

All on one dynamic engine whose tokens do not depend on bits, so a request served alone tells what it must say in
company.
"""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.models import transformer
from pagedweight_jax.paging.arena import KV
from pagedweight_jax.paging.invariants import check_invariants
from pagedweight_jax.paging.table import DEVICE, IN_TRANSFER, pages_in
from pagedweight_jax.planning.policy import Policy
from pagedweight_jax.serving.loading import floor_bits
from pagedweight_jax.serving.request import SamplingParams

CONTEXT, CHUNK, BLOCK = 96, 16, 16  # of flat_engine


class Squeezed:
    """An engine whose arena lacks the frames in ``held``, as if its budget were smaller."""

    def __init__(self, engine, checkpoint, late_mover):
        self.engine, self.checkpoint, self.late_mover = engine, checkpoint, late_mover
        self.held = np.empty(0, np.int32)

    def squeeze(self, kv_blocks, chance, seed=0):
        """Leaves the cache ``kv_blocks`` blocks beside weights at their floor; transfers land late from now on."""
        bits = int(floor_bits(self.engine.calibration, self.engine.config).max())
        self.settle()
        self.engine.residency.mover = self.late_mover(self.engine.residency.mover, chance, seed)
        self.engine.allocator.give(self.held)
        self.engine.lower_to(bits)
        self.engine.residency.retire()
        spare_frames = self.engine.allocator.num_free - kv_blocks * self.engine.state.geometry.frames_per_block
        self.held = self.engine.allocator.take(spare_frames, KV)

    def settle(self):
        """Steps until nothing moves; transfers land in time again."""
        residency = self.engine.residency
        if hasattr(residency.mover, "chance"):
            residency.mover.chance = 1.0
        for _ in range(100_000):
            self.step()
            moving = len(pages_in(residency.table, IN_TRANSFER)) + len(residency.retiring_pages)
            if not moving and self.engine.events[-1].mean_bits == residency.mean_bits:
                break
        else:
            raise AssertionError("pages never stop moving")
        residency.mover = getattr(residency.mover, "mover", residency.mover)

    def step(self):
        self.engine.step()
        kv_frames = np.concatenate([self.engine.blocks.frames(), self.held])
        check_invariants(self.engine.residency.table, self.engine.allocator, kv_frames)

    def run(self, most=1000):
        for _ in range(most):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"no end after {most} boundaries: {self.engine.events[-1]}")

    def alone(self, prompt, params):
        """Serves one request and returns it."""
        request = self.engine.add_request(prompt, params)
        self.run()
        return request

    def check_pages(self):
        """Every page that is on the device is in the arena, word for word, and the device's own map says where."""
        table, page_map = self.engine.residency.table, self.engine.state.page_map
        arena_AW = np.asarray(self.engine.state.arena_AW)
        assert np.array_equal(page_map.bits_LEU, table.committed_LEU)
        for layer, of_kinds in enumerate(table.frames):
            for kind, (frames_EF, layout) in enumerate(zip(of_kinds, table.layouts)):
                mapped_EF = np.asarray((page_map.gate_up_frames_LEF, page_map.down_frames_LEF)[kind])[layer]
                for plane in range(layout.max_bits):
                    here_E = table.state_LEUP[layer, :, kind, plane] == DEVICE
                    columns = slice(*layout.page_starts[plane : plane + 2])
                    frames = frames_EF[here_E, columns]
                    assert np.array_equal(mapped_EF[here_E, columns], frames)
                    assert np.array_equal(arena_AW[frames], self.checkpoint.load_pages(layer, kind, plane)[here_E])


@pytest.fixture
def squeezed(flat_engine, flat, late_mover):
    squeezed = Squeezed(flat_engine, flat.checkpoint, late_mover)
    calibration, queue = flat_engine.calibration, flat_engine._queue
    yield squeezed
    flat_engine.calibration, flat_engine._queue = calibration, queue
    squeezed.settle()
    flat_engine.allocator.give(squeezed.held)


def random_requests(rng, count):
    """Returns (prompt, params or None) with many lengths at the borders of chunks, blocks and the context."""
    work = []
    for seed in range(count):
        border = rng.choice([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * CHUNK, CONTEXT - 1])
        prompt_tokens = int(rng.choice([border, rng.integers(1, CONTEXT)]))
        prompt = tuple(rng.integers(1, 128, prompt_tokens).tolist())
        if prompt_tokens > 1 and rng.random() < 0.2:
            work.append((prompt, None))
            continue
        left = CONTEXT - prompt_tokens
        max_tokens = int(min(left, rng.choice([1, 4, 5, BLOCK, left])))
        ignore_eos, temperature = bool(rng.integers(2)), float(rng.integers(2))
        work.append(
            (prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos))
        )
    return work


def test_random_traffic_changes_no_token_loses_nothing_and_ends(squeezed):
    engine = squeezed.engine
    seen = Counter()
    for seed, (kv_blocks, chance) in enumerate([(24, 1.0), (12, 0.5), (7, 0.2), (6, 0.1)]):
        rng = np.random.default_rng(seed)
        work = random_requests(rng, 12)
        expected = [squeezed.alone(*one) for one in work]
        squeezed.squeeze(kv_blocks, chance, seed)
        first, requests, cancelled = len(engine.events), [], set()
        while len(requests) < len(work) or engine.has_work:
            while len(requests) < len(work) and rng.random() < 0.3:
                requests.append(engine.add_request(*work[len(requests)]))
            if requests and rng.random() < 0.01:
                request = requests[rng.integers(len(requests))]
                cancelled |= set() if request.finish_reason else {request}
                engine.cancel(request)
            squeezed.step()
            if len(engine.events) % 16 == 0:
                squeezed.check_pages()
            assert len(engine.events) < first + 3000, f"no end in sight: {engine.events[-1]}"
        for one, other in zip(requests, expected):
            if one in cancelled:
                assert one.finish_reason == "cancelled"
            else:
                assert (one.generated, one.finish_reason) == (other.generated, other.finish_reason)
                np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5)
        assert engine.blocks.used_blocks == 0
        for event in engine.events[first:]:
            waits = event.rows and not event.chunks and not event.decode_steps
            seen.update(preempted=len(event.preempted), lowered=len(event.lowered), raised=len(event.raised))
            seen.update(dropped=event.pages_cancelled, landed=event.pages_landed, waits=int(waits))
    assert min(seen.values()) > 0, seen


def set_policy(engine, policy):
    """Gives the planner a policy, and the routing mass that its buckets need."""
    shape_LE = engine.calibration.sensitivity_LEUQ.shape[:2]
    mass_LE = np.full(shape_LE, 1 / shape_LE[1])
    engine.calibration = replace(engine.calibration, mass_LE=mass_LE, policy=policy)
    engine._queue = replace(engine._queue, plans={})


def random_policy(rng):
    buckets = int(rng.integers(1, 4))
    return Policy(
        edges=tuple(np.sort(rng.uniform(0.3, 2, buckets - 1))),
        multipliers=tuple(np.sort(rng.uniform(0.5, 4, buckets))),
        floors=tuple(np.sort(rng.integers(0, 8, buckets)).tolist()),
        depth_caps=tuple(None if rng.random() < 0.5 else int(rng.integers(0, 3)) for _ in range(buckets)),
        stages=tuple(np.unique(rng.integers(0, 3, 2)).tolist()),
        half_life_tokens=float(rng.choice([8, 512])),
        prior_tokens=float(rng.choice([0, 64])),
    )


@pytest.mark.parametrize("seed", range(8))
def test_under_any_policy_every_accepted_request_ends(squeezed, seed):
    """The arena holds one full context beside weights at the policy's floors, not at the smallest bitwidth."""
    engine, rng = squeezed.engine, np.random.default_rng(seed)
    squeezed.settle()
    set_policy(engine, random_policy(rng))
    squeezed.squeeze(kv_blocks=CONTEXT // BLOCK, chance=0.5, seed=seed)
    requests = [engine.add_request(*one) for one in random_requests(rng, 5)]
    requests.append(engine.add_request((1,), SamplingParams(max_tokens=CONTEXT - 1, ignore_eos=True)))
    squeezed.run(most=600)
    assert all(request.finish_reason in ("stop", "length") for request in requests)


def test_a_row_that_waits_for_bits_below_the_floor_would_wait_for_ever(squeezed, monkeypatch):
    """The negative control of the test above: with the smallest bitwidth for a floor, nobody ever moves."""
    engine = squeezed.engine
    squeezed.settle()
    set_policy(engine, Policy(floors=(5,)))
    squeezed.squeeze(kv_blocks=CONTEXT // BLOCK, chance=1.0)
    work = [((2,) * CHUNK, SamplingParams(max_tokens=CONTEXT - CHUNK, ignore_eos=True))] * 2
    requests = [engine.add_request(*one) for one in work]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_frames_will_come", lambda: bool((engine.residency.table.desired_LEU > 3).any()))
        with pytest.raises(AssertionError, match="no end after 60 boundaries"):
            squeezed.run(most=60)
    squeezed.run(most=60)
    assert all(request.finish_reason == "length" for request in requests)
    assert np.all(engine.residency.table.committed_LEU >= 5)


def test_the_page_check_finds_one_wrong_word(squeezed):
    engine = squeezed.engine
    squeezed.check_pages()
    right, frame = engine.state, engine.residency.table.frames[1][0][2, 0]
    engine.state = right.replace(arena_AW=right.arena_AW.at[frame, 0].add(1))
    with pytest.raises(AssertionError):
        squeezed.check_pages()
    engine.state = right


def test_tokens_are_the_dense_models_whatever_the_bits(squeezed, flat):
    weights = flat.dequantized(np.full_like(squeezed.engine.residency.table.committed_LEU, 3))
    prompt = tuple(range(5, 5 + CHUNK + 1))
    request = squeezed.alone(prompt, SamplingParams(max_tokens=10, ignore_eos=True))
    logits_TV = jax.jit(transformer.dense_forward)(weights, jnp.array(request.tokens[:-1]))
    assert request.generated == np.argmax(logits_TV, axis=-1)[len(prompt) - 1 :].tolist()


@pytest.mark.parametrize("prompt_tokens", [1, BLOCK - 1, BLOCK, 2 * CHUNK, CONTEXT - 1])
def test_a_first_token_that_stops_or_is_the_last_is_the_only_one(squeezed, prompt_tokens):
    prompt = tuple(np.random.default_rng(prompt_tokens).integers(1, 128, prompt_tokens).tolist())
    most = CONTEXT - prompt_tokens
    whole = squeezed.alone(prompt, SamplingParams(max_tokens=most, ignore_eos=True))
    assert (len(whole.tokens), whole.finish_reason) == (CONTEXT, "length")
    stopped = squeezed.alone(prompt, SamplingParams(max_tokens=most, stop_token_ids=(whole.generated[0],)))
    assert (stopped.generated, stopped.finish_reason) == (whole.generated[:1], "stop")
    one = squeezed.alone(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    assert (one.generated, one.finish_reason) == (whole.generated[:1], "length")


def start_transfers(squeezed, kv_blocks):
    """Brings pages under way that never land before ``mover.chance`` says so."""
    squeezed.squeeze(kv_blocks, chance=0.0)
    squeezed.step()
    assert len(pages_in(squeezed.engine.residency.table, IN_TRANSFER))


def test_nobody_is_preempted_for_frames_that_are_on_their_way_back(squeezed):
    """The pages of a reload that nobody wants any more hold their frames until they land: the cache waits for them."""
    engine = squeezed.engine
    start_transfers(squeezed, kv_blocks=CONTEXT // BLOCK)
    request = engine.add_request((1,) * CHUNK, SamplingParams(max_tokens=CONTEXT - CHUNK, ignore_eos=True))
    engine.add_request((1,) * CONTEXT, None)  # waits, and presses for all that weights can give
    for _ in range(60):
        squeezed.step()
    assert engine.residency.unwanted_frames
    assert np.all(engine.residency.table.desired_LEU == engine.residency.table.min_bits)
    assert not request.finish_reason
    engine.residency.mover.chance = 1.0
    squeezed.run()
    assert request.num_preemptions == 0


def test_a_frozen_engine_drops_what_is_on_its_way(squeezed):
    engine = squeezed.engine
    start_transfers(squeezed, kv_blocks=8)
    request = engine.add_request((1, 2, 3), SamplingParams(max_tokens=3))
    with pytest.raises(RuntimeError, match="only while it has no requests"):
        engine.freeze()
    squeezed.run()
    config, table = engine.config, engine.residency.table
    engine.freeze()
    engine.residency.mover.chance = 1.0
    squeezed.settle()
    assert request.finish_reason
    assert np.array_equal(engine.residency.table.committed_LEU, table.committed_LEU)
    assert not len(pages_in(engine.residency.table, IN_TRANSFER))
    engine.config = config
