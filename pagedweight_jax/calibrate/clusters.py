# SPDX-License-Identifier: Apache-2.0
"""Weighted one-dimensional k-means of many rows at once, on numpy or JAX arrays.

A row is sorted. A cluster is then a run of neighbours, a clustering is a list of borders, and prefix sums give the
error that a cluster removes in O(1)::

    border      0     1     2     3     4          sorted weights  v0 <= v1 <= v2 <= v3
                |  v0 |  v1 |  v2 |  v3 |          mass_RI[i]    =  sum of h          left of border i
    clusters    [     0     ][ 1 ][  2  ]          moment_RI[i]  =  sum of h (w - c)  left of border i
    borders   = [0, 2, 3, 4]

    error  =  sum h (w - c)^2  -  sum over clusters of S^2 / M,      M, S the cluster's mass and moment about any c

Equal weights share a cluster: inside a run of them the prefix sums stay those at its start, so a border there means a
border at the start.

Letters: R rows, C columns, I = C + 1 border positions, K clusters, B = K - 1 inner borders, G candidates for a border,
S samples. All sums are float64. What depends on the kind of array is in ``Rows``: ``rows_numpy`` for a CPU, where XLA's
sort is slow, ``rows_jax`` for a GPU. Both take the same cuts unless two are equal but for rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Protocol

import jax
import numpy as np

Array = np.ndarray | jax.Array

CELLS = 48
"""Least cells of the grid that a seed starts from: rows of fewer distinct values are solved exactly."""

SAMPLES = 256
"""Positions between which a row's density is estimated."""

JOINT_CLUSTERS = 16
"""Up to so many clusters a border may go anywhere on the grid; of more, each stays within ``WINDOW`` of its place."""

WINDOW = 16

STEPS = 4
"""How many steps either way a refinement tries for every border."""

TINY = 1e-300
"""Makes 0 / 0, the gain of an empty cluster, 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SortedRows:
    """Rows ready to be clustered.

    Attributes:
      order_RC: where every weight of ascending order comes from, as ``Rows.codes`` needs it.
      value_RC: the weights in that order, float32.
      center_R1: c, the median.
      mass_RI, moment_RI: sums of h and of h (w - c) left of every border position.
      start_RI: where the run of equal weights starts that a position lies in; C starts one of its own.
      distinct_R: how many distinct weights there are.
    """

    order_RC: Array
    value_RC: Array
    center_R1: Array
    mass_RI: Array
    moment_RI: Array
    start_RI: Array
    distinct_R: Array


class Clustering(NamedTuple):
    """Borders of every row's clusters, ascending from 0 to C, and the prefix sums there; all [R, K + 1]."""

    borders: Array
    mass: Array
    moment: Array


class Rows(Protocol):
    """What clustering asks of an array library."""

    xp: ModuleType

    def sort(self, w_RC: Array, h_C: Array) -> SortedRows:
        """Returns the rows sorted. ``h_C`` is positive."""

    def best_cuts(self, rows: SortedRows, clustering: Clustering) -> Array:
        """Returns where to cut every cluster, int[R, K]: the first of the best places; its end if there is none.

        Every position is tried. Cutting (M, S) into (A, B) and (M - A, S - B) removes (B - A S/M)^2 M / (A (M - A)).
        """

    def codes(self, rows: SortedRows, borders: Array) -> Array:
        """Returns uint8[R, C]: the cluster of every weight, in column order."""

    def take(self, x_RX: Array, row: Array, index: Array) -> Array:
        """Returns x[row, index], the two broadcast."""

    def search(self, sorted_RX: Array, query_RY: Array) -> Array:
        """Returns the first place of each row where ``sorted`` is at least the query; X if there is none."""

    def gains(self, mass: tuple[Array, Array], moment: tuple[Array, Array]) -> Array:
        """Returns S^2 / M of clusters between two borders; -inf if they are out of order. Holds until the next call.

        Args:
          mass, moment: prefix sums at the left and at the right border, broadcast.
        """

    def max_plus(self, score_GR: Array, gain_GGR: Array) -> Array:
        """Returns the greatest score[g] + gain[g, h] over all g."""

    def joint_path(self, mass_GR: Array, moment_GR: Array, num_clusters: int) -> Array:
        """Returns int[B, R]: the positions of a grid that are jointly the best borders of so many clusters.

        Args:
          mass_GR, moment_GR: the prefix sums there.
          num_clusters: K.
        """

    def running_max(self, x_RK: Array) -> Array:
        """Returns the greatest value of each row so far."""

    def may_hold(self, mask: Array) -> bool:
        """False only if no entry is true."""

    def settle(self, step: Callable, borders_BR: Array, reach_BR: Array) -> Array:
        """Returns the borders after ``borders, reach = step(borders, reach, row_R)`` until nothing moves."""


def _clustering(ops: Rows, rows: SortedRows, borders: Array) -> Clustering:
    row_R1 = np.arange(len(borders))[:, None]
    return Clustering(borders, ops.take(rows.mass_RI, row_R1, borders), ops.take(rows.moment_RI, row_R1, borders))


def split(ops: Rows, rows: SortedRows, clustering: Clustering) -> Clustering:
    """Returns every cluster cut in two where the error falls most, old borders at even places.

    A cluster of fewer than two distinct values keeps them left and gets an empty right child.
    """
    cuts = _clustering(ops, rows, ops.best_cuts(rows, clustering))

    def merge(old, new):
        pairs_RK2 = ops.xp.stack([old[:, :-1], new], axis=2)
        return ops.xp.concatenate([pairs_RK2.reshape(len(old), -1), old[:, -1:]], axis=1)

    return Clustering(*map(merge, clustering, cuts))


def best_path(ops: Rows, first_GR: Array, between_GGR: list[Array], last_GR: Array) -> Array:
    """Returns int[B, R]: which candidate of every border, all borders jointly, removes the most error.

    A dynamic programme over the borders; the first of equal candidates is taken.

    Args:
      ops: the array library.
      first_GR: what the first cluster removes, by its right border.
      between_GGR: what each further cluster removes, by its left border, then by its right one.
      last_GR: what the last cluster removes, by its left border.
    """
    scores = [first_GR]
    for gain_GGR in between_GGR:
        scores.append(ops.max_plus(scores[-1], gain_GGR))
    row_R = np.arange(first_GR.shape[1])
    chosen = [(scores[-1] + last_GR).argmax(0)]
    for score_GR, gain_GGR in zip(scores[-2::-1], between_GGR[::-1]):
        chosen.append((score_GR + gain_GGR[:, chosen[-1], row_R]).argmax(0))
    return ops.xp.stack(chosen[::-1])


def _grid(ops: Rows, rows: SortedRows, cells: int) -> Array:
    """Returns int[R, cells + 1]: positions from 0 to C, dense where an optimal quantizer has many borders.

    Those are as dense as the cube root of the weights' density (Panter and Dite, 1951), that is: equal cells of the
    measure (mass * width^2)^(1/3), estimated between ``SAMPLES`` positions.
    """
    xp, (R, C) = ops.xp, rows.value_RC.shape
    row_R1 = np.arange(R)[:, None]
    sample_S = np.arange(SAMPLES + 1) * C // SAMPLES
    value_RS = rows.value_RC[:, np.minimum(sample_S, C - 1)].astype(np.float64)
    width_RS, mass_RS = xp.diff(value_RS, axis=1), xp.diff(rows.mass_RI[:, sample_S], axis=1)
    measure_RS = xp.cumsum(xp.cbrt(mass_RS * width_RS * width_RS), axis=1)
    measure_RS = xp.concatenate([xp.zeros((R, 1)), measure_RS / (measure_RS[:, -1:] + TINY)], axis=1)
    goal_RG = np.arange(1, cells) / cells * xp.ones((R, 1))
    after_RG = xp.minimum(xp.maximum(ops.search(measure_RS, goal_RG), 1), SAMPLES)
    low_RG, high_RG = ops.take(measure_RS, row_R1, after_RG - 1), ops.take(measure_RS, row_R1, after_RG)
    part_RG = xp.minimum((goal_RG - low_RG) / (high_RG - low_RG + TINY), 1)
    inner_RG = xp.rint((after_RG - 1 + part_RG) * (C / SAMPLES)).astype(np.int64)
    ends_R1 = xp.zeros_like(inner_RG[:, :1])
    grid_RG = xp.concatenate([ends_R1, inner_RG, ends_R1 + C], axis=1)
    few_R1 = rows.distinct_R[:, None] < CELLS
    if not ops.may_hold(few_R1):
        return grid_RG
    rank_RI = xp.cumsum(rows.start_RI == np.arange(C + 1), axis=1)
    every_RG = ops.search(rank_RI, np.arange(cells + 1) * rows.distinct_R[:, None] // cells + 1)
    return xp.where(few_R1, every_RG, grid_RG)


def _coarse(ops: Rows, mass_RG: Array, moment_RG: Array, num_clusters: int) -> Array:
    """Returns int[B, R]: the grid positions that are jointly best."""
    cells = mass_RG.shape[1] - 1
    if num_clusters > JOINT_CLUSTERS:
        place_B1 = (np.arange(1, num_clusters) * cells // num_clusters)[:, None]
        place_BR = place_B1 + ops.xp.zeros(len(mass_RG), np.int64)
        return _refine(ops, mass_RG, moment_RG, place_BR, ops.xp.ones_like(place_BR), WINDOW)
    return ops.joint_path(mass_RG.T, moment_RG.T, num_clusters)


def _refine(
    ops: Rows, mass_RI: Array, moment_RI: Array, borders_BR: Array, reach_BR: Array, num_steps: int
) -> Array:
    """Returns int[B, R]: the borders after joint moves of up to ``reach``, then shorter ones, until none helps."""
    xp, end = ops.xp, mass_RI.shape[1] - 1

    def step(old_BR, reach_BR, row_R):
        step_BR = xp.maximum(1, -(-reach_BR // num_steps))
        steps_G1 = np.arange(-num_steps, num_steps + 1)[:, None]
        candidates_BGR = xp.minimum(xp.maximum(old_BR[:, None] + step_BR[:, None] * steps_G1, 0), end)
        mass_BGR, moment_BGR = ops.take(mass_RI, row_R, candidates_BGR), ops.take(moment_RI, row_R, candidates_BGR)
        left_mass_GR, right_mass_GR = mass_BGR[0], mass_RI[row_R, -1] - mass_BGR[-1]
        between_BGGR = ops.gains(
            (mass_BGR[:-1, :, None], mass_BGR[1:, None]), (moment_BGR[:-1, :, None], moment_BGR[1:, None])
        )
        chosen_BR = best_path(
            ops,
            moment_BGR[0] ** 2 / (left_mass_GR + TINY),
            list(between_BGGR),
            (moment_RI[row_R, -1] - moment_BGR[-1]) ** 2 / (right_mass_GR + TINY),
        )
        return xp.take_along_axis(candidates_BGR, chosen_BR[:, None], axis=1)[:, 0], step_BR

    return ops.settle(step, borders_BR, reach_BR)


def seed(ops: Rows, rows: SortedRows, num_clusters: int) -> Clustering:
    """Returns K clusters of least error.

    1. Grid: at least 48 and at least 4 K cells, dense where borders belong.
    2. Coarse: a dynamic programme puts all borders on the best grid positions at once.
    3. Fine: it moves them by up to four steps each, the steps falling from a cell to one position, until none moves.

    The result is the optimum for rows of fewer than 48 distinct values and within a few 1e-4 of it for long ones.

    Args:
      ops: the array library.
      rows: the sorted rows.
      num_clusters: K, a power of two of at least 2.
    """
    xp, (R, C) = ops.xp, rows.value_RC.shape
    cells, row_R = max(CELLS, (6 if num_clusters <= JOINT_CLUSTERS else 4) * num_clusters), np.arange(R)
    grid_RG = _grid(ops, rows, cells)
    on_grid = _clustering(ops, rows, grid_RG)
    place_BR = _coarse(ops, on_grid.mass, on_grid.moment, num_clusters)
    borders_BR = ops.take(grid_RG, row_R, place_BR)
    below_BR = ops.take(grid_RG, row_R, xp.maximum(place_BR - 1, 0))
    above_BR = ops.take(grid_RG, row_R, xp.minimum(place_BR + 1, cells))
    reach_BR = xp.maximum(above_BR - borders_BR, borders_BR - below_BR)
    borders_BR = _refine(ops, rows.mass_RI, rows.moment_RI, borders_BR, reach_BR, STEPS)
    inner_RB = ops.take(rows.start_RI, row_R[:, None], borders_BR.T)
    ends_R1 = xp.zeros_like(inner_RB[:, :1])
    return _clustering(ops, rows, xp.concatenate([ends_R1, inner_RB, ends_R1 + C], axis=1))


def centroids(ops: Rows, rows: SortedRows, clustering: Clustering) -> Array:
    """Returns float64[R, K]: weighted means, ascending; an empty cluster repeats its left neighbour (or the first)."""
    xp, borders, (R, C) = ops.xp, clustering.borders, rows.value_RC.shape
    row_R1 = np.arange(R)[:, None]
    mean_RK = rows.center_R1 + xp.diff(clustering.moment, axis=1) / (xp.diff(clustering.mass, axis=1) + TINY)
    low_RK = ops.take(rows.value_RC, row_R1, xp.minimum(borders[:, :-1], C - 1))
    high_RK = ops.take(rows.value_RC, row_R1, xp.maximum(borders[:, 1:] - 1, 0))
    mean_RK = xp.minimum(xp.maximum(mean_RK, low_RK), high_RK)  # rounding must not unsort the table
    filled_RK = borders[:, 1:] > borders[:, :-1]
    if not ops.may_hold(~filled_RK):
        return mean_RK
    source_RK = ops.running_max(xp.where(filled_RK, np.arange(filled_RK.shape[1]), 0))
    return ops.take(mean_RK, row_R1, xp.maximum(source_RK, filled_RK.argmax(1)[:, None]))


def quantize_rows(ops: Rows, w_RC: Array, h_C: Array, min_bits: int, max_bits: int) -> tuple[Array, list[Array]]:
    """Returns codes of ``max_bits`` bits, uint8[R, C], and the float16 LUTs [R, 2^b] of all bitwidths.

    Args:
      ops: the array library.
      w_RC: float32, finite.
      h_C: float64, positive.
      min_bits, max_bits: the bitwidths.
    """
    rows = ops.sort(w_RC, h_C)
    clustering = seed(ops, rows, 2**min_bits)
    luts = [centroids(ops, rows, clustering).astype(np.float16)]
    for _ in range(min_bits, max_bits):
        clustering = split(ops, rows, clustering)
        luts.append(centroids(ops, rows, clustering).astype(np.float16))
    return ops.codes(rows, clustering.borders), luts
