# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from pagedweight_jax.paging.arena import FREE, KV, RETIRED, WEIGHT, FrameAllocator, make_arena


def test_arena_shape():
    arena_AW = make_arena(5, 64)
    assert arena_AW.shape == (5, 64)
    assert arena_AW.dtype == np.uint32
    assert not arena_AW.any()


def test_frames_are_taken_in_order_and_come_back():
    allocator = FrameAllocator(10)
    first, second = allocator.take(4, WEIGHT), allocator.take(3, KV)
    np.testing.assert_array_equal(first, [0, 1, 2, 3])
    np.testing.assert_array_equal(second, [4, 5, 6])
    assert [allocator.count(owner) for owner in (FREE, WEIGHT, KV, RETIRED)] == [3, 4, 3, 0]
    allocator.retire(first[:2])
    assert [allocator.count(owner) for owner in (FREE, WEIGHT, KV, RETIRED)] == [3, 2, 3, 2]
    allocator.give(first[:2])
    allocator.give(second)
    assert allocator.num_free == 8
    assert sorted([*allocator.free_frames, *first[2:]]) == list(range(10))
    np.testing.assert_array_equal(allocator.take(3, KV), second)  # the last given are the first taken
    assert allocator.take(0, KV).size == 0


def test_random_moves_agree_with_a_set():
    rng = np.random.default_rng(0)
    allocator, held = FrameAllocator(200), np.empty(0, np.int32)
    for _ in range(500):
        if rng.random() < 0.5:
            taken = allocator.take(int(rng.integers(0, allocator.num_free + 1)), KV)
            assert not np.isin(taken, held).any()
            held = np.concatenate([held, taken])
        else:
            given, held = np.split(rng.permutation(held), [rng.integers(0, held.size + 1)])
            allocator.give(given)
        assert sorted(allocator.free_frames) == sorted(set(range(200)) - set(held.tolist()))
        assert np.all(allocator.owners(held) == KV)
        assert np.all(allocator.owners(allocator.free_frames) == FREE)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda a, taken: a.take(8, KV), "8 frames taken with 7 of 10 free"),
        (lambda a, taken: a.take(-1, KV), "-1 frames taken"),
        (lambda a, taken: a.take(1, FREE), "not for the free list"),
        (lambda a, taken: a.give(np.array([0, 9])), "frame 9 is given back but belongs to the free list"),
        (lambda a, taken: a.give(taken[[0, 1, 0]]), "frame 0 is given back twice"),
        (lambda a, taken: a.give(np.array([-1])), "frames -1..-1 given back"),
        (lambda a, taken: a.give(np.array([10])), "frames 10..10 given back"),
        (lambda a, taken: a.retire(np.array([2, 3])), "frame 3 is retired but belongs to the free list"),
        (lambda a, taken: (a.retire(taken), a.retire(taken)), "frame 0 is retired but belongs to a page being retired"),
        (lambda a, taken: (a.give(taken), a.give(taken)), "frame 0 is given back but belongs to the free list"),
    ],
)
def test_misuse_is_caught(misuse, message):
    allocator = FrameAllocator(10)
    taken = allocator.take(3, WEIGHT)
    with pytest.raises(RuntimeError, match=message):
        misuse(allocator, taken)
    assert sorted(allocator.free_frames) == sorted(np.flatnonzero(allocator.owners(np.arange(10)) == FREE))
    assert allocator.num_free == allocator.count(FREE) == allocator.free_frames.size
