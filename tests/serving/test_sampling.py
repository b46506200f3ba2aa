# SPDX-License-Identifier: Apache-2.0
"""Sampling: greedy, distribution, and independence of the batch."""

import jax.numpy as jnp
import numpy as np

from pagedweight_jax.serving.sampling import sample

LOGITS_V = jnp.array([0.0, 1.0, 2.0, -1.0])


def draw(count, temperature, seed=0, logits=LOGITS_V):
    rows = jnp.broadcast_to(logits, (count, logits.size))
    seeds, positions = jnp.full(count, seed, jnp.uint32), jnp.arange(count, dtype=jnp.int32)
    return np.asarray(sample(rows, jnp.full(count, temperature), seeds, positions))


def test_temperature_zero_is_the_argmax():
    assert np.all(draw(50, 0.0) == 2)


def test_frequencies_follow_the_softmax_at_the_temperature():
    for temperature in (0.7, 1.5):
        probabilities = np.exp(np.asarray(LOGITS_V, np.float64) / temperature)
        probabilities /= probabilities.sum()
        counts = np.bincount(draw(20_000, temperature), minlength=4)
        error = np.sqrt(probabilities * (1 - probabilities) / 20_000)
        assert np.all(np.abs(counts / 20_000 - probabilities) < 4 * error)
        wrong = np.roll(probabilities, 1)
        assert np.any(np.abs(counts / 20_000 - wrong) > 4 * error)


def test_a_draw_depends_on_seed_and_position_not_on_the_row():
    assert np.array_equal(draw(64, 1.0, seed=3), draw(64, 1.0, seed=3))
    assert not np.array_equal(draw(64, 1.0, seed=3), draw(64, 1.0, seed=4))
    logits = jnp.stack([LOGITS_V] * 3)
    alone = sample(logits[:1], jnp.ones(1), jnp.array([5], jnp.uint32), jnp.array([17]))
    among = sample(logits, jnp.array([0.0, 1.0, 2.0]), jnp.array([1, 5, 9], jnp.uint32), jnp.array([3, 17, 40]))
    assert int(alone[0]) == int(among[1])
