# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.paging.arena import WEIGHT, FrameAllocator
from pagedweight_jax.paging.page_map import PageMap, page_map, page_map_update
from pagedweight_jax.paging.table import (
    RETIRING,
    begin_offload,
    begin_reload,
    commit_lower,
    commit_raise,
    frame_slots,
    initial_table,
    land,
    missing_pages,
    pages_in,
    raisable_blocks,
    retire,
    set_desired,
    surplus_pages,
)


@pytest.fixture
def world(layouts, bits_LEU):
    allocator = FrameAllocator(600)
    return initial_table(layouts, 2, 3, bits_LEU, allocator), allocator


@jax.jit
def publish(device_map, bits_LEU, gate_up, down):
    def put(frames_LEF, update):
        layer, expert, column, frame = update
        return frames_LEF.at[layer, expert, column].set(frame, mode="drop")

    return PageMap(
        bits_LEU=bits_LEU,
        gate_up_frames_LEF=put(device_map.gate_up_frames_LEF, gate_up),
        down_frames_LEF=put(device_map.down_frames_LEF, down),
    )


def assert_shows(device_map, table):
    """The map and the table agree on every committed plane, and all frames are valid."""
    np.testing.assert_array_equal(device_map.bits_LEU, table.committed_LEU)
    for kind, frames_LEF in enumerate((device_map.gate_up_frames_LEF, device_map.down_frames_LEF)):
        starts = np.array(table.layouts[kind].page_starts)
        for layer, expert in np.ndindex(frames_LEF.shape[:2]):
            stop = starts[table.committed_LEU[layer, expert, kind]]
            held = table.frames[layer][kind][expert, :stop]
            assert (held >= 0).all()
            np.testing.assert_array_equal(frames_LEF[layer, expert, :stop], held)
        assert frames_LEF.min() >= 0


def test_start_up_map(world):
    table, _ = world
    start = page_map(table)
    assert_shows(start, table)
    for leaf, last in zip(jax.tree.leaves(start), (2, *(layout.block_frames for layout in table.layouts))):
        assert leaf.dtype == np.int32
        assert leaf.shape == (2, 3, last)
    absent_LEF = np.stack([of_kinds[0] for of_kinds in table.frames]) < 0
    assert absent_LEF.any()
    assert (start.gate_up_frames_LEF[absent_LEF] == 0).all()


def test_updates_keep_the_map_current(world):
    """Lowering, reloading elsewhere and raising: scattering what landed is all that the device's map needs."""
    table, allocator = world
    device_map = jax.tree.map(jnp.array, page_map(table))
    table = commit_lower(table, np.argwhere(table.committed_LEU > 2), 2)
    table = begin_offload(table, surplus_pages(table))
    table, freed = retire(table, pages_in(table, RETIRING))
    allocator.give(np.random.default_rng(0).permutation(freed))
    none = page_map_update(table, np.empty((0, 4), int), 64)
    device_map = publish(device_map, table.committed_LEU.astype(np.int32), *none)
    assert_shows(device_map, table)

    table = set_desired(table, np.full(table.desired_LEU.shape, 5))
    for chunk in np.array_split(missing_pages(table), 9):
        frames = allocator.take(len(frame_slots(table.layouts, chunk)), WEIGHT)
        table = land(begin_reload(table, chunk, frames), chunk)
        table = commit_raise(table, raisable_blocks(table))
        update = page_map_update(table, chunk, 64)
        before = device_map
        device_map = publish(before, table.committed_LEU.astype(np.int32), *update)
        assert_shows(device_map, table)
        stale = publish(before, table.committed_LEU.astype(np.int32), *none)  # negative control
        with pytest.raises(AssertionError):
            assert_shows(stale, table)
    assert (table.committed_LEU == 5).all()
    assert publish._cache_size() == 1


def test_update_lists_each_frame_once_then_padding(world):
    table, _ = world
    pages = np.array([(1, 0, 0, 1), (0, 2, 1, 0), (1, 1, 0, 0)])
    gate_up, down = page_map_update(table, pages, 8)
    assert gate_up.shape == down.shape == (4, 8)
    assert gate_up.dtype == down.dtype == np.int32
    first = table.layouts[0].page_starts[1]
    np.testing.assert_array_equal(gate_up[0], [1, 1, 1, 1, 1, 1, 2, 2])  # layer 2 does not exist
    np.testing.assert_array_equal(gate_up[1, :6], [0, 0, 0, 0, 1, 1])
    np.testing.assert_array_equal(gate_up[2, :6], [first, first + 1, first + 2, first + 3, 0, 1])
    np.testing.assert_array_equal(gate_up[3, :4], table.frames[1][0][0, first : first + 4])
    np.testing.assert_array_equal(down[:, 0], [0, 2, 0, table.frames[0][1][2, 0]])
    assert (down[0, 1:] == 2).all()


def test_update_has_to_fit(world):
    table, _ = world
    with pytest.raises(ValueError, match="6 frames landed, a page-map update has room for 5"):
        page_map_update(table, [(1, 0, 0, 1), (1, 1, 0, 0)], 5)
