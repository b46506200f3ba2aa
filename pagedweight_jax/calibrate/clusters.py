# SPDX-License-Identifier: Apache-2.0
"""Weighted one-dimensional k-means of many rows at once.

A row is sorted and its equal weights are merged. A cluster is then a run of neighbouring distinct values, a clustering
is a list of borders, and prefix sums give the error that a cluster removes in O(1)::

    border      0     1     2     3     4          distinct values  v0 < v1 < v2 < v3
                |  v0 |  v1 |  v2 |  v3 |          mass_RI[i]    =  sum of h         left of border i
    clusters    [     0     ][ 1 ][  2  ]          moment_RI[i]  =  sum of h (w - mean)  left of border i
    borders   = [0, 2, 3, 4]

    error  =  sum h (w - mean)^2  -  sum over clusters of S^2 / M,      M, S the cluster's mass and moment

Letters: R rows, C columns, V distinct values (short rows repeat their last one), I = V + 1 border positions,
K clusters, B = K - 1 inner borders, G grid positions. Everything is float64 numpy: XLA's sort on a CPU is slow.
"""

from dataclasses import dataclass

import numpy as np

WINDOW = 33
"""Positions that the coarse search tries for every border: rows of fewer distinct values are solved exactly."""

STEPS = np.arange(-4, 5)
"""What a refinement tries for every border, in units of its current step."""

TINY = 1e-300
"""Makes 0 / 0, the gain of an empty cluster, 0."""


@dataclass(frozen=True)
class SortedRows:
    """Rows ready to be clustered.

    Attributes:
      order_RC: column of every weight in ascending order.
      rank_RC: which distinct value that weight is.
      value_RV: the distinct values, ascending; the last one repeats to the common length V.
      mean_R1: weighted mean of the row.
      mass_RI, moment_RI: sums of h and of h (w - mean) left of every border position.
    """

    order_RC: np.ndarray
    rank_RC: np.ndarray
    value_RV: np.ndarray
    mean_R1: np.ndarray
    mass_RI: np.ndarray
    moment_RI: np.ndarray


def sort_rows(w_RC: np.ndarray, h_RC: np.ndarray) -> SortedRows:
    """Returns the rows sorted, equal weights merged. ``h_RC`` is positive."""
    order_RC = np.argsort(w_RC, axis=1, kind="stable")
    w_RC = np.take_along_axis(w_RC, order_RC, axis=1).astype(np.float64)
    h_RC = np.take_along_axis(h_RC, order_RC, axis=1).astype(np.float64)
    rank_RC = np.zeros(w_RC.shape, np.int64)
    np.cumsum(w_RC[:, 1:] != w_RC[:, :-1], axis=1, out=rank_RC[:, 1:])
    mean_R1 = (h_RC * w_RC).sum(1, keepdims=True) / h_RC.sum(1, keepdims=True)

    def left_of_borders(prefix_RC):
        sums_RI = np.repeat(prefix_RC[:, -1:], rank_RC.max() + 2, axis=1)
        sums_RI[:, 0] = 0
        np.put_along_axis(sums_RI, rank_RC + 1, prefix_RC, axis=1)  # of equal weights the last one stays
        return sums_RI

    value_RV = np.repeat(w_RC[:, -1:], rank_RC.max() + 1, axis=1)
    np.put_along_axis(value_RV, rank_RC, w_RC, axis=1)
    return SortedRows(
        order_RC=order_RC,
        rank_RC=rank_RC,
        value_RV=value_RV,
        mean_R1=mean_R1,
        mass_RI=left_of_borders(np.cumsum(h_RC, axis=1)),
        moment_RI=left_of_borders(np.cumsum(h_RC * (w_RC - mean_R1), axis=1)),
    )


def _sums(rows: SortedRows, borders_RK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mass_RK = np.diff(np.take_along_axis(rows.mass_RI, borders_RK, axis=1), axis=1)
    moment_RK = np.diff(np.take_along_axis(rows.moment_RI, borders_RK, axis=1), axis=1)
    return mass_RK, moment_RK


def split(rows: SortedRows, borders: np.ndarray) -> np.ndarray:
    """Returns int64[R, 2K + 1]: every cluster cut in two where the error falls most, old borders at even places.

    The cut is exhaustive: cutting (M, S) into (A, B) and (M - A, S - B) removes (B - A S/M)^2 M / (A (M - A)), which is
    evaluated at every position. The first of equal cuts is taken. A cluster of fewer than two distinct values keeps
    them left and gets an empty right child.

    Args:
      rows: the sorted rows.
      borders: int64[R, K + 1], ascending, from 0 to V.
    """
    num_rows, num_positions = rows.mass_RI.shape
    flat = borders + num_positions * np.arange(num_rows)[:, None]
    start, end = flat[:, :-1].ravel(), flat[:, 1:].ravel()
    # Cluster by cluster [start, end) tiles the flat prefix sums once a row's last cluster takes position V as well.
    counts = np.diff(flat, axis=1)
    counts[:, -1] += 1
    counts = counts.ravel()
    mass, moment = rows.mass_RI.ravel(), rows.moment_RI.ravel()
    M, S = mass[end] - mass[start], moment[end] - moment[start]
    A = mass - np.repeat(mass[start], counts)
    gain = moment - np.repeat(moment[start], counts)
    gain -= A * np.repeat(S / (M + TINY), counts)
    gain *= gain
    A *= np.repeat(M, counts) - A
    A[A <= 0] = np.inf  # nothing on one side: not a cut
    gain /= A

    nonempty = np.flatnonzero(counts)
    best = np.zeros(len(start))
    best[nonempty] = np.maximum.reduceat(gain, start[nonempty])
    hits = np.flatnonzero((gain == np.repeat(best, counts)) & (gain > 0))[::-1]
    cluster = np.repeat(np.arange(len(start)), counts)
    cut = end.copy()
    cut[cluster[hits]] = hits  # reversed: the first of equal hits is written last
    children = np.empty((num_rows, 2 * borders.shape[1] - 1), np.int64)
    children[:, ::2] = flat
    children[:, 1::2] = cut.reshape(num_rows, -1)
    return children - num_positions * np.arange(num_rows)[:, None]


def _choose(mass_RI: np.ndarray, moment_RI: np.ndarray, candidates_RBG: np.ndarray) -> np.ndarray:
    """Returns int64[R, B]: which candidate of every border, all borders jointly, leaves the least error.

    A dynamic programme over the borders, exact for these candidates; the first of equal ones is taken.
    """
    num_rows, num_borders = candidates_RBG.shape[:2]
    flat = candidates_RBG.reshape(num_rows, -1)
    mass_RBG = np.take_along_axis(mass_RI, flat, axis=1).reshape(candidates_RBG.shape)
    moment_RBG = np.take_along_axis(moment_RI, flat, axis=1).reshape(candidates_RBG.shape)
    score_RG = moment_RBG[:, 0] ** 2 / (mass_RBG[:, 0] + TINY)
    came_from = []
    for b in range(1, num_borders):
        gain_RGG = moment_RBG[:, b, :, None] - moment_RBG[:, b - 1, None, :]
        gain_RGG *= gain_RGG
        M_RGG = mass_RBG[:, b, :, None] - mass_RBG[:, b - 1, None, :]
        gain_RGG /= M_RGG + TINY
        gain_RGG[M_RGG < 0] = -np.inf  # borders out of order
        gain_RGG += score_RG[:, None, :]
        came_from.append(gain_RGG.argmax(2))
        score_RG = np.take_along_axis(gain_RGG, came_from[-1][..., None], axis=2)[..., 0]
    last_moment_RG, last_mass_RG = moment_RI[:, -1:] - moment_RBG[:, -1], mass_RI[:, -1:] - mass_RBG[:, -1]
    score_RG = score_RG + last_moment_RG**2 / (last_mass_RG + TINY)
    chosen = [score_RG.argmax(1)]
    for back_RG in reversed(came_from):
        chosen.append(back_RG[np.arange(num_rows), chosen[-1]])
    return np.stack(chosen[::-1], axis=1)


def _coarse(mass_RG: np.ndarray, moment_RG: np.ndarray, num_clusters: int) -> np.ndarray:
    """Returns int64[R, B]: grid positions that are jointly best within a window around each of them."""
    num_rows, cells = mass_RG.shape[0], mass_RG.shape[1] - 1
    place_RB = np.tile(np.arange(1, num_clusters) * cells // num_clusters, (num_rows, 1))
    moving = np.arange(num_rows)
    while moving.size:
        first_RB = np.clip(place_RB[moving] - WINDOW // 2, 0, cells + 1 - WINDOW)
        candidates_RBG = first_RB[..., None] + np.arange(WINDOW)
        place_RB[moving] = first_RB + _choose(mass_RG[moving], moment_RG[moving], candidates_RBG)
        next_RB = np.clip(place_RB[moving] - WINDOW // 2, 0, cells + 1 - WINDOW)
        moving = moving[(next_RB != first_RB).any(1)]
    return place_RB


def _fine(mass_RI: np.ndarray, moment_RI: np.ndarray, borders_RB: np.ndarray, reach_RB: np.ndarray) -> np.ndarray:
    """Returns int64[R, B]: the borders after joint moves of up to ``reach_RB``, then shorter ones, until none helps."""
    borders_RB, reach_RB, moving = borders_RB.copy(), reach_RB.copy(), np.arange(len(borders_RB))
    while moving.size:
        old_RB = borders_RB[moving]
        step_RB = np.maximum(1, -(-reach_RB[moving] // STEPS[-1]))
        candidates_RBG = np.clip(old_RB[..., None] + step_RB[..., None] * STEPS, 0, mass_RI.shape[1] - 1)
        chosen_RB = _choose(mass_RI[moving], moment_RI[moving], candidates_RBG)
        borders_RB[moving] = np.take_along_axis(candidates_RBG, chosen_RB[..., None], axis=2)[..., 0]
        reach_RB[moving] = step_RB
        moving = moving[((step_RB > 1) | (borders_RB[moving] != old_RB)).any(1)]
    return borders_RB


def seed(rows: SortedRows, num_clusters: int) -> np.ndarray:
    """Returns int64[R, K + 1]: the borders of K clusters of least error, ascending, from 0 to V.

    1. Grid: exhaustive splits cut the row into at least 32 and at least 4 K cells (rows of up to 32 distinct values:
       every position).
    2. Coarse: the jointly best grid positions, by a dynamic programme over 33 positions per border (all of them if
       K <= 8, else recentred until they stay).
    3. Fine: the jointly best of 9 positions per border, in steps that shrink from a grid cell to one value, until no
       border moves: moving any number of borders by up to 4 values each does not help.

    Measured error above the exact optimum's, K = 8, 320 weights with chi-squared h: gaussian 0.04 % on average (92 % of
    rows are optimal, the worst 1.8 %), Student-t(3) 0.05 %, Student-t(2) 0.08 %; 2048 gaussian weights 0.05 %; K = 16,
    gaussian 0.04 %, Student-t(3) 1.3 %. Lloyd's iteration from quantiles of density^(1/3) is 7 % above on the first.

    Args:
      rows: the sorted rows.
      num_clusters: K, a power of two of at least 2.
    """
    num_rows, num_positions = rows.mass_RI.shape
    grid_RG = np.tile([0, num_positions - 1], (num_rows, 1))
    while grid_RG.shape[1] < max(WINDOW, 4 * num_clusters + 1):
        grid_RG = split(rows, grid_RG)
    cells = grid_RG.shape[1] - 1
    distinct_R1 = rows.rank_RC[:, -1:] + 1
    grid_RG = np.where(distinct_R1 < WINDOW, np.arange(cells + 1) * distinct_R1 // cells, grid_RG)
    place_RB = _coarse(
        np.take_along_axis(rows.mass_RI, grid_RG, axis=1),
        np.take_along_axis(rows.moment_RI, grid_RG, axis=1),
        num_clusters,
    )
    borders_RB = np.take_along_axis(grid_RG, place_RB, axis=1)
    below_RB = np.take_along_axis(grid_RG, np.maximum(place_RB - 1, 0), axis=1)
    above_RB = np.take_along_axis(grid_RG, np.minimum(place_RB + 1, cells), axis=1)
    reach_RB = np.maximum(above_RB - borders_RB, borders_RB - below_RB)
    borders_RB = _fine(rows.mass_RI, rows.moment_RI, borders_RB, reach_RB)
    ends_R1 = np.full((num_rows, 1), num_positions - 1)
    return np.concatenate([np.zeros_like(ends_R1), borders_RB, ends_R1], axis=1)


def centroids(rows: SortedRows, borders: np.ndarray) -> np.ndarray:
    """Returns float64[R, K]: weighted means, ascending; an empty cluster repeats its left neighbour (or the first)."""
    mass_RK, moment_RK = _sums(rows, borders)
    mean_RK = rows.mean_R1 + moment_RK / (mass_RK + TINY)
    last_value = rows.value_RV.shape[1] - 1
    low_RK = np.take_along_axis(rows.value_RV, np.minimum(borders[:, :-1], last_value), axis=1)
    high_RK = np.take_along_axis(rows.value_RV, np.maximum(borders[:, 1:] - 1, 0), axis=1)
    mean_RK = np.clip(mean_RK, low_RK, high_RK)  # rounding must not leave the cluster: keeps the table sorted
    filled = mass_RK > 0
    source_RK = np.maximum.accumulate(np.where(filled, np.arange(filled.shape[1]), 0), axis=1)
    source_RK = np.maximum(source_RK, filled.argmax(1)[:, None])
    return np.take_along_axis(mean_RK, source_RK, axis=1)


def codes(rows: SortedRows, borders: np.ndarray) -> np.ndarray:
    """Returns uint8[R, C]: the cluster of every weight, in column order."""
    num_rows, num_clusters = borders.shape[0], borders.shape[1] - 1
    labels = np.tile(np.arange(num_clusters, dtype=np.uint8), num_rows)
    cluster_RV = np.repeat(labels, np.diff(borders, axis=1).ravel()).reshape(num_rows, -1)
    codes_RC = np.empty(rows.order_RC.shape, np.uint8)
    np.put_along_axis(codes_RC, rows.order_RC, np.take_along_axis(cluster_RV, rows.rank_RC, axis=1), axis=1)
    return codes_RC
