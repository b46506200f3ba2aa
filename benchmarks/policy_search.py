# SPDX-License-Identifier: Apache-2.0
"""Tunes the planner's policy on calibration text, under three memory targets, many trials at a time.

    python benchmarks/policy_search.py demo.paged --text c4=calib.jsonl.xz --text books=calibration.txt \\
        --other wiki=wiki.test.raw --journal benchmarks/results/policy_search.jsonl --write

Each text is a batch of its own: what routing and prompts can tell is how one batch differs from the average. The search
begins with the checkpoint's own policy; the windows behind those that it was tuned on confirm what was found, and other
texts, on which nothing was tuned, say what it is worth. The result is printed as JSON; ``--write`` keeps it, with its
evidence, in the checkpoint.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from pressure_cases import Case, Text, default_workers, full_context_bytes, processes, record, texts, unquantized

from pagedweight_jax.calibrate.search import NEUTRAL, default_moves, search
from pagedweight_jax.checkpoint.manifest import MANIFEST
from pagedweight_jax.checkpoint.paged import open_checkpoint, sha256_of
from pagedweight_jax.checkpoint.policy import read_policy, write_policy
from pagedweight_jax.planning.policy import Policy


@dataclass(frozen=True)
class Scorer:
    """KL of a policy at each memory target, averaged over the texts."""

    checkpoint: Path
    texts: tuple[Text, ...]
    targets: tuple[int, ...]
    batch: int
    rows: Callable[[Sequence[Case]], Iterator[dict]]

    def cases(self, policy: Policy) -> list[Case]:
        return [
            Case(
                label="trial",
                checkpoint=self.checkpoint,
                text=text,
                batch=self.batch,
                memory_bytes=memory_bytes,
                policy=policy,
            )
            for memory_bytes, text in product(self.targets, self.texts)
        ]

    def many(self, policies: Sequence[Policy]):
        cases = [case for policy in policies for case in self.cases(policy)]
        kl = []
        for row in self.rows(cases):
            kl.append(row["kl"])
            if len(kl) == len(self.targets) * len(self.texts):
                yield np.reshape(kl, (len(self.targets), len(self.texts))).mean(axis=1)
                kl.clear()

    def __call__(self, policy: Policy):
        return next(self.many([policy]))

    def windows(self, policy: Policy) -> dict[str, np.ndarray]:
        """Returns by text the KL of its windows at each memory target, [targets, windows]."""
        rows = list(self.rows(self.cases(policy)))
        return {
            text.name: np.array([row["kl_windows"] for row in rows[place :: len(self.texts)]])
            for place, text in enumerate(self.texts)
        }


def compare(scorer: Scorer, first: Policy, found: Policy) -> dict:
    """Returns by text, and of all, what the policy found costs against the first one: mean over the targets.

    ``relative`` of 1 is as much; its standard error is over windows, which are paired.
    """
    first_W, change_W = scorer.windows(first), scorer.windows(found)
    for name, kl_TW in change_W.items():
        change_W[name] = ((kl_TW - first_W[name]) / first_W[name].mean(axis=1, keepdims=True)).mean(axis=0)
    return {
        name: {
            "windows": len(c_W),
            "relative": round(1 + c_W.mean(), 5),
            "standard_error": round(c_W.std(ddof=1) / len(c_W) ** 0.5, 5),
        }
        for name, c_W in (change_W | {"all": np.concatenate(list(change_W.values()))}).items()
    }


class Rows:
    """Scores cases in worker processes, none of them twice."""

    def __init__(self, run: Callable, model: Path, cache: Path):
        self._run, self._folders, self._known = run, (model, cache), {}

    def __call__(self, cases: Sequence[Case]) -> Iterator[dict]:
        """Yields the cases' rows, in order."""
        new = [case for case in dict.fromkeys(cases) if case not in self._known]
        missing = iter(self._run(record, new, *self._folders))
        for case in cases:
            if case not in self._known:
                self._known[case] = next(missing)
            yield self._known[case]


def half_life_moves(policy: Policy) -> Iterator[Policy]:
    """How fast a request's tokens are forgotten; an engine that scores whole windows feels it."""
    for half_life_tokens in (256.0, 2048.0):
        yield replace(policy, half_life_tokens=half_life_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="paged, with what pagedweight calibrate measured")
    parser.add_argument("--model", type=Path, default=Path("checkpoints/demo-moe"), help="its Hugging Face folder")
    parser.add_argument("--text", action="append", required=True, help="NAME=PATH or NAME=PATH@WINDOWS_TO_SKIP")
    parser.add_argument("--other", action="append", default=[], help="the same: to score what was found, not to tune")
    parser.add_argument("--targets", type=float, nargs="+", default=[3.25, 3.75, 4.5], help="bits at full context")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--windows", type=int, default=4, help="of each text to tune on")
    parser.add_argument("--more-windows", type=int, default=12, help="of each text to confirm, and of each other text")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes of two cores each")
    parser.add_argument("--cache", type=Path, default=Path(".ablation"), help="the unquantized model's hidden states")
    parser.add_argument("--journal", type=Path, default=Path("benchmarks/results/policy_search.jsonl"))
    parser.add_argument("--write", action="store_true", help="keep the best policy in the checkpoint")
    args = parser.parse_args()
    tune = tuple(texts(args.text, args.windows, args.window))
    confirm = tuple(replace(text, skip=text.skip + args.windows, windows=args.more_windows) for text in tune)
    other = tuple(texts(args.other, args.more_windows, args.window))
    targets = tuple(full_context_bytes(args.checkpoint, args.batch, args.window, bits) for bits in args.targets)
    checkpoint = open_checkpoint(args.checkpoint)
    online = read_policy(checkpoint)
    if online is None:
        raise SystemExit(f"{args.checkpoint}: run pagedweight calibrate first")
    names = " ".join(f"{text.name}@{text.skip}" for text in tune)
    subject = (
        f"{sha256_of(checkpoint.path / MANIFEST)[:16]} {names} {args.batch} of {args.windows} x {args.window}, "
        f"{args.more_windows} to confirm, targets {targets}"
    )
    with processes(args.workers) as run:
        for row in run(unquantized, [*tune, *confirm, *other], args.model, args.cache):
            print(json.dumps(row), flush=True)
        rows = Rows(run, args.model, args.cache)
        tuning, confirming, scoring = (
            Scorer(args.checkpoint, t, targets, args.batch, rows) for t in (tune, confirm, other)
        )
        buckets, alpha, prior, *others = default_moves(checkpoint.manifest.min_bits)  # it begins with good buckets
        result = search(
            tuning,
            [lambda policy: [NEUTRAL], alpha, prior, buckets, *others, half_life_moves],
            args.journal,
            subject=subject,
            start=online.policy,
            confirm=confirming,
            rounds=args.rounds,
            run=lambda scorer, policies: scorer.many(list(policies)),
        )
        evidence = result.evidence()
        for name, scorer in {"calibration_text": confirming, "other_text": scoring}.items():
            if scorer.texts and result.best is not result.first:
                evidence[name] = compare(scorer, result.first.policy, result.best.policy)
    for trial in result.trials:
        print([float(f"{s:.5g}") for s in trial.scores], trial.policy)
    print(json.dumps(evidence, indent=1))
    if args.write:
        fit = online.fit | {"search": evidence}
        print(write_policy(checkpoint, replace(online, policy=result.policy, fit=fit)))


if __name__ == "__main__":
    main()
