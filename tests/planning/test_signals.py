# SPDX-License-Identifier: Apache-2.0
"""Signals of requests by hand: forgetting, eq. 1, features, and how a batch is merged."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pagedweight_jax.planning import signals as signals_module
from pagedweight_jax.planning.observation import KVPressure, Observation
from pagedweight_jax.planning.signals import (
    FORGOTTEN,
    RequestSignals,
    batch_features,
    batch_mass,
    features,
    log_features,
    observe,
    request_weights,
)


def signals(mass, norm=None, square=None, largest=None, tokens=1.0):
    """Of one layer; down's inputs are 10 times gate_up's."""
    mass_LE = np.array([mass], float)
    by_kind = [
        np.stack([a, np.array(a) * k], axis=-1)[None]
        for a, k in ((norm or mass, 10.0), (square or mass, 100.0), (largest or mass, 10.0))
    ]
    return RequestSignals(
        mass_LE=mass_LE, norm_LEU=by_kind[0], square_LEU=by_kind[1], max_LEU=by_kind[2], tokens=tokens
    )


def test_observe_forgets_by_tokens():
    """Two tokens at a half-life of one: what was there counts a quarter; the maximum stays."""
    old = signals([4.0, 8.0], norm=[8.0, 16.0], square=[16.0, 64.0], largest=[3.0, 5.0], tokens=6.0)
    sums = signals([1.0, 0.0], norm=[2.0, 0.0], square=[5.0, 0.0], largest=[4.0, 0.0], tokens=0.0)
    new = observe(old, sums, tokens=2, half_life_tokens=1.0)
    np.testing.assert_array_equal(new.mass_LE, [[2.0, 2.0]])
    np.testing.assert_array_equal(new.norm_LEU, [[[4.0, 40.0], [4.0, 40.0]]])
    np.testing.assert_array_equal(new.square_LEU, [[[9.0, 900.0], [16.0, 1600.0]]])
    np.testing.assert_array_equal(new.max_LEU, [[[4.0, 40.0], [5.0, 50.0]]])
    assert new.tokens == 3.5
    np.testing.assert_array_equal(old.mass_LE, [[4.0, 8.0]])


def test_observe_in_one_call_or_two_is_the_same():
    a, b = signals([1.0, 2.0]), signals([3.0, 5.0])
    empty = RequestSignals.empty(1, 2)
    twice = observe(observe(empty, a, 4, math.inf), b, 3, math.inf)
    np.testing.assert_array_equal(twice.mass_LE, [[4.0, 7.0]])
    assert twice.tokens == 7
    nothing = observe(twice, RequestSignals.empty(1, 2), 0, 5.0)
    np.testing.assert_array_equal(nothing.mass_LE, twice.mass_LE)


def test_what_is_long_ago_is_no_feature_any_more():
    old = signals([1.0, 1.0])
    new = observe(old, signals([0.0, 1.0]), tokens=70, half_life_tokens=1.0)
    assert FORGOTTEN > 2.0**-70
    for array in (new.mass_LE, new.norm_LEU, new.square_LEU, new.max_LEU):
        assert (array[0, 0] == 0).all()
        assert (array[0, 1] > 0).all()


def test_sums_may_be_float32():
    sums = signals([1.0, 2.0])
    sums = replace(
        sums,
        **{name: getattr(sums, name).astype(np.float32) for name in ("mass_LE", "norm_LEU", "square_LEU", "max_LEU")},
    )
    assert observe(RequestSignals.empty(1, 2), sums, 1, 10.0).norm_LEU.dtype == np.float64


def test_features_by_hand():
    phi_LEUX = features(signals([2.0, 0.0], norm=[6.0, 0.0], square=[32.0, 0.0], largest=[5.0, 0.0]))
    np.testing.assert_array_equal(phi_LEUX[0, 0], [[3.0, 4.0, 5.0], [30.0, 40.0, 50.0]])
    assert np.isnan(phi_LEUX[0, 1]).all()


def test_request_weights_by_hand():
    """Shares 1/4 and 3/4; 100 tokens count half beside 100 of the calibration text, none count nothing."""
    np.testing.assert_array_equal(request_weights([1, 3], [100.0, 300.0], 100.0), [0.125, 0.5625])
    np.testing.assert_array_equal(request_weights([1, 3], [0.0, 300.0], 0.0), [0.0, 0.75])
    np.testing.assert_array_equal(request_weights([0, 0], [5.0, 5.0], 0.0), [0.0, 0.0])
    assert request_weights([], [], 100.0).shape == (0,)


def test_batch_mass_by_hand():
    """Eq. 1 of each request: (3/4, 1/4) and (0, 1); the calibration's (1/2, 1/2) has what is left of 1."""
    requests = (signals([3.0, 1.0]), signals([0.0, 7.0]))
    mass_LE = batch_mass(requests, np.array([0.5, 0.25]), np.array([[0.5, 0.5]]))
    np.testing.assert_allclose(mass_LE, [[0.5 * 0.75 + 0.25 * 0.5, 0.5 * 0.25 + 0.25 + 0.25 * 0.5]], rtol=1e-15)


def test_batch_mass_without_signals_is_the_calibrations():
    calibration_mass_LE = np.array([[0.25, 0.75]])
    np.testing.assert_array_equal(batch_mass((), np.zeros(0), calibration_mass_LE), calibration_mass_LE)
    silent = (RequestSignals.empty(1, 2),)
    np.testing.assert_array_equal(batch_mass(silent, np.ones(1), calibration_mass_LE), calibration_mass_LE)


def test_features_of_one_request_are_relative_to_the_calibrations():
    request = signals([2.0, 0.0], norm=[6.0, 0.0], square=[32.0, 0.0], largest=[5.0, 0.0])
    known_LEUX = np.array([[[[1.0, 2.0, 4.0], [30.0, 40.0, 50.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]]])
    x_XLEU, evidence_LEU = batch_features((request,), np.array([0.25]), log_features(known_LEUX))
    np.testing.assert_allclose(x_XLEU[:, 0, 0, 0], np.log([3.0, 2.0, 1.25]), rtol=1e-5)
    np.testing.assert_allclose(x_XLEU[:, 0, 0, 1], 0, atol=1e-5)
    np.testing.assert_array_equal(x_XLEU[:, 0, 1], 0)
    np.testing.assert_array_equal(evidence_LEU, [[[0.25, 0.25], [0.0, 0.0]]])
    np.testing.assert_allclose(np.exp(x_XLEU[:, 0, 0]).T * known_LEUX[0, 0], features(request)[0, 0], rtol=1e-5)


def test_features_are_averaged_over_the_requests_that_have_them():
    """The first expert is known from both requests, weights 0.25 and 0.5, the second from the last alone."""
    first = signals([1.0, 0.0], norm=[2.0, 0.0], square=[4.0, 0.0], largest=[2.0, 0.0])
    last = signals([1.0, 3.0], norm=[5.0, 6.0], square=[25.0, 27.0], largest=[5.0, 4.0])
    x_XLEU, evidence_LEU = batch_features((first, last), np.array([0.25, 0.5]), log_features(np.ones((1, 2, 2, 3))))
    np.testing.assert_array_equal(evidence_LEU[..., 0], [[0.75, 0.5]])
    np.testing.assert_allclose(x_XLEU[:, 0, 0, 0], [(math.log(2) + 2 * math.log(5)) / 3] * 3, rtol=1e-5)
    np.testing.assert_allclose(x_XLEU[:, 0, 1, 0], np.log([2.0, 3.0, 4.0]), rtol=1e-5)


def test_requests_merged_one_at_a_time_are_the_same(planning, monkeypatch):
    rng = np.random.default_rng(0)
    requests, weight_B = tuple(planning.make_signals(rng) for _ in range(5)), rng.random(5) / 5
    known_LEUX = rng.lognormal(size=(*planning.shape, 3))
    x_XLEU, evidence_LEU = batch_features(requests, weight_B, log_features(known_LEUX))
    for cached_floats in (1, 2 * x_XLEU[0].size):
        monkeypatch.setattr(signals_module, "CACHED_FLOATS", cached_floats)
        one_XLEU, one_LEU = batch_features(requests, weight_B, log_features(known_LEUX))
        np.testing.assert_allclose(one_XLEU, x_XLEU, atol=1e-5)
        np.testing.assert_allclose(one_LEU, evidence_LEU, rtol=1e-5)


def test_a_block_without_calibration_features_has_none():
    known_LEUX = np.ones((1, 1, 2, 3))
    known_LEUX[0, 0, 1, 2] = np.nan
    x_XLEU, evidence_LEU = batch_features((signals([2.0]),), np.ones(1), log_features(known_LEUX))
    np.testing.assert_array_equal(evidence_LEU, [[[1.0, 0.0]]])
    np.testing.assert_array_equal(x_XLEU[:, 0, 0, 1], 0)
    assert (x_XLEU[:, 0, 0, 0] != 0).any()


def test_an_observation_knows_the_blocks_of_every_request():
    kv = KVPressure(free_blocks=1, pending_blocks=0, releasing_blocks=0, block_bytes=1)
    with pytest.raises(ValueError, match="1 requests, KV blocks of 2"):
        Observation(boundary=0, kv=kv, requests=(signals([1.0]),), kv_blocks=(1, 2))
