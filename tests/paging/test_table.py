# SPDX-License-Identifier: Apache-2.0
import copy
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

from pagedweight_jax.paging.arena import KV, RETIRED, WEIGHT, FrameAllocator
from pagedweight_jax.paging.invariants import check_invariants
from pagedweight_jax.paging.table import (
    DEVICE,
    HOST,
    IN_TRANSFER,
    RETIRING,
    begin_offload,
    begin_reload,
    bytes_table,
    cancel,
    commit_lower,
    commit_raise,
    frame_slots,
    initial_table,
    is_desired,
    land,
    missing_pages,
    page_frames,
    pages_in,
    raisable_blocks,
    retire,
    set_desired,
    surplus_pages,
)
from pallas_kernels.bitplane import BlockLayout


@pytest.fixture
def world(layouts):
    """(table with every block at 3 bits, allocator with room for all planes)."""
    allocator = FrameAllocator(6 * sum(layout.block_frames for layout in layouts))
    return initial_table(layouts, 2, 3, np.full((2, 3, 2), 3), allocator), allocator


def raise_desired(table, bits):
    return set_desired(table, np.full(table.desired_LEU.shape, bits))


def test_initial_table(layouts, bits_LEU):
    allocator = FrameAllocator(600)
    table = initial_table(layouts, 2, 3, bits_LEU, allocator)
    check_invariants(table, allocator)
    frame_bytes = 4 * layouts[0].frame_words
    assert allocator.count(WEIGHT) * frame_bytes == sum(
        layouts[kind].resident_bytes(int(bits_LEU[layer, expert, kind])) for layer, expert, kind in np.ndindex(2, 3, 2)
    )
    np.testing.assert_array_equal(table.committed_LEU, bits_LEU)
    np.testing.assert_array_equal(table.desired_LEU, bits_LEU)
    assert table.host_copy_LEUP.all()
    for layer, expert, kind, plane in np.ndindex(table.state_LEUP.shape):
        resident = plane < bits_LEU[layer, expert, kind]
        assert table.state_LEUP[layer, expert, kind, plane] == (DEVICE if resident else HOST)
        assert (page_frames(table, [(layer, expert, kind, plane)]) >= 0).all() == resident


def test_bytes_table(layouts, world):
    table, _ = world
    assert table.bytes_UQ.shape == (2, 4)
    for kind, bits in np.ndindex(2, 4):
        assert table.bytes_UQ[kind, bits] == layouts[kind].resident_bytes(bits + 2)
    np.testing.assert_array_equal(table.bytes_UQ, bytes_table(layouts))


def test_frame_slots_follow_the_layout(layouts):
    pages = np.array([(1, 2, 0, 4), (0, 0, 1, 0), (1, 2, 0, 1)])
    slots_S4 = frame_slots(layouts, pages)
    expected = [
        (layer, expert, kind, column)
        for layer, expert, kind, plane in pages
        for column in range(layouts[kind].page_starts[plane], layouts[kind].page_starts[plane + 1])
    ]
    np.testing.assert_array_equal(slots_S4, expected)
    assert frame_slots(layouts, np.empty((0, 4), int)).shape == (0, 4)


def test_a_table_is_a_pytree(world):
    table, _ = world
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(table))
    chex.assert_trees_all_equal(jax.tree.map(np.copy, table), table)


def test_lowering_goes_down_to_the_free_list(world):
    table, allocator = world
    free_before = allocator.num_free
    blocks = np.array([(0, 1, 0), (1, 2, 1)])
    table = commit_lower(table, blocks, np.array([2, 2]))
    assert table.committed_LEU[0, 1, 0] == table.desired_LEU[1, 2, 1] == 2
    assert (table.state_LEUP == DEVICE).sum() == 36  # nothing has moved
    pages = surplus_pages(table)
    np.testing.assert_array_equal(pages, [(0, 1, 0, 2), (1, 2, 1, 2)])
    frames = page_frames(table, pages)
    table = begin_offload(table, pages)
    allocator.retire(frames)
    check_invariants(table, allocator)
    np.testing.assert_array_equal(page_frames(table, pages), frames)  # a running step may still read them
    table, freed = retire(table, pages_in(table, RETIRING))
    np.testing.assert_array_equal(freed, frames)
    allocator.give(freed)
    check_invariants(table, allocator)
    assert allocator.num_free == free_before + sum(table.layouts[kind].page_frames(2) for kind in (0, 1))
    assert (page_frames(table, pages) == -1).all()


def test_raising_waits_for_every_plane(world):
    table, allocator = world
    desired_LEU = table.desired_LEU.copy()
    desired_LEU[1, 0, 0] = 5
    table = set_desired(table, desired_LEU)
    pages = missing_pages(table)
    np.testing.assert_array_equal(pages, [(1, 0, 0, 3), (1, 0, 0, 4)])
    frames = allocator.take(len(frame_slots(table.layouts, pages)), WEIGHT)
    table = begin_reload(table, pages, frames)
    np.testing.assert_array_equal(page_frames(table, pages), frames)
    assert not len(missing_pages(table))
    table = land(table, pages[1:])
    assert not len(raisable_blocks(table))  # plane 4 without plane 3 is worth nothing
    assert not len(surplus_pages(table))  # yet it is wanted
    table = land(table, pages[:1])
    np.testing.assert_array_equal(raisable_blocks(table), [(1, 0, 0)])
    table = commit_raise(table, raisable_blocks(table))
    assert table.committed_LEU[1, 0, 0] == 5
    check_invariants(table, allocator)


def test_a_raise_takes_the_planes_that_are_there(world):
    table, allocator = world
    table = raise_desired(table, 5)
    page = np.array([(0, 0, 1, 3)])
    table = land(begin_reload(table, page, allocator.take(len(frame_slots(table.layouts, page)), WEIGHT)), page)
    table = commit_raise(table, [(0, 0, 1)])
    assert table.committed_LEU[0, 0, 1] == 4
    assert table.desired_LEU[0, 0, 1] == 5
    check_invariants(table, allocator)


def test_pressure_during_a_reload_cancels_it(world):
    table, allocator = world
    before = table
    table = raise_desired(table, 4)
    pages = missing_pages(table)[:2]
    table = begin_reload(table, pages, allocator.take(len(frame_slots(table.layouts, pages)), WEIGHT))
    assert is_desired(table, pages).tolist() == [True, True]
    table = commit_lower(table, pages[:1, :3], 3)  # its committed bits are 3 already: only the wish goes
    assert is_desired(table, pages).tolist() == [False, True]
    table, freed = cancel(table, pages)
    allocator.give(freed)
    check_invariants(table, allocator)
    chex.assert_trees_all_equal(set_desired(table, before.desired_LEU), before)


def moved_world(world):
    """A table with pages in all four states: plane 4 of (0, 0, 0) in transfer, plane 2 of (0, 1, 0) retiring."""
    table, allocator = world
    desired_LEU = table.desired_LEU.copy()
    desired_LEU[0, 0, 0] = 5
    table = set_desired(table, desired_LEU)
    page = np.array([(0, 0, 0, 4)])
    table = begin_reload(table, page, allocator.take(len(frame_slots(table.layouts, page)), WEIGHT))
    return begin_offload(commit_lower(table, [(0, 1, 0)], 2), [(0, 1, 0, 2)])


@pytest.mark.parametrize(
    ("verb", "illegal", "message"),
    [
        (begin_offload, (0, 0, 0, 2), "layer 0 expert 0 gate_up plane 2 must be DEVICE and above the committed"),
        (begin_offload, (0, 0, 0, 3), "plane 3 must be .*3 bits, 5 desired.*DEVICE DEVICE DEVICE HOST IN_TRANSFER"),
        (begin_offload, (0, 0, 0, 4), "plane 4 must be DEVICE"),
        (begin_offload, (0, 1, 0, 2), "plane 2 must be DEVICE"),
        (retire, (0, 0, 0, 2), "plane 2 must be RETIRING"),
        (retire, (0, 0, 0, 3), "plane 3 must be RETIRING"),
        (retire, (0, 0, 0, 4), "plane 4 must be RETIRING"),
        (land, (0, 0, 0, 3), "plane 3 must be IN_TRANSFER"),
        (land, (1, 2, 1, 0), "layer 1 expert 2 down plane 0 must be IN_TRANSFER"),
        (land, (0, 1, 0, 2), "plane 2 must be IN_TRANSFER"),
        (cancel, (0, 0, 0, 2), "plane 2 must be IN_TRANSFER"),
        (begin_reload, (0, 0, 0, 4), "plane 4 must be HOST"),
        (begin_reload, (0, 0, 0, 0), "plane 0 must be HOST"),
        (begin_reload, (0, 1, 0, 2), "plane 2 must be HOST"),
        (begin_reload, (0, 1, 1, 3), "plane 3 must be HOST, desired"),
        (land, (2, 0, 0, 0), "layer 2 expert 0 gate_up plane 0 does not exist"),
        (land, (0, -1, 0, 0), "expert -1 gate_up plane 0 does not exist"),
        (land, (0, 0, 2, 0), "expert 0 2 plane 0 does not exist"),
        (land, (0, 0, 0, 5), "plane 5 does not exist"),
    ],
)
def test_illegal_moves_of_pages(world, verb, illegal, message):
    table = moved_world(world)
    before = copy.deepcopy(table)
    with pytest.raises(ValueError, match=f"{verb.__name__}: .*{message}"):
        verb(table, np.array([illegal]), *([np.zeros(99, np.int32)] if verb is begin_reload else []))
    chex.assert_trees_all_equal(table, before)


def test_one_illegal_page_spoils_the_call(world):
    table = moved_world(world)
    with pytest.raises(ValueError, match="layer 0 expert 0 gate_up plane 3 must be IN_TRANSFER"):
        land(table, [(0, 0, 0, 4), (0, 0, 0, 3)])
    with pytest.raises(ValueError, match="layer 0 expert 0 gate_up plane 4 is named twice"):
        land(table, [(0, 0, 0, 4), (0, 0, 0, 4)])
    assert land(table, [(0, 0, 0, 4)]).state_LEUP[0, 0, 0, 4] == DEVICE


@pytest.mark.parametrize("wrong", [np.zeros(3, np.int32), np.full(18, -1, np.int32), np.zeros((1, 18), np.int32)])
def test_reload_needs_the_right_frames(world, wrong):
    table = raise_desired(world[0], 5)
    assert table.layouts[0].page_frames(4) == 18
    with pytest.raises(ValueError, match="1 pages take 18 frames"):
        begin_reload(table, [(0, 0, 0, 4)], wrong)


def test_illegal_moves_of_bits(world):
    table, _ = world
    for bits in (1, 3, 4):
        with pytest.raises(ValueError, match=rf"expert 1 down cannot be lowered to \[{bits}\] bits; .* at 3 bits"):
            commit_lower(table, [(0, 0, 0), (0, 1, 1)], [2, bits])
    with pytest.raises(ValueError, match="layer 0 expert 1 down is named twice"):
        commit_lower(table, [(0, 1, 1), (0, 1, 1)], 2)
    with pytest.raises(ValueError, match="commit_raise: layer 0 expert 1 down cannot be raised"):
        commit_raise(raise_desired(table, 5), [(0, 1, 1)])
    for bits in (1, 6):
        with pytest.raises(ValueError, match=f"layer 0 expert 0 gate_up cannot run at {bits} bits \\(2..5\\)"):
            raise_desired(table, bits)
    with pytest.raises(ValueError, match="shape"):
        set_desired(table, np.full((3, 2), 3))


def test_a_page_without_a_host_copy_is_never_dropped(world):
    table, _ = world
    host_copy_LEUP = table.host_copy_LEUP.copy()
    host_copy_LEUP[0, 0, 0, 2] = False
    table = commit_lower(replace(table, host_copy_LEUP=host_copy_LEUP), [(0, 0, 0), (0, 1, 0)], 2)
    table = begin_offload(table, surplus_pages(table))
    with pytest.raises(ValueError, match="expert 0 gate_up plane 2 must be RETIRING and have a host copy"):
        retire(table, pages_in(table, RETIRING))
    retire(table, [(0, 1, 0, 2)])


def test_transitions_are_pure_and_copy_only_what_they_touch(world):
    table, allocator = world
    table = raise_desired(table, 4)
    before = copy.deepcopy(table)
    page = np.array([(1, 2, 1, 3)])
    reloading = begin_reload(table, page, allocator.take(len(frame_slots(table.layouts, page)), WEIGHT))
    dropped, _ = cancel(reloading, page)
    landed = land(reloading, page)
    raised = commit_raise(landed, page[:, :3])
    lowered = commit_lower(raised, page[:, :3], 2)
    retiring = begin_offload(lowered, surplus_pages(lowered))
    retired, _ = retire(retiring, pages_in(retiring, RETIRING))
    chex.assert_trees_all_equal(table, before)
    chex.assert_trees_all_equal(replace(dropped, committed_LEU=before.committed_LEU), before)
    assert reloading.state_LEUP[1, 2, 1, 3] == IN_TRANSFER
    assert retiring.state_LEUP[1, 2, 1, 3] == RETIRING
    for after in (reloading, dropped, retired):
        touched = [(i, j) for i, j in np.ndindex(2, 2) if after.frames[i][j] is not table.frames[i][j]]
        assert touched == [(1, 1)]
    for after in (landed, raised, lowered, retiring):
        assert after.frames is reloading.frames or all(
            after.frames[i][j] is reloading.frames[i][j] for i, j in np.ndindex(2, 2)
        )


def test_empty_moves_change_nothing(world):
    table, _ = world
    none = np.empty((0, 4), int)
    for after in (
        begin_offload(table, none),
        retire(table, none)[0],
        begin_reload(table, none, np.empty(0, np.int32)),
        land(table, none),
        cancel(table, none)[0],
        commit_lower(table, none[:, :3], []),
        commit_raise(table, none[:, :3]),
    ):
        chex.assert_trees_all_equal(after, table)
    assert is_desired(table, none).shape == page_frames(table, none).shape == (0,)


def test_layouts_must_belong_together(layouts):
    other = BlockLayout(64, 32, False, 3, 5, 64)
    with pytest.raises(ValueError, match="same bitwidths"):
        initial_table((layouts[0], other), 1, 1, np.full((1, 1, 2), 3), FrameAllocator(99))


def test_too_small_an_arena_is_caught(layouts):
    with pytest.raises(RuntimeError, match="of 40 free"):
        initial_table(layouts, 2, 3, np.full((2, 3, 2), 3), FrameAllocator(40))


def test_owners_tell_kv_from_pages(world):
    table, allocator = world
    kv = allocator.take(5, KV)
    check_invariants(table, allocator, kv)
    allocator.retire(kv[:2])
    check_invariants(table, allocator, kv)  # released, not yet reusable
    assert allocator.count(RETIRED) == 2
