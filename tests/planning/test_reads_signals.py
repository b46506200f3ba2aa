# SPDX-License-Identifier: Apache-2.0
"""Signals are gathered where they change a decision, and only there."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.planning.policy import NEUTRAL_POLICY
from pagedweight_jax.planning.scoring import Prior, effective_policy, expert_buckets, reads_signals, score_damage

SWITCHES = [
    PlannerConfig(routing_statistics=routing, prompt_residual=prompt, global_sensitivity=sensitivity)
    for routing, prompt, sensitivity in product((False, True), repeat=3)
]


@pytest.mark.parametrize("config", SWITCHES, ids=lambda config: None)
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 1.5])
@pytest.mark.parametrize("buckets", [False, True])
def test_damage_depends_on_signals_where_they_are_read(planning, config, heads, alpha, buckets):
    policy = replace(planning.rich_policy if buckets else NEUTRAL_POLICY, alpha=alpha)
    world = planning.make_world(8, rich=True, policy=policy)
    calibration = world.calibration if heads else replace(world.calibration, heads=None)
    prior = Prior.of(calibration, world.table.bytes_UQ, config)

    def damage(observation):
        bucket_LE = expert_buckets(observation, calibration, effective_policy(calibration, config))
        return score_damage(observation, calibration, bucket_LE, prior, config)

    changed = not np.array_equal(damage(planning.observe(0, world=world)), damage(planning.observe(0)))
    assert changed == reads_signals(calibration, config)
