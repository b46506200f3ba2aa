# SPDX-License-Identifier: Apache-2.0
"""``clusters.Rows`` for numpy: sorting by packed integers, and passes over memory that is used again and again."""

from collections.abc import Callable
from math import prod

import jax
import numpy as np

from pagedweight_jax.calibrate.clusters import TINY, Clustering, SortedRows

PLACE_BITS = 23
"""Of a weight's place in its row's range at most: float32 has one more, and so no place rounds up to a power of two."""

RIGHT_BORDERS = 7
"""Places on a grid that clusters end at, taken together."""

PIECE_WEIGHTS = 3 << 16
"""Sorted, cut and coded at once, at most: passes over so many stay in a processor's caches."""

LEAST_RANGE = np.float32(1e-25)
"""Rows of smaller weights have few places that differ: their scale must not overflow."""


def even_slices(num_rows: int, most: int) -> list[slice]:
    """Returns the rows in slices of like size, of at most so many rows, and of one at least."""
    step = -(-num_rows // -(-num_rows // max(1, most)))
    return [slice(r, min(r + step, num_rows)) for r in range(0, num_rows, step)]


def pieces(num_rows: int, num_columns: int) -> list[slice]:
    """Returns the rows in slices of ``PIECE_WEIGHTS`` weights at most."""
    return even_slices(num_rows, PIECE_WEIGHTS // num_columns)


class NumpyRows:
    """Keeps its large arrays from chunk to chunk of rows: fresh memory costs more than the arithmetic on it.

    Long passes go piece by piece of a chunk. A seed's many short ones take the chunk whole: threads wait for Python's
    lock between them, and the longer they are, the less.

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

    def _order(self, w_RC: np.ndarray, h_C: np.ndarray, order_RC: np.ndarray, value_RC: np.ndarray) -> np.ndarray:
        """Writes every row's places in the flat ``w_RC`` in ascending order of their weights, and the weights in that
        order; returns their columns' h, float64[R, C].

        Integers with a weight's place in its row's range above its column sort fast, and one way. Of 32 bits, 2048
        columns leave 21 for the place: that takes half the time of 64 and leaves few neighbours to swap.
        """
        C, first_R1 = w_RC.shape[1], w_RC.shape[1] * np.arange(len(w_RC))[:, None]
        column_bits = max(1, (C - 1).bit_length())
        largest_R1 = np.maximum(w_RC.max(1, keepdims=True), -w_RC.min(1, keepdims=True))
        scale_R1 = np.float32((1 << min(31 - column_bits, PLACE_BITS)) - 1) / np.maximum(largest_R1, LEAST_RANGE)
        place_RC, key_RC = self._array("place", w_RC.shape, np.float32), self._array("key", w_RC.shape, np.int32)
        h_RC = self._array("gain", w_RC.shape)

        def gather():
            np.take(h_C, order_RC, out=h_RC, mode="clip")
            np.add(order_RC, first_R1, out=order_RC)
            np.take(w_RC.reshape(-1), order_RC, out=value_RC, mode="clip")

        key_RC[:] = np.multiply(w_RC, scale_R1, out=place_RC)
        key_RC <<= column_bits
        key_RC |= np.arange(C, dtype=np.int32)
        key_RC.sort(axis=1)
        key_RC &= (1 << column_bits) - 1
        order_RC[:] = key_RC
        gather()
        if not self._swap_neighbours(value_RC, order_RC, h_RC):
            bits_RC = np.add(w_RC, 0, out=place_RC).view(np.int32)  # -0.0 is 0.0 here, too
            np.bitwise_xor(bits_RC, (bits_RC >> 31) & 0x7FFFFFFF, out=order_RC)  # ordered as the weights are
            order_RC <<= 32
            order_RC |= np.arange(C)
            order_RC.sort(axis=1)
            order_RC &= 0xFFFFFFFF
            gather()
        return h_RC

    def _swap_neighbours(self, value_RC: np.ndarray, *others: np.ndarray) -> bool:
        """Sorts rows that almost are, and others with them; False if they are not, and too much work is left."""
        C, value = value_RC.shape[1], value_RC.reshape(-1)
        arrays = [value, *(other_RC.reshape(-1) for other_RC in others)]
        greater_RC = self._array("equal", value_RC[:, 1:].shape, bool)
        for _ in range(16):
            places = np.flatnonzero(np.greater(value_RC[:, :-1], value_RC[:, 1:], out=greater_RC))
            if not places.size or 8 * places.size > value.size:
                break
            places += places // (C - 1)
            left = places[np.diff(places, prepend=-2) > 1]  # of three in a row, two now
            for x in arrays:
                x[left], x[left + 1] = x[left + 1], x[left]
        return not places.size

    def sort(self, w_RC: np.ndarray, h_C: np.ndarray) -> SortedRows:
        R, C = w_RC.shape
        rows = SortedRows(
            order_RC=self._array("order", (R, C), np.int64),
            value_RC=self._array("value", (R, C), np.float32),
            center_R1=np.empty((R, 1)),
            mass_RI=self._array("mass", (R, C + 1)),
            moment_RI=self._array("moment", (R, C + 1)),
            start_RI=self._array("start", (R, C + 1), np.int32),
            distinct_R=np.full(R, C),
        )
        for piece in pieces(R, C):
            self._sort(np.ascontiguousarray(w_RC[piece]), h_C, jax.tree.map(lambda x, piece=piece: x[piece], rows))
        return rows

    def _sort(self, w_RC: np.ndarray, h_C: np.ndarray, rows: SortedRows) -> None:
        """Writes what ``sort`` returns."""
        (R, C), value_RC, start_RI = w_RC.shape, rows.value_RC, rows.start_RI
        h_RC = self._order(w_RC, h_C, rows.order_RC, value_RC)
        rows.center_R1[:] = value_RC[:, C // 2, None]

        sums_RI = self._array("sums", (R, C + 1), np.complex128)  # two sums in the time of one
        sums_RI[:, 0] = 0
        sums_RI.real[:, 1:] = h_RC
        offset_RC = self._array("weight", (R, C))
        offset_RC[:] = value_RC
        offset_RC -= rows.center_R1
        np.multiply(h_RC, offset_RC, out=sums_RI.imag[:, 1:])
        np.cumsum(sums_RI[:, 1:], axis=1, out=sums_RI[:, 1:])
        rows.mass_RI[:], rows.moment_RI[:] = sums_RI.real, sums_RI.imag

        start_RI[:] = np.arange(C + 1)
        equal_RC = self._array("equal", (R, C - 1), bool)
        np.equal(value_RC[:, 1:], value_RC[:, :-1], out=equal_RC)
        some = np.flatnonzero(equal_RC.any(1))
        if some.size:
            some = some if 2 * some.size < R else slice(None)  # all rows: in place
            starts = start_RI[some]
            starts[:, 1:-1] *= ~equal_RC[some]
            start_RI[some] = np.maximum.accumulate(starts, axis=1, out=starts)
            rows.distinct_R[some] -= np.count_nonzero(equal_RC[some], axis=1)
            flat = start_RI[some] + (C + 1) * np.arange(R)[some, None]
            for sums_RI in (rows.mass_RI, rows.moment_RI):
                sums_RI[some] = np.take(sums_RI.reshape(-1), flat, out=self._array("gain", flat.shape), mode="clip")

    def best_cuts(self, rows: SortedRows, clustering: Clustering) -> np.ndarray:
        cuts = np.empty_like(clustering.borders[:, 1:])
        for piece in pieces(*rows.value_RC.shape):
            of_piece = Clustering(*(x[piece] for x in clustering))
            cuts[piece] = self._best_cuts(rows.mass_RI[piece], rows.moment_RI[piece], of_piece)
        return cuts

    def _best_cuts(self, mass_RI: np.ndarray, moment_RI: np.ndarray, clustering: Clustering) -> np.ndarray:
        (R, I), K = mass_RI.shape, clustering.borders.shape[1] - 1
        start, m, s = clustering.borders[:, :-1], clustering.mass, clustering.moment
        # Cluster by cluster [start, end) tiles the positions once a row's last cluster takes position C as well.
        counts = np.diff(clustering.borders, axis=1)
        counts[:, -1] += 1
        counts_flat = counts.reshape(-1)

        def spread(x_RK):
            return np.repeat(x_RK.reshape(-1), counts_flat)

        mass, moment = mass_RI.reshape(-1), moment_RI.reshape(-1)
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
        codes_RC, code_K = np.empty(rows.order_RC.shape, np.uint8), np.arange(borders.shape[1] - 1, dtype=np.uint8)
        for piece in pieces(*codes_RC.shape):
            counts = np.diff(borders[piece], axis=1)
            label_RK = np.broadcast_to(code_K, counts.shape)
            in_order = np.repeat(label_RK.reshape(-1), counts.reshape(-1))
            codes_RC[piece].reshape(-1)[rows.order_RC[piece].reshape(-1)] = in_order
        return codes_RC

    def take(self, x_RX: np.ndarray, row: np.ndarray, index: np.ndarray) -> np.ndarray:
        return x_RX.reshape(-1).take(index + x_RX.shape[1] * row)

    def search(self, sorted_RX: np.ndarray, query_RY: np.ndarray) -> np.ndarray:
        (R, X), span = sorted_RX.shape, sorted_RX.max() + 1
        first_R1 = np.arange(R)[:, None]
        flat = np.searchsorted((sorted_RX + span * first_R1).reshape(-1), (query_RY + span * first_R1).reshape(-1))
        return flat.reshape(R, -1) - X * first_R1

    def gains(self, mass: tuple[np.ndarray, np.ndarray], moment: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        return self._gains(mass, moment, "gain", 0)

    def _gains(self, mass: tuple, moment: tuple, name: str, ordered: int) -> np.ndarray:
        """``gains``, kept under a name; the first ``ordered`` left borders are in order with all right ones."""
        shape = np.broadcast_shapes(mass[0].shape, mass[1].shape)
        gain, M = self._array(name, shape), self._array("sum", shape)
        np.subtract(moment[1], moment[0], out=gain)
        gain *= gain
        np.subtract(mass[1], mass[0], out=M)
        M += TINY
        gain /= M
        if M[ordered:].min(initial=0) < 0:
            np.copyto(gain[ordered:], -np.inf, where=M[ordered:] < 0)
        return gain

    def max_plus(self, score_GR: np.ndarray, gain_GGR: np.ndarray) -> np.ndarray:
        return np.add(score_GR[:, None], gain_GGR, out=self._array("sum", gain_GGR.shape)).max(0)

    def joint_path(self, mass_GR: np.ndarray, moment_GR: np.ndarray, num_clusters: int) -> np.ndarray:
        # No cluster's left border is right of its right one: half of all pairs need no time.
        G, row_R, blocks = len(mass_GR), np.arange(mass_GR.shape[1]), []
        mass_GR, moment_GR = np.ascontiguousarray(mass_GR), np.ascontiguousarray(moment_GR)
        for first in range(0, G, RIGHT_BORDERS):
            right, left = slice(first, first + RIGHT_BORDERS), slice(0, first + RIGHT_BORDERS)
            pairs = (mass_GR[left, None], mass_GR[right]), (moment_GR[left, None], moment_GR[right])
            blocks.append((right, left, self._gains(*pairs, f"gain {first}", first)))

        def extended(score_GR):
            best_GR = np.empty_like(score_GR)
            for right, left, gain_GGR in blocks:
                best_GR[right] = self.max_plus(score_GR[left], gain_GGR)
            return best_GR

        def to(right_R):
            return self.gains((mass_GR, mass_GR[right_R, row_R]), (moment_GR, moment_GR[right_R, row_R]))

        scores = [self.gains((mass_GR[0], mass_GR), (moment_GR[0], moment_GR)).copy()]
        for _ in range(num_clusters - 2):
            scores.append(extended(scores[-1]))
        chosen = [(scores[-1] + to(G - 1)).argmax(0)]
        for score_GR in scores[-2::-1]:
            chosen.append((score_GR + to(chosen[-1])).argmax(0))
        return np.stack(chosen[::-1])

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
