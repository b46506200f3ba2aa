# SPDX-License-Identifier: Apache-2.0
"""Thousands of random moves of weight pages and KV blocks through one arena.

Beside the table runs a model that knows nothing of frames: the state of each page, the bits of each block. Every move
must agree with it, moves that it calls illegal must be refused, and after each one all invariants hold. The arena is
played by an array of tags: whoever takes frames writes over them, so a frame that changed hands too early is seen.
"""

import copy

import chex
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedweight_jax.paging import table as paging
from pagedweight_jax.paging.arena import KV, WEIGHT, FrameAllocator
from pagedweight_jax.paging.invariants import check_invariants
from pagedweight_jax.paging.table import DEVICE, HOST, IN_TRANSFER, RETIRING
from pallas_kernels.bitplane import BlockLayout

LAYOUTS = BlockLayout(64, 64, True, 2, 5, 64), BlockLayout(64, 32, False, 2, 5, 64)
SHAPE = (2, 3, 2)
KV_BLOCK_FRAMES = 12
SEEDS = st.integers(0, 2**32 - 1)


def some(rng, rows, limit=None):
    """A random part of ``rows`` in random order: at least one if there are any, at most ``limit``."""
    rows = rng.permutation(np.asarray(rows))
    return rows[: rng.integers(1, min(len(rows), limit or len(rows)) + 1)] if len(rows) else rows


class PagingMachine(RuleBasedStateMachine):
    @initialize(seed=SEEDS)
    def start(self, seed):
        self.num_moves = 0
        rng = self.rng(seed)
        bits_LEU = rng.integers(2, 6, SHAPE)
        self.allocator = FrameAllocator(int(rng.integers(480, 620)))
        while sum(LAYOUTS[u].page_starts[b] for (*_, u), b in np.ndenumerate(bits_LEU)) > self.allocator.num_frames:
            bits_LEU = np.maximum(bits_LEU - 1, 2)
        self.table = paging.initial_table(LAYOUTS, *SHAPE[:2], bits_LEU, self.allocator)
        self.tags_A = np.zeros(self.allocator.num_frames, np.int64)
        self.kv = {}  # tag: frames
        self.next_kv_tag = -1
        self.states = {}
        self.pages_moved = [0, 0, 0, 0]
        for *block, plane in np.ndindex(*SHAPE, 5):
            self.states[*block, plane] = DEVICE if plane < bits_LEU[tuple(block)] else HOST
        self.committed = {block: int(bits_LEU[block]) for block in np.ndindex(SHAPE)}
        self.desired = dict(self.committed)
        self.left_since_dispatch = set()
        self.write(paging.pages_in(self.table, DEVICE))
        self.dispatch()

    def rng(self, seed):
        self.num_moves += 1
        return np.random.default_rng((seed, self.num_moves))  # hypothesis likes to repeat small seeds

    # What the device does

    def write(self, pages):
        self.tags_A[paging.page_frames(self.table, pages)] = self.expected_tags(pages)

    def expected_tags(self, pages):
        layer, expert, kind, column = paging.frame_slots(LAYOUTS, pages).T
        return 1 + ((layer * SHAPE[1] + expert) * SHAPE[2] + kind) * 1000 + column

    @rule()
    def dispatch(self):
        """A call starts, with the table as it is: until the next one it reads what is committed now."""
        planes = np.arange(5) < self.table.committed_LEU[..., None]
        self.read_pages = np.argwhere(planes)
        self.read_frames = paging.page_frames(self.table, self.read_pages)
        self.left_since_dispatch = set()

    # Moves of the host

    @precondition(lambda self: self.allocator.num_free >= KV_BLOCK_FRAMES)
    @rule()
    def take_kv_block(self):
        frames = self.allocator.take(KV_BLOCK_FRAMES, KV)
        self.tags_A[frames] = self.next_kv_tag
        self.kv[self.next_kv_tag] = frames
        self.next_kv_tag -= 1

    @precondition(lambda self: self.kv)
    @rule(seed=SEEDS, retire_first=st.booleans())
    def free_kv_block(self, seed, retire_first):
        frames = self.kv.pop(int(self.rng(seed).choice(list(self.kv))))
        if retire_first:
            self.allocator.retire(frames)
        self.allocator.give(frames)

    @rule(seed=SEEDS)
    def desire(self, seed):
        rng = self.rng(seed)
        self.desired |= {tuple(b): int(rng.integers(2, 6)) for b in some(rng, list(np.ndindex(SHAPE))).tolist()}
        self.publish_desired()

    def publish_desired(self):
        desired_LEU = np.array([self.desired[block] for block in np.ndindex(SHAPE)]).reshape(SHAPE)
        self.table = paging.set_desired(self.table, desired_LEU)

    @rule(seed=SEEDS)
    def lower(self, seed):
        rng = self.rng(seed)
        top = {block: max(self.committed[block], self.desired[block]) for block in self.committed}
        blocks = some(rng, [block for block in top if top[block] > 2], limit=3)
        bits = [int(rng.integers(2, top[tuple(block)])) for block in blocks]
        self.table = paging.commit_lower(self.table, blocks, bits)
        for block, to in zip(blocks.tolist(), bits):
            self.committed[tuple(block)] = min(self.committed[tuple(block)], to)
            self.desired[tuple(block)] = min(self.desired[tuple(block)], to)

    @rule(seed=SEEDS)
    def offload(self, seed):
        surplus = paging.surplus_pages(self.table)
        kept = {block: max(self.committed[block], self.desired[block]) for block in self.committed}
        assert {*map(tuple, surplus.tolist())} == {
            (*block, p) for (*block, p), s in self.states.items() if s == DEVICE and p >= kept[tuple(block)]
        }
        pages = some(self.rng(seed), surplus).reshape(-1, 4)
        self.table = paging.begin_offload(self.table, pages)
        self.allocator.retire(paging.page_frames(self.table, pages))
        self.left_since_dispatch |= self.now(pages, RETIRING)

    @rule(seed=SEEDS)
    def free_retired(self, seed):
        """Only what left before the running call started: that call may not read it."""
        retiring = {*map(tuple, paging.pages_in(self.table, RETIRING).tolist())}
        pages = some(self.rng(seed), sorted(retiring - self.left_since_dispatch)).reshape(-1, 4)
        self.table, frames = paging.retire(self.table, pages.astype(int))
        self.allocator.give(frames)
        self.now(pages, HOST)

    @rule(seed=SEEDS)
    def reload(self, seed):
        rng = self.rng(seed)
        blocks = some(rng, [block for block in self.desired if self.desired[block] < 5], limit=3).tolist()
        self.desired |= {tuple(block): self.desired[tuple(block)] + 1 for block in blocks}
        self.publish_desired()
        missing = paging.missing_pages(self.table)
        assert {*map(tuple, missing.tolist())} == {
            (*block, p) for (*block, p), s in self.states.items() if s == HOST and p < self.desired[tuple(block)]
        }
        pages = some(rng, missing).reshape(-1, 4)
        counts = np.cumsum([LAYOUTS[u].page_frames(p) for *_, u, p in pages.tolist()])
        pages = pages[: np.searchsorted(counts, self.allocator.num_free, side="right")]
        frames = self.allocator.take(len(paging.frame_slots(LAYOUTS, pages)), WEIGHT)
        self.table = paging.begin_reload(self.table, pages, frames)
        self.now(pages, IN_TRANSFER)

    @rule(seed=SEEDS)
    def arrive(self, seed):
        rng = self.rng(seed)
        pages = some(rng, paging.pages_in(self.table, IN_TRANSFER)).reshape(-1, 4)
        desired = [plane < self.desired[tuple(block)] for *block, plane in pages.tolist()]
        np.testing.assert_array_equal(paging.is_desired(self.table, pages), desired)
        wanted = np.array(desired, bool) & (rng.random(len(pages)) < 0.9)
        self.table, frames = paging.cancel(self.table, pages[~wanted])
        self.allocator.give(frames)
        self.now(pages[~wanted], HOST)
        self.table = paging.land(self.table, pages[wanted])
        self.write(pages[wanted])
        self.now(pages[wanted], DEVICE)

    @rule(seed=SEEDS)
    def raise_bits(self, seed):
        raisable = {}
        for block in self.committed:
            leading = next((p for p in range(5) if self.states[*block, p] != DEVICE), 5)
            if (bits := min(leading, self.desired[block])) > self.committed[block]:
                raisable[block] = bits
        assert {*map(tuple, paging.raisable_blocks(self.table).tolist())} == set(raisable)
        blocks = some(self.rng(seed), list(raisable)).reshape(-1, 3).astype(int)
        self.table = paging.commit_raise(self.table, blocks)
        self.committed |= {tuple(block): raisable[tuple(block)] for block in blocks.tolist()}

    @rule(seed=SEEDS, verb=st.sampled_from(["begin_offload", "retire", "begin_reload", "land", "cancel"]))
    def try_illegal(self, seed, verb):
        *block, plane = page = tuple(self.rng(seed).integers(0, (*SHAPE, 5)).tolist())
        needed = {"begin_offload": DEVICE, "retire": RETIRING, "begin_reload": HOST}.get(verb, IN_TRANSFER)
        legal = self.states[page] == needed
        legal &= verb != "begin_offload" or plane >= self.committed[tuple(block)]
        legal &= verb != "begin_reload" or plane < self.desired[tuple(block)]
        if legal:
            return
        before = copy.deepcopy(self.table)
        frames = [np.zeros(LAYOUTS[page[2]].page_frames(plane), np.int32)] if verb == "begin_reload" else []
        with pytest.raises(ValueError, match=f"{verb}: layer {page[0]} expert {page[1]} .* plane {plane} must be"):
            getattr(paging, verb)(self.table, [page], *frames)
        chex.assert_trees_all_equal(self.table, before)

    def now(self, pages, state):
        moved = {*map(tuple, pages.tolist())}
        self.pages_moved[state] += len(moved)
        self.states |= dict.fromkeys(moved, state)
        return moved

    # What must hold after every move

    @invariant()
    def sound(self):
        kv_frames = np.concatenate([np.empty(0, int), *self.kv.values()])
        check_invariants(self.table, self.allocator, kv_frames)

    @invariant()
    def agrees_with_the_model(self):
        assert all(self.table.state_LEUP[page] == state for page, state in self.states.items())
        assert all(self.table.committed_LEU[block] == bits for block, bits in self.committed.items())
        assert all(self.table.desired_LEU[block] == bits for block, bits in self.desired.items())

    @invariant()
    def nothing_is_overwritten(self):
        on_device = paging.pages_in(self.table, DEVICE)
        np.testing.assert_array_equal(
            self.tags_A[paging.page_frames(self.table, on_device)], self.expected_tags(on_device)
        )
        np.testing.assert_array_equal(self.tags_A[self.read_frames], self.expected_tags(self.read_pages))
        for tag, frames in self.kv.items():
            assert (self.tags_A[frames] == tag).all()


TestPagingMachine = PagingMachine.TestCase
TestPagingMachine.settings = settings(
    max_examples=50,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_long_walk(seed):
    """The same moves, 1500 of them in one life, so that pages go round many times."""
    rng = np.random.default_rng(seed)
    machine = PagingMachine()
    machine.start(seed)
    moves = ["kv", "dispatch", "desire", "lower", "offload", "free_retired", "reload", "arrive", "raise_bits"]
    for move in rng.choice(moves, 1500):
        if move == "kv" and machine.allocator.num_free >= KV_BLOCK_FRAMES:
            machine.take_kv_block()
        elif move == "kv" and machine.kv:
            for _ in range(len(machine.kv)):
                machine.free_kv_block(seed, bool(rng.integers(2)))
        elif move == "dispatch":
            machine.dispatch()
        elif move != "kv":
            getattr(machine, move)(seed)
        machine.sound()
        machine.agrees_with_the_model()
        machine.nothing_is_overwritten()
    assert min(machine.pages_moved) > 150


def test_the_machine_sees_frames_that_change_hands_too_early():
    """Negative control: freeing what the running call still reads is noticed."""
    machine = PagingMachine()
    machine.start(0)
    machine.lower(3)
    machine.offload(3)
    machine.nothing_is_overwritten()
    assert machine.left_since_dispatch
    machine.left_since_dispatch = set()
    machine.free_retired(0)
    while machine.allocator.num_free >= KV_BLOCK_FRAMES:
        machine.take_kv_block()
    machine.sound()  # owners are in order: only the running call is betrayed
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        machine.nothing_is_overwritten()
