# SPDX-License-Identifier: Apache-2.0
"""The whole room at work: real words travel through a real arena under a KV load that comes and goes."""

from contextlib import closing
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.paging import table as pt
from pagedweight_jax.paging.arena import KV, WEIGHT, FrameAllocator, make_arena
from pagedweight_jax.paging.host_pool import fill_host_pool
from pagedweight_jax.paging.invariants import check_invariants
from pagedweight_jax.paging.mover import PageMover
from pagedweight_jax.paging.page_map import PageMap, page_map, page_map_update

KV_BLOCK_FRAMES = 20
NUM_FRAMES = 560  # all planes take 474, the lowest two 42


@partial(jax.jit, donate_argnums=0)
def write(arena_AW, frames, words):
    return arena_AW.at[frames].set(words, mode="drop")


@partial(jax.jit, donate_argnums=0)
def land_pages(arena_AW, staged_B, frames_BF):
    return arena_AW.at[frames_BF].set(jax.lax.optimization_barrier(jnp.stack(staged_B)), mode="drop")


@partial(jax.jit, donate_argnums=0)
def publish(frames_LEF, update):
    layer, expert, column, frame = update
    return frames_LEF.at[layer, expert, column].set(frame, mode="drop")


class Server:
    """The moves of a serving engine's boundary, without the engine."""

    def __init__(self, layouts, leaves, bits_LEU):
        device = jax.devices()[0]
        self.layouts = layouts
        self.pool = fill_host_pool(leaves, layouts, device)
        self.allocator = FrameAllocator(NUM_FRAMES)
        self.table = pt.initial_table(layouts, 2, 3, bits_LEU, self.allocator)
        self.mover = PageMover(
            self.pool, layouts, num_frames=NUM_FRAMES, device=device, batch_pages=3, max_staged_bytes=100_000
        )
        self.arena_AW = make_arena(NUM_FRAMES, 64, device)
        self.map = jax.tree.map(jnp.array, page_map(self.table))
        self.kv = {}  # frames (a tuple) -> words
        self.cancelled = self.landed = 0
        pages = pt.pages_in(self.table, pt.DEVICE)
        self.mover.start_reload(pages, pt.page_frames(self.table, pages))
        for transfer in self.mover.drain():
            self.arena_AW = land_pages(self.arena_AW, transfer.staged_B, transfer.frames_BF)

    def land(self, transfers):
        for transfer in transfers:
            wanted = pt.is_desired(self.table, transfer.pages_N4)
            self.table, frames = pt.cancel(self.table, transfer.pages_N4[~wanted])
            self.allocator.give(frames)
            transfer = transfer.keep(wanted)
            self.table = pt.land(self.table, transfer.pages_N4)
            self.arena_AW = land_pages(self.arena_AW, transfer.staged_B, transfer.frames_BF)
            gate_up, down = page_map_update(self.table, transfer.pages_N4, 64)
            self.map = PageMap(
                bits_LEU=self.map.bits_LEU,
                gate_up_frames_LEF=publish(self.map.gate_up_frames_LEF, gate_up),
                down_frames_LEF=publish(self.map.down_frames_LEF, down),
            )
            self.landed += len(transfer.pages_N4)
            self.cancelled += int((~wanted).sum())
        self.table = pt.commit_raise(self.table, pt.raisable_blocks(self.table))

    def retire(self):
        self.table, frames = pt.retire(self.table, pt.pages_in(self.table, pt.RETIRING))
        self.allocator.give(frames)

    def lower(self, rng):
        top_LEU = np.maximum(self.table.committed_LEU, self.table.desired_LEU)
        blocks = rng.permutation(np.argwhere(top_LEU > 2))[:4]
        self.table = pt.commit_lower(self.table, blocks, top_LEU[tuple(blocks.T)] - 1)
        pages = pt.surplus_pages(self.table)
        self.table = pt.begin_offload(self.table, pages)
        self.allocator.retire(pt.page_frames(self.table, pages))

    def reload(self, rng, room):
        desired_LEU = self.table.desired_LEU.copy()
        blocks = rng.permutation(np.argwhere(desired_LEU < 5))[:3]
        desired_LEU[tuple(blocks.T)] += 1
        self.table = pt.set_desired(self.table, desired_LEU)
        pages = pt.missing_pages(self.table)
        ends = np.cumsum([self.layouts[kind].page_frames(plane) for *_, kind, plane in pages.tolist()])
        pages = pages[: np.searchsorted(ends, self.allocator.num_free - room, side="right")]
        frames = self.allocator.take(len(pt.frame_slots(self.layouts, pages)), WEIGHT)
        self.table = pt.begin_reload(self.table, pages, frames)
        self.mover.start_reload(pages, frames)

    def take_kv(self, rng):
        frames = self.allocator.take(KV_BLOCK_FRAMES, KV)
        self.kv[tuple(frames.tolist())] = words = rng.integers(0, 2**32, (KV_BLOCK_FRAMES, 64), np.uint32)
        self.arena_AW = write(self.arena_AW, frames, words)

    def check(self):
        """Every committed plane, read as a kernel does it, and every KV block hold the words that were meant."""
        check_invariants(self.table, self.allocator, np.array([*self.kv], int))
        arena_AW = np.asarray(self.arena_AW)
        for kind, frames_LEF in enumerate(map(np.asarray, (self.map.gate_up_frames_LEF, self.map.down_frames_LEF))):
            starts = self.layouts[kind].page_starts
            for layer, expert in np.ndindex(2, 3):
                for plane in range(self.table.committed_LEU[layer, expert, kind]):
                    frames_F = frames_LEF[layer, expert, starts[plane] : starts[plane + 1]]
                    np.testing.assert_array_equal(arena_AW[frames_F], self.pool.get(layer, expert, kind, plane))
        for frames, words in self.kv.items():
            np.testing.assert_array_equal(arena_AW[list(frames)], words)


@pytest.mark.parametrize("seed", [0, 1])
def test_precision_and_cache_trade_one_arena(layouts, leaves, bits_LEU, seed):
    rng = np.random.default_rng(seed)
    server = Server(layouts, leaves, bits_LEU)
    with closing(server.mover):
        server.check()
        for boundary in range(60):
            load = boundary % 30 < 15
            server.land(server.mover.poll())
            server.retire()
            for _ in range(2):
                if load and server.allocator.num_free >= KV_BLOCK_FRAMES:
                    server.take_kv(rng)
                elif not load and server.kv:
                    server.allocator.give(np.array(server.kv.popitem()[0]))
            if load and server.allocator.num_free < 4 * KV_BLOCK_FRAMES:
                server.lower(rng)
            elif rng.random() < (0.3 if load else 0.9):
                server.reload(rng, room=KV_BLOCK_FRAMES)
            server.check()
        while (server.table.desired_LEU < 5).any() or len(pt.missing_pages(server.table)):
            server.reload(rng, room=0)
            server.land(server.mover.drain())
            server.retire()
            server.check()
        assert (server.table.committed_LEU == 5).all()
        assert server.landed > 40


def test_a_wrong_word_is_seen(layouts, leaves, bits_LEU):
    """Negative control of the check above: one frame swapped in the device's map, one KV word changed."""
    server = Server(layouts, leaves, bits_LEU)
    with closing(server.mover):
        server.take_kv(np.random.default_rng(0))
        server.check()
        arena_AW = server.arena_AW
        server.arena_AW = arena_AW.at[next(iter(server.kv))[3], 5].add(1)
        with pytest.raises(AssertionError, match="not equal"):
            server.check()
        server.arena_AW = arena_AW
        server.check()
        frames_LEF = server.map.down_frames_LEF
        server.map = PageMap(
            bits_LEU=server.map.bits_LEU,
            gate_up_frames_LEF=server.map.gate_up_frames_LEF,
            down_frames_LEF=frames_LEF.at[1, 2, 0].set(frames_LEF[1, 2, 1]),
        )
        with pytest.raises(AssertionError, match="not equal"):
            server.check()
