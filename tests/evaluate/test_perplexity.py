# SPDX-License-Identifier: Apache-2.0
"""The protocol of perplexity, and that an engine and plain dense code agree on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.errors import UserError
from pagedweight_jax.evaluate.perplexity import perplexity, score_dense, score_served, split_windows
from pagedweight_jax.models import transformer

FORWARD = jax.jit(transformer.dense_forward)


def test_windows_are_consecutive_and_the_tail_is_dropped():
    windows = split_windows(range(23), 5)
    np.testing.assert_array_equal(windows, np.arange(20).reshape(4, 5))
    np.testing.assert_array_equal(split_windows(range(23), 5, limit=2), windows[:2])
    np.testing.assert_array_equal(split_windows(range(23), 5, limit=9), windows)


@pytest.mark.parametrize(("tokens", "length", "limit"), [(4, 5, None), (4, 1, None), (4, 2, 0)])
def test_windows_that_cannot_be_are_refused(tokens, length, limit):
    with pytest.raises(UserError, match=r"perplexity: .*[0-9]"):
        split_windows(range(tokens), length, limit)


def test_perplexity_is_the_mean_over_windows_of_the_mean_per_window():
    result = perplexity(np.log([[0.5, 0.5, 0.5], [0.125, 0.125, 0.125]]))
    assert result.perplexity == pytest.approx(4.0, rel=1e-12)  # sqrt(2 * 8)
    assert (result.windows, result.window_tokens) == (2, 4)
    assert result.standard_error == pytest.approx(np.log(2), rel=1e-12)  # of {ln 2, ln 8}
    assert perplexity([[-1.0]]).standard_error == 0


@pytest.mark.parametrize("logprobs", [[[-1.0, float("nan")]], [[-1.0, -float("inf")]], [-1.0]])
def test_perplexity_refuses_what_is_no_log_probability(logprobs):
    with pytest.raises(ValueError, match="not all finite"):
        perplexity(logprobs)


def test_dense_scores_are_the_next_tokens(tiny_weights):
    windows = np.random.default_rng(0).integers(0, 128, (2, 16)).astype(np.int32)
    seen = []
    scores = score_dense(tiny_weights, windows, lambda done, total: seen.append((done, total)))
    assert scores.shape == (2, 15)
    logits_TV = np.asarray(FORWARD(tiny_weights, jnp.asarray(windows[1])), np.float64)
    for t in (0, 7, 14):
        expected = logits_TV[t, windows[1, t + 1]] - np.log(np.exp(logits_TV[t]).sum())
        assert scores[1, t] == pytest.approx(expected, abs=1e-5)
    assert seen == [(0, 30), (15, 30), (30, 30)]
    shuffled = score_dense(tiny_weights, windows[:, ::-1].copy())
    assert np.abs(shuffled - scores).max() > 0.1


class DenseServer:
    """What ``score_served`` asks of an engine, two rows at a time, over plain dense code."""

    def __init__(self, weights):
        self.weights, self.waiting = weights, []

    @property
    def has_work(self):
        return bool(self.waiting)

    def add_request(self, prompt, params):
        assert params is None
        self.waiting.append(type("Request", (), {"prompt": prompt, "logprobs": []})())
        return self.waiting[-1]

    def step(self):
        for request in self.waiting[:2]:
            logp_TV = np.asarray(jax.nn.log_softmax(FORWARD(self.weights, jnp.asarray(request.prompt))))
            request.logprobs += [logp_TV[t, token] for t, token in enumerate(request.prompt[1:])]
        self.waiting = self.waiting[2:]
        return []


def test_served_scores_come_in_the_order_of_the_windows(tiny_weights):
    windows = np.random.default_rng(1).integers(0, 128, (3, 16)).astype(np.int32)
    seen = []
    scores = score_served(DenseServer(tiny_weights), windows, lambda done, total: seen.append((done, total)))
    np.testing.assert_allclose(scores, score_dense(tiny_weights, windows), atol=1e-5)
    assert seen == [(30, 45), (45, 45)]
