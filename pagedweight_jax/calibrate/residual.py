# SPDX-License-Identifier: Apache-2.0
"""The prompt residual: what a sequence's damage is beyond its usage of the experts, and the heads that predict it.

Damage D of one sequence differs from the global g mainly because the sequence uses its experts more or less than the
text at large. That is the business of the routing mass m. The residual is what is left per unit of it (eq. 5, 6)::

    rho  =  log(D / (g m / m_text))        rho^  =  w . log(phi / phi_text) + a        eta  =  exp(alpha c clip(rho^))

Heads are shared by all layers and experts, one per kind and one-bit reduction; phi are the features of both blocks of
an expert. Their confidence c is the share of the variance of rho that they explain in sequences they were not fitted
to, so a head that has learnt nothing is silent. Everything here is numpy, on ``SequenceStatistics``. Letters: N
sequences, L E U R as in the planner, X the features of both kinds of blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pagedweight_jax.calibrate.prepare import MIN_TOKENS
from pagedweight_jax.calibrate.sequences import SequenceStatistics
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.calibration import ResidualHeads
from pagedweight_jax.planning.signals import RequestSignals, features

FOLDS = 5
RIDGE = 1e-2
"""Penalty of a head's weights, in units of the features' variances: the three norms are nearly collinear."""

CLIP = (0.01, 0.99)
"""Quantiles of the measured residuals that bound the predicted ones."""


@dataclass(frozen=True, kw_only=True)
class TextMeans:
    """What the text does on average.

    Attributes:
      damage_LEUR: float64, g of each one-bit reduction.
      mass_LE: float64, routing masses, 1 per layer.
      features_LEUX: float64, phi; the largest norm is the mean over sequences of each one's. NaN for unused blocks.
    """

    damage_LEUR: np.ndarray
    mass_LE: np.ndarray
    features_LEUX: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Sequences beside the means of a text. NaN where a sequence did not use a block, or the text did not.

    Attributes:
      log_g_LEUR: log g.
      log_damage_NLEUR: log D.
      log_mass_NLE: log of the relative mass m / m_text.
      x_NLEX: log(phi / phi_text), gate_up's before down's.
    """

    log_g_LEUR: np.ndarray
    log_damage_NLEUR: np.ndarray
    log_mass_NLE: np.ndarray
    x_NLEX: np.ndarray

    @property
    def rho_NLEUR(self) -> np.ndarray:
        return self.log_damage_NLEUR - self.log_g_LEUR - self.log_mass_NLE[..., None, None]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Predictions for sequences by means and heads that had not seen them; NaN as in ``Residuals``.

    Attributes:
      measured_NLEUR: log D.
      by_damage_NLEUR: log g.
      by_usage_NLEUR: and the relative mass.
      by_prompt_NLEUR: and eta with alpha = 1.
    """

    measured_NLEUR: np.ndarray
    by_damage_NLEUR: np.ndarray
    by_usage_NLEUR: np.ndarray
    by_prompt_NLEUR: np.ndarray


def whole_sequences(statistics: SequenceStatistics) -> SequenceStatistics:
    """Returns the same sequences with one span each."""
    return merge_spans(statistics, 0, statistics.mass_NZLE.shape[1])


def merge_spans(statistics: SequenceStatistics, first: int, last: int) -> SequenceStatistics:
    """Returns the sequences with one span each, made of the spans ``first`` .. ``last`` - 1."""

    def mean(array):
        return array[:, first:last].mean(axis=1, keepdims=True, dtype=np.float64)

    return SequenceStatistics(
        damage_NZLEUR=mean(statistics.damage_NZLEUR),
        mass_NZLE=mean(statistics.mass_NZLE),
        norm_NZLEU=mean(statistics.norm_NZLEU),
        square_NZLEU=mean(statistics.square_NZLEU),
        max_NZLEU=statistics.max_NZLEU[:, first:last].max(axis=1, keepdims=True).astype(np.float64),
        tokens_NZLE=statistics.tokens_NZLE[:, first:last].sum(axis=1, keepdims=True),
    )


def request_signals(whole: SequenceStatistics, n: int, tokens: int) -> RequestSignals:
    """Returns sequence ``n``, merged to one span of ``tokens`` tokens, as the engine would have seen it."""
    return RequestSignals(
        mass_LE=whole.mass_NZLE[n, 0] * tokens,
        norm_LEU=whole.norm_NZLEU[n, 0] * tokens,
        square_LEU=whole.square_NZLEU[n, 0] * tokens,
        max_LEU=whole.max_NZLEU[n, 0],
        tokens=tokens,
    )


def text_means(whole: SequenceStatistics, fallback_LEUR: np.ndarray) -> TextMeans:
    """Returns the means over sequences of one span each.

    Args:
      whole: the sequences.
      fallback_LEUR: g of the experts that all sequences together gave fewer than ``MIN_TOKENS`` tokens.
    """
    mass_LE = whole.mass_NZLE[:, 0].mean(axis=0)
    few_LE = whole.tokens_NZLE.sum(axis=(0, 1)) < MIN_TOKENS
    damage_LEUR = np.where(few_LE[..., None, None], fallback_LEUR, whole.damage_NZLEUR[:, 0].mean(axis=0))
    mean = RequestSignals(
        mass_LE=mass_LE,
        norm_LEU=whole.norm_NZLEU[:, 0].mean(axis=0),
        square_LEU=whole.square_NZLEU[:, 0].mean(axis=0),
        max_LEU=_mean_where(whole.max_NZLEU[:, 0], whole.mass_NZLE[:, 0, ..., None] > 0),
    )
    return TextMeans(
        damage_LEUR=damage_LEUR,
        mass_LE=mass_LE / mass_LE.sum(axis=-1, keepdims=True),
        features_LEUX=features(mean),
    )


def _mean_where(values_NX: np.ndarray, where_NX: np.ndarray) -> np.ndarray:
    return (values_NX * where_NX).sum(axis=0) / np.maximum(where_NX.sum(axis=0), 1)


def residuals(whole: SequenceStatistics, means: TextMeans) -> Residuals:
    """Returns sequences of one span each beside the means of a text."""
    phi_NLEUX = np.stack([features(request_signals(whole, n, 1)) for n in range(len(whole))])
    mass_NLE = whole.mass_NZLE[:, 0]
    log_mass_NLE = _log(mass_NLE / mass_NLE.sum(axis=-1, keepdims=True)) - _log(means.mass_LE)
    return Residuals(
        log_g_LEUR=_log(means.damage_LEUR),
        log_damage_NLEUR=_log(whole.damage_NZLEUR[:, 0]),
        log_mass_NLE=log_mass_NLE,
        x_NLEX=(_log(phi_NLEUX) - _log(means.features_LEUX)).reshape(*log_mass_NLE.shape, -1),
    )


def _log(array: np.ndarray) -> np.ndarray:
    """Returns the logarithm, NaN where there is none."""
    return np.log(np.where(array > 0, array, np.nan))


def ridge(x_AX: np.ndarray, y_A: np.ndarray, penalty: float = RIDGE) -> tuple[np.ndarray, float]:
    """Returns the weights w [X] and the intercept a that minimise mean (x w + a - y)^2 + penalty sum (sd_X w)^2.

    Args:
      x_AX: examples.
      y_A: what to predict.
      penalty: of weights measured in standard deviations of their feature, so no feature's unit matters.
    """
    mean_X, sd_X = x_AX.mean(axis=0), np.maximum(x_AX.std(axis=0), 1e-9)
    z_AX = (x_AX - mean_X) / sd_X
    gram_XX = z_AX.T @ z_AX / len(z_AX) + penalty * np.eye(len(mean_X))
    w_X = np.linalg.solve(gram_XX, z_AX.T @ (y_A - y_A.mean()) / len(z_AX)) / sd_X
    return w_X, float(y_A.mean() - mean_X @ w_X)


def fit_heads(examples: Residuals) -> ResidualHeads:
    """Returns the heads fitted to all used blocks of all sequences, with a confidence of 1.

    Raises:
      UserError: fewer than 2 used blocks of a kind.
    """
    *_, U, R = examples.log_g_LEUR.shape
    x_NLEX, rho_NLEUR = examples.x_NLEX, examples.rho_NLEUR
    X = x_NLEX.shape[-1]
    weight_URX, intercept_UR, low_UR, high_UR = np.zeros((U, R, X)), *np.zeros((3, U, R))
    for u, r in np.ndindex(U, R):
        rho_NLE = rho_NLEUR[..., u, r]
        used_NLE = np.isfinite(rho_NLE) & np.isfinite(x_NLEX).all(axis=-1)
        if used_NLE.sum() < 2:
            raise UserError("calibration: the text uses too few experts to learn from; give more --samples")
        weight_URX[u, r], intercept_UR[u, r] = ridge(x_NLEX[used_NLE], rho_NLE[used_NLE])
        low_UR[u, r], high_UR[u, r] = np.quantile(rho_NLE[used_NLE], CLIP)
    return ResidualHeads(
        weight_URX=weight_URX,
        intercept_UR=intercept_UR,
        confidence_UR=np.ones((U, R)),
        low_UR=low_UR,
        high_UR=high_UR,
    )


def predict(heads: ResidualHeads, x_NLEX: np.ndarray) -> np.ndarray:
    """Returns clip(rho^), [N, L, E, U, R]; NaN where a feature is."""
    rho_NLEUR = np.einsum("...X,URX->...UR", x_NLEX, heads.weight_URX) + heads.intercept_UR
    return np.clip(rho_NLEUR, heads.low_UR, heads.high_UR)


def folds(num_sequences: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (sequences to fit, sequences held out), every sequence held out once.

    Raises:
      UserError: fewer than 2 sequences.
    """
    if num_sequences < 2:
        raise UserError(f"calibration: need 2 samples at least, one to fit and one to try it on, got {num_sequences}")
    order_N = np.random.default_rng(seed).permutation(num_sequences)
    for held in np.array_split(order_N, min(FOLDS, num_sequences)):
        yield np.setdiff1d(order_N, held), held


def cross_fit(whole: SequenceStatistics, fallback_LEUR: np.ndarray) -> tuple[ResidualHeads, HeldOut]:
    """Returns the heads fitted to all sequences, with their confidences, and the predictions that tell those.

    A confidence is the held-out R^2 of rho, 0 where a head is worse than the mean.
    """
    parts = []
    for fitted, held in folds(len(whole)):
        means = text_means(whole.take(fitted), fallback_LEUR)
        heads = fit_heads(residuals(whole.take(fitted), means))
        others = residuals(whole.take(held), means)
        g_NLEUR = np.broadcast_to(others.log_g_LEUR, others.log_damage_NLEUR.shape)
        parts.append((others.log_damage_NLEUR, g_NLEUR, others.rho_NLEUR, predict(heads, others.x_NLEX)))
    back_N = np.argsort(np.concatenate([held for _, held in folds(len(whole))]))
    measured_NLEUR, g_NLEUR, rho_NLEUR, predicted_NLEUR = (np.concatenate(arrays)[back_N] for arrays in zip(*parts))
    confidence_UR = np.maximum(r_squared(rho_NLEUR, predicted_NLEUR), 0)
    heads = fit_heads(residuals(whole, text_means(whole, fallback_LEUR)))
    by_usage_NLEUR = measured_NLEUR - rho_NLEUR
    return replace(heads, confidence_UR=confidence_UR), HeldOut(
        measured_NLEUR=measured_NLEUR,
        by_damage_NLEUR=g_NLEUR,
        by_usage_NLEUR=by_usage_NLEUR,
        by_prompt_NLEUR=by_usage_NLEUR + confidence_UR * predicted_NLEUR,
    )


def r_squared(measured_NLEUR: np.ndarray, predicted_NLEUR: np.ndarray) -> np.ndarray:
    """Returns 1 - (mean squared error) / (variance) of each kind and reduction over all that is finite, [U, R]."""
    both = np.isfinite(measured_NLEUR) & np.isfinite(predicted_NLEUR)
    count_UR = np.maximum(both.sum(axis=(0, 1, 2)), 1)
    measured_NLEUR, predicted_NLEUR = (np.where(both, array, 0) for array in (measured_NLEUR, predicted_NLEUR))
    mean_UR = measured_NLEUR.sum(axis=(0, 1, 2)) / count_UR
    variance_UR = (np.square(measured_NLEUR - mean_UR) * both).sum(axis=(0, 1, 2))
    error_UR = np.square(measured_NLEUR - predicted_NLEUR).sum(axis=(0, 1, 2))
    return 1 - error_UR / np.maximum(variance_UR, 1e-300)
