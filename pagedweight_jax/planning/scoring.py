# SPDX-License-Identifier: Apache-2.0
"""Predicted damage for the requests that run now: what is known offline, corrected by what their tokens showed."""

from dataclasses import dataclass

import numpy as np

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.planning.damage import (
    global_damage,
    predicted_damage,
    predicted_residual,
    prompt_multiplier,
    reductions_outermost,
    released_bytes,
    uniform_damage,
)
from pagedweight_jax.planning.observation import Observation
from pagedweight_jax.planning.policy import NEUTRAL_POLICY, Policy
from pagedweight_jax.planning.signals import batch_features, batch_mass, log_features, request_weights
from pagedweight_jax.planning.stages import routing_buckets


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is known offline, in the form in which every boundary uses it.

    Attributes:
      damage_LEUR: float32, each reduction's damage: g of eq. 4, or its uniform rival.
      features_XLEU: float32, log φ of the calibration text; None where heads do not count.
    """

    damage_LEUR: np.ndarray
    features_XLEU: np.ndarray | None

    @classmethod
    def of(cls, calibration: Calibration, bytes_UQ: np.ndarray, config: PlannerConfig) -> "Prior":
        """Returns the prior of a server whose blocks take M_u^b = ``bytes_UQ``."""
        features_XLEU = log_features(calibration.features_LEUX) if _heads_count(calibration, config) else None
        damage_LEUR = prior_damage(calibration, bytes_UQ, config.global_sensitivity)
        return cls(damage_LEUR=damage_LEUR, features_XLEU=features_XLEU)


def effective_policy(calibration: Calibration, config: PlannerConfig) -> Policy:
    """Returns the policy whose buckets count: a neutral one where routing statistics or all sensitivity is off."""
    return calibration.policy if config.routing_statistics and config.global_sensitivity else NEUTRAL_POLICY


def reads_signals(calibration: Calibration, config: PlannerConfig) -> bool:
    """Returns whether damage depends on what the requests' tokens showed."""
    buckets = effective_policy(calibration, config).edges
    return bool(buckets) or (config.global_sensitivity and _heads_count(calibration, config))


def expert_buckets(observation: Observation, calibration: Calibration, policy: Policy) -> np.ndarray:
    """Returns β of every expert, int64 [L, E]: by the running requests' routing mass, without any by calibration's."""
    if not policy.edges:
        return np.zeros(calibration.sensitivity_LEUQ.shape[:2], np.int64)
    weight_B = _request_weights(observation, policy)
    mass_LE = batch_mass(observation.requests, weight_B, calibration.mass_LE)
    return routing_buckets(mass_LE, calibration.mass_LE, policy.edges)


def score_damage(
    observation: Observation, calibration: Calibration, bucket_LE: np.ndarray, prior: Prior, config: PlannerConfig
) -> np.ndarray:
    """Returns d of every one-bit reduction for the running requests, [L, E, U, R]: eq. 8 with what is switched on.

    Args:
      observation, calibration, config: as for ``plan_step``.
      bucket_LE: β of ``effective_policy``.
      prior: of this calibration and configuration.
    """
    if not config.global_sensitivity:
        return predicted_damage(prior.damage_LEUR)
    multipliers = np.array(effective_policy(calibration, config).multipliers, np.float32)
    mu_LE11 = multipliers.take(bucket_LE)[..., None, None]
    if prior.features_XLEU is None or not observation.requests:
        return predicted_damage(prior.damage_LEUR, mu_LE11)
    weight_B = _request_weights(observation, calibration.policy)
    x_XLEU, evidence_LEU = batch_features(observation.requests, weight_B, prior.features_XLEU)
    rho_LEUR = predicted_residual(x_XLEU, calibration.heads)
    eta_LEUR = prompt_multiplier(rho_LEUR, evidence_LEU, calibration.heads, calibration.policy.alpha)
    return predicted_damage(prior.damage_LEUR, mu_LE11, eta_LEUR)


def prior_damage(calibration: Calibration, bytes_UQ: np.ndarray, global_sensitivity: bool) -> np.ndarray:
    """Returns each reduction's damage as known offline, float32 [L, E, U, R]: g of eq. 4, or its uniform rival."""
    if global_sensitivity:
        return reductions_outermost(global_damage(calibration.sensitivity_LEUQ))
    g_UR = uniform_damage(released_bytes(bytes_UQ))
    return reductions_outermost(np.broadcast_to(g_UR, (*calibration.sensitivity_LEUQ.shape[:2], *g_UR.shape)))


def _request_weights(observation: Observation, policy: Policy) -> np.ndarray:
    tokens = [request.tokens for request in observation.requests]
    return request_weights(observation.kv_blocks, tokens, policy.prior_tokens)


def _heads_count(calibration: Calibration, config: PlannerConfig) -> bool:
    return calibration.heads is not None and calibration.policy.alpha > 0 and config.prompt_residual
