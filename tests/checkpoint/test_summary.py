# SPDX-License-Identifier: Apache-2.0
"""``inspect`` shows the online policy if there is one."""

import json

import numpy as np

from pagedweight_jax.checkpoint.paged import open_checkpoint
from pagedweight_jax.checkpoint.policy import OnlinePolicy, PolicyRun, write_policy
from pagedweight_jax.checkpoint.summary import summarize
from pagedweight_jax.cli.checkpoint import facts_table
from pagedweight_jax.planning.calibration import ResidualHeads
from pagedweight_jax.planning.policy import Policy


def shown(summary):
    """The facts by name, as ``inspect`` prints them."""
    table = facts_table(summary)
    return dict(zip(*(list(column.cells) for column in table.columns)))


def test_the_policy_is_shown(copy):
    checkpoint = open_checkpoint(copy)
    assert summarize(checkpoint)["policy"] is None
    assert shown(summarize(checkpoint))["online policy"].startswith("none")
    L, E, U, Q = checkpoint.sensitivity.shape
    zeros = np.zeros((U, Q - 1))
    online = OnlinePolicy(
        run=PolicyRun(text_sha256="ab" * 32, samples=3, sequence_length=8, seed=1),
        damage_LEUR=np.ones((L, E, U, Q - 1)),
        mass_LE=np.full((L, E), 1 / E),
        features_LEUX=np.ones((L, E, U, 3)),
        heads=ResidualHeads(
            weight_URX=np.zeros((U, Q - 1, 6)), intercept_UR=zeros, confidence_UR=zeros, low_UR=zeros, high_UR=zeros
        ),
        policy=Policy(edges=(1.0, 2.0), multipliers=(0.5, 1.5, 2.0), floors=(0, 3, 3), depth_caps=(None, 1, 1)),
        fit={},
    )
    write_policy(checkpoint, online)
    summary = json.loads(json.dumps(summarize(checkpoint)))
    assert summary["policy"]["run"] == {"text_sha256": "ab" * 32, "samples": 3, "sequence_length": 8, "seed": 1}
    assert summary["policy"]["policy"]["floors"] == [0, 3, 3]
    assert shown(summary)["online policy"] == (
        "3 buckets of experts, multipliers 0.5 to 2, floors 0, 3 bits; "
        "measured on 3 sequences of 8 tokens, text abababababab"
    )
