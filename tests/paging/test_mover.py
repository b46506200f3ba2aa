# SPDX-License-Identifier: Apache-2.0
"""The mover on JAX's CPU backend: real transfers, real threads. Where order matters, a gate holds the thread."""

import threading
from contextlib import closing
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.paging.arena import make_arena
from pagedweight_jax.paging.host_pool import fill_host_pool
from pagedweight_jax.paging.mover import PageMover
from pagedweight_jax.paging.table import frame_slots

NUM_FRAMES = 1000
ALL_PAGES = np.argwhere(np.ones((2, 3, 2, 5), bool))


@pytest.fixture(scope="module")
def pool(layouts, leaves):
    return fill_host_pool(leaves, layouts, jax.devices()[0])


@pytest.fixture
def make_mover(pool, layouts):
    """make_mover(**changes) -> PageMover, closed after the test."""
    movers = []

    def make(pool=pool, batch_pages=4, max_staged_bytes=1 << 20):
        mover = PageMover(
            pool,
            layouts,
            num_frames=NUM_FRAMES,
            device=jax.devices()[0],
            batch_pages=batch_pages,
            max_staged_bytes=max_staged_bytes,
        )
        movers.append(mover)
        return mover

    yield make
    for mover in movers:
        mover.close()
        assert not mover._thread.is_alive()


class GatedPool:
    """A pool from which the thread gets as many pages as the test has allowed."""

    def __init__(self, pool):
        self.pool, self.permits, self.fetched = pool, threading.Semaphore(0), []

    def allow(self, pages):
        self.permits.release(pages)

    def get(self, *page):
        self.permits.acquire()
        self.fetched.append(page)
        return self.pool.get(*page)


@pytest.fixture
def gated(make_mover, pool):
    gated = GatedPool(pool)
    yield gated
    gated.allow(1000)  # before the movers are closed


class FakeArray:
    """A device array whose transfer ends when the test says so."""

    ready = False

    def is_ready(self):
        return self.ready

    def block_until_ready(self):
        self.ready = True


def some_frames(layouts, pages, seed=0):
    return np.random.default_rng(seed).permutation(NUM_FRAMES)[: len(frame_slots(layouts, pages))].astype(np.int32)


@partial(jax.jit, donate_argnums=0)
def scatter(arena_AW, staged_B, frames_BF):
    return arena_AW.at[frames_BF].set(jnp.stack(staged_B), mode="drop")


def expected_arena(pool, layouts, pages, frames):
    arena_AW = np.zeros((NUM_FRAMES, 64), np.uint32)
    slots = frame_slots(layouts, pages)
    for (layer, expert, kind, column), frame in zip(slots, frames):
        plane = np.searchsorted(layouts[kind].page_starts, column, side="right") - 1
        arena_AW[frame] = pool.get(layer, expert, kind, plane)[column - layouts[kind].page_starts[plane]]
    return arena_AW


@pytest.mark.parametrize("batch_pages", [1, 4, 7])
def test_every_page_arrives_where_it_should(make_mover, pool, layouts, batch_pages):
    pages = np.random.default_rng(1).permutation(ALL_PAGES)
    frames = some_frames(layouts, pages)
    mover = make_mover(batch_pages=batch_pages)
    mover.start_reload(pages[:20], frames[: len(frame_slots(layouts, pages[:20]))])
    mover.start_reload(pages[20:], frames[len(frame_slots(layouts, pages[:20])) :])
    scatter.clear_cache()
    arena_AW, landed, shapes = make_arena(NUM_FRAMES, 64, jax.devices()[0]), [], set()
    for transfer in mover.drain():
        kind, plane = transfer.pages_N4[0, 2:]
        assert (transfer.pages_N4[:, 2:] == (kind, plane)).all()
        assert transfer.frames_BF.shape == (batch_pages, layouts[kind].page_frames(plane))
        assert len(transfer.staged_B) == batch_pages
        assert all(page.sharding.memory_kind == "device" for page in transfer.staged_B)
        shapes.add(transfer.staged_B[0].shape)
        landed += transfer.pages_N4.tolist()
        arena_AW = scatter(arena_AW, transfer.staged_B, transfer.frames_BF)
    assert sorted(landed) == ALL_PAGES.tolist()
    expected_AW = expected_arena(pool, layouts, pages, frames)
    np.testing.assert_array_equal(arena_AW, expected_AW)
    assert scatter._cache_size() == len(shapes)
    swapped = expected_arena(pool, layouts, pages[::-1], frames)  # negative control
    assert (swapped != expected_AW).any()


def test_a_short_batch_is_filled_with_rows_that_go_nowhere(make_mover, layouts):
    mover = make_mover(batch_pages=4)
    pages = np.array([(0, 0, 0, 2), (1, 2, 0, 2)])
    mover.start_reload(pages, np.arange(12))
    (transfer,) = mover.drain()
    np.testing.assert_array_equal(transfer.pages_N4, pages)
    np.testing.assert_array_equal(transfer.frames_BF[:2], np.arange(12).reshape(2, 6))
    assert (transfer.frames_BF[2:] == NUM_FRAMES).all()
    assert transfer.staged_B[2] is transfer.staged_B[3] is transfer.staged_B[0]


def test_significant_planes_go_first_within_a_reload(make_mover, layouts):
    mover = make_mover(batch_pages=2)
    pages = np.array([(0, 0, 0, 4), (1, 0, 0, 3), (0, 1, 1, 3), (0, 0, 1, 3), (0, 0, 0, 3), (1, 1, 1, 3)])
    mover.start_reload(pages, some_frames(layouts, pages))
    mover.start_reload([(0, 0, 0, 0)], [1, 2])
    order = [transfer.pages_N4.tolist() for transfer in mover.drain()]
    assert order == [
        [[1, 0, 0, 3], [0, 0, 0, 3]],
        [[0, 1, 1, 3], [0, 0, 1, 3]],
        [[1, 1, 1, 3]],
        [[0, 0, 0, 4]],
        [[0, 0, 0, 0]],
    ]


def test_dropped_pages_do_not_land(make_mover, pool, layouts):
    mover = make_mover(batch_pages=4)
    pages = ALL_PAGES[(ALL_PAGES[:, 2:] == (1, 3)).all(axis=1)][:3]
    frames = some_frames(layouts, pages)
    mover.start_reload(pages, frames)
    (transfer,) = mover.drain()
    for kept_N in np.ndindex(2, 2, 2):
        kept_N = np.array(kept_N, bool)
        part = transfer.keep(kept_N)
        np.testing.assert_array_equal(part.pages_N4, pages[kept_N])
        assert part.frames_BF.shape == transfer.frames_BF.shape
        arena_AW = scatter(make_arena(NUM_FRAMES, 64), part.staged_B, part.frames_BF)
        kept_frames = frames.reshape(3, -1)[kept_N].reshape(-1)
        np.testing.assert_array_equal(arena_AW, expected_arena(pool, layouts, pages[kept_N], kept_frames))


def test_poll_never_waits(make_mover, gated):
    mover = make_mover(pool=gated)
    assert mover.poll() == []
    mover.start_reload(ALL_PAGES[:1], [3, 4])
    assert mover.poll() == []  # the thread stands at the gate
    gated.allow(1)
    assert len(list(mover.drain())) == 1
    assert mover.poll() == []
    assert list(mover.drain()) == []


def test_poll_returns_what_is_ready_in_the_order_of_issue(make_mover, layouts, monkeypatch):
    issued, arrays = threading.Semaphore(0), []

    def fake_put(pages, sharding):
        arrays.append([FakeArray() for _ in pages])
        issued.release()
        return arrays[-1]

    monkeypatch.setattr(jax, "device_put", fake_put)
    mover = make_mover(batch_pages=2)
    pages = np.array([(0, 0, 1, 0), (0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 1, 0), (0, 2, 1, 0)])
    mover.start_reload(pages, np.arange(5))
    for _ in range(3):
        assert issued.acquire(timeout=60)
    for page in (arrays[1][0], arrays[1][1], arrays[0][0]):
        page.ready = True
    assert mover.poll() == []  # the second batch waits for the first, which has one page to come
    arrays[0][1].ready = True
    landed = mover.poll()
    while len(landed) < 2:  # issued, but perhaps not yet listed
        landed += mover.poll()
    assert [transfer.pages_N4.tolist() for transfer in landed] == [pages[:2].tolist(), pages[2:4].tolist()]
    assert mover.poll() == []
    arrays[2][0].ready = True
    (last,) = mover.drain()
    assert last.pages_N4.tolist() == pages[4:].tolist()
    assert last.staged_B == (arrays[2][0],) * 2


def test_staging_memory_is_bounded(make_mover, pool, layouts, monkeypatch):
    """With room for two batches, at most two are under way, arrived, or still with the caller."""
    mover_bytes = 2 * 4 * layouts[0].page_frames(4) * 64 * 4
    alive, peak = [], []
    put = jax.device_put

    def counting_put(pages, sharding):
        alive.append(sum(page.nbytes for page in pages))
        peak.append(sum(alive))
        return put(pages, sharding)

    monkeypatch.setattr(jax, "device_put", counting_put)
    mover = make_mover(max_staged_bytes=mover_bytes)
    pages = np.repeat(ALL_PAGES, 3, axis=0)
    mover.start_reload(pages, np.zeros(len(frame_slots(layouts, pages)), np.int32))
    count, returned = 0, 0
    while count < len(pages):
        del alive[:returned]  # let go of what the last poll returned, before the next one
        landed = mover.poll()
        returned = len(landed)
        count += sum(len(transfer.pages_N4) for transfer in landed)
    assert mover_bytes / 2 <= max(peak) <= mover_bytes
    assert len(peak) == 10 * 5  # 18 pages of each kind and plane, by four


def test_drain_reaches_what_the_bound_kept_back(make_mover, layouts):
    largest_bytes = 4 * layouts[0].page_frames(4) * 64 * 4
    mover = make_mover(max_staged_bytes=largest_bytes)
    pages = np.repeat(ALL_PAGES, 2, axis=0)
    mover.start_reload(pages, np.zeros(len(frame_slots(layouts, pages)), np.int32))
    assert sum(len(transfer.pages_N4) for transfer in mover.drain()) == len(pages)
    with pytest.raises(ValueError, match=f"a batch of 4 pages takes {largest_bytes} bytes, the bound is"):
        make_mover(max_staged_bytes=largest_bytes - 1)


def test_an_error_in_the_thread_surfaces_at_the_next_poll(make_mover, layouts):
    mover = make_mover()
    mover.start_reload(ALL_PAGES[:1], [3, 4])
    assert len(list(mover.drain())) == 1
    mover.start_reload([(0, 7, 0, 0)], [1, 2])  # there is no expert 7
    with pytest.raises(RuntimeError, match="the page mover's thread failed") as info:
        list(mover.drain())
    assert isinstance(info.value.__cause__, IndexError)
    with pytest.raises(RuntimeError, match="failed"):
        mover.poll()


def test_pages_and_frames_must_match(make_mover):
    mover = make_mover()
    with pytest.raises(ValueError, match=r"1 pages take 2 frames, got \(3,\)"):
        mover.start_reload([(0, 0, 0, 0)], [1, 2, 3])
    mover.start_reload(np.empty((0, 4), int), [])
    assert list(mover.drain()) == []


def test_close_leaves_the_rest_where_it_is(make_mover, gated, layouts):
    with closing(make_mover(pool=gated, batch_pages=1)) as mover:
        mover.start_reload(ALL_PAGES[:3], some_frames(layouts, ALL_PAGES[:3]))
        closer = threading.Thread(target=mover.close)
        closer.start()
        with mover._changed:
            mover._changed.wait_for(lambda: mover._closed)
        gated.allow(3)
        closer.join()
    assert len(gated.fetched) <= 1
    with pytest.raises(RuntimeError, match="closed"):
        mover.start_reload(ALL_PAGES[:1], [1, 2])
    assert len(list(mover.drain())) == len(gated.fetched)
