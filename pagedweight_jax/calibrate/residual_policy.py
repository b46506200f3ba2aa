# SPDX-License-Identifier: Apache-2.0
"""The policy to begin with, and how well the planner's damage predicts what comes after.

No search is needed for a sensible policy. The damage of a block follows its usage, so the multiplier of a routing
bucket is the relative mass at its centre, and the buckets are narrow. What is left to choose, how many tokens the text
counts before a request's first and how strongly the prompt residual counts, is what predicts best: the planner sees the
first half of a sequence and says what the second half will suffer.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pagedweight_jax.calibrate.residual import (
    TextMeans,
    folds,
    merge_spans,
    request_signals,
    text_means,
    whole_sequences,
)
from pagedweight_jax.calibrate.sequences import SequenceStatistics
from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.planning.calibration import Calibration, ResidualHeads
from pagedweight_jax.planning.observation import KVPressure, Observation
from pagedweight_jax.planning.policy import NEUTRAL_POLICY, Policy
from pagedweight_jax.planning.scoring import effective_policy, expert_buckets, score_damage
from pagedweight_jax.planning.signals import RequestSignals

OCTAVES, BUCKETS_PER_OCTAVE = 4, 4
"""Buckets reach from 1/16 to 16 times the text's usage. Half as many per octave cost a third of what they bring."""

PRIOR_TOKENS = (32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
ALPHAS = (0.0, 0.5, 1.0, 1.5, 2.0)


def usage_buckets() -> Policy:
    """Returns buckets of equal width in the logarithm of the relative mass, each with its centre as its multiplier."""
    steps = np.arange(-OCTAVES * BUCKETS_PER_OCTAVE, OCTAVES * BUCKETS_PER_OCTAVE + 1) / BUCKETS_PER_OCTAVE
    edges = (steps[1:] + steps[:-1]) / 2
    return Policy(
        edges=tuple(np.exp2(edges).tolist()),
        multipliers=tuple(np.exp2(steps).tolist()),
        floors=(0,) * len(steps),
        depth_caps=(None,) * len(steps),
    )


def first_policy(
    statistics: SequenceStatistics, span_tokens: int, fallback_LEUR: np.ndarray, heads: ResidualHeads
) -> tuple[Policy, dict]:
    """Returns the policy that best predicts the second halves of the sequences from the first, and how well: JSON.

    Args:
      statistics: sequences of at least 2 spans; else nothing comes after, and the policy's defaults stay.
      span_tokens: tokens of a span.
      fallback_LEUR: as for ``text_means``.
      heads: the prompt residual's.
    """
    policy = usage_buckets()
    num_spans = statistics.mass_NZLE.shape[1]
    if num_spans < 2:
        return policy, {}
    halves = Halves(statistics, span_tokens, fallback_LEUR, heads)
    usage_only = {p: halves.score(replace(policy, prior_tokens=p, alpha=0.0)) for p in PRIOR_TOKENS}
    policy = replace(policy, prior_tokens=min(PRIOR_TOKENS, key=lambda p: usage_only[p]["error"]))
    by_alpha = {a: halves.score(replace(policy, alpha=a)) for a in ALPHAS}
    policy = replace(policy, alpha=min(ALPHAS, key=lambda a: by_alpha[a]["error"]))
    return policy, {
        "tokens_before": halves.tokens,
        "g": halves.score(NEUTRAL_POLICY),
        "usage": by_alpha[0.0],
        "prompt": by_alpha[policy.alpha],
        "error_by_prior_tokens": {str(p): score["error"] for p, score in usage_only.items()},
        "error_by_alpha": {str(a): score["error"] for a, score in by_alpha.items()},
    }


class Halves:
    """First halves of sequences as requests, second halves as what they suffer.

    Attributes:
      tokens: of a first half.
    """

    def __init__(
        self, statistics: SequenceStatistics, span_tokens: int, fallback_LEUR: np.ndarray, heads: ResidualHeads
    ):
        num_spans = statistics.mass_NZLE.shape[1]
        self.tokens = num_spans // 2 * span_tokens
        self._heads = heads
        self._before = merge_spans(statistics, 0, num_spans // 2)
        self._after_NLEUR = merge_spans(statistics, num_spans // 2, num_spans).damage_NZLEUR[:, 0]
        whole = whole_sequences(statistics)
        self._means = [(text_means(whole.take(fitted), fallback_LEUR), held) for fitted, held in folds(len(whole))]

    def score(self, policy: Policy) -> dict[str, float]:
        """Returns the error (root mean square of log predicted / measured, up to a factor common to a sequence) and
        the rank correlation, both within a sequence, as the planner compares, and averaged over sequences."""
        errors, ranks = [], []
        for predicted_LEUR, measured_LEUR in self._predictions(policy):
            used_LEUR = (measured_LEUR > 0) & (predicted_LEUR > 0)
            log_ratio = np.log(predicted_LEUR[used_LEUR] / measured_LEUR[used_LEUR])
            errors.append(log_ratio.var())
            ranks.append(rank_correlation(predicted_LEUR[used_LEUR], measured_LEUR[used_LEUR]))
        return {"error": float(np.sqrt(np.mean(errors))), "spearman": float(np.mean(ranks))}

    def _predictions(self, policy: Policy) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for means, held in self._means:
            calibration = planner_calibration(means, self._heads, policy)
            for n in held:
                signals = request_signals(self._before, n, self.tokens)
                yield planner_damage(calibration, signals), self._after_NLEUR[n]


def planner_calibration(means: TextMeans, heads: ResidualHeads | None, policy: Policy) -> Calibration:
    """Returns what the planner works from, with no error at the largest bitwidth, which is called 8 bits."""
    max_bits = 8
    zero_LEU1 = np.zeros((*means.damage_LEUR.shape[:-1], 1))
    return Calibration(
        sensitivity_LEUQ=np.concatenate([zero_LEU1, np.cumsum(means.damage_LEUR, axis=-1)], axis=-1)[..., ::-1],
        min_bits=max_bits - means.damage_LEUR.shape[-1],
        max_bits=max_bits,
        mass_LE=means.mass_LE,
        features_LEUX=means.features_LEUX,
        heads=heads,
        policy=policy,
    )


def planner_damage(calibration: Calibration, *requests: RequestSignals) -> np.ndarray:
    """Returns the planner's predicted damage, [L, E, U, R], for requests that hold as many KV blocks each."""
    config = PlannerConfig()
    kv = KVPressure(free_blocks=0, pending_blocks=0, releasing_blocks=0, block_bytes=1)
    observation = Observation(boundary=0, kv=kv, requests=requests, kv_blocks=(1,) * len(requests))
    bucket_LE = expert_buckets(observation, calibration, effective_policy(calibration, config))
    unused_UQ = np.zeros((2, calibration.sensitivity_LEUQ.shape[-1]), np.int64)  # sizes matter without sensitivities
    return score_damage(observation, calibration, bucket_LE, unused_UQ, config)


def rank_correlation(one_A: np.ndarray, other_A: np.ndarray) -> float:
    """Returns Spearman's coefficient; ties are ranked in order of appearance. NaN for fewer than 2 values."""
    if len(one_A) < 2:
        return float("nan")
    one_A, other_A = (np.argsort(np.argsort(array, kind="stable")) for array in (one_A, other_A))
    return float(np.corrcoef(one_A, other_A)[0, 1])
