# SPDX-License-Identifier: Apache-2.0
"""The engine's record: one line per boundary, with the numbers behind every decision."""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pagedweight_jax.errors import UserError
from pagedweight_jax.paging.arena import FREE, KV, RETIRED, WEIGHT, FrameAllocator

KEPT_EVENTS = 10_000
"""Boundaries that an engine remembers, some 30 MB."""

Changes = tuple[tuple[int, int, int, int, int], ...]
"""(layer, expert, kind, from bits, to bits) of blocks whose committed bits changed."""


@dataclass(frozen=True, kw_only=True)
class Moves:
    """What moved at a boundary. Two add up.

    Attributes:
      lowered, raised: blocks committed at other bits.
      reloads_started, pages_landed, pages_cancelled, pages_offloaded: pages.
      moved_bytes: bytes of pages that landed.
    """

    lowered: Changes = ()
    raised: Changes = ()
    reloads_started: int = 0
    pages_landed: int = 0
    pages_cancelled: int = 0
    pages_offloaded: int = 0
    moved_bytes: int = 0

    def __add__(self, other: "Moves") -> "Moves":
        return Moves(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Who holds the memory once a boundary's calls are started.

    Attributes:
      kv_bytes, weight_bytes, releasing_bytes, free_bytes: the arena's share of each.
      device_bytes: what the engine's arrays, pages in transfer and programs' temporaries take; never above
        ``budget_bytes``.
    """

    kv_bytes: int
    weight_bytes: int
    releasing_bytes: int
    free_bytes: int
    device_bytes: int
    budget_bytes: int

    @classmethod
    def of(cls, allocator: FrameAllocator, frame_bytes: int, device_bytes: int, budget_bytes: int) -> "MemoryUse":
        """Returns the use of an arena whose frames are the allocator's."""
        return cls(
            kv_bytes=allocator.count(KV) * frame_bytes,
            weight_bytes=allocator.count(WEIGHT) * frame_bytes,
            releasing_bytes=allocator.count(RETIRED) * frame_bytes,
            free_bytes=allocator.count(FREE) * frame_bytes,
            device_bytes=device_bytes,
            budget_bytes=budget_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class BoundaryEvent(Moves, MemoryUse):
    """What one boundary saw and decided.

    Attributes:
      boundary: its number.
      time_seconds: since the engine was built.
      arrived, cancelled: request numbers since the boundary before; ``lower_to``: bits to which all blocks were lowered
        by hand meanwhile, None if they were not.
      rows: decode rows in use; ``waiting``: requests without one.
      chunks: prefill calls; ``decode_steps``: steps of the decode call, 0 if it was left out.
      admitted, preempted: request numbers, in order. ``finished``: those whose last token the host saw.
      tokens: generated tokens that the host saw.
      context_tokens: tokens of all running requests that the host knows.
      free_blocks, pending_blocks: as the planner saw them.
      target_bytes: D of eq. 7.
      mean_bits: committed bits, mean over blocks weighted by their number of weights.
      blocks_by_bits: linear-blocks committed at each bitwidth.
    """

    boundary: int
    time_seconds: float
    arrived: tuple[int, ...] = ()
    cancelled: tuple[int, ...] = ()
    lower_to: int | None = None
    rows: int
    waiting: int
    chunks: int
    decode_steps: int
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    finished: tuple[int, ...]
    tokens: int
    context_tokens: int
    free_blocks: int
    pending_blocks: int
    target_bytes: int
    mean_bits: float
    blocks_by_bits: dict[int, int]


class EventLog(Sequence[BoundaryEvent]):
    """The records of an engine's boundaries; only the newest ones are kept, so that a server's memory stays bounded.

    An index is the number of a boundary, whatever was let go: ``first = len(events)`` and later ``events[first:]`` are
    the events in between. Iteration, and a slice, yield what is kept.
    """

    def __init__(self, kept: int = KEPT_EVENTS):
        self._kept: deque[BoundaryEvent] = deque(maxlen=kept)
        self._count = 0

    def append(self, event: BoundaryEvent) -> None:
        self._kept.append(event)
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[BoundaryEvent]:
        return iter(self._kept)

    def __getitem__(self, index):
        gone = self._count - len(self._kept)
        numbers = range(self._count)[index]
        if isinstance(index, slice):
            return [self._kept[number - gone] for number in numbers if number >= gone]
        if numbers < gone:
            raise IndexError(f"boundary {numbers}: only those from {gone} on are kept")
        return self._kept[numbers - gone]


def read_events(path: Path) -> list[BoundaryEvent]:
    """Returns the events that ``write_events`` wrote.

    Raises:
      UserError: no such file, or one that holds something else.
    """

    def event(line: str) -> BoundaryEvent:
        fields = json.loads(line)
        fields["blocks_by_bits"] = {int(bits): count for bits, count in fields["blocks_by_bits"].items()}
        for name in ("arrived", "cancelled", "admitted", "preempted", "finished"):
            fields[name] = tuple(fields.get(name, ()))
        for name in ("lowered", "raised"):
            fields[name] = tuple(tuple(change) for change in fields[name])
        return BoundaryEvent(**fields)

    try:
        return [event(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not an event log ({type(error).__name__})") from error


def write_events(path: Path, events: Iterable[BoundaryEvent]) -> None:
    """Writes one JSON object per line."""
    with Path(path).open("w", encoding="utf-8") as file:
        for event in events:
            file.write(json.dumps(asdict(event)) + "\n")
