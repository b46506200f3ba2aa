# SPDX-License-Identifier: Apache-2.0
"""KL divergence from remembered hidden states is that of the full distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.evaluate import divergence as module
from pagedweight_jax.evaluate.divergence import divergence, reference
from pagedweight_jax.models import transformer
from pagedweight_jax.models.weights import MoEWeights, init_weights


@pytest.fixture(scope="module")
def windows():
    return np.random.default_rng(0).integers(0, 128, (2, 23)).astype(np.int32)


@pytest.fixture(scope="module")
def other_weights(tiny_config):
    return init_weights(tiny_config(), jax.random.key(1))


def log_softmax(weights, tokens_T):
    logits_TV = np.asarray(transformer.dense_forward(weights, jnp.asarray(tokens_T)), np.float64)[:-1]
    return logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))


def test_divergence_is_that_of_the_distributions(tiny_weights, other_weights, windows, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_TOKENS", 8)  # 22 tokens are two chunks and a part of a third
    seen = []
    ref = reference(tiny_weights, windows, lambda done, total: seen.append((done, total)))
    theirs = reference(other_weights, windows)
    for window, tokens_T in enumerate(windows):
        logp_TV, logq_TV = log_softmax(tiny_weights, tokens_T), log_softmax(other_weights, tokens_T)
        expected_T = (np.exp(logp_TV) * (logp_TV - logq_TV)).sum(-1)
        kl_T = divergence(ref, window, other_weights, theirs.hidden_WTD[window])
        np.testing.assert_allclose(kl_T, expected_T, rtol=1e-4, atol=1e-6)
        assert kl_T.shape == (22,)
        assert kl_T.min() > 1e-4
    assert seen == [(0, 44), (22, 44), (44, 44)]


def test_a_model_does_not_diverge_from_itself(tiny_weights, windows):
    ref = reference(tiny_weights, windows)
    assert np.abs(divergence(ref, 1, tiny_weights, ref.hidden_WTD[1])).max() < 1e-6
    assert divergence(ref, 1, tiny_weights, ref.hidden_WTD[0]).max() > 1e-3  # of another window


def test_the_reference_keeps_no_experts(tiny_weights, windows):
    ref = reference(tiny_weights, windows)
    assert ref.hidden_WTD.shape == (2, 22, 64)
    assert ref.hidden_WTD.dtype == np.float32
    assert all(layer.mlp.experts is None for layer in ref.weights.layers if isinstance(layer.mlp, MoEWeights))
