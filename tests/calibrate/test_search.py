# SPDX-License-Identifier: Apache-2.0
"""The policy search finds what there is, never loses to the one it starts with, and goes on where it was stopped."""

import json
from dataclasses import replace
from itertools import product

import pytest

from pagedweight_jax.calibrate import search as policy_search
from pagedweight_jax.calibrate.search import NEUTRAL, bucket_moves, default_moves, relative, search
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.policy import Policy

MOVES = default_moves(min_bits=3)


class Landscape:
    """Costs at two targets: best with a power of 0.5 in five buckets and alpha 0.5; counts its calls."""

    def __init__(self, stop_after=None):
        self.calls = 0
        self.stop_after = stop_after

    def __call__(self, policy: Policy) -> tuple[float, float]:
        if self.calls == self.stop_after:
            raise KeyboardInterrupt
        self.calls += 1
        spread = policy.multipliers[-1] / policy.multipliers[0]
        cost = 1 + 0.1 * abs(spread - 4.0) / 3 + 0.2 * abs(policy.alpha - 0.5) + 0.05 * (policy.stages != (0,))
        return 0.02 * cost, 0.3 * cost


def test_every_coordinate_offers_what_changes_nothing():
    shaped = list(bucket_moves(NEUTRAL))[-1]
    assert len(shaped.edges) == 32
    assert next(iter(bucket_moves(shaped))) == NEUTRAL
    for policy, moves in product((NEUTRAL, shaped), MOVES):
        offered = list(moves(policy))
        assert len(set(offered)) == len(offered) >= 2
        assert policy in offered


def test_the_search_finds_the_valley(tmp_path):
    score = Landscape()
    result = search(score, MOVES, tmp_path / "journal.jsonl", subject="valley")
    assert result.policy == result.best.policy
    assert (result.policy.alpha, result.policy.stages) == (0.5, (0,))
    assert result.policy.multipliers[-1] / result.policy.multipliers[0] == pytest.approx(4.0, rel=1e-3)
    assert result.first.policy == NEUTRAL
    assert relative(result.best.scores, result.first.scores) == pytest.approx(1 / 1.2, rel=1e-3)
    assert len(result.trials) == score.calls  # nothing is scored twice
    evidence = json.loads(json.dumps(result.evidence()))
    assert evidence["relative"] < 1
    assert evidence["relative_on_other_text"] is None


def test_targets_count_alike_whatever_their_size():
    assert relative((0.01, 2.0), (0.02, 1.0)) == pytest.approx(1.25)


def test_the_first_stays_where_nothing_is_better(tmp_path):
    flat = search(lambda policy: (0.5,), MOVES, tmp_path / "flat.jsonl", subject="flat")
    assert flat.policy == NEUTRAL
    hill = search(lambda p: (1.0 + (p != NEUTRAL),), MOVES, tmp_path / "hill.jsonl", subject="hill")
    assert hill.policy == NEUTRAL
    noise = search(
        lambda p: (1 - 0.9 * policy_search.LEAST_GAIN * (p != NEUTRAL),), MOVES, tmp_path / "n", subject="n"
    )
    assert noise.policy == NEUTRAL


@pytest.mark.parametrize("start", [NEUTRAL, Policy(half_life_tokens=500.0, prior_tokens=300.0, alpha=0.7)])
@pytest.mark.parametrize(("name", "best"), [("alpha", 1.5), ("prior_tokens", 64.0), ("depth_caps", (1,))])
def test_what_the_score_ignores_stays_as_it_was(tmp_path, start, name, best):
    def score(policy):
        return (1.0 + (getattr(policy, name) != best),)

    result = search(score, MOVES, tmp_path / "journal", subject="s", start=start)
    assert result.policy == replace(start, **{name: best})


def test_what_other_text_does_not_confirm_is_not_returned(tmp_path):
    confirm = {NEUTRAL: (1.0, 1.0)}
    kept = search(
        Landscape(), MOVES, tmp_path / "a", subject="s", confirm=lambda policy: confirm.get(policy, (0.9, 1.0))
    )
    assert kept.policy == kept.best.policy != NEUTRAL
    assert kept.confirmed == pytest.approx(0.95)
    refused = search(
        Landscape(), MOVES, tmp_path / "b", subject="s", confirm=lambda policy: confirm.get(policy, (0.9, 1.2))
    )
    assert refused.policy == NEUTRAL != refused.best.policy
    assert refused.confirmed == pytest.approx(1.05)


def test_a_stopped_search_goes_on_where_it_was(tmp_path):
    journal = tmp_path / "journal.jsonl"
    whole = search(Landscape(), MOVES, tmp_path / "whole.jsonl", subject="valley")
    first = Landscape(stop_after=7)
    with pytest.raises(KeyboardInterrupt):
        search(first, MOVES, journal, subject="valley")
    with journal.open("a") as file:
        file.write('{"what": "tune", "pol')  # killed while it wrote
    second = Landscape()
    assert search(second, MOVES, journal, subject="valley") == whole
    assert first.calls + second.calls == len(whole.trials)
    third = Landscape()
    assert search(third, MOVES, journal, subject="valley") == whole
    assert third.calls == 0
    assert journal.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_a_foreign_or_damaged_journal_is_refused(tmp_path):
    journal = tmp_path / "journal.jsonl"
    search(Landscape(), MOVES, journal, subject="one text")
    with pytest.raises(UserError, match="of a search on 'one text', not on 'another'"):
        search(Landscape(), MOVES, journal, subject="another")
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([lines[0], lines[1][:-9], *lines[2:], ""]))
    with pytest.raises(UserError, match="not the journal of a policy search"):
        search(Landscape(), MOVES, journal, subject="one text")


@pytest.mark.parametrize(
    "content",
    [
        b'{"precious": 1}',
        b"one line\nand one without an end",
        b'{"subject": "another"}\n{"what": "tune", "pol',
        b'{"subject": "valley"}\n{"what": "tune"}\n{"what": "tune", "pol',
        b'{"subject": "valley"}\n{"what": "tune", "policy": null, "scores": [1]}\n',
        "a song of Köln\n".encode("latin-1"),
        b"",
    ],
)
def test_a_file_that_is_not_this_search_s_is_left_as_it_was(tmp_path, content):
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"not the journal of a policy search|of a search on 'another'"):
        search(Landscape(), MOVES, path, subject="valley")
    assert path.read_bytes() == content


def test_a_pool_maps_the_trials_of_a_coordinate(tmp_path):
    sizes = []

    def pool_map(function, policies):
        policies = list(policies)
        sizes.append(len(policies))
        return [function(policy) for policy in policies]

    result = search(Landscape(), MOVES, tmp_path / "pool.jsonl", subject="valley", run=pool_map)
    assert result == search(Landscape(), MOVES, tmp_path / "serial.jsonl", subject="valley")
    assert max(sizes) >= 8
