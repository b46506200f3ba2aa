# SPDX-License-Identifier: Apache-2.0
"""``clusters.Rows`` for numpy: sorting by packed integers, and passes over memory that is used again and again."""

from collections.abc import Callable
from math import prod

import numpy as np

from pagedweight_jax.calibrate.clusters import TINY, Clustering, SortedRows


class NumpyRows:
    """Keeps its large arrays from chunk to chunk of rows: fresh memory costs more than the arithmetic on it.

    What ``sort`` returns holds until the next ``sort``; not to be shared between threads.
    """

    xp = np

    def __init__(self):
        self._memory = {}

    def _array(self, name: str, shape: tuple[int, ...], dtype: type = np.float64) -> np.ndarray:
        size = prod(shape)
        if name not in self._memory or self._memory[name].size < size:
            self._memory[name] = np.empty(size, dtype)
        return self._memory[name][:size].reshape(shape)

    def _ordered(self, w_RC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64[R, C], every row's columns in ascending order of their weights, and the weights in that order.

        Integers with a weight's bits above its column sort fast, and one way. Of 32 bits only the weight's upper ones
        find room: that takes half the time and leaves few neighbours to swap.
        """
        (R, C), column_bits = w_RC.shape, max(1, (w_RC.shape[1] - 1).bit_length())
        first_R1 = C * np.arange(R)[:, None]
        bits_RC, short_RC = w_RC.view(np.int32), self._array("short key", (R, C), np.int32)
        np.right_shift(bits_RC, 31, out=short_RC)
        short_RC &= 0x7FFFFFFF
        short_RC ^= bits_RC  # ordered as the weights are
        key_RC = self._array("key", (R, C), np.int64)
        key_RC[:] = short_RC
        short_RC &= -1 << column_bits
        short_RC |= np.arange(C, dtype=np.int32)
        short_RC.sort(axis=1)
        order_RC, value_RC = self._array("order", (R, C), np.int64), self._array("value", (R, C), np.float32)
        order_RC[:] = short_RC
        order_RC &= (1 << column_bits) - 1
        flat_RC = self._array("flat", (R, C), np.int64)
        np.take(w_RC.reshape(-1), np.add(order_RC, first_R1, out=flat_RC), out=value_RC, mode="clip")
        if not self._swap_neighbours(value_RC, order_RC):
            key_RC <<= 32
            key_RC |= np.arange(C)
            key_RC.sort(axis=1)
            np.bitwise_and(key_RC, 0xFFFFFFFF, out=order_RC)
            np.take(w_RC.reshape(-1), np.add(order_RC, first_R1, out=flat_RC), out=value_RC, mode="clip")
        return order_RC, value_RC

    def _swap_neighbours(self, value_RC: np.ndarray, order_RC: np.ndarray) -> bool:
        """Sorts rows that almost are; False if they are not, and too much work is left."""
        C = value_RC.shape[1]
        value, order = value_RC.reshape(-1), order_RC.reshape(-1)
        greater_RC = self._array("equal", value_RC[:, 1:].shape, bool)
        for _ in range(16):
            places = np.flatnonzero(np.greater(value_RC[:, :-1], value_RC[:, 1:], out=greater_RC))
            if not places.size or 8 * places.size > value.size:
                break
            places += places // (C - 1)
            left = places[np.diff(places, prepend=-2) > 1]  # of three in a row, two now
            for x in (value, order):
                x[left], x[left + 1] = x[left + 1], x[left]
        return not places.size

    def sort(self, w_RC: np.ndarray, h_C: np.ndarray) -> SortedRows:
        R, C = w_RC.shape
        order_RC, value_RC = self._ordered(np.ascontiguousarray(w_RC))
        h_RC = np.take(h_C, order_RC, out=self._array("gain", (R, C)), mode="clip")
        order_RC += C * np.arange(R)[:, None]
        center_R1 = value_RC[:, C // 2, None].astype(np.float64)

        sums_RI = self._array("sums", (R, C + 1), np.complex128)  # two sums in the time of one
        sums_RI[:, 0] = 0
        sums_RI.real[:, 1:] = h_RC
        h_RC *= np.subtract(value_RC, center_R1, out=self._array("weight", (R, C)))
        sums_RI.imag[:, 1:] = h_RC
        np.cumsum(sums_RI[:, 1:], axis=1, out=sums_RI[:, 1:])
        mass_RI, moment_RI = self._array("mass", sums_RI.shape), self._array("moment", sums_RI.shape)
        mass_RI[:], moment_RI[:] = sums_RI.real, sums_RI.imag

        start_RI, distinct_R = self._array("start", sums_RI.shape, np.int32), np.full(R, C)
        start_RI[:] = np.arange(C + 1)
        equal_RC = self._array("equal", (R, C - 1), bool)
        np.equal(value_RC[:, 1:], value_RC[:, :-1], out=equal_RC)
        some = np.flatnonzero(equal_RC.any(1))
        if some.size:
            some = some if 2 * some.size < R else slice(None)  # all rows: in place
            starts = start_RI[some]
            starts[:, 1:-1] *= ~equal_RC[some]
            start_RI[some] = np.maximum.accumulate(starts, axis=1, out=starts)
            distinct_R[some] -= np.count_nonzero(equal_RC[some], axis=1)
            flat = start_RI[some] + (C + 1) * np.arange(R)[some, None]
            for sums_RI in (mass_RI, moment_RI):
                sums_RI[some] = np.take(sums_RI.reshape(-1), flat, out=self._array("gain", flat.shape), mode="clip")
        return SortedRows(order_RC, value_RC, center_R1, mass_RI, moment_RI, start_RI, distinct_R)

    def best_cuts(self, rows: SortedRows, clustering: Clustering) -> np.ndarray:
        (R, I), K = rows.mass_RI.shape, clustering.borders.shape[1] - 1
        start, m, s = clustering.borders[:, :-1], clustering.mass, clustering.moment
        # Cluster by cluster [start, end) tiles the positions once a row's last cluster takes position C as well.
        counts = np.diff(clustering.borders, axis=1)
        counts[:, -1] += 1
        counts_flat = counts.reshape(-1)

        def spread(x_RK):
            return np.repeat(x_RK.reshape(-1), counts_flat)

        mass, moment = rows.mass_RI.reshape(-1), rows.moment_RI.reshape(-1)
        gain, weight = self._array("gain", (R * I,)), self._array("weight", (R * I,))
        mean = np.diff(s, axis=1) / (np.diff(m, axis=1) + TINY)
        np.multiply(mass, spread(mean), out=gain)
        np.subtract(moment, gain, out=gain)
        gain -= spread(s[:, :-1] - m[:, :-1] * mean)  # B - A S/M: exactly 0 at the cluster's start
        gain *= gain
        np.subtract(mass, spread(m[:, :-1]), out=weight)  # A
        right = spread(m[:, 1:])
        right -= mass
        weight *= right
        weight += TINY
        gain /= weight
        gain.reshape(R, I)[:, -1] = 0
        # One maximum finds the first best place: its complement stands in the gain's lowest bits (a part in 1e11).
        places = (1 << I.bit_length()) - 1
        key = gain.view(np.int64)
        key &= ~places
        key.reshape(R, I)[:] |= places - np.arange(I)
        best = np.maximum.reduceat(key, (start + I * np.arange(R)[:, None]).reshape(-1)).reshape(R, K)
        return np.where((best <= places) | (counts == 0), clustering.borders[:, 1:], places - (best & places))

    def codes(self, rows: SortedRows, borders: np.ndarray) -> np.ndarray:
        R, K = borders.shape[0], borders.shape[1] - 1
        labels_RK = np.tile(np.arange(K, dtype=np.uint8), (R, 1))
        codes_RC = np.empty(rows.order_RC.shape, np.uint8)
        codes_RC.reshape(-1)[rows.order_RC.reshape(-1)] = np.repeat(
            labels_RK.reshape(-1), np.diff(borders, axis=1).reshape(-1)
        )
        return codes_RC

    def take(self, x_RX: np.ndarray, row: np.ndarray, index: np.ndarray) -> np.ndarray:
        return x_RX.reshape(-1).take(index + x_RX.shape[1] * row)

    def search(self, sorted_RX: np.ndarray, query_RY: np.ndarray) -> np.ndarray:
        (R, X), span = sorted_RX.shape, sorted_RX.max() + 1
        first_R1 = np.arange(R)[:, None]
        flat = np.searchsorted((sorted_RX + span * first_R1).reshape(-1), (query_RY + span * first_R1).reshape(-1))
        return flat.reshape(R, -1) - X * first_R1

    def gains(self, mass: tuple[np.ndarray, np.ndarray], moment: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        shape = np.broadcast_shapes(mass[0].shape, mass[1].shape)
        gain, M = self._array("gain", shape), self._array("sum", shape)
        np.subtract(moment[1], moment[0], out=gain)
        gain *= gain
        np.subtract(mass[1], mass[0], out=M)
        M += TINY
        gain /= M
        if M.min(initial=0) < 0:
            np.copyto(gain, -np.inf, where=M < 0)
        return gain

    def max_plus(self, score_GR: np.ndarray, gain_GGR: np.ndarray) -> np.ndarray:
        return np.add(score_GR[:, None], gain_GGR, out=self._array("sum", gain_GGR.shape)).max(0)

    def running_max(self, x_RK: np.ndarray) -> np.ndarray:
        return np.maximum.accumulate(x_RK, axis=1)

    def may_hold(self, mask: np.ndarray) -> bool:
        return bool(mask.any())

    def settle(self, step: Callable, borders_BR: np.ndarray, reach_BR: np.ndarray) -> np.ndarray:
        borders_BR, row_R = borders_BR.copy(), np.arange(borders_BR.shape[1])
        while row_R.size:
            old_BR = borders_BR[:, row_R]
            new_BR, reach_BR = step(old_BR, reach_BR, row_R)
            borders_BR[:, row_R] = new_BR
            moving_R = ((reach_BR > 1) | (new_BR != old_BR)).any(0)
            row_R, reach_BR = row_R[moving_R], reach_BR[:, moving_R]
        return borders_BR
