# SPDX-License-Identifier: Apache-2.0
"""The scheduler under random traffic: arrivals, stops, cancellations, and weights that take frames and give them back.

``World`` is the engine without programs. Its device only counts: the host sees a call's tokens one call late.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pagedweight_jax.paging.arena import FREE, KV, RETIRED, WEIGHT, FrameAllocator
from pagedweight_jax.serving.kv_blocks import KVBlocks
from pagedweight_jax.serving.request import Request, SamplingParams
from pagedweight_jax.serving.scheduler import Scheduler
from pagedweight_jax.serving.state import Geometry
from pallas_kernels.paged_attention.layout import KVLayout

STOP, TOKEN = 0, 1
BLOCK_TOKENS, LAYERS = 16, 2
KV_LAYOUT = KVLayout(num_kv_heads=1, head_dim=2, dtype="float32", frame_words=2 * BLOCK_TOKENS)


@dataclass
class Row:
    """A row on the device: tokens in its cache, tokens that it may still produce, tokens until it draws a stop."""

    length: int = 0
    remaining: int = 0
    until_stop: int = 0

    def draw(self) -> int:
        self.remaining -= 1
        self.until_stop -= 1
        if self.until_stop == 0:
            self.remaining = 0
            return STOP
        return TOKEN


@dataclass
class Results:
    """What the host has not read of one boundary's calls: tokens, or a number of log-probabilities, per request."""

    tokens: list[tuple[Request, list[int]]] = field(default_factory=list)
    scores: list[tuple[Request, int, int]] = field(default_factory=list)


class World:
    """Requests, scheduler, blocks, a counting device, and weights that hold the frames in ``stolen``."""

    def __init__(self, max_blocks, rows=4, spare_frames=0, chunk_tokens=16, steps_per_call=4, scheduler=Scheduler):
        self.geometry = Geometry(
            gate_up=None,  # how weights lie in frames is not the scheduler's business
            down=None,
            kv=KV_LAYOUT,
            num_layers=LAYERS,
            max_num_seqs=rows,
            max_model_len=max_blocks * BLOCK_TOKENS - 3,
        )
        self.allocator = FrameAllocator(max_blocks * self.geometry.frames_per_block + spare_frames)
        self.blocks = KVBlocks(self.geometry, self.allocator)
        self.scheduler = scheduler(self.blocks, chunk_tokens=chunk_tokens, steps_per_call=steps_per_call)
        self.device = [Row() for _ in range(rows)]
        self.in_flight = Results()
        self.stolen, self.retiring = [], np.empty(0, np.int32)
        self.requests, self.done, self.admissions, self.until_stop = [], [], [], {}

    def add(self, prompt_tokens, max_tokens, until_stop):
        """``max_tokens`` 0 makes a scoring request, ``until_stop`` 0 one that never draws a stop."""
        params = SamplingParams(max_tokens=max_tokens) if max_tokens else None
        request = Request(number=len(self.requests), prompt=(TOKEN,) * prompt_tokens, params=params, stops=(STOP,))
        self.requests.append(request)
        self.until_stop[request] = until_stop
        self.scheduler.add(request)

    def cancel(self, request):
        """As ``Engine.cancel``."""
        request.cancelled = True
        if request.row is not None:
            self.device[request.row] = Row()
        self.end(request)

    def end(self, request):
        self.scheduler.finish(request)
        self.done.append(request)

    def steal(self, num_frames):
        """Weights rise into free frames."""
        self.stolen += self.allocator.take(min(num_frames, self.allocator.num_free), WEIGHT).tolist()

    def give_way(self, num_frames):
        """Weights are lowered: reusable one boundary later."""
        leaving, self.stolen = np.array(self.stolen[:num_frames], np.int32), self.stolen[num_frames:]
        self.allocator.retire(leaving)
        self.retiring = np.concatenate([self.retiring, leaving])

    def boundary(self, may_wait=None, releasable_blocks=0):
        """One step of the engine; returns its schedule. By default rows may wait as long as weights can give way."""
        can_release = bool(self.stolen or len(self.retiring))
        self.allocator.give(self.retiring)
        self.retiring = np.empty(0, np.int32)
        schedule = self.scheduler.schedule(can_release if may_wait is None else may_wait, releasable_blocks)
        if self.scheduler.pending_blocks() > self.blocks.free_blocks:
            self.give_way(3)
        self.admissions += schedule.admitted
        for row, _ in schedule.preempted:
            self.device[row] = Row()
        for request in schedule.admitted:
            until_stop = self.until_stop[request]
            self.device[request.row] = Row(until_stop=max(0, until_stop - len(request.generated)))
        before, self.in_flight = self.in_flight, self.run(schedule)
        for request, tokens in before.tokens:
            if not request.finish_reason:
                request.generated += tokens
        for request, num_preemptions, count in before.scores:
            if not request.finish_reason and request.num_preemptions == num_preemptions:
                request.logprobs += [-1.0] * count
        for request in [r for r in self.requests if r.finish_reason and r not in self.done]:
            self.end(request)
        return schedule

    def run(self, schedule):
        results = Results()
        for chunk in schedule.chunks:
            request, row = chunk.request, self.device[chunk.request.row]
            assert row.length == chunk.start, "chunks of a prompt follow one another"
            assert chunk.tokens == request.tokens[chunk.start : chunk.start + len(chunk.tokens)]
            assert chunk.start % self.scheduler.chunk_tokens == 0
            self.write(request.row, len(chunk.tokens))
            if request.params is None:
                count = len(request.prompt[chunk.start + 1 : chunk.start + 1 + len(chunk.tokens)])
                results.scores.append((request, request.num_preemptions, count))
            elif chunk.last:
                row.remaining = request.remaining_tokens
                results.tokens.append((request, [row.draw()]))
        decoding = [r for r in self.scheduler.running.values() if r.decoding]
        assert schedule.decode or not decoding or not schedule.chunks, "only a boundary that waits leaves rows out"
        if schedule.decode:
            tokens = {request: [] for request in decoding}
            for _ in range(self.scheduler.steps_per_call):
                for request in decoding:
                    row = self.device[request.row]
                    if row.remaining > 0:
                        self.write(request.row, 1)
                        tokens[request].append(row.draw())
            results.tokens += tokens.items()
        return results

    def write(self, row, count):
        """The cache of ``row`` grows: the blocks must be there before the call that writes them."""
        self.device[row].length += count
        held = self.blocks.num_blocks_B[row] * BLOCK_TOKENS
        assert self.device[row].length <= held, f"row {row} writes token {self.device[row].length} of {held}"

    def drain(self):
        """Steps until all is done; the oldest request moves at every boundary at which the weights do not give way."""
        chunk_tokens, steps = self.scheduler.chunk_tokens, self.scheduler.steps_per_call
        most = 2 * len(self.stolen) + 2 * len(self.requests) + 4
        most += sum(-(-r.max_context_tokens // chunk_tokens) + r.max_context_tokens // steps + 4 for r in self.requests)
        for _ in range(most):
            if self.scheduler.has_work:
                self.boundary()
                self.check()
        assert not self.scheduler.has_work, f"no end after {most} boundaries"

    def check(self):
        waiting, running, done = list(self.scheduler.waiting), list(self.scheduler.running.items()), self.done
        places = [*waiting, *(request for _, request in running), *done]
        assert sorted(r.number for r in places) == list(range(len(self.requests)))
        assert all(r.finish_reason for r in done)
        assert not any(r.finish_reason for r in places[: len(waiting) + len(running)])
        order = [r.number for r in waiting]
        assert order == sorted(order)
        assert all(r.number < order[0] for _, r in running if order), "a later request runs before an earlier one"
        assert all(r.row == row for row, r in running)
        assert all(r.row is None for r in (*waiting, *done))
        for row, held in enumerate(self.blocks.num_blocks_B):
            request = self.scheduler.running.get(row)
            assert held <= (self.blocks.blocks_for(request.max_context_tokens) if request else 0)
            in_use_GLF = self.blocks.table_BGLF[row] < self.allocator.num_frames
            assert ((np.arange(len(in_use_GLF)) < held) == in_use_GLF.T).all()
        frames = self.blocks.frames()
        assert len(np.unique(frames)) == len(frames) == self.allocator.count(KV)
        assert self.allocator.count(WEIGHT) == len(self.stolen)
        assert self.allocator.count(RETIRED) == len(self.retiring)

    def check_end(self):
        assert len(self.done) == len(self.requests)
        self.give_way(len(self.stolen))
        self.boundary()
        assert self.allocator.count(FREE) == self.allocator.num_frames
        first_admissions = list(dict.fromkeys(r.number for r in self.admissions))
        assert first_admissions == sorted(first_admissions)
        for request in self.done:
            if not request.cancelled:
                until_stop, generated = self.until_stop[request], len(request.generated)
                if request.params:
                    stops = 0 < until_stop <= request.params.max_tokens
                    assert generated == (until_stop if stops else request.params.max_tokens)
                else:
                    assert len(request.logprobs) == len(request.prompt) - 1


class Traffic(RuleBasedStateMachine):
    scheduler = Scheduler

    @initialize(
        rows=st.integers(1, 4),
        max_blocks=st.integers(1, 6),
        spare_frames=st.integers(0, 20),
        chunk_tokens=st.sampled_from([1, 7, 16, 32]),
        steps_per_call=st.sampled_from([1, 4, 16]),
    )
    def build(self, **sizes):
        self.world = World(**sizes, scheduler=self.scheduler)

    @rule(data=st.data(), scoring=st.booleans())
    def arrive(self, data, scoring):
        longest = self.world.geometry.max_model_len
        prompt_tokens = data.draw(st.integers(2 if scoring else 1, longest - (not scoring)))
        max_tokens = 0 if scoring else data.draw(st.integers(1, longest - prompt_tokens))
        self.world.add(prompt_tokens, max_tokens, data.draw(st.integers(0, 40)))

    @rule(index=st.integers(0, 100))
    def cancel(self, index):
        alive = [r for r in self.world.requests if r not in self.world.done]
        if alive:
            self.world.cancel(alive[index % len(alive)])

    @rule(num_frames=st.integers(1, 12))
    def raise_weights(self, num_frames):
        self.world.steal(num_frames)

    @rule(num_frames=st.integers(1, 12))
    def lower_weights(self, num_frames):
        self.world.give_way(num_frames)

    @rule(may_wait=st.sampled_from([None, None, None, False]))
    def step(self, may_wait):
        self.world.boundary(may_wait)

    @rule()
    def step_often(self):
        for _ in range(5):
            self.world.boundary()
            self.world.check()

    @invariant()
    def holds(self):
        self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()
            self.world.check_end()


SETTINGS = settings(
    max_examples=200, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_random_traffic_keeps_every_promise():
    run_state_machine_as_test(Traffic, settings=SETTINGS)


class ReservesOneCall(Scheduler):
    """Forgets that a call is in flight."""

    def _context_tokens(self, request):
        return super()._context_tokens(request) - self.steps_per_call * request.decoding


class PreemptsToTheEnd(Scheduler):
    def _preempt_youngest(self):
        row, request = super()._preempt_youngest()
        self.waiting.rotate(-1)
        return row, request


class ForgetsWhoIsInFlight(Scheduler):
    """Takes a preempted request for one that has nothing in flight."""

    def _preempt_youngest(self):
        row, request = super()._preempt_youngest()
        request.num_preemptions -= 1
        return row, request


class NeverPreempts(Scheduler):
    def schedule(self, may_wait, releasable_blocks):
        return super().schedule(True, releasable_blocks)


@pytest.mark.parametrize("wrong", [ReservesOneCall, PreemptsToTheEnd, ForgetsWhoIsInFlight, NeverPreempts])
def test_random_traffic_finds_a_wrong_scheduler(wrong):
    traffic = type("WrongTraffic", (Traffic,), {"scheduler": wrong})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(traffic, settings=settings(SETTINGS, phases=[Phase.generate]))


def test_prompts_that_fit_together_run_together_and_no_other_is_let_in():
    """What a prompt still needs is kept for it: prompts alone never preempt one another."""
    world = World(max_blocks=6)
    for blocks in (2, 3, 1, 1):
        world.add(prompt_tokens=blocks * BLOCK_TOKENS, max_tokens=0, until_stop=0)
    world.boundary()
    assert [r.number for r in world.scheduler.running.values()] == [0, 1, 2]
    world.drain()
    assert not any(r.num_preemptions for r in world.requests)
    world.check_end()


def test_the_youngest_gives_way_and_comes_back_first():
    world = World(max_blocks=6)
    for _ in range(3):
        world.add(prompt_tokens=BLOCK_TOKENS, max_tokens=4 * BLOCK_TOKENS, until_stop=0)
    preempted = [r.number for _ in range(100) for _, r in world.boundary().preempted]
    assert set(preempted) == {1, 2}
    assert [r.number for r in world.done] == [0, 1, 2]
    world.check_end()


def test_while_weights_give_way_nobody_is_preempted():
    world = World(max_blocks=6)
    for _ in range(2):
        world.add(prompt_tokens=BLOCK_TOKENS, max_tokens=2 * BLOCK_TOKENS, until_stop=0)
    world.boundary()
    world.steal(world.allocator.num_free)
    world.drain()
    assert not any(r.num_preemptions for r in world.requests)
    world.check_end()


@pytest.mark.parametrize(
    ("max_tokens", "releasable_blocks", "admitted"),
    [(0, 5, 4), (BLOCK_TOKENS, 5, 3), (2 * BLOCK_TOKENS, 5, 2), (0, 0, 2), (BLOCK_TOKENS, 0, 1)],
)
def test_what_fits_once_weights_give_way_is_let_in_now(max_tokens, releasable_blocks, admitted):
    """Against blocks that are not free yet counts all that a request may grow to, not its prompt alone."""
    world = World(max_blocks=9)
    for _ in range(4):
        world.add(prompt_tokens=2 * BLOCK_TOKENS, max_tokens=max_tokens, until_stop=0)
    world.steal(5 * world.geometry.frames_per_block)
    world.boundary(releasable_blocks=releasable_blocks)
    assert len(world.scheduler.running) == admitted
