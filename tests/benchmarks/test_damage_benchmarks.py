# SPDX-License-Identifier: Apache-2.0
"""What is measured of a block is what the whole model does with that block lowered; and the figures, by hand."""

import damage_check
import damage_domains
import jax
import numpy as np
import pytest
from damage_model import Model
from damage_states import Scorer

from pagedweight_jax.config import DOWN, GATE_UP
from pagedweight_jax.models.weights import init_weights

pytestmark = pytest.mark.usefixtures("compile_in_a_hurry")

WIDTHS = (3, 4, 5)


@pytest.fixture(scope="module")
def model(tiny_config):
    """The tiny model, whose weights err by 10 % at 3 bits, 3 % at 4 and 1 % at 5."""
    weights, rng = init_weights(tiny_config(), jax.random.key(0)), np.random.default_rng(0)

    def noisy(w_ENC, share):
        w_ENC = np.asarray(w_ENC)
        return w_ENC + share * w_ENC.std() * rng.standard_normal(w_ENC.shape, np.float32)

    def at(share):
        experts = [layer.mlp.experts for layer in weights.layers]
        return [(noisy(e.gate_up_ENC, share), noisy(e.down_ENC, share)) for e in experts]

    return Model(weights=weights, quantized=dict(zip(WIDTHS, map(at, (0.1, 0.03, 0.01)))))


@pytest.fixture(scope="module")
def windows(tiny_config):
    return np.random.default_rng(1).integers(0, tiny_config().vocab_size, (2, 32), np.int32)


ONE_BLOCK = [(0, 1, GATE_UP, 3), (0, 2, DOWN, 4), (1, 0, GATE_UP, 4), (1, 3, DOWN, 3)]


def test_a_lowered_block_costs_what_the_model_with_it_costs(model, windows):
    scorer = Scorer.on(model, windows)
    experts = np.arange(4)
    score_LEUQ2 = scorer.single_blocks(experts)
    full = scorer.state(scorer.full())
    assert 0 < full[0] < 0.01
    np.testing.assert_array_equal(score_LEUQ2[..., -1, :], np.broadcast_to(full, score_LEUQ2[..., -1, :].shape))
    for layer, expert, kind, bits in ONE_BLOCK:
        bits_LEU = scorer.full()
        bits_LEU[layer, expert, kind] = bits
        score = score_LEUQ2[layer, expert, kind, WIDTHS.index(bits)]
        np.testing.assert_allclose(score, scorer.state(bits_LEU), rtol=1e-4, atol=1e-7)
        assert abs(score[0] - full[0]) > 1e-6  # not one that was left as it is


def test_text_by_text_a_step_costs_the_difference_of_two_models(model, windows):
    rise = damage_domains.measure(model, windows, np.arange(4))
    reference_BTV, _ = damage_domains._trace(model.weights, windows)
    full_LEU = np.full((2, 4, 2), 5, np.uint8)

    def kl_BH(bits_LEU):
        logp_BTV, _ = damage_domains._trace(model.at(bits_LEU), windows)
        return np.asarray(damage_domains._kl_by_half(logp_BTV, reference_BTV), np.float64)

    for layer, expert, kind, bits in ONE_BLOCK:
        high_LEU, low_LEU = full_LEU.copy(), full_LEU.copy()
        high_LEU[layer, expert, kind], low_LEU[layer, expert, kind] = bits + 1, bits
        expected_BH = kl_BH(low_LEU) - kl_BH(high_LEU)
        np.testing.assert_allclose(rise[:, :, layer, expert, kind, 4 - bits], expected_BH, rtol=1e-3, atol=1e-7)


def test_the_predicted_damage_of_a_state_by_hand():
    s_LEUQ = np.array([[[[10.0, 4.0, 1.0], [7.0, 3.0, 2.0]]]])
    assert damage_check.of_state(s_LEUQ, np.array([[[3, 4]]], np.uint8), 3) == (10 - 1) + (3 - 2)
    assert damage_check.of_state(s_LEUQ, np.array([[[5, 5]]], np.uint8), 3) == 0


def test_scales_fit_the_rises_of_whole_layers(model):
    """Two experts cost 1 + 3 by the proxy and 8 as measured: what it says is doubled, at every width."""
    s_LEUQ = np.array([[[[4.0, 1.0, 0.0], [2.0, 1.0, 0.0]], [[9.0, 3.0, 0.0], [2.0, 1.0, 0.0]]]])
    scaled_LEUQ = damage_check.fitted(model, s_LEUQ, np.array([[8.0, 1.0]]))
    np.testing.assert_array_equal(scaled_LEUQ[:, :, 0], 2 * s_LEUQ[:, :, 0])
    np.testing.assert_array_equal(scaled_LEUQ[:, :, 1], 0.5 * s_LEUQ[:, :, 1])


def test_rank_correlations_over_all_and_by_part():
    rise_LEUR = np.arange(1.0, 17.0).reshape(2, 2, 2, 2)
    found = damage_check.rank_correlations(np.exp(rise_LEUR), rise_LEUR, 3)
    assert found == {
        "overall": 1.0, "layer": [1.0, 1.0], "kind": {"gate_up": 1.0, "down": 1.0}, "step": {"4->3": 1.0, "5->4": 1.0}
    }  # fmt: skip
    turned_LEUR = rise_LEUR.copy()
    turned_LEUR[1] *= -1
    found = damage_check.rank_correlations(turned_LEUR, rise_LEUR, 3)
    assert found["layer"] == [1.0, -1.0]
    assert found["overall"] < 0.5
    assert damage_domains.correlations(turned_LEUR, rise_LEUR)["layers"] == [1.0, -1.0]


def test_bundles_are_the_same_every_time_and_lower_some_blocks():
    full_LEU = np.full((2, 4, 2), 6, np.uint8)
    bundles = damage_check.random_bundles(full_LEU, 3, 20)
    for one, again in zip(bundles, damage_check.random_bundles(full_LEU, 3, 20), strict=True):
        np.testing.assert_array_equal(one, again)
    lowered = [(bits_LEU < 6).mean() for bits_LEU in bundles]
    assert min(bits_LEU.min() for bits_LEU in bundles) == 3
    assert 0 < np.mean(lowered) < 0.5
    assert max(bits_LEU.max() for bits_LEU in bundles) == 6
