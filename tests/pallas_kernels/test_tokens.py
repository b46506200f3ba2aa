# SPDX-License-Identifier: Apache-2.0
"""A step's beginning and end: draws, their noise, what rows become; the kernels give what the definition does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense.columns import Cut
from pallas_kernels.tokens import noise, pallas_triton, reference
from pallas_kernels.tokens.api import Rows, advance, best_of_blocks, choose, read_tokens

LOGITS_V = jnp.array([0.0, 1.0, 2.0, -1.0])
CUT = Cut(columns=16, depth=16, num_warps=1, num_stages=1)


def draw(count, temperature, seed=0):
    rows = jnp.broadcast_to(LOGITS_V, (count, LOGITS_V.size))
    of_rows = jnp.full(count, temperature), jnp.full(count, seed, jnp.uint32), jnp.arange(count, dtype=jnp.int32)
    return np.asarray(choose(*reference.best(reference.scores(rows, *of_rows))))


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
    of_rows = jnp.array([0.0, 1.0, 2.0]), jnp.array([1, 5, 9], jnp.uint32), jnp.array([3, 17, 40])
    alone = reference.scores(logits[:1], jnp.ones(1), jnp.array([5], jnp.uint32), jnp.array([17]))
    np.testing.assert_array_equal(alone[0], reference.scores(logits, *of_rows)[1])


def test_noise_is_what_jax_draws():
    seeds, numbers = jnp.array([0, 7, 2**32 - 1], jnp.uint32), jnp.array([1, 4095, 12], jnp.int32)
    drawn = noise.gumbel(seeds[:, None], numbers[:, None], jnp.arange(5000)[None])
    for row, seed, number in zip(drawn, seeds, numbers, strict=True):
        expected = jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), number), (5000,), jnp.float32)
        np.testing.assert_array_equal(row, expected)
    assert not np.array_equal(drawn[0], drawn[1])


def test_ranks_are_in_the_order_of_the_numbers():
    x = np.array([-np.inf, -3e38, -1.0, -1e-30, 0.0, 1e-30, 1.0, 3e38, np.inf, np.nan], np.float32)
    ranks = np.asarray(reference.rank(jnp.asarray(x)))
    assert np.all(np.diff(ranks.astype(np.int64)) > 0)
    assert int(reference.rank(jnp.float32(-0.0))) == int(reference.rank(jnp.float32(0.0)))
    assert int(reference.rank(-jnp.float32(np.nan))) == ranks[-1]


def head_case(num_tokens, vocab=77, width=32):
    """Returns (x, head, logits): the rows x pick logits out of a table of small integers, many of them equal."""
    table = np.random.default_rng(3).integers(-6, 7, (width, vocab)).astype(np.float32)
    return jnp.eye(num_tokens, width), jnp.asarray(table), table[:num_tokens]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_the_kernel_draws_what_the_definition_draws(num_tokens, transposed):
    x, head, logits = head_case(num_tokens)
    stored = head.T if transposed else head
    warm = jnp.asarray(np.resize([0.0, 0.8, 0.0, 1.7], num_tokens), jnp.float32)
    of_rows = jnp.arange(num_tokens, dtype=jnp.uint32) + 9, jnp.arange(num_tokens) - 1
    for temperature in (warm, jnp.zeros(num_tokens)):
        args = x, stored, transposed, temperature, *of_rows
        ranks, tokens = pallas_triton.best_of_blocks(*args, cut=CUT, interpret=True)
        assert ranks.shape == tokens.shape == (num_tokens, 5)
        drawn, greedy = np.asarray(choose(ranks, tokens)), np.asarray(temperature) == 0
        np.testing.assert_array_equal(drawn, choose(*reference.best_of_blocks(*args)))
        np.testing.assert_array_equal(drawn[greedy], logits.argmax(axis=1)[greedy])
    assert not np.array_equal(choose(ranks, jnp.roll(tokens, 1, axis=1)), logits.argmax(axis=1))  # negative control


def test_the_first_nan_is_drawn_as_argmax_draws_it():
    logits = jnp.array([[1.0, 5.0, jnp.nan, 7.0] * 12]).at[0, 1].set(-jnp.nan)
    of_row = jnp.zeros(1), jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32)
    found = pallas_triton.best_of_blocks(jnp.ones((1, 1)), logits, False, *of_row, cut=CUT, interpret=True)
    assert int(choose(*found)[0]) == int(jnp.argmax(logits)) == 1
    assert int(choose(*reference.best_of_blocks(jnp.ones((1, 1)), logits, False, *of_row))[0]) == 1


def rows_case():
    """Returns (ranks, tokens, rows, stop ids): of rows that go on, end by themselves, by a stop id, and are idle."""
    ranks = jnp.array([[3, 9, 9], [1, 0, -5], [2, 2, 2], [5, 6, 7]])
    tokens = jnp.array([[4, 17, 30], [8, 18, 31], [1, 19, 32], [2, 20, 33]])
    lengths, remaining = jnp.array([10, 20, 30, 40]), jnp.array([5, 1, 4, 0])
    rows = Rows(jnp.array([6, 6, 6, 6]), jnp.where(remaining > 0, lengths, -1), lengths, remaining)
    return ranks, tokens, rows, jnp.array([[-1, -1], [-1, -1], [7, 1], [33, -1]])


@pytest.mark.parametrize("run", [advance, lambda *args: pallas_triton.advance(*args, interpret=True)])
def test_rows_after_a_step(run):
    *drawn, rows, stop_ids = rows_case()
    after, tokens_NB = run(*drawn, rows, stop_ids, jnp.full((3, 4), 99), jnp.int32(1))
    after = Rows(*after)
    assert tokens_NB.tolist() == [[99] * 4, [17, 8, 1, -1], [99] * 4]
    assert after.last_tokens_B.tolist() == [17, 8, 1, 6]
    assert after.lengths_B.tolist() == [11, 21, 31, 40]
    assert after.remaining_B.tolist() == [4, 0, 0, 0]
    assert after.positions_B.tolist() == [11, -1, -1, -1]


def test_rows_of_tokens():
    rng = np.random.default_rng(0)
    embed, norm = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((50, 40), (40,)))
    args = jnp.array([3, 49, 0]), jnp.array([0, 4000, 17]), embed, norm, 1e-6, jnp.asarray(rng.random(6), jnp.float32)
    found, expected = pallas_triton.read_tokens(*args, interpret=True), read_tokens(*args)
    np.testing.assert_array_equal(found[0], embed[args[0]])
    for out, ref in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(ref, np.float32), rtol=1e-2, atol=1e-6)
    assert not np.allclose(found[2], jnp.roll(expected[2], 1, axis=0))
    assert np.all(read_tokens(args[0], jnp.array([-1, -1, -1]), *args[2:])[2] == 1)


def test_what_does_not_fit_is_refused():
    x, head, _ = head_case(2)
    of_rows = jnp.zeros(2), jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"head \(77, 32\), transposed False"):
        best_of_blocks(x, head.T, *of_rows)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        best_of_blocks(x, head, jnp.zeros(3), *of_rows[1:])
    with pytest.raises(ValueError, match="'cuda' is not one of"):
        best_of_blocks(x, head, *of_rows, implementation="cuda")
    with pytest.raises(ValueError, match=r"\(2,\), \(3,\)"):
        read_tokens(jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.int32), head, head[0], 1e-6, jnp.ones(4))
    ranks, tokens, rows, stop_ids = rows_case()
    with pytest.raises(ValueError, match=r"\(4, 3\), \(3, 3\)"):
        advance(ranks, tokens[:3], rows, stop_ids, jnp.zeros((1, 4), jnp.int32), jnp.int32(0))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 16])
def test_compiled_draws_are_the_definition_s(num_tokens):
    """Of bfloat16 rows and head, whose products are exact: logits differ by the order of sums alone."""
    keys = jax.random.split(jax.random.key(num_tokens), 2)
    x = jax.random.normal(keys[0], (num_tokens, 2048), jnp.bfloat16)
    head = jax.random.normal(keys[1], (2048, 151_936), jnp.bfloat16) * jnp.bfloat16(2048**-0.5)
    of_rows = jnp.arange(num_tokens, dtype=jnp.uint32), jnp.full(num_tokens, 2048)
    for temperature in (0.0, 1.0):
        args = x, head, jnp.full(num_tokens, temperature), *of_rows
        found, expected = (
            choose(*jax.jit(lambda *args, name=name: best_of_blocks(*args, implementation=name))(*args))
            for name in ("triton", "xla")
        )
        np.testing.assert_array_equal(found, expected)
