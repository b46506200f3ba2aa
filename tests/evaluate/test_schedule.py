# SPDX-License-Identifier: Apache-2.0
"""A schedule says which bits every block had at every boundary, and comes back from disk as it was."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from pagedweight_jax.errors import UserError
from pagedweight_jax.evaluate.schedule import Boundary, Schedule, boundary_of, read_schedule, write_schedule

BEGIN_LEU = np.full((2, 3, 2), 6, np.uint8)


@dataclass(frozen=True)
class Event:
    """What a schedule reads of a boundary's record."""

    chunks: int
    mean_bits: float
    lowered: tuple = ()
    raised: tuple = ()
    kv_bytes: int = 1
    weight_bytes: int = 2
    device_bytes: int = 30


EVENTS = (
    Event(chunks=4, mean_bits=6.0),
    Event(chunks=4, mean_bits=5.0, lowered=((0, 1, 0, 6, 4), (1, 2, 1, 6, 3))),
    Event(chunks=0, mean_bits=3.0),
    Event(chunks=2, mean_bits=5.5, raised=((1, 2, 1, 3, 5),), lowered=((0, 1, 0, 4, 3),)),
)


@pytest.fixture
def schedule():
    return Schedule(budget_bytes=40, initial_LEU=BEGIN_LEU, boundaries=tuple(map(boundary_of, EVENTS)))


def test_bits_follow_the_changes(schedule):
    bits_BLEU = schedule.bits()
    assert bits_BLEU.shape == (4, 2, 3, 2)
    np.testing.assert_array_equal(bits_BLEU[0], BEGIN_LEU)
    np.testing.assert_array_equal(bits_BLEU[:, 0, 1, 0], [6, 4, 4, 3])
    np.testing.assert_array_equal(bits_BLEU[:, 1, 2, 1], [6, 3, 3, 5])
    assert (bits_BLEU != 6).sum() == 6


def test_means_count_scored_tokens(schedule):
    assert schedule.mean_bits == pytest.approx((4 * 6 + 4 * 5 + 2 * 5.5) / 10)
    assert schedule.lowest_bits == 5.0  # nothing was scored at 3


def test_a_schedule_comes_back_from_disk(schedule, tmp_path):
    write_schedule(tmp_path / "schedule.json", schedule, {"perplexity": 12.5, "kl": None})
    read, score = read_schedule(tmp_path / "schedule.json")
    assert score == {"perplexity": 12.5, "kl": None}
    assert read.boundaries == schedule.boundaries
    assert read.budget_bytes == 40
    np.testing.assert_array_equal(read.bits(), schedule.bits())
    assert len((tmp_path / "schedule.json").read_text().splitlines()) == len(EVENTS) + 5


def test_a_change_from_bits_that_a_block_does_not_have_is_seen(schedule):
    wrong = Boundary(
        chunks=1, mean_bits=5.0, kv_bytes=1, weight_bytes=1, device_bytes=1, changes=((0, 1, 0, 6, 5),)
    )
    with pytest.raises(ValueError, match=r"boundary 4: block .* has 3 bits"):
        replace(schedule, boundaries=(*schedule.boundaries, wrong)).bits()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"budget_bytes": 1, "initial_LEU": [], "boundaries": []}',
        '{"score": {}, "budget_bytes": 1, "initial_LEU": [], "boundaries": [{}]}',
    ],
)
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match="not a schedule"):
        read_schedule(tmp_path / "x.json")
    with pytest.raises(UserError, match="not a schedule"):
        read_schedule(tmp_path / "absent.json")
