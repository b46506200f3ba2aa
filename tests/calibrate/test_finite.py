# SPDX-License-Identifier: Apache-2.0
"""The first activation that is no number is named: layer, linear-block, expert, token of which sequence."""

import jax
import numpy as np
import pytest

from pagedweight_jax.calibrate.finite import check_activations
from pagedweight_jax.calibrate.hessian import run_layer
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import init_weights


def test_the_first_place_on_the_way_through_a_layer_is_named():
    attended_BS, left_BS = np.ones((2, 3), bool), np.ones((2, 3), bool)
    ids_TK, gate_up_TK, down_TK = np.arange(12).reshape(6, 2), np.ones((6, 2)), np.ones((6, 2))
    check_activations(5, 40, attended_BS, left_BS)
    check_activations(5, 40, attended_BS, left_BS, ids_TK, [gate_up_TK, down_TK])
    for array, bad, where in (
        (left_BS, False, "output: row 2 of calibration sequence 40: the activations are NaN or infinite"),
        (down_TK, np.inf, "down: expert 5, row 2 of calibration sequence 40: the activations that enter"),
        (gate_up_TK, np.nan, "gate_up: expert 5, row 2 of calibration sequence 40: the activations that enter"),
        (attended_BS, False, "attention: row 2 of calibration sequence 40: queries, keys or values are NaN"),
    ):
        array.reshape(6, -1)[3:, 0] = bad
        array.reshape(6, -1)[2, -1] = bad
        with pytest.raises(UserError, match=rf"^layer 5 {where}"):
            check_activations(5, 40, attended_BS, left_BS, ids_TK, [gate_up_TK, down_TK])


@pytest.fixture
def entering():
    """Two batches of two sequences."""
    return np.random.default_rng(0).standard_normal((2, 2, 12, 64)).astype(np.float32)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_enters_a_layer(tiny_weights, entering, value):
    """All tokens of its sequence see it, but it is where it began."""
    assert run_layer(tiny_weights.config, 1, tiny_weights.layers[1], entering) is not None
    entering[1, 1, 7, 3] = value
    with pytest.raises(UserError, match=r"^layer 1 attention: row 7 of calibration sequence 3: queries,"):
        run_layer(tiny_weights.config, 1, tiny_weights.layers[1], entering)


@pytest.mark.parametrize(
    ("kind", "gate", "up", "down"), [("gate_up", 1, 1e25, 1), ("down", 1e15, 1e12, 1e-12)], ids=["gate_up", "down"]
)
def test_what_overflows_in_an_expert(tiny_weights, entering, kind, gate, up, down):
    w, F = jax.tree.map(np.array, tiny_weights.layers[1]), tiny_weights.config.moe_intermediate_size
    w.mlp.experts.gate_up_ENC[2, :F] *= gate
    w.mlp.experts.gate_up_ENC[2, F:] *= up
    w.mlp.experts.down_ENC[2] *= down
    with pytest.raises(UserError, match=rf"^layer 1 {kind}: expert 2, row \d+ of calibration sequence 0: the"):
        run_layer(tiny_weights.config, 1, w, entering)


def test_what_leaves_a_dense_layer(tiny_config, entering):
    config = tiny_config(sparse_layers=(False, True))
    w = jax.tree.map(np.array, init_weights(config, jax.random.key(0)).layers[0])
    assert run_layer(config, 0, w, entering) is None
    w.mlp.down_FD[:] = 3e38
    with pytest.raises(UserError, match=r"^layer 0 output: row \d+ of calibration sequence 0: the activations are"):
        run_layer(config, 0, w, entering)
