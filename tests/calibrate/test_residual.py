# SPDX-License-Identifier: Apache-2.0
"""The prompt residual's heads on sequences whose damage is known in closed form."""

from dataclasses import replace

import numpy as np
import pytest

from pagedweight_jax.calibrate import residual
from pagedweight_jax.calibrate.residual import (
    cross_fit,
    fit_heads,
    folds,
    merge_spans,
    predict,
    r_squared,
    residuals,
    ridge,
    text_means,
    whole_sequences,
)
from pagedweight_jax.calibrate.residual_policy import (
    SHARES,
    Halves,
    first_policy,
    foresight_report,
    lowered_by,
    planner_calibration,
    rank_correlation,
    usage_buckets,
)
from pagedweight_jax.calibrate.residual_report import draw_held_out, held_out_report
from pagedweight_jax.calibrate.sequences import SequenceStatistics
from pagedweight_jax.errors import UserError

L, E, U, R, SPAN = 2, 4, 2, 3, 64

BYTES_UQ = np.array([[300, 420, 560, 800], [200, 270, 350, 500]])
"""Of a block at 3 .. 6 bits."""


def synthetic(num_sequences=40, num_spans=4, power=2.0, noise=0.1, drift=0.0, seed=0):
    """Sequences whose damage is g times usage times (norm / its mean)^power times noise.

    Usage and norms are a sequence's own, and drift from span to span.
    """
    rng = np.random.default_rng(seed)
    N, Z = num_sequences, num_spans

    def own(sigma, *shape):
        return np.exp(
            rng.normal(0, sigma, (N, 1, L, E, *shape)) + drift * rng.normal(0, sigma, (N, Z, L, E, *shape))
        )

    mass_NZLE = 0.1 * rng.uniform(0.5, 2, (L, E)) * own(0.5)
    norm_NZLEU = rng.uniform(1, 3, (L, E, U)) * own(0.3, U)
    g_LEUR = 10.0 ** rng.uniform(-4, -2, (L, E, U, 1)) * 4.0 ** np.arange(R)
    x_NZLEU = np.log(norm_NZLEU / norm_NZLEU.mean(0))
    usage_NZLE = mass_NZLE / mass_NZLE.sum(-1, keepdims=True)
    usage_NZLE = usage_NZLE / usage_NZLE.mean((0, 1))
    log_NZLEUR = power * x_NZLEU[..., None] + noise * rng.standard_normal((N, Z, L, E, U, R))
    mass_NZLE1 = mass_NZLE[..., None]
    return SequenceStatistics(
        damage_NZLEUR=g_LEUR * usage_NZLE[..., None, None] * np.exp(log_NZLEUR),
        mass_NZLE=mass_NZLE,
        norm_NZLEU=mass_NZLE1 * norm_NZLEU,
        square_NZLEU=mass_NZLE1 * np.square(norm_NZLEU) * 1.21,
        max_NZLEU=2 * norm_NZLEU,
        tokens_NZLE=np.full((N, Z, L, E), 50, np.int32),
    ), g_LEUR


def test_ridge_is_least_squares_with_a_penalty():
    x_AX = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0], [4.0, 3.0]])
    y_A = np.array([1.0, 2.0, 2.0, 5.0])
    w_X, a = ridge(x_AX, y_A, penalty=0.0)
    solution = np.linalg.lstsq(np.c_[x_AX, np.ones(4)], y_A, rcond=None)[0]
    np.testing.assert_allclose([*w_X, a], solution, rtol=1e-10)

    sd_X = x_AX.std(0)
    rows = np.r_[np.c_[x_AX, np.ones(4)], np.c_[np.diag(np.sqrt(4 * 0.3) * sd_X), np.zeros(2)]]
    solution = np.linalg.lstsq(rows, np.r_[y_A, 0, 0], rcond=None)[0]
    w_X, a = ridge(x_AX, y_A, penalty=0.3)
    np.testing.assert_allclose([*w_X, a], solution, rtol=1e-10)
    assert abs(w_X).sum() < abs(np.linalg.lstsq(np.c_[x_AX, np.ones(4)], y_A, rcond=None)[0][:2]).sum()


def test_ridge_does_not_know_units_or_constants():
    x_AX = np.random.default_rng(0).standard_normal((20, 3))
    y_A = x_AX @ [1.0, -2.0, 0.5]
    w_X, a = ridge(x_AX, y_A)
    scaled_X, scaled_a = ridge(x_AX * [1e3, 1.0, 1e-3], y_A)
    np.testing.assert_allclose(scaled_X * [1e3, 1.0, 1e-3], w_X, rtol=1e-8)
    assert scaled_a == pytest.approx(a, abs=1e-12)
    w_X, a = ridge(np.ones((5, 2)), np.arange(5.0))
    np.testing.assert_allclose([*w_X, a], [0, 0, 2], atol=1e-12)


def test_the_heads_find_what_the_norms_do():
    statistics, g_LEUR = synthetic()
    heads, held_out = cross_fit(whole_sequences(statistics), g_LEUR)
    weight_URUX = heads.weight_URX.reshape(U, R, U, 3)
    own_URX, other_URX = (weight_URUX[[0, 1], :, kinds] for kinds in ([0, 1], [1, 0]))
    np.testing.assert_allclose(own_URX.sum(-1), 2.0, atol=0.1)  # the three norms move together
    np.testing.assert_allclose(other_URX.sum(-1), 0.0, atol=0.1)  # the other block's say nothing
    assert (heads.confidence_UR > 0.95).all()
    r2 = {name: r_squared(held_out.measured_NLEUR, array).min() for name, array in vars(held_out).items()}
    assert r2["by_damage_NLEUR"] < r2["by_usage_NLEUR"] < r2["by_prompt_NLEUR"]
    assert r2["by_prompt_NLEUR"] > 0.99


def test_heads_that_learn_nothing_have_no_confidence():
    statistics, g_LEUR = synthetic(power=0.0, noise=0.3)
    heads, held_out = cross_fit(whole_sequences(statistics), g_LEUR)
    assert (heads.confidence_UR < 0.02).all()
    np.testing.assert_allclose(held_out.by_prompt_NLEUR, held_out.by_usage_NLEUR, atol=0.02)
    shuffled, _ = synthetic(seed=1)
    statistics, g_LEUR = synthetic()
    foreign = replace(statistics, norm_NZLEU=shuffled.norm_NZLEU, square_NZLEU=shuffled.square_NZLEU)
    foreign = replace(foreign, max_NZLEU=shuffled.max_NZLEU)
    assert (cross_fit(whole_sequences(foreign), g_LEUR)[0].confidence_UR < 0.02).all()


def test_no_sequence_is_predicted_by_what_it_taught():
    statistics, g_LEUR = synthetic(num_sequences=10)
    whole = whole_sequences(statistics)
    _, held_out = cross_fit(whole, g_LEUR)
    for fitted, held in folds(10):
        assert not set(fitted) & set(held)
        means = text_means(whole.take(fitted), g_LEUR)
        np.testing.assert_array_equal(held_out.by_damage_NLEUR[held[0]], np.log(means.damage_LEUR))
        own = residuals(whole.take(held), means)
        np.testing.assert_allclose(held_out.measured_NLEUR[held], own.log_damage_NLEUR)
    assert sorted(n for _, held in folds(10) for n in held) == list(range(10))


def test_blocks_that_a_sequence_did_not_use_do_not_count():
    statistics, g_LEUR = synthetic()
    used = {name: array.copy() for name, array in vars(statistics).items()}
    for array in used.values():
        array[:5, :, 1, 2] = 0  # expert 2 of layer 1 in the first five
    whole = whole_sequences(SequenceStatistics(**used))
    heads, held_out = cross_fit(whole, g_LEUR)
    assert np.isnan(held_out.measured_NLEUR[:5, 1, 2]).all()
    assert np.isfinite(held_out.measured_NLEUR[5:]).all()
    assert np.isfinite(heads.weight_URX).all()
    kept = residuals(whole, text_means(whole, g_LEUR))
    rho = kept.rho_NLEUR[:, :, :, 0, 0]
    w_X, _ = ridge(kept.x_NLEX[np.isfinite(rho)], rho[np.isfinite(rho)])
    np.testing.assert_allclose(heads.weight_URX[0, 0], w_X)
    report = held_out_report(held_out, heads, 6)
    assert report[0]["examples"] == 40 * L * E - 5


def test_rare_experts_keep_the_damage_they_had():
    statistics, g_LEUR = synthetic(num_sequences=4)
    tokens_NZLE = statistics.tokens_NZLE.copy()
    tokens_NZLE[:, :, 0, 1] = 1
    whole = whole_sequences(replace(statistics, tokens_NZLE=tokens_NZLE))
    means = text_means(whole, -g_LEUR)
    np.testing.assert_array_equal(means.damage_LEUR[0, 1], -g_LEUR[0, 1])
    assert (np.delete(means.damage_LEUR.reshape(L * E, U, R), 1, axis=0) > 0).all()
    np.testing.assert_allclose(means.mass_LE.sum(-1), 1)


def test_predictions_are_clipped():
    statistics, g_LEUR = synthetic()
    examples = residuals(whole_sequences(statistics), text_means(whole_sequences(statistics), g_LEUR))
    heads = fit_heads(examples)
    far = predict(heads, 100 * examples.x_NLEX)
    np.testing.assert_array_equal(far.max((0, 1, 2)), heads.high_UR)
    np.testing.assert_array_equal(far.min((0, 1, 2)), heads.low_UR)
    assert (heads.low_UR < 0).all()
    assert (heads.high_UR > 0).all()


def test_spans_merge_as_their_tokens_would():
    statistics, _ = synthetic(drift=0.5)
    merged = merge_spans(statistics, 1, 3)
    np.testing.assert_allclose(merged.damage_NZLEUR[:, 0], statistics.damage_NZLEUR[:, 1:3].mean(1))
    np.testing.assert_array_equal(merged.max_NZLEU[:, 0], statistics.max_NZLEU[:, 1:3].max(1))
    assert (merged.tokens_NZLE == 100).all()


def test_buckets_follow_the_usage():
    policy = usage_buckets()
    relative = np.exp(np.random.default_rng(0).uniform(np.log(1 / 16), np.log(16), 1000))
    multiplier = np.array(policy.multipliers)[np.searchsorted(policy.edges, relative, side="right")]
    assert np.abs(np.log2(multiplier / relative)).max() <= 1 / 8 + 1e-9
    assert policy.multipliers[len(policy.multipliers) // 2] == 1


def halves_of(statistics, g_LEUR):
    heads, _ = cross_fit(whole_sequences(statistics), g_LEUR)
    return Halves.of(statistics, SPAN, g_LEUR, heads, BYTES_UQ, max_bits=6)


def exchanged(statistics, seed=3):
    """The same sequences, but for their second halves, which are other sequences'."""
    order_N = np.random.default_rng(seed).permutation(len(statistics))
    arrays = {name: array.copy() for name, array in vars(statistics).items()}
    for array in arrays.values():
        array[:, 2:] = array[order_N, 2:]
    return SequenceStatistics(**arrays)


def test_what_lasts_is_used_and_what_does_not_is_not():
    statistics, g_LEUR = synthetic(power=0.5, noise=0.05)
    lasting, fleeting = halves_of(statistics, g_LEUR), halves_of(exchanged(statistics), g_LEUR)
    policy = first_policy(lasting)
    assert policy.prior_tokens <= 64
    report = foresight_report(lasting, policy)
    assert report["tokens_before"] == 2 * SPAN
    assert report["cost"]["g"] == [1, 1, 1]
    assert max(report["cost"]["routing"]) < 0.97
    assert np.mean(report["cost"]["prompt"]) < np.mean(report["cost"]["routing"])
    assert report["error"]["g"] > report["error"]["routing"] > report["error"]["prompt"]
    assert report["spearman"]["g"] < report["spearman"]["routing"] < report["spearman"]["prompt"]

    assert first_policy(fleeting).prior_tokens == 1024
    assert np.mean(foresight_report(fleeting, policy)["cost"]["routing"]) > 1


def test_a_cost_is_what_the_lowered_blocks_suffer():
    statistics, g_LEUR = synthetic(num_sequences=4)
    halves = halves_of(statistics, g_LEUR)
    policy = usage_buckets()
    releasable_bytes = L * E * (BYTES_UQ[:, -1] - BYTES_UQ[:, 0]).sum()
    expected = np.zeros((4, len(SHARES)))
    for n, t in np.ndindex(expected.shape):
        calibration = planner_calibration(halves.means_N[n], halves.heads, policy, 6)
        target_bytes = int(SHARES[t] * releasable_bytes)
        lost_LEU = lowered_by(calibration, halves.signals_N[n], BYTES_UQ, target_bytes)
        released_bytes = 0
        for (layer, e, u), lost in np.ndenumerate(lost_LEU):
            released_bytes += BYTES_UQ[u, R] - BYTES_UQ[u, R - lost]
            expected[n, t] += statistics.damage_NZLEUR[n, 2:, layer, e, u, :lost].mean(0).sum()
        assert target_bytes <= released_bytes < target_bytes + BYTES_UQ.max()
    np.testing.assert_allclose(halves.costs(policy), expected.mean(0))


def test_a_policy_that_releases_too_little_costs_everything():
    statistics, g_LEUR = synthetic(num_sequences=4)
    halves = halves_of(statistics, g_LEUR)
    strict = replace(usage_buckets(), floors=(5,) * 33)
    assert np.isinf(halves.costs(strict)[-1])
    assert np.isfinite(halves.costs(replace(strict, stages=(0, 2)))).all()


def test_a_sequence_is_judged_by_the_means_of_the_others_and_the_heads_of_all():
    statistics, g_LEUR = synthetic(num_sequences=10)
    halves = halves_of(statistics, g_LEUR)
    whole = whole_sequences(statistics)
    of_all, seen = text_means(whole, g_LEUR), []
    for fitted, held in folds(10):
        means = text_means(whole.take(fitted), g_LEUR)
        for n in held:
            seen.append(n)
            for name, array in vars(means).items():
                np.testing.assert_array_equal(getattr(halves.means_N[n], name), array)
                assert (array != getattr(of_all, name)).any()
    assert sorted(seen) == list(range(10))
    heads, _ = cross_fit(whole, g_LEUR)
    np.testing.assert_array_equal(halves.heads.weight_URX, heads.weight_URX)


def test_too_little_is_said():
    statistics, g_LEUR = synthetic(num_sequences=1)
    with pytest.raises(UserError, match="need 2 samples at least"):
        cross_fit(whole_sequences(statistics), g_LEUR)
    empty = SequenceStatistics(**{name: np.zeros_like(array) for name, array in vars(synthetic()[0]).items()})
    with np.errstate(invalid="ignore"), pytest.raises(UserError, match="uses too few experts"):
        cross_fit(whole_sequences(empty), g_LEUR)


def test_rank_correlation():
    one = np.array([1.0, 5.0, 3.0, 2.0])
    assert rank_correlation(one, np.exp(one)) == pytest.approx(1)
    assert rank_correlation(one, -one) == pytest.approx(-1)
    assert rank_correlation(one, np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(0.2)
    assert np.isnan(rank_correlation(one[:1], one[:1]))


def test_the_figure_is_drawn(tmp_path):
    statistics, g_LEUR = synthetic(num_sequences=6)
    _, held_out = cross_fit(whole_sequences(statistics), g_LEUR)
    draw_held_out(tmp_path / "fit.png", held_out, "Six sequences")
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


def test_folds_do_not_depend_on_anything_else():
    assert residual.FOLDS == 5
    first, second = list(folds(7)), list(folds(7))
    for (fitted, held), (other_fitted, other_held) in zip(first, second, strict=True):
        np.testing.assert_array_equal(fitted, other_fitted)
        np.testing.assert_array_equal(held, other_held)
    assert len(list(folds(3))) == 3
