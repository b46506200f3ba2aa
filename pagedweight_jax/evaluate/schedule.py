# SPDX-License-Identifier: Apache-2.0
"""The schedule of a score under pressure: every linear-block's bits at every boundary, and the memory they left.

On disk it is JSON: the score, the bits at the start, and for each boundary only the blocks that changed.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pagedweight_jax.errors import UserError

Change = tuple[int, int, int, int, int]
"""(layer, expert, kind, from bits, to bits)."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """One boundary; the calls that follow it run with its bits.

    Attributes:
      chunks: prefill calls.
      mean_bits: over blocks, weighted by their number of weights.
      kv_bytes, weight_bytes: the arena's share of each.
      device_bytes: all that the device holds.
      changes: blocks lowered and raised.
    """

    chunks: int
    mean_bits: float
    kv_bytes: int
    weight_bytes: int
    device_bytes: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The bits at the start, uint8 [L, E, U], and what each boundary made of them; ``budget_bytes`` held throughout."""

    budget_bytes: int
    initial_LEU: np.ndarray
    boundaries: tuple[Boundary, ...]

    @property
    def mean_bits(self) -> float:
        """Mean over the scored tokens."""
        return sum(b.chunks * b.mean_bits for b in self.boundaries) / max(1, sum(b.chunks for b in self.boundaries))

    @property
    def lowest_bits(self) -> float:
        """Lowest mean bits at which tokens were scored."""
        return min(b.mean_bits for b in self.boundaries if b.chunks)

    def bits(self) -> np.ndarray:
        """Returns the bits of every block after each boundary, uint8 [boundaries, L, E, U].

        Raises:
          ValueError: a change starts from bits that the block does not have.
        """
        bits_LEU, seen = self.initial_LEU.copy(), []
        for number, boundary in enumerate(self.boundaries):
            for *block, before, after in boundary.changes:
                held = bits_LEU[tuple(block)]
                if held != before:
                    raise ValueError(f"boundary {number}: block {block} has {held} bits, the change begins at {before}")
                bits_LEU[tuple(block)] = after
            seen.append(bits_LEU.copy())
        return np.array(seen, np.uint8).reshape(-1, *self.initial_LEU.shape)


def boundary_of(event) -> Boundary:
    """Returns what a schedule keeps of an engine's event (``serving.events.BoundaryEvent``)."""
    return Boundary(
        chunks=event.chunks,
        mean_bits=event.mean_bits,
        kv_bytes=event.kv_bytes,
        weight_bytes=event.weight_bytes,
        device_bytes=event.device_bytes,
        changes=(*event.raised, *event.lowered),
    )


def check_schedule(path: Path) -> None:
    """Raises UserError unless a schedule can be written to ``path``; writes nothing."""
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{path}: {folder} is not a folder that can be written to")
    if Path(path).is_dir():
        raise UserError(f"{path}: a folder, a schedule is a file")


def write_schedule(path: Path, schedule: Schedule, score: dict) -> None:
    """Writes the schedule as JSON, a boundary a line, with the figures ``score`` that were measured under it."""
    rows = ",\n".join(json.dumps(asdict(boundary)) for boundary in schedule.boundaries)
    initial = json.dumps(schedule.initial_LEU.tolist())
    Path(path).write_text(
        f'{{"score": {json.dumps(score)},\n"budget_bytes": {schedule.budget_bytes},\n"initial_LEU": {initial},\n'
        f'"boundaries": [\n{rows}\n]}}\n',
        encoding="utf-8",
    )


def read_schedule(path: Path) -> tuple[Schedule, dict]:
    """Returns the schedule and the score that ``write_schedule`` wrote, to study which bits led to which score.

    Raises:
      UserError: no such file, or one that holds something else.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        boundaries = tuple(
            Boundary(**(row | {"changes": tuple(tuple(change) for change in row["changes"])}))
            for row in fields["boundaries"]
        )
        initial_LEU = np.array(fields["initial_LEU"], np.uint8)
        schedule = Schedule(budget_bytes=fields["budget_bytes"], initial_LEU=initial_LEU, boundaries=boundaries)
        return schedule, fields["score"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a schedule ({type(error).__name__})") from error
