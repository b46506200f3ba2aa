# SPDX-License-Identifier: Apache-2.0
"""The invariants of memory, checked in one place."""

import numpy as np

from pagedweight_jax.config import KINDS
from pagedweight_jax.paging.arena import FREE, KV, OWNER_NAMES, RETIRED, WEIGHT, FrameAllocator
from pagedweight_jax.paging.table import DEVICE, HOST, IN_TRANSFER, RETIRING, PageTable


def check_invariants(table: PageTable, allocator: FrameAllocator, kv_frames: np.ndarray = ()) -> None:
    """Returns nothing; raises AssertionError, naming the place, unless all of these hold:

    1. min_bits <= q <= max_bits for the committed bits of every block, and so for the desired ones;
    2. planes 0 .. q-1 of every block are on the device;
    3. a page has its frames exactly when it is not HOST;
    4. a page whose words are not on the device has a host copy: none was ever dropped;
    5. every frame has exactly one owner (the free list, a weight page, a KV block or a page being retired), and the
       allocator says the same.

    Args:
      table: the page table.
      allocator: of the arena that the table's frames lie in.
      kv_frames: integers, the frames of all KV blocks: those in use, and those retired but not yet given back.
    """
    _check_bits(table)
    _check_pages(table)
    _check_owners(table, allocator, np.asarray(kv_frames, np.int64).reshape(-1))


def _fail_at(wrong: np.ndarray, message: str) -> None:
    if wrong.any():
        layer, expert, kind, *plane = (int(i) for i in np.argwhere(wrong)[0])
        at = f"layer {layer} expert {expert} {KINDS[kind]}" + "".join(f" plane {p}" for p in plane)
        raise AssertionError(f"{at}: {message}")


def _check_bits(table: PageTable) -> None:
    for name, bits_LEU in (("committed", table.committed_LEU), ("desired", table.desired_LEU)):
        outside = (bits_LEU < table.min_bits) | (bits_LEU > table.max_bits)
        _fail_at(outside, f"{name} bits outside {table.min_bits}..{table.max_bits}")


def _check_pages(table: PageTable) -> None:
    planes_P = np.arange(table.max_bits)
    needed_LEUP = planes_P < table.committed_LEU[..., None]
    _fail_at(needed_LEUP & (table.state_LEUP != DEVICE), "committed, but not on the device")
    away_LEUP = np.isin(table.state_LEUP, (HOST, IN_TRANSFER))
    _fail_at(away_LEUP & ~table.host_copy_LEUP, "not on the device and without a host copy")
    for layer, of_kinds in enumerate(table.frames):
        for kind, (frames_EF, layout) in enumerate(zip(of_kinds, table.layouts)):
            has_frames_EF = np.repeat(table.state_LEUP[layer, :, kind] != HOST, np.diff(layout.page_starts), axis=1)
            wrong = np.argwhere((frames_EF >= 0) != has_frames_EF)
            if len(wrong):
                expert, column = wrong[0]
                plane = np.searchsorted(layout.page_starts, column, side="right") - 1
                held = "has" if frames_EF[expert, column] >= 0 else "lacks"
                at = f"layer {layer} expert {expert} {KINDS[kind]} plane {plane}"
                raise AssertionError(f"{at}: the page {held} frame {column - layout.page_starts[plane]} of its list")


def _table_frames(table: PageTable, states: tuple[int, ...]) -> np.ndarray:
    """Returns the frames of all pages in one of ``states``."""
    frames = [np.empty(0, np.int32)]
    for layer, of_kinds in enumerate(table.frames):
        for kind, (frames_EF, layout) in enumerate(zip(of_kinds, table.layouts)):
            held_EP = np.isin(table.state_LEUP[layer, :, kind], states)
            frames.append(frames_EF[np.repeat(held_EP, np.diff(layout.page_starts), axis=1)])
    return np.concatenate(frames)


def _check_owners(table: PageTable, allocator: FrameAllocator, kv_frames: np.ndarray) -> None:
    claims = (
        ((FREE,), allocator.free_frames),
        ((WEIGHT,), _table_frames(table, (IN_TRANSFER, DEVICE))),
        ((KV, RETIRED), kv_frames),
        ((RETIRED,), _table_frames(table, (RETIRING,))),
    )
    frames = np.concatenate([claimed for _, claimed in claims])
    if frames.size and not 0 <= frames.min() <= frames.max() < allocator.num_frames:
        raise AssertionError(f"frames {frames.min()}..{frames.max()} listed, the arena has {allocator.num_frames}")
    owners_A = np.bincount(frames, minlength=allocator.num_frames)
    if (owners_A != 1).any():
        frame = int((owners_A != 1).argmax())
        names = [OWNER_NAMES[owner[0]] for owner, claimed in claims for _ in range(np.sum(claimed == frame))]
        raise AssertionError(f"frame {frame} has {len(names)} owners: {', '.join(names) or 'nobody'}")
    for owner, claimed in claims:
        wrong = ~np.isin(allocator.owners(claimed), owner)
        if wrong.any():
            frame = claimed[wrong.argmax()]
            says = OWNER_NAMES[int(allocator.owners(frame))]
            raise AssertionError(f"frame {frame} belongs to {OWNER_NAMES[owner[0]]}, the allocator says {says}")
    for owner, name in enumerate(OWNER_NAMES):
        counted = np.count_nonzero(allocator.owners(np.arange(allocator.num_frames)) == owner)
        if allocator.count(owner) != counted:
            raise AssertionError(f"the allocator counts {allocator.count(owner)} frames of {name}, there are {counted}")
