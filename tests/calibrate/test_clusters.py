# SPDX-License-Identifier: Apache-2.0
"""One-dimensional clustering against definitions that share no code with it."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight_jax.calibrate import clusters

TIES = st.lists(st.tuples(st.integers(-6, 6), st.integers(1, 4)), min_size=1, max_size=9)


def run_error(w, h) -> float:
    """sum h (w - mean)^2 of one cluster, 0 if it is empty."""
    return float(h @ (w - h @ w / h.sum()) ** 2) if len(w) else 0.0


def error_of(w, h, borders) -> float:
    """The error of clusters that are runs of the sorted row."""
    order = np.argsort(w)
    return sum(run_error(w[order][s:e], h[order][s:e]) for s, e in pairwise(borders))


def brute_force(w, h, num_clusters) -> float:
    """Least error over all clusterings of the sorted row, empty clusters allowed."""
    inner = combinations(np.repeat(np.arange(len(w) + 1), num_clusters - 1), num_clusters - 1)
    return min(error_of(w, h, [0, *borders, len(w)]) for borders in set(inner) if list(borders) == sorted(borders))


def optimum(w, h, num_clusters) -> float:
    """Least error by the textbook O(K n^2) dynamic programme."""
    order = np.argsort(w)
    w, h = w[order] - np.average(w, weights=h), h[order]
    prefix = [np.concatenate([[0], np.cumsum(x)]) for x in (h, h * w, h * w * w)]
    M, S, Q = (x[None, :] - x[:, None] for x in prefix)
    valid = M > 0
    error = np.where(valid, Q - S**2 / np.where(valid, M, 1), np.where(np.eye(len(M), dtype=bool), 0, np.inf))
    best = error[0]
    for _ in range(num_clusters - 1):
        best = (best[:, None] + error).min(0)
    return best[-1]


def quantized_error(w_RC, h_RC, rows, borders):
    lut_RK = clusters.centroids(rows, borders)
    quantized_RC = np.take_along_axis(lut_RK, clusters.codes(rows, borders).astype(int), axis=1)
    return (h_RC * (w_RC - quantized_RC) ** 2).sum(1)


def random_rows(kind, num_rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    draw = {
        "gaussian": rng.standard_normal,
        "student_t3": lambda size: rng.standard_t(3, size),
        "outlier": lambda size: np.where(np.arange(size[1]) == 7, 100.0, rng.standard_normal(size)),
    }[kind]
    return draw((num_rows, columns)).astype(np.float32), rng.chisquare(1, (num_rows, columns)) + 1e-3


@settings(max_examples=60, deadline=None)
@given(row=TIES, num_clusters=st.sampled_from([2, 4]))
def test_seed_is_the_brute_force_optimum(row, num_clusters):
    w, h = np.array(row, np.float64).T
    rows = clusters.sort_rows(w[None], h[None])
    error = quantized_error(w[None], h[None], rows, clusters.seed(rows, num_clusters))[0]
    assert error == pytest.approx(brute_force(w, h, num_clusters), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("kind", ["gaussian", "student_t3", "outlier"])
@pytest.mark.parametrize("num_clusters", [2, 8, 16, 64])
def test_seed_is_optimal_up_to_32_distinct_values(kind, num_clusters):
    w_RC, h_RC = random_rows(kind, 20, 32)
    rows = clusters.sort_rows(w_RC, h_RC)
    error_R = quantized_error(w_RC, h_RC, rows, clusters.seed(rows, num_clusters))
    np.testing.assert_allclose(
        error_R, [optimum(w.astype(np.float64), h, num_clusters) for w, h in zip(w_RC, h_RC)], rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(("kind", "mean_excess"), [("gaussian", 1e-3), ("student_t3", 1e-3), ("outlier", 4e-3)])
def test_seed_is_near_the_optimum_on_long_rows(kind, mean_excess):
    w_RC, h_RC = random_rows(kind, 40, 320)
    rows = clusters.sort_rows(w_RC, h_RC)
    error_R = quantized_error(w_RC, h_RC, rows, clusters.seed(rows, 8))
    excess_R = error_R / [optimum(w.astype(np.float64), h, 8) for w, h in zip(w_RC, h_RC)] - 1
    assert excess_R.min() > -1e-9
    assert excess_R.mean() < mean_excess
    nested = np.tile([0, rows.mass_RI.shape[1] - 1], (40, 1))
    for _ in range(3):
        nested = clusters.split(rows, nested)
    assert (error_R < quantized_error(w_RC, h_RC, rows, nested)).all()  # the bound above is not loose for everything


@settings(max_examples=60, deadline=None)
@given(row=TIES, levels=st.integers(1, 4))
def test_every_cut_is_the_best_one(row, levels):
    w, h = np.array(row, np.float64).T
    rows = clusters.sort_rows(w[None], h[None])
    values = rows.value_RV[0]
    borders = np.array([[0, len(values)]])
    for _ in range(levels):
        children = clusters.split(rows, borders)
        np.testing.assert_array_equal(children[:, ::2], borders)
        for start, cut, end in zip(borders[0, :-1], children[0, 1::2], borders[0, 1:]):
            member = np.isin(w, values[start:end])

            def cut_error(at, start=start, end=end):
                left, right = np.isin(w, values[start:at]), np.isin(w, values[at:end])
                return run_error(w[left], h[left]) + run_error(w[right], h[right])

            best = min([cut_error(at) for at in range(start, end + 1)])
            assert cut_error(cut) == pytest.approx(best, rel=1e-12, abs=1e-12)
            if end - start < 2:
                assert cut == end, "a cluster that cannot be cut keeps its values left"
            else:
                assert start < cut < end
                assert cut_error(cut) < run_error(w[member], h[member])
        borders = children


def test_cuts_do_not_move_when_rows_of_other_lengths_are_beside_them():
    w_RC, h_RC = random_rows("gaussian", 6, 50)
    w_RC[1] = 3.0
    w_RC[2, 5:] = w_RC[2, 0]
    w_RC[3] = np.round(w_RC[3])

    def levels(w, h):
        rows = clusters.sort_rows(w, h)
        borders = clusters.seed(rows, 4)
        for _ in range(3):
            yield clusters.centroids(rows, borders), clusters.codes(rows, borders)
            borders = clusters.split(rows, borders)

    together = list(levels(w_RC, h_RC))
    for r in range(len(w_RC)):
        for (lut_RK, codes_RC), (lut_1K, codes_1C) in zip(together, levels(w_RC[r : r + 1], h_RC[r : r + 1])):
            np.testing.assert_array_equal(codes_RC[r], codes_1C[0])
            np.testing.assert_allclose(lut_RK[r], lut_1K[0], rtol=1e-13)


def test_an_empty_cluster_repeats_its_neighbours_centroid():
    rows = clusters.sort_rows(np.array([[1.0, 2.0]]), np.ones((1, 2)))
    np.testing.assert_array_equal(clusters.centroids(rows, np.array([[0, 0, 1, 1, 2, 2]])), [[1, 1, 1, 2, 2]])


def test_means_survive_a_large_offset():
    """Prefix sums are taken about the row's mean: without that this row would lose every digit of its spread."""
    w_RC = np.array([[1e8 + 8 * i for i in range(8)]], np.float64)
    rows = clusters.sort_rows(w_RC, np.ones((1, 8)))
    np.testing.assert_allclose(clusters.centroids(rows, clusters.seed(rows, 8)), w_RC, rtol=1e-15)
