# SPDX-License-Identifier: Apache-2.0
"""One-dimensional clustering against definitions that share no code with it."""

from itertools import combinations, pairwise

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight_jax.calibrate import clusters
from pagedweight_jax.calibrate.clusters import Clustering
from pagedweight_jax.calibrate.rows_jax import JaxRows
from pagedweight_jax.calibrate.rows_numpy import NumpyRows

OPS = NumpyRows()
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


def quantized_error(w_RC, h_C, rows, clustering):
    lut_RK = clusters.centroids(OPS, rows, clustering)
    quantized_RC = np.take_along_axis(lut_RK, OPS.codes(rows, clustering.borders).astype(int), axis=1)
    return (h_C * (w_RC - quantized_RC) ** 2).sum(1)


def whole(rows) -> Clustering:
    """One cluster a row."""
    return clusters._clustering(OPS, rows, np.tile([0, rows.value_RC.shape[1]], (len(rows.value_RC), 1)))


def random_rows(kind, num_rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    draw = {
        "gaussian": rng.standard_normal,
        "student_t3": lambda size: rng.standard_t(3, size),
        "outlier": lambda size: np.where(np.arange(size[1]) == 7, 100.0, rng.standard_normal(size)),
    }[kind]
    return draw((num_rows, columns)).astype(np.float32), rng.chisquare(1, columns) + 1e-3


@settings(max_examples=60, deadline=None)
@given(row=TIES, num_clusters=st.sampled_from([2, 4]))
def test_seed_is_the_brute_force_optimum(row, num_clusters):
    w, h = np.array(row, np.float64).T
    rows = OPS.sort(w[None].astype(np.float32), h)
    error = quantized_error(w[None], h, rows, clusters.seed(OPS, rows, num_clusters))[0]
    assert error == pytest.approx(brute_force(w, h, num_clusters), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("kind", ["gaussian", "student_t3", "outlier"])
@pytest.mark.parametrize("num_clusters", [2, 8, 16, 64])
@pytest.mark.parametrize("columns", [32, 47, 94])
def test_seed_is_optimal_for_fewer_than_48_distinct_values(kind, num_clusters, columns):
    w_RC, h_C = random_rows(kind, 12, columns)
    if columns > 47:
        w_RC[:, 47:] = w_RC[:, :47]  # every value twice
    rows = OPS.sort(w_RC, h_C)
    assert (rows.distinct_R == min(columns, 47)).all()
    error_R = quantized_error(w_RC, h_C, rows, clusters.seed(OPS, rows, num_clusters))
    np.testing.assert_allclose(
        error_R, [optimum(w.astype(np.float64), h_C, num_clusters) for w in w_RC], rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(("kind", "mean_excess"), [("gaussian", 1e-3), ("student_t3", 1e-3), ("outlier", 4e-3)])
def test_seed_is_near_the_optimum_on_long_rows(kind, mean_excess):
    w_RC, h_C = random_rows(kind, 40, 320)
    rows = OPS.sort(w_RC, h_C)
    error_R = quantized_error(w_RC, h_C, rows, clusters.seed(OPS, rows, 8))
    excess_R = error_R / [optimum(w.astype(np.float64), h_C, 8) for w in w_RC] - 1
    assert excess_R.min() > -1e-9
    assert excess_R.mean() < mean_excess
    nested = whole(rows)
    for _ in range(3):
        nested = clusters.split(OPS, rows, nested)
    assert (error_R < quantized_error(w_RC, h_C, rows, nested)).all()  # the bound above is not loose for everything


@settings(max_examples=60, deadline=None)
@given(row=TIES, levels=st.integers(1, 4))
def test_every_cut_is_the_best_one(row, levels):
    w, h = np.array(row, np.float64).T
    rows = OPS.sort(w[None].astype(np.float32), h)
    clustering = whole(rows)
    order = np.argsort(w, kind="stable")
    w, h = w[order], h[order]
    for _ in range(levels):
        children = clusters.split(OPS, rows, clustering)
        np.testing.assert_array_equal(children.borders[:, ::2], clustering.borders)
        for start, cut, end in zip(clustering.borders[0, :-1], children.borders[0, 1::2], clustering.borders[0, 1:]):

            def cut_error(at, start=start, end=end):
                return run_error(w[start:at], h[start:at]) + run_error(w[at:end], h[at:end])

            best = min([cut_error(at) for at in range(start, end + 1)])
            assert cut_error(cut) == pytest.approx(best, rel=1e-12, abs=1e-12)
            if len(set(w[start:end])) < 2:
                assert cut == end, "a cluster that cannot be cut keeps its values left"
            else:
                assert start < cut < end
                assert w[cut - 1] < w[cut], "equal weights stay together"
                assert cut_error(cut) < run_error(w[start:end], h[start:end])
        clustering = children


def test_cuts_do_not_move_when_rows_of_other_kinds_are_beside_them():
    w_RC, h_C = random_rows("gaussian", 6, 50)
    w_RC[1] = 3.0
    w_RC[2, 5:] = w_RC[2, 0]
    w_RC[3] = np.round(w_RC[3])

    def levels(w):
        return clusters.quantize_rows(OPS, w, h_C, 2, 5)

    codes_RC, luts = levels(w_RC)
    for r in range(len(w_RC)):
        codes_1C, luts_1 = levels(w_RC[r : r + 1])
        np.testing.assert_array_equal(codes_RC[r], codes_1C[0])
        for lut_RK, lut_1K in zip(luts, luts_1):
            np.testing.assert_array_equal(lut_RK[r], lut_1K[0])


def check_sorted(w_RC):
    """Zeros of both signs are equal, as to numpy."""
    R, C = w_RC.shape
    order_RC = np.argsort(w_RC, axis=1, kind="stable")
    rows = OPS.sort(w_RC, np.ones(C))
    np.testing.assert_array_equal(rows.order_RC - C * np.arange(R)[:, None], order_RC)
    np.testing.assert_array_equal(rows.value_RC, np.take_along_axis(w_RC, order_RC, axis=1))


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("columns", [1, 2, 33, 1408])
def test_rows_are_sorted_with_equal_weights_in_column_order(columns, spread):
    """However many of the weights' leading bits are equal."""
    w_RC = (1 + spread * np.random.default_rng(0).standard_normal((40, columns))).astype(np.float32)
    w_RC[::3] *= -1
    w_RC[5] = np.round(w_RC[5])
    check_sorted(w_RC)


@pytest.fixture
def fast(monkeypatch):
    """Whether each sort that follows got by with 32 bits a weight."""
    found, swap = [], NumpyRows._swap_neighbours

    def watched(*arguments):
        found.append(swap(*arguments))
        return found[-1]

    monkeypatch.setattr(NumpyRows, "_swap_neighbours", watched)
    return found


def test_rows_of_any_length_sort_fast(fast):
    lengths = range(2, 301)
    for columns in lengths:
        w_RC = random_rows("gaussian", 12, columns, seed=columns)[0]
        w_RC[::3] *= -1e-3
        w_RC[1, ::2] = 0
        w_RC[1, 1::4] = -0.0
        check_sorted(w_RC)
    assert fast == [True] * len(lengths)


def test_zeros_of_both_signs_sort_alike_where_32_bits_do_not_do(fast):
    w_RC = random_rows("gaussian", 12, 64)[0]
    w_RC[:, ::4], w_RC[:, 2::4] = 0, -0.0
    w_RC[:, 9] = 1e30  # the others share one place
    check_sorted(w_RC)
    assert fast == [False]


def test_an_empty_cluster_repeats_its_neighbours_centroid():
    rows = OPS.sort(np.array([[1.0, 2.0]], np.float32), np.ones(2))
    clustering = clusters._clustering(OPS, rows, np.array([[0, 0, 1, 1, 2, 2]]))
    np.testing.assert_array_equal(clusters.centroids(OPS, rows, clustering), [[1, 1, 1, 2, 2]])


def test_means_survive_a_large_offset():
    """Prefix sums are taken about the row's median: without that this row would lose every digit of its spread."""
    w_RC = np.array([[1e8 + 8 * i for i in range(8)]], np.float32)
    rows = OPS.sort(w_RC, np.ones(8))
    np.testing.assert_allclose(clusters.centroids(OPS, rows, clusters.seed(OPS, rows, 8)), w_RC, rtol=1e-15)


def mixed_rows(columns):
    """Rows of all kinds, and importances."""
    w_RC, h_C = random_rows("gaussian", 24, columns)
    w_RC[0] = -0.25
    w_RC[1] = np.round(w_RC[1])
    w_RC[2, 40:] = 0
    w_RC[3, ::2] = -0.0
    w_RC[4:10] = random_rows("student_t3", 6, columns)[0]
    w_RC[10:14] = random_rows("outlier", 4, columns)[0]
    w_RC[14:20].view(np.uint32)[:] &= 0xFFFF0000  # as of bfloat16
    h_C[::7] = 1e-6
    return w_RC, h_C


@pytest.mark.parametrize("bits", [(3, 5), (1, 2)])
def test_a_gpu_takes_the_same_cuts(bits):
    """The JAX functions against numpy's, here on XLA's CPU; equal but for the last bit of a float16."""
    w_RC, h_C = mixed_rows(352)
    with jax.enable_x64(True):
        codes_RC, luts = jax.jit(lambda w, h: clusters.quantize_rows(JaxRows(), w, h, *bits))(w_RC, h_C)
    expected_RC, expected_luts = clusters.quantize_rows(OPS, w_RC, h_C, *bits)
    np.testing.assert_array_equal(codes_RC, expected_RC)
    for lut_RK, expected_RK in zip(luts, expected_luts):
        np.testing.assert_allclose(lut_RK, expected_RK, rtol=2**-10, atol=2**-24)
    other_RC, _ = clusters.quantize_rows(OPS, w_RC, h_C[::-1].copy(), *bits)
    assert (other_RC != expected_RC).mean() > 0.01  # the comparison can fail
