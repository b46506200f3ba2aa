# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of one bitwidth has no steps to take: the planner leaves it alone under any pressure."""

import numpy as np
import pytest

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning import greedy
from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.planning.planner import initial_bits, plan_reload, plan_step
from pagedweight_jax.planning.queue import PlanQueue


@pytest.mark.parametrize("global_sensitivity", [True, False])
@pytest.mark.parametrize("free_blocks", [0, 1000])
@pytest.mark.parametrize("spare_samples", [0, greedy.SPARE_SAMPLES])
def test_one_width_is_served_as_it_is(planning, monkeypatch, free_blocks, global_sensitivity, spare_samples):
    monkeypatch.setattr(greedy, "SPARE_SAMPLES", spare_samples)
    world = planning.make_world(0)
    bytes_UQ = world.table.bytes_UQ[:, :1]
    world.table.bytes_UQ = bytes_UQ
    world.table.desired_LEU = np.full(planning.shape, 5, np.uint8)
    calibration = Calibration(sensitivity_LEUQ=world.calibration.sensitivity_LEUQ[..., :1], min_bits=5, max_bits=5)
    config = PlannerConfig(global_sensitivity=global_sensitivity)
    needed_bytes = 6 * int(bytes_UQ.sum())
    bits_LEU = initial_bits(calibration, bytes_UQ, needed_bytes, global_sensitivity)
    np.testing.assert_array_equal(bits_LEU, world.table.desired_LEU)
    with pytest.raises(UserError, match="1 too few"):
        initial_bits(calibration, bytes_UQ, needed_bytes - 1, global_sensitivity)
    observation = planning.observe(free_blocks, block_bytes=10, boundary=100)
    queue, plan = plan_step(world.table, observation, calibration, PlanQueue.start(bits_LEU), config)
    assert plan is None
    assert plan_reload(world.table, observation, calibration, queue, config) is None
