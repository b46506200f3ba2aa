# SPDX-License-Identifier: Apache-2.0
"""``clusters.Rows`` for JAX, traced under ``jax.enable_x64``: for a GPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.calibrate.clusters import TINY, Clustering, SortedRows, best_path


class JaxRows:
    """No state: XLA owns the memory."""

    xp = jnp

    def sort(self, w_RC: jax.Array, h_C: jax.Array) -> SortedRows:
        bits_RC = jax.lax.bitcast_convert_type(w_RC, jnp.int32)
        key_RC = (bits_RC ^ ((bits_RC >> 31) & 0x7FFFFFFF)).astype(jnp.int64) << 32 | np.arange(w_RC.shape[1])
        order_RC = jnp.sort(key_RC, axis=1, stable=False).astype(jnp.int32)  # the columns; as in NumpyRows
        value_RC = jnp.take_along_axis(w_RC, order_RC, axis=1)
        h_RC = h_C[order_RC]
        center_R1 = value_RC[:, value_RC.shape[1] // 2, None].astype(jnp.float64)
        new_RC = jnp.pad(value_RC[:, 1:] != value_RC[:, :-1], ((0, 0), (1, 1)), constant_values=True)
        start_RI = jax.lax.cummax(jnp.where(new_RC, np.arange(new_RC.shape[1]), 0), axis=1)

        def left_of_borders(x_RC):
            return jnp.take_along_axis(jnp.pad(jnp.cumsum(x_RC, axis=1), ((0, 0), (1, 0))), start_RI, axis=1)

        return SortedRows(
            order_RC=order_RC,
            value_RC=value_RC,
            center_R1=center_R1,
            mass_RI=left_of_borders(h_RC),
            moment_RI=left_of_borders(h_RC * (value_RC - center_R1)),
            start_RI=start_RI,
            distinct_R=new_RC.sum(1) - 1,
        )

    def _cluster_of(self, borders: jax.Array, num_positions: int) -> jax.Array:
        """Returns int64[R, positions]: the cluster that starts last at or before each position."""
        row_R1 = np.arange(len(borders))[:, None]
        starts = jnp.zeros((len(borders), num_positions), jnp.int64).at[row_R1, borders[:, 1:-1]].add(1, mode="drop")
        return jnp.cumsum(starts, axis=1)

    def best_cuts(self, rows: SortedRows, clustering: Clustering) -> jax.Array:
        mass_RI, moment_RI, borders = rows.mass_RI, rows.moment_RI, clustering.borders
        (R, I), K = mass_RI.shape, borders.shape[1] - 1
        row_R1, cluster_RI = np.arange(R)[:, None], self._cluster_of(borders, I)
        m, s = clustering.mass, clustering.moment
        mean = jnp.diff(s, axis=1) / (jnp.diff(m, axis=1) + TINY)
        left_RI, right_RI = m[row_R1, cluster_RI], m[row_R1, cluster_RI + 1]
        gain_RI = (moment_RI - s[row_R1, cluster_RI] - (mass_RI - left_RI) * mean[row_R1, cluster_RI]) ** 2
        weight_RI = (mass_RI - left_RI) * (right_RI - mass_RI)
        gain_RI = jnp.where(weight_RI > 0, gain_RI / jnp.where(weight_RI > 0, weight_RI, 1), 0)
        places = (1 << I.bit_length()) - 1  # as in NumpyRows
        key_RI = jax.lax.bitcast_convert_type(gain_RI, jnp.int64) & ~places | (places - np.arange(I))
        best = jnp.zeros((R, K), jnp.int64).at[row_R1, cluster_RI].max(key_RI)
        return jnp.where(best <= places, borders[:, 1:], places - (best & places))

    def codes(self, rows: SortedRows, borders: jax.Array) -> jax.Array:
        cluster_RC = self._cluster_of(borders, rows.order_RC.shape[1]).astype(jnp.uint8)
        row_R1 = np.arange(len(borders))[:, None]
        return jnp.zeros_like(cluster_RC).at[row_R1, rows.order_RC].set(cluster_RC, unique_indices=True)

    def take(self, x_RX: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
        return x_RX[row, index]

    def search(self, sorted_RX: jax.Array, query_RY: jax.Array) -> jax.Array:
        return jax.vmap(jnp.searchsorted)(sorted_RX, query_RY)

    def gains(self, mass: tuple[jax.Array, jax.Array], moment: tuple[jax.Array, jax.Array]) -> jax.Array:
        M = mass[1] - mass[0]
        return jnp.where(M < 0, -jnp.inf, (moment[1] - moment[0]) ** 2 / (M + TINY))

    def max_plus(self, score_GR: jax.Array, gain_GGR: jax.Array) -> jax.Array:
        return (score_GR[:, None] + gain_GGR).max(0)

    def joint_path(self, mass_GR: jax.Array, moment_GR: jax.Array, num_clusters: int) -> jax.Array:
        gain_GGR = self.gains((mass_GR[:, None], mass_GR), (moment_GR[:, None], moment_GR))
        return best_path(self, gain_GGR[0], [gain_GGR] * (num_clusters - 2), gain_GGR[:, -1])

    def running_max(self, x_RK: jax.Array) -> jax.Array:
        return jax.lax.cummax(x_RK, axis=1)

    def may_hold(self, mask: jax.Array) -> bool:
        return True

    def settle(self, step: Callable, borders_BR: jax.Array, reach_BR: jax.Array) -> jax.Array:
        row_R = np.arange(borders_BR.shape[1])

        def move(state):
            old_BR, reach_BR, _ = state
            new_BR, reach_BR = step(old_BR, reach_BR, row_R)
            return new_BR, reach_BR, ((reach_BR > 1) | (new_BR != old_BR)).any()

        return jax.lax.while_loop(lambda state: state[2], move, (borders_BR, reach_BR, True))[0]
