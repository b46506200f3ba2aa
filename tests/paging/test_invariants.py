# SPDX-License-Identifier: Apache-2.0
"""Negative controls: ``check_invariants`` reports each invariant that is broken by hand in a sound world."""

from dataclasses import replace

import numpy as np
import pytest

from pagedweight_jax.paging.arena import FREE, KV, WEIGHT, FrameAllocator
from pagedweight_jax.paging.invariants import check_invariants
from pagedweight_jax.paging.table import (
    DEVICE,
    HOST,
    IN_TRANSFER,
    RETIRING,
    begin_offload,
    begin_reload,
    commit_lower,
    frame_slots,
    initial_table,
    page_frames,
    set_desired,
)


@pytest.fixture
def world(layouts):
    """(table, allocator, kv_frames) with pages in all four states: block (0, 0, 0) reloads plane 4 and (0, 1, 0)
    retires plane 2, the others run at 3 bits."""
    allocator = FrameAllocator(300)
    table = initial_table(layouts, 2, 3, np.full((2, 3, 2), 3), allocator)
    desired_LEU = table.desired_LEU.copy()
    desired_LEU[0, 0, 0] = 5
    coming, going = np.array([(0, 0, 0, 4)]), np.array([(0, 1, 0, 2)])
    frames = allocator.take(len(frame_slots(layouts, coming)), WEIGHT)
    table = begin_reload(set_desired(table, desired_LEU), coming, frames)
    table = begin_offload(commit_lower(table, going[:, :3], 2), going)
    allocator.retire(page_frames(table, going))
    kv_frames = allocator.take(24, KV)
    check_invariants(table, allocator, kv_frames)
    assert set(np.unique(table.state_LEUP)) == {HOST, IN_TRANSFER, DEVICE, RETIRING}
    assert allocator.num_free > 0
    return table, allocator, kv_frames


def changed(table, field, at, value):
    array = getattr(table, field).copy()
    array[at] = value
    return replace(table, **{field: array})


def with_frame(table, layer, kind, at, value):
    frames = [list(of_kinds) for of_kinds in table.frames]
    frames[layer][kind] = frames[layer][kind].copy()
    frames[layer][kind][at] = value
    return replace(table, frames=tuple(tuple(of_kinds) for of_kinds in frames))


@pytest.mark.parametrize(
    ("field", "at", "value", "message"),
    [
        ("committed_LEU", (1, 0, 0), 1, "layer 1 expert 0 gate_up: committed bits outside 2..5"),
        ("committed_LEU", (1, 0, 0), 6, "layer 1 expert 0 gate_up: committed bits outside 2..5"),
        ("desired_LEU", (1, 2, 1), 1, "layer 1 expert 2 down: desired bits outside 2..5"),
        ("desired_LEU", (1, 2, 1), 6, "layer 1 expert 2 down: desired bits outside 2..5"),
        ("committed_LEU", (0, 1, 0), 3, "layer 0 expert 1 gate_up plane 2: committed, but not on the device"),
        ("committed_LEU", (0, 2, 1), 4, "layer 0 expert 2 down plane 3: committed, but not on the device"),
        ("state_LEUP", (0, 2, 1, 0), IN_TRANSFER, "layer 0 expert 2 down plane 0: committed, but not on the device"),
        ("state_LEUP", (0, 2, 1, 3), DEVICE, "layer 0 expert 2 down plane 3: the page lacks frame 0"),
        ("state_LEUP", (0, 0, 0, 4), HOST, "layer 0 expert 0 gate_up plane 4: the page has frame 0"),
        ("state_LEUP", (0, 1, 0, 2), HOST, "layer 0 expert 1 gate_up plane 2: the page has frame 0"),
        ("host_copy_LEUP", (0, 0, 0, 3), False, "layer 0 expert 0 gate_up plane 3: .*without a host copy"),
        ("host_copy_LEUP", (0, 0, 0, 4), False, "layer 0 expert 0 gate_up plane 4: .*without a host copy"),
        ("state_LEUP", (0, 1, 0, 2), DEVICE, "belongs to a weight page, the allocator says a page being retired"),
        ("state_LEUP", (0, 0, 0, 4), RETIRING, "belongs to a page being retired, the allocator says a weight page"),
    ],
)
def test_a_wrong_entry_is_caught(world, field, at, value, message):
    table, allocator, kv_frames = world
    with pytest.raises(AssertionError, match=message):
        check_invariants(changed(table, field, at, value), allocator, kv_frames)


@pytest.mark.parametrize("at", [(0, 0, 1, 2), (0, 1, 0, 2)])
def test_a_page_that_stays_needs_no_host_copy(world, at):
    table, allocator, kv_frames = world
    check_invariants(changed(table, "host_copy_LEUP", at, False), allocator, kv_frames)


def test_a_wrong_frame_is_caught(world):
    table, allocator, kv_frames = world
    last_of_plane_2 = table.layouts[1].page_starts[3] - 1
    count = table.layouts[1].page_frames(2)
    retired_frame = table.frames[0][0][1, table.layouts[0].page_starts[2]]
    cases = [
        ((1, last_of_plane_2), -1, f"layer 1 expert 1 down plane 2: the page lacks frame {count - 1} of its list"),
        ((1, last_of_plane_2 + 1), 7, "layer 1 expert 1 down plane 3: the page has frame 0 of its list"),
        ((1, 0), table.frames[1][1][1, 1], "2 owners: a weight page, a weight page|0 owners: nobody"),
        ((1, 0), kv_frames[0], "owners: a weight page, a KV block|0 owners: nobody"),
        ((1, 0), allocator.free_frames[0], "owners: the free list, a weight page|0 owners: nobody"),
        ((1, 0), retired_frame, "owners: a weight page, a page being retired|0 owners: nobody"),
        ((1, 0), 300, "frames 0..300 listed, the arena has 300"),
    ]
    for at, frame, message in cases:
        with pytest.raises(AssertionError, match=message):
            check_invariants(with_frame(table, 1, 1, at, frame), allocator, kv_frames)


def test_wrong_kv_frames_are_caught(world):
    table, allocator, kv_frames = world
    with pytest.raises(AssertionError, match=f"frame {kv_frames[-1]} has 0 owners: nobody"):
        check_invariants(table, allocator, kv_frames[:-1])
    with pytest.raises(AssertionError, match=f"frame {kv_frames[0]} has 2 owners: a KV block, a KV block"):
        check_invariants(table, allocator, [*kv_frames, kv_frames[0]])
    with pytest.raises(AssertionError, match="frame 5 has 2 owners: a weight page, a KV block"):
        check_invariants(table, allocator, [*kv_frames, 5])
    with pytest.raises(AssertionError, match="2 owners: the free list, a KV block"):
        check_invariants(table, allocator, [*kv_frames, allocator.free_frames[0]])


def test_an_allocator_that_disagrees_is_caught(world):
    table, allocator, kv_frames = world
    allocator.give(kv_frames[:1])
    with pytest.raises(AssertionError, match="2 owners: the free list, a KV block"):
        check_invariants(table, allocator, kv_frames)
    frame = allocator.take(1, WEIGHT)
    assert frame == kv_frames[:1]
    with pytest.raises(AssertionError, match="belongs to a KV block, the allocator says a weight page"):
        check_invariants(table, allocator, kv_frames)


def test_wrong_counts_are_caught(world):
    table, allocator, kv_frames = world
    allocator._counts[KV] += 1
    with pytest.raises(AssertionError, match="counts 25 frames of a KV block, there are 24"):
        check_invariants(table, allocator, kv_frames)
    allocator._counts[KV] -= 1
    allocator._owner_A[kv_frames[0]] = FREE
    with pytest.raises(AssertionError, match="belongs to a KV block, the allocator says the free list"):
        check_invariants(table, allocator, kv_frames)
