# SPDX-License-Identifier: Apache-2.0
"""The policy search: edges, multipliers, floors, depth caps and alpha that cost the least under some memory targets.

Coordinate descent from a policy to start with, which is the first trial: what it returns is never worse on the text
that it was tuned on, and ``confirm`` holds it to that on text that it was not. Every trial is a line of a journal, so a
search that was stopped goes on where it was, and a finished one is repeated without a single score.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.policy import NEUTRAL_POLICY, Policy

Score = Callable[[Policy], Sequence[float]]
"""What a policy costs at each memory target, in the same order: KL in nats per token, or perplexity; positive."""

Moves = Callable[[Policy], Iterable[Policy]]
"""The policies that differ from this one in one coordinate."""

NEUTRAL = replace(NEUTRAL_POLICY, alpha=0.0)
"""Global damage alone decides, even where there are residual heads."""

LEAST_GAIN = 1e-3
"""A policy that is better by a smaller share than this is not better."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A policy and what it cost at each memory target."""

    policy: Policy
    scores: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found, and why one may believe it.

    Attributes:
      policy: the best one, or the one to start with.
      first, best: their trials on the tuning text.
      confirmed: ``relative`` of the best policy's on text apart, or None where that was not asked for. Where it is 1 or
        more, ``policy`` is the one to start with.
      trials: all that were scored, in order.
    """

    policy: Policy
    first: Trial
    best: Trial
    confirmed: float | None
    trials: tuple[Trial, ...]

    def evidence(self) -> dict:
        """Returns JSON values for a record of the search."""
        return {
            "trials": len(self.trials),
            "first_scores": list(self.first.scores),
            "best_scores": list(self.best.scores),
            "best_policy": asdict(self.best.policy),
            "relative": relative(self.best.scores, self.first.scores),
            "relative_on_other_text": self.confirmed,
        }


def relative(scores: Sequence[float], first: Sequence[float]) -> float:
    """Returns the mean over the targets of what a policy costs against the first one: 1 is as much."""
    return float(np.mean(np.asarray(scores) / np.asarray(first)))


def search(
    score: Score,
    moves: Sequence[Moves],
    journal: Path,
    *,
    subject: str,
    start: Policy = NEUTRAL,
    confirm: Score | None = None,
    rounds: int = 2,
    run: Callable = map,
) -> SearchResult:
    """Returns the policy of the lowest mean cost, relative to the first one's, that coordinate descent finds.

    Each coordinate in turn is set to its best value with all others as they are, until a round changes nothing.

    Args:
      score: measures a policy on the tuning text.
      moves: the coordinates.
      journal: JSON lines, one a trial; made if it is not there. Trials that it holds are not scored again.
      subject: names what ``score`` and ``confirm`` measure (checkpoint, texts, targets): a journal of other is refused.
      start: the policy to begin with and to be held against.
      confirm: measures a policy on text apart.
      rounds: at most this many.
      run: ``map``, or a pool's, to score the trials of a coordinate in parallel.

    Raises:
      UserError: the journal is of another subject, or damaged before its last line.
    """
    known = _open(journal, subject)
    trials: dict[str, Trial] = {}

    def measure(what: str, function: Score, policies: Sequence[Policy]) -> list[Trial]:
        keys = [_key(what, policy) for policy in policies]
        missing = {key: policy for key, policy in zip(keys, policies) if key not in known}
        for (key, policy), scores in zip(missing.items(), run(function, missing.values())):
            known[key] = Trial(policy=policy, scores=tuple(float(s) for s in scores))
            _append(journal, what, known[key])
        return [known[key] for key in keys]

    def tune(policies: Sequence[Policy]) -> list[Trial]:
        tried = measure("tune", score, policies)
        trials.update((_key("tune", trial.policy), trial) for trial in tried)
        return tried

    (first,) = tune([start])
    best, best_cost = first, 1.0
    for _ in range(rounds):
        before = best
        for coordinate in moves:
            for trial in tune([p for p in dict.fromkeys(coordinate(best.policy)) if p != best.policy]):
                cost = relative(trial.scores, first.scores)
                if cost < best_cost - LEAST_GAIN:
                    best, best_cost = trial, cost
        if best is before:
            break
    confirmed = None
    if confirm is not None and best is not first:
        theirs, ours = measure("confirm", confirm, [start, best.policy])
        confirmed = relative(ours.scores, theirs.scores)
    return SearchResult(
        policy=start if confirmed is not None and confirmed >= 1 else best.policy,
        first=first,
        best=best,
        confirmed=confirmed,
        trials=tuple(trials.values()),
    )


# The coordinates


def bucket_moves(policy: Policy) -> Iterator[Policy]:
    """Edges and multipliers: none, or buckets of equal width in log mass whose multipliers are powers of their middles.

    Damage is about proportional to an expert's traffic, so a power of 1 would be right if the next tokens were routed
    as those seen so far; less of it hedges. Floors and depth caps are dropped with the buckets that they were of.
    """
    yield replace(policy, edges=(), multipliers=(1.0,), floors=(0,), depth_caps=(None,))
    for octaves, per_octave in ((2, 1), (4, 4)):
        steps = np.arange(-octaves * per_octave, octaves * per_octave + 1) / per_octave
        edges = tuple(np.exp2((steps[1:] + steps[:-1]) / 2).tolist())
        for power in (0.5, 0.75, 1.0, 1.5):
            multipliers = tuple(np.exp2(power * steps).tolist())
            floors, depth_caps = (0,) * len(steps), (None,) * len(steps)
            yield replace(policy, edges=edges, multipliers=multipliers, floors=floors, depth_caps=depth_caps)


def floor_moves(policy: Policy, min_bits: int) -> Iterator[Policy]:
    """Floors above the smallest bitwidth for the hottest buckets, a quarter or a half; given up at the last stage."""
    count = len(policy.multipliers)
    yield replace(policy, floors=(0,) * count, stages=(0,))
    for hot in sorted({-(-count // 4), -(-count // 2)}):
        floors = (min_bits,) * (count - hot) + (min_bits + 1,) * hot
        yield replace(policy, floors=floors, stages=(0, 1))


def cap_moves(policy: Policy) -> Iterator[Policy]:
    """Depth caps: none, or the same for all buckets, or one step less for the hottest quarter."""
    count = len(policy.multipliers)
    yield replace(policy, depth_caps=(None,) * count)
    hot = -(-count // 4)
    for cap in (1, 2):
        yield replace(policy, depth_caps=(cap,) * count)
        if hot < count:
            yield replace(policy, depth_caps=(cap + 1,) * (count - hot) + (cap,) * hot)


def alpha_moves(policy: Policy) -> Iterator[Policy]:
    """The strength of the prompt residual."""
    for alpha in (0.0, 0.5, 1.0, 1.5):
        yield replace(policy, alpha=alpha)


def prior_moves(policy: Policy) -> Iterator[Policy]:
    """How fast a request's tokens are believed."""
    for prior_tokens in (64.0, 256.0, 1024.0):
        yield replace(policy, prior_tokens=prior_tokens)


def default_moves(min_bits: int) -> tuple[Moves, ...]:
    """Returns the coordinates that damage to single sequences depends on, the one that matters most first.

    The half-life is none of them: nothing is forgotten within a sequence of calibration.
    """
    return bucket_moves, alpha_moves, prior_moves, lambda policy: floor_moves(policy, min_bits), cap_moves


# The journal


def _key(what: str, policy: Policy) -> str:
    return json.dumps([what, asdict(policy)], sort_keys=True)


def _append(journal: Path, what: str, trial: Trial) -> None:
    line = json.dumps({"what": what, "policy": asdict(trial.policy), "scores": trial.scores})
    with journal.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def _open(journal: Path, subject: str) -> dict[str, Trial]:
    """Returns the journal's trials by key; begins it where there is none. A line that was cut short is taken out.

    Nothing is written to a file that is not this search's.
    """
    known = read_journal(journal, subject)
    if journal.exists():
        content = journal.read_bytes()
        if (whole := _whole_lines(content)) != content:
            os.truncate(journal, len(whole))
    else:
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.write_text(json.dumps({"subject": subject}) + "\n", encoding="utf-8")
    return known


def read_journal(journal: Path, subject: str) -> dict[str, Trial]:
    """Returns the trials in the whole lines of a journal by key, none where there is no file.

    Raises:
      UserError: the file is no journal, of another subject, or damaged before its last line.
    """
    if not journal.exists():
        return {}
    if not journal.is_file():
        raise UserError(f"{journal}: not a file, a search's journal is one")
    known = {}
    try:
        head, *rows = map(json.loads, _whole_lines(journal.read_bytes()).splitlines())
        theirs = head["subject"]
        for row in rows:
            fields = {name: tuple(v) if isinstance(v, list) else v for name, v in row["policy"].items()}
            trial = Trial(policy=Policy(**fields), scores=tuple(row["scores"]))
            known[_key(row["what"], trial.policy)] = trial
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = type(error).__name__
        raise UserError(f"{journal}: not the journal of a policy search ({why}); name another file") from error
    if theirs != subject:
        raise UserError(f"{journal}: of a search on {theirs!r}, not on {subject!r}; delete it or name another")
    return known


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]
