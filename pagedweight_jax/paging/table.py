# SPDX-License-Identifier: Apache-2.0
"""The page table: which bitwidth each linear-block runs at, and where each of its weight pages is.

A page is on the host, on its way to the device, on the device, or on its way out::

                 begin_reload               land
        HOST  ─────────────────▶ IN_TRANSFER ────▶ DEVICE
         ▲ ▲                          │               │
         │ └───────── cancel ─────────┘               │ begin_offload
         └──────────────────── retire ── RETIRING ◀───┘

and a block's committed bitwidth q moves only at a safe boundary: ``commit_lower`` before its pages leave (lower q, then
move pages), ``commit_raise`` after they have landed (move pages, then raise q). Hence planes 0 .. q-1 of every block
are on the device at all times, which is all that a kernel relies on.

Every transition is a pure function that returns a new table and raises ValueError, naming the block and its state, when
it is illegal. Pages are rows (layer, expert, kind, plane) of an integer array, blocks rows (layer, expert, kind).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from pagedweight_jax.config import KINDS
from pagedweight_jax.paging.arena import WEIGHT, FrameAllocator
from pallas_kernels.bitplane import BlockLayout

HOST, IN_TRANSFER, DEVICE, RETIRING = range(4)
"""States of a page. All but HOST have frames; only the words of DEVICE may be read."""

STATE_NAMES = ("HOST", "IN_TRANSFER", "DEVICE", "RETIRING")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PageTable:
    """Where every weight page is. A host pytree of numpy arrays; L counts sparse layers, P is ``max_bits``.

    Attributes:
      committed_LEU: uint8, q: the bitwidth that kernels run each block at.
      desired_LEU: uint8, d: the bitwidth that the planner wants.
      state_LEUP: uint8, HOST, IN_TRANSFER, DEVICE or RETIRING.
      host_copy_LEUP: bool, whether the host holds the page; always true when it mirrors all pages.
      frames: per layer and kind int32[E, block_frames], a block's pages one after another as in
        ``BlockLayout.page_starts``; -1 where a page has no frames. Transitions copy only the arrays that they change.
      layouts: of gate_up and down blocks, with the same bitwidths and frame size. Static.
    """

    committed_LEU: np.ndarray
    desired_LEU: np.ndarray
    state_LEUP: np.ndarray
    host_copy_LEUP: np.ndarray
    frames: tuple[tuple[np.ndarray, np.ndarray], ...]
    layouts: tuple[BlockLayout, BlockLayout] = field(metadata={"static": True})

    @property
    def min_bits(self) -> int:
        return self.layouts[0].min_bits

    @property
    def max_bits(self) -> int:
        return self.layouts[0].max_bits

    @property
    def bytes_UQ(self) -> np.ndarray:
        """M_u^b, int64: device bytes of a block of each kind at min_bits .. max_bits bits."""
        return bytes_table(self.layouts)


def bytes_table(layouts: tuple[BlockLayout, BlockLayout]) -> np.ndarray:
    """Returns M_u^b, int64[U, Q]: device bytes of a block of each kind at min_bits .. max_bits bits."""
    return np.array(
        [[layout.resident_bytes(b) for b in range(layout.min_bits, layout.max_bits + 1)] for layout in layouts]
    )


def initial_table(
    layouts: tuple[BlockLayout, BlockLayout],
    num_layers: int,
    num_experts: int,
    bits_LEU: np.ndarray,
    allocator: FrameAllocator,
) -> PageTable:
    """Returns the table at start-up: every block committed at its initial bits, the host mirroring all pages.

    Takes the frames of planes 0 .. bits-1. Their pages are DEVICE at once: the caller writes the words of
    ``pages_in(table, DEVICE)`` into the arena before the first step.

    Args:
      layouts: of gate_up and down blocks.
      num_layers, num_experts: L sparse layers and E routed experts.
      bits_LEU: integers in min_bits .. max_bits.
      allocator: gives up the frames.
    """
    shape = (num_layers, num_experts, len(KINDS))
    gate_up, down = layouts
    if (gate_up.min_bits, gate_up.max_bits, gate_up.frame_words) != (down.min_bits, down.max_bits, down.frame_words):
        raise ValueError(f"gate_up and down need the same bitwidths and frames, got {gate_up} and {down}")
    _check_bits("initial_table", bits_LEU, shape, layouts)
    resident_LEUP = np.arange(gate_up.max_bits) < bits_LEU[..., None]
    frames = []
    for resident_EUP in resident_LEUP:
        of_kinds = []
        for kind, layout in enumerate(layouts):
            held_EF = np.repeat(resident_EUP[:, kind], np.diff(layout.page_starts), axis=-1)
            frames_EF = np.full(held_EF.shape, -1, np.int32)
            frames_EF[held_EF] = allocator.take(int(held_EF.sum()), WEIGHT)
            of_kinds.append(frames_EF)
        frames.append(tuple(of_kinds))
    return PageTable(
        committed_LEU=bits_LEU.astype(np.uint8),
        desired_LEU=bits_LEU.astype(np.uint8),
        state_LEUP=np.where(resident_LEUP, DEVICE, HOST).astype(np.uint8),
        host_copy_LEUP=np.ones(resident_LEUP.shape, bool),
        frames=tuple(frames),
        layouts=layouts,
    )


# Questions


def pages_in(table: PageTable, state: int) -> np.ndarray:
    """Returns all pages in ``state``, int64[n, 4]."""
    return np.argwhere(table.state_LEUP == state)


def surplus_pages(table: PageTable) -> np.ndarray:
    """Returns the pages to offload, int64[n, 4]: on the device, yet neither committed nor desired."""
    kept_LEU1 = np.maximum(table.committed_LEU, table.desired_LEU)[..., None]
    return np.argwhere((table.state_LEUP == DEVICE) & (np.arange(table.max_bits) >= kept_LEU1))


def missing_pages(table: PageTable) -> np.ndarray:
    """Returns the pages to reload, int64[n, 4]: on the host, yet desired."""
    return np.argwhere((table.state_LEUP == HOST) & (np.arange(table.max_bits) < table.desired_LEU[..., None]))


def raisable_blocks(table: PageTable) -> np.ndarray:
    """Returns the blocks that ``commit_raise`` may raise now, int64[n, 3]."""
    return np.argwhere(_reachable_bits(table) > table.committed_LEU)


def is_desired(table: PageTable, pages: np.ndarray) -> np.ndarray:
    """Returns bool[n]: whether each page is still wanted on the device; if not, ``cancel`` it when it lands."""
    layer, expert, kind, plane = np.asarray(pages).reshape(-1, 4).T
    return plane < table.desired_LEU[layer, expert, kind]


def page_frames(table: PageTable, pages: np.ndarray) -> np.ndarray:
    """Returns the frames of ``pages``, int32, page after page; -1 for the slots of a page that has none."""
    slots_S4 = frame_slots(table.layouts, pages)
    frames_S = np.empty(len(slots_S4), np.int32)
    for layer, kind, rows in _by_layer_and_kind(slots_S4):
        frames_S[rows] = table.frames[layer][kind][slots_S4[rows, 1], slots_S4[rows, 3]]
    return frames_S


def frame_slots(layouts: tuple[BlockLayout, BlockLayout], pages: np.ndarray) -> np.ndarray:
    """Returns where ``pages`` list their frames, int64[S, 4] rows (layer, expert, kind, column), page after page."""
    pages = np.asarray(pages, np.int64).reshape(-1, 4)
    starts_UP = np.array([layout.page_starts for layout in layouts])
    kind_n, plane_n = pages[:, 2], pages[:, 3]
    first_n = starts_UP[kind_n, plane_n]
    count_n = starts_UP[kind_n, plane_n + 1] - first_n
    slots_S4 = np.repeat(pages, count_n, axis=0)
    passed_n = np.cumsum(count_n) - count_n  # slots before each page
    slots_S4[:, 3] = np.arange(len(slots_S4)) - np.repeat(passed_n - first_n, count_n)
    return slots_S4


# Transitions of bitwidths


def set_desired(table: PageTable, desired_LEU: np.ndarray) -> PageTable:
    """Returns the table with the bitwidths that the planner wants from now on; nothing moves yet."""
    _check_bits("set_desired", desired_LEU, table.desired_LEU.shape, table.layouts)
    return replace(table, desired_LEU=desired_LEU.astype(np.uint8))


def commit_lower(table: PageTable, blocks: np.ndarray, bits: np.ndarray) -> PageTable:
    """Returns the table with ``blocks`` committed, and desired, at no more than ``bits``. Their pages do not move yet.

    A block whose raise is still under way may have its desired bits alone lowered by this.

    Args:
      table: before.
      blocks: int[n, 3].
      bits: int[n], at least min_bits and below the committed or the desired bits.
    """
    blocks, at = _index(table, "commit_lower", blocks, width=3)
    bits = np.broadcast_to(np.asarray(bits), len(blocks))
    committed_LEU, desired_LEU = table.committed_LEU.copy(), table.desired_LEU.copy()
    illegal = (bits < table.min_bits) | (bits >= np.maximum(committed_LEU[at], desired_LEU[at]))
    _refuse(table, "commit_lower", blocks, illegal, f"cannot be lowered to {bits[illegal][:1]} bits")
    committed_LEU[at] = np.minimum(committed_LEU[at], bits)
    desired_LEU[at] = np.minimum(desired_LEU[at], bits)
    return replace(table, committed_LEU=committed_LEU, desired_LEU=desired_LEU)


def commit_raise(table: PageTable, blocks: np.ndarray) -> PageTable:
    """Returns the table with ``blocks`` committed at as many of their desired bits as have all planes on the device.

    Args:
      table: before.
      blocks: int[n, 3], each with at least one plane to gain; ``raisable_blocks`` lists them.
    """
    blocks, at = _index(table, "commit_raise", blocks, width=3)
    reachable_LEU = _reachable_bits(table)
    illegal = reachable_LEU[at] <= table.committed_LEU[at]
    _refuse(table, "commit_raise", blocks, illegal, "cannot be raised")
    committed_LEU = table.committed_LEU.copy()
    committed_LEU[at] = reachable_LEU[at]
    return replace(table, committed_LEU=committed_LEU)


# Transitions of pages


def begin_offload(table: PageTable, pages: np.ndarray) -> PageTable:
    """Returns the table with ``pages`` RETIRING: no step that starts from here on reads them.

    They keep their frames until ``retire`` at the next boundary, since a running step may read them. The caller tells
    the allocator: ``allocator.retire(page_frames(table, pages))``.
    """
    pages, at = _index(table, "begin_offload", pages)
    illegal = (table.state_LEUP[at] != DEVICE) | (pages[:, 3] < table.committed_LEU[at[:3]])
    _refuse(table, "begin_offload", pages, illegal, "must be DEVICE and above the committed bits")
    return _move(table, at, RETIRING)


def retire(table: PageTable, pages: np.ndarray) -> tuple[PageTable, np.ndarray]:
    """Returns (the table with RETIRING ``pages`` on the HOST, the frames that they gave up, int32)."""
    pages, at = _index(table, "retire", pages)
    illegal = (table.state_LEUP[at] != RETIRING) | ~table.host_copy_LEUP[at]
    _refuse(table, "retire", pages, illegal, "must be RETIRING and have a host copy")
    return _move_to_host(table, pages, at)


def begin_reload(table: PageTable, pages: np.ndarray, frames: np.ndarray) -> PageTable:
    """Returns the table with HOST ``pages`` IN_TRANSFER, to land in ``frames``.

    Args:
      table: before.
      pages: int[n, 4], desired ones.
      frames: int32, as many as ``BlockLayout.page_frames`` says, page after page, taken from the allocator.
    """
    pages, at = _index(table, "begin_reload", pages)
    illegal = (table.state_LEUP[at] != HOST) | ~table.host_copy_LEUP[at] | ~is_desired(table, pages)
    _refuse(table, "begin_reload", pages, illegal, "must be HOST, desired and have a host copy")
    slots_S4 = frame_slots(table.layouts, pages)
    if np.shape(frames) != (len(slots_S4),) or (len(slots_S4) and np.min(frames) < 0):
        raise ValueError(f"begin_reload: {len(pages)} pages take {len(slots_S4)} frames, got {np.shape(frames)}")
    return _with_frames(_move(table, at, IN_TRANSFER), slots_S4, frames)


def land(table: PageTable, pages: np.ndarray) -> PageTable:
    """Returns the table with IN_TRANSFER ``pages`` on the DEVICE: their words are in their frames."""
    pages, at = _index(table, "land", pages)
    _refuse(table, "land", pages, table.state_LEUP[at] != IN_TRANSFER, "must be IN_TRANSFER")
    return _move(table, at, DEVICE)


def cancel(table: PageTable, pages: np.ndarray) -> tuple[PageTable, np.ndarray]:
    """Returns (the table with IN_TRANSFER ``pages`` back on the HOST, the frames that they gave up, int32).

    The frames were never read or written, so they are reusable at once. Call it only when the transfer is finished
    and its words are thrown away: a later landing would write into frames that belong to someone else.
    """
    pages, at = _index(table, "cancel", pages)
    _refuse(table, "cancel", pages, table.state_LEUP[at] != IN_TRANSFER, "must be IN_TRANSFER")
    return _move_to_host(table, pages, at)


# Helpers


def _reachable_bits(table: PageTable) -> np.ndarray:
    """Returns int64[L, E, U]: the desired bits, but no more than the leading planes that are on the device."""
    leading_LEU = np.logical_and.accumulate(table.state_LEUP == DEVICE, axis=-1).sum(axis=-1)
    return np.minimum(leading_LEU, table.desired_LEU)


def _by_layer_and_kind(slots_S4: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields (layer, kind, rows of ``slots_S4``) for each frame array that the slots touch."""
    key_S = slots_S4[:, 0] * len(KINDS) + slots_S4[:, 2]
    order_S = np.argsort(key_S, kind="stable")
    for rows in np.split(order_S, np.flatnonzero(np.diff(key_S[order_S])) + 1):
        if rows.size:
            yield int(slots_S4[rows[0], 0]), int(slots_S4[rows[0], 2]), rows


def _move(table: PageTable, at: tuple[np.ndarray, ...], state: int) -> PageTable:
    state_LEUP = table.state_LEUP.copy()
    state_LEUP[at] = state
    return replace(table, state_LEUP=state_LEUP)


def _move_to_host(table: PageTable, pages: np.ndarray, at: tuple[np.ndarray, ...]) -> tuple[PageTable, np.ndarray]:
    freed_S = page_frames(table, pages)
    return _with_frames(_move(table, at, HOST), frame_slots(table.layouts, pages), np.full_like(freed_S, -1)), freed_S


def _with_frames(table: PageTable, slots_S4: np.ndarray, frames_S: np.ndarray) -> PageTable:
    changed = [list(of_kinds) for of_kinds in table.frames]
    for layer, kind, rows in _by_layer_and_kind(slots_S4):
        changed[layer][kind] = changed[layer][kind].copy()
        changed[layer][kind][slots_S4[rows, 1], slots_S4[rows, 3]] = np.asarray(frames_S)[rows]
    return replace(table, frames=tuple(tuple(of_kinds) for of_kinds in changed))


def _check_bits(verb: str, bits_LEU: np.ndarray, shape: tuple[int, ...], layouts: tuple[BlockLayout, BlockLayout]):
    low, high = layouts[0].min_bits, layouts[0].max_bits
    if bits_LEU.shape != shape:
        raise ValueError(f"{verb}: bits must have shape {shape}, got {bits_LEU.shape}")
    for block in np.argwhere((bits_LEU < low) | (bits_LEU > high)):
        raise ValueError(f"{verb}: {_name(block)} cannot run at {bits_LEU[tuple(block)]} bits ({low}..{high})")


def _index(table: PageTable, verb: str, rows: np.ndarray, width: int = 4) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Returns (rows as int64[n, width], their index tuple) of pages or blocks that exist and are named once each."""
    rows = np.asarray(rows, np.int64).reshape(-1, width)
    shape = table.state_LEUP.shape[:width]
    outside = ((rows < 0) | (rows >= shape)).any(axis=1)
    if outside.any():
        raise ValueError(f"{verb}: {_name(rows[outside.argmax()])} does not exist, the table is {shape}")
    unique, counts = np.unique(np.ravel_multi_index(tuple(rows.T), shape), return_counts=True)
    if unique.size != len(rows):
        raise ValueError(f"{verb}: {_name(np.unravel_index(unique[counts.argmax()], shape))} is named twice")
    return rows, tuple(rows.T)


def _refuse(table: PageTable, verb: str, rows: np.ndarray, illegal: np.ndarray, why: str) -> None:
    if not illegal.any():
        return
    i = int(illegal.argmax())
    block = tuple(rows[i, :3])
    states = [STATE_NAMES[state] for state in table.state_LEUP[block]]
    raise ValueError(
        f"{verb}: {_name(rows[i])} {why}; the block is at {table.committed_LEU[block]} bits, "
        f"{table.desired_LEU[block]} desired, its planes are {' '.join(states)}"
    )


def _name(row) -> str:
    layer, expert, kind = (int(x) for x in row[:3])
    block = f"layer {layer} expert {expert} {KINDS[kind] if 0 <= kind < len(KINDS) else kind}"
    return block if len(row) == 3 else f"{block} plane {int(row[3])}"
