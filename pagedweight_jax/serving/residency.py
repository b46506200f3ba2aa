# SPDX-License-Identifier: Apache-2.0
"""Carries out the planner's decisions: what leaves the device, what comes back, and when bits change.

    lowering    lower q, publish it, give the pages up; their frames are reusable one boundary later
    raising     take frames, copy from the host beside the running steps; at a boundary scatter, then raise q
"""

from dataclasses import replace

import jax
import numpy as np

from pagedweight_jax.errors import UserError
from pagedweight_jax.paging import table as pt
from pagedweight_jax.paging.arena import RETIRED, WEIGHT, FrameAllocator
from pagedweight_jax.paging.mover import PageMover
from pagedweight_jax.paging.page_map import page_map_update
from pagedweight_jax.planning.queue import MovePlan
from pagedweight_jax.serving.events import Changes, Moves
from pagedweight_jax.serving.programs import Programs
from pagedweight_jax.serving.state import DecodeState


class Residency:
    """The page table of a running engine, and the moves between its states.

    Attributes:
      table: where every page is.
      retiring_pages: given up at the last boundary, int64[n, 4].
    """

    def __init__(
        self,
        table: pt.PageTable,
        allocator: FrameAllocator,
        mover: PageMover,
        programs: Programs,
        update_frames: int,
    ):
        self.table = table
        self.allocator = allocator
        self.mover = mover
        self.programs = programs
        self.update_frames = update_frames
        self.retiring_pages = np.empty((0, 4), np.int64)
        elements_U = np.array([layout.rows * layout.columns for layout in table.layouts], np.float64)
        self._share_U = elements_U / elements_U.sum()

    @property
    def mean_bits(self) -> float:
        """Committed bits per routed weight."""
        return float((self.table.committed_LEU.mean(axis=(0, 1)) * self._share_U).sum())

    @property
    def blocks_by_bits(self) -> dict[int, int]:
        """How many linear-blocks are committed at each bitwidth."""
        bits, counts = np.unique(self.table.committed_LEU, return_counts=True)
        return dict(zip(bits.tolist(), counts.tolist()))

    @property
    def releasing_frames(self) -> int:
        """Frames on their way to the free list: of retiring pages, and of transfers that will be dropped."""
        return self.allocator.count(RETIRED) + self.unwanted_frames

    @property
    def unwanted_frames(self) -> int:
        """Frames of pages in transfer that will be dropped when they arrive."""
        pages = pt.pages_in(self.table, pt.IN_TRANSFER)
        return len(pt.frame_slots(self.table.layouts, pages[~pt.is_desired(self.table, pages)]))

    def frames_at(self, bits_LEU: np.ndarray) -> int:
        """Frames that the weights take at these bits."""
        starts = [np.array(layout.page_starts) for layout in self.table.layouts]
        return sum(int(starts_P[bits_LEU[..., kind]].sum()) for kind, starts_P in enumerate(starts))

    def plan_of(self, changes: Changes) -> MovePlan | None:
        """Returns the plan that changes these blocks; None if there are none.

        Raises:
          UserError: a block is not committed at the bits from which it is to change.
        """
        desired_LEU = self.table.desired_LEU.copy()
        for *block, from_bits, to_bits in changes:
            committed_bits = int(self.table.committed_LEU[tuple(block)])
            if committed_bits != from_bits:
                raise UserError(f"the record changes block {block} at {from_bits} bits, it runs at {committed_bits}")
            desired_LEU[tuple(block)] = to_bits
        table = self.table
        return MovePlan.between(table.desired_LEU, desired_LEU, table.bytes_UQ, table.min_bits) if changes else None

    def retire(self) -> None:
        """Makes the frames of pages that were given up at the last boundary reusable."""
        if len(self.retiring_pages):
            self.table, frames = pt.retire(self.table, self.retiring_pages)
            self.allocator.give(frames)
            self.retiring_pages = np.empty((0, 4), np.int64)

    def land(self, state: DecodeState, wait: bool = False) -> tuple[DecodeState, Moves]:
        """Writes arrived pages into the arena and raises the blocks that they complete. Returns (state, what moved).

        A page that is no longer wanted is dropped and its frames are free at once. With ``wait``, all that is under way
        has arrived.
        """
        moves = Moves()
        for transfer in self.mover.drain() if wait else self.mover.poll():
            wanted = pt.is_desired(self.table, transfer.pages_N4)
            if not wanted.all():
                self.table, frames = pt.cancel(self.table, transfer.pages_N4[~wanted])
                self.allocator.give(frames)
                moves += Moves(pages_cancelled=int((~wanted).sum()))
                transfer = transfer.keep(wanted)
            pages = transfer.pages_N4
            if not len(pages):
                continue
            program = self.programs.land[int(pages[0, 2]), int(pages[0, 3])]
            arena_AW = program(state.arena_AW, list(transfer.staged_B), transfer.frames_BF)
            self.table = pt.land(self.table, pages)
            updates = page_map_update(self.table, pages, self.update_frames)
            state = state.replace(arena_AW=arena_AW, page_map=self.programs.publish(state.page_map, *updates))
            moves += Moves(pages_landed=len(pages), moved_bytes=len(pages) * transfer.staged_B[0].nbytes)
        before_LEU = self.table.committed_LEU
        blocks = pt.raisable_blocks(self.table)
        if len(blocks):
            self.table = pt.commit_raise(self.table, blocks)
            state = self._publish_bits(state)
        return state, moves + Moves(raised=_changes(before_LEU, self.table.committed_LEU))

    def lower(self, state: DecodeState, plan: MovePlan) -> tuple[DecodeState, Moves]:
        """Lowers the plan's blocks now and gives their pages up. Returns (state, what moved)."""
        before_LEU = self.table.committed_LEU
        self.table = pt.set_desired(self.table, plan.apply(self.table.desired_LEU))
        above = before_LEU[tuple(plan.blocks.T)] > plan.to_bits
        self.table = pt.commit_lower(self.table, plan.blocks[above], plan.to_bits[above])
        pages = pt.surplus_pages(self.table)
        self.table = pt.begin_offload(self.table, pages)
        self.allocator.retire(pt.page_frames(self.table, pages))
        self.retiring_pages = np.concatenate([self.retiring_pages, pages])
        moves = Moves(lowered=_changes(before_LEU, self.table.committed_LEU), pages_offloaded=len(pages))
        return self._publish_bits(state), moves

    def reload(self, plan: MovePlan | None) -> Moves:
        """Starts to bring back what the plan, or an earlier one, wants and free frames hold; returns what moved."""
        if plan is not None:
            self.table = pt.set_desired(self.table, plan.apply(self.table.desired_LEU))
        pages = pt.missing_pages(self.table)
        frames_n = [self.table.layouts[kind].page_frames(plane) for _, _, kind, plane in pages.tolist()]
        pages = pages[np.cumsum(frames_n) <= self.allocator.num_free]  # most significant planes of a block come first
        if len(pages):
            frames = self.allocator.take(len(pt.frame_slots(self.table.layouts, pages)), WEIGHT)
            self.table = pt.begin_reload(self.table, pages, frames)
            self.mover.start_reload(pages, frames)
        return Moves(reloads_started=len(pages))

    def _publish_bits(self, state: DecodeState) -> DecodeState:
        # astype copies: the committed bits are the table's, and a step donates what it is given.
        bits_LEU = jax.device_put(self.table.committed_LEU.astype(np.int32), state.arena_AW.sharding)
        return state.replace(page_map=replace(state.page_map, bits_LEU=bits_LEU))


def _changes(before_LEU: np.ndarray, after_LEU: np.ndarray) -> Changes:
    blocks = np.argwhere(before_LEU != after_LEU)
    return tuple((*map(int, b), int(before_LEU[tuple(b)]), int(after_LEU[tuple(b)])) for b in blocks)
