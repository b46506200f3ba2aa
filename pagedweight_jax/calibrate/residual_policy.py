# SPDX-License-Identifier: Apache-2.0
"""The policy to begin with, and what it is worth: damage that the planner chooses before it comes.

No search is needed for a sensible policy. The damage of a block follows its usage, so the multiplier of a routing
bucket is the relative mass at its centre, and the buckets are narrow. The prompt residual counts in full, for its heads
have confidences of their own. What is left to choose, how many tokens the text counts before a request's first, is
tried out, without an engine: the planner sees the first half of a sequence and lowers blocks; the second half says what
that costs.
"""

from dataclasses import dataclass, replace

import numpy as np

from pagedweight_jax.calibrate.residual import (
    TextMeans,
    folds,
    merge_spans,
    request_signals,
    text_means,
    whole_sequences,
)
from pagedweight_jax.calibrate.search import NEUTRAL
from pagedweight_jax.calibrate.sequences import SequenceStatistics
from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.planning.calibration import Calibration, ResidualHeads
from pagedweight_jax.planning.observation import KVPressure, Observation
from pagedweight_jax.planning.planner import plan_step
from pagedweight_jax.planning.policy import Policy
from pagedweight_jax.planning.queue import PlanQueue
from pagedweight_jax.planning.scoring import Prior, effective_policy, expert_buckets, score_damage
from pagedweight_jax.planning.signals import RequestSignals

OCTAVES, BUCKETS_PER_OCTAVE = 4, 4
"""Buckets reach from 1/16 to 16 times the text's usage. Half as many per octave cost a third of what they bring."""

PRIOR_TOKENS = (32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

SHARES = (0.25, 0.5, 0.75)
"""Memory targets, as shares of the bytes that all blocks together can release."""


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


@dataclass(frozen=True)
class Halves:
    """First halves of sequences as requests, second halves as what they suffer.

    Attributes:
      tokens: of a first half.
      signals_N: what the first halves showed.
      after_NLEUR: damage of each one-bit reduction to the second halves.
      means_N: of text without the sequence.
      heads: the prompt residual's, fitted to all sequences: few numbers, shared by all blocks.
      bytes_UQ: M_u^b for b = min_bits .. max_bits.
      max_bits: from which the planner lowers.
    """

    tokens: int
    signals_N: tuple[RequestSignals, ...]
    after_NLEUR: np.ndarray
    means_N: tuple[TextMeans, ...]
    heads: ResidualHeads
    bytes_UQ: np.ndarray
    max_bits: int

    @classmethod
    def of(
        cls,
        statistics: SequenceStatistics,
        span_tokens: int,
        fallback_LEUR: np.ndarray,
        heads: ResidualHeads,
        bytes_UQ: np.ndarray,
        max_bits: int,
    ) -> "Halves":
        """Returns the halves of sequences of at least 2 spans, each judged by the means of the others."""
        num_spans = statistics.mass_NZLE.shape[1]
        tokens = num_spans // 2 * span_tokens
        before = merge_spans(statistics, 0, num_spans // 2)
        whole = whole_sequences(statistics)
        means = {}
        for fitted, held in folds(len(whole)):
            means |= dict.fromkeys(held.tolist(), text_means(whole.take(fitted), fallback_LEUR))
        return cls(
            tokens=tokens,
            signals_N=tuple(request_signals(before, n, tokens) for n in range(len(before))),
            after_NLEUR=merge_spans(statistics, num_spans // 2, num_spans).damage_NZLEUR[:, 0],
            means_N=tuple(means[n] for n in range(len(whole))),
            heads=heads,
            bytes_UQ=bytes_UQ,
            max_bits=max_bits,
        )

    def costs(self, policy: Policy) -> tuple[float, ...]:
        """Returns the mean damage to the second halves when the planner releases each of ``SHARES`` of the bytes.

        Infinite where the policy does not let it release as much.
        """
        L, E, _, R = self.after_NLEUR.shape[1:]
        releasable_bytes = L * E * int((self.bytes_UQ[:, -1] - self.bytes_UQ[:, 0]).sum())
        cost_NT = np.empty((len(self.signals_N), len(SHARES)))
        for n, (signals, after_LEUR) in enumerate(zip(self.signals_N, self.after_NLEUR)):
            calibration = self._calibration(n, policy)
            for t, share in enumerate(SHARES):
                lost_LEU = lowered_by(calibration, signals, self.bytes_UQ, int(share * releasable_bytes))
                met = lost_LEU is not None
                cost_NT[n, t] = after_LEUR[np.arange(R) < lost_LEU[..., None]].sum() if met else np.inf
        return tuple(cost_NT.mean(axis=0).tolist())

    def fit(self, policy: Policy) -> tuple[float, float]:
        """Returns how far predictions are off (root mean square of log predicted / measured, up to a factor common to a
        sequence) and their rank correlation with the measured damage; both within a sequence, as the planner compares.
        """
        variances, ranks = [], []
        for n, (signals, after_LEUR) in enumerate(zip(self.signals_N, self.after_NLEUR)):
            predicted_LEUR, used_LEUR = planner_damage(self._calibration(n, policy), signals), after_LEUR > 0
            predicted, measured = predicted_LEUR[used_LEUR], after_LEUR[used_LEUR]
            variances.append(np.var(np.log(predicted / measured)))
            ranks.append(rank_correlation(predicted, measured))
        return float(np.sqrt(np.mean(variances))), float(np.mean(ranks))

    def _calibration(self, n: int, policy: Policy) -> Calibration:
        return planner_calibration(self.means_N[n], self.heads, policy, self.max_bits)


def first_policy(halves: Halves) -> Policy:
    """Returns the policy of ``usage_buckets`` whose prior makes predictions by routing least wrong.

    It is not chosen by its costs: those hardly depend on it, and would follow the noise. Alpha stays 1: on text like
    the calibration text costs hardly depend on it, and on other text it is better than less.
    """
    policies = [replace(usage_buckets(), prior_tokens=p, alpha=0.0) for p in PRIOR_TOKENS]
    return replace(min(policies, key=lambda policy: halves.fit(policy)[0]), alpha=1.0)


def foresight_report(halves: Halves, policy: Policy) -> dict:
    """Returns what routing and prompt are worth, JSON: costs relative to global damage alone, and ``Halves.fit``."""
    steps = {"g": NEUTRAL, "routing": replace(policy, alpha=0.0), "prompt": policy}
    reference = np.array(halves.costs(NEUTRAL))
    fits = {name: halves.fit(one) for name, one in steps.items()}
    return {
        "tokens_before": halves.tokens,
        "shares": list(SHARES),
        "cost": {name: np.round(halves.costs(one) / reference, 4).tolist() for name, one in steps.items()},
        "error": {name: round(error, 4) for name, (error, _) in fits.items()},
        "spearman": {name: round(rank, 4) for name, (_, rank) in fits.items()},
    }


# The planner, run on numbers


@dataclass(frozen=True)
class _Blocks:
    """What the planner reads of a page table."""

    desired_LEU: np.ndarray
    bytes_UQ: np.ndarray


def planner_calibration(means: TextMeans, heads: ResidualHeads | None, policy: Policy, max_bits: int) -> Calibration:
    """Returns what the planner works from; errors count from the largest bitwidth's."""
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


def _observation(requests: tuple[RequestSignals, ...], block_bytes: int) -> Observation:
    kv = KVPressure(free_blocks=0, pending_blocks=0, releasing_blocks=0, block_bytes=block_bytes)
    return Observation(boundary=0, kv=kv, requests=requests, kv_blocks=(1,) * len(requests))


def lowered_by(
    calibration: Calibration, signals: RequestSignals, bytes_UQ: np.ndarray, target_bytes: int
) -> np.ndarray | None:
    """Returns the bits that each block loses, uint8 [L, E, U], when all have max bits and the planner meets a target.

    None if the policy does not let it.
    """
    full_LEU = np.full(calibration.sensitivity_LEUQ.shape[:-1], calibration.max_bits, np.uint8)
    observation = _observation((signals,), target_bytes)  # D is one block: none is free, and none need be
    config = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0)
    table = _Blocks(desired_LEU=full_LEU, bytes_UQ=bytes_UQ)
    _, plan = plan_step(table, observation, calibration, PlanQueue.start(full_LEU), config)
    if plan is None or plan.total_released_bytes < target_bytes:
        return None
    return full_LEU - plan.apply(full_LEU)


def planner_damage(calibration: Calibration, *requests: RequestSignals) -> np.ndarray:
    """Returns the planner's predicted damage, [L, E, U, R], for requests that hold as many KV blocks each."""
    config = PlannerConfig()
    observation = _observation(requests, block_bytes=1)
    bucket_LE = expert_buckets(observation, calibration, effective_policy(calibration, config))
    unused_UQ = np.zeros((2, calibration.sensitivity_LEUQ.shape[-1]), np.int64)  # sizes matter without sensitivities
    return score_damage(observation, calibration, bucket_LE, Prior.of(calibration, unused_UQ, config), config)


def rank_correlation(one_A: np.ndarray, other_A: np.ndarray) -> float:
    """Returns Spearman's coefficient; ties are ranked in order of appearance. NaN for fewer than 2 values."""
    if len(one_A) < 2:
        return float("nan")
    one_A, other_A = (np.argsort(np.argsort(array, kind="stable")) for array in (one_A, other_A))
    return float(np.corrcoef(one_A, other_A)[0, 1])
