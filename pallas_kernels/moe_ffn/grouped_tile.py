# SPDX-License-Identifier: Apache-2.0
"""A program of a grouped product: the pairs of one tile times R rows of their expert's linear-block."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton import load, store


@dataclass(frozen=True)
class Config:
    """How the products are cut into programs; none of it changes a result.

    Attributes:
      tile: pairs of a program, a multiple of 16.
      rows, num_warps: R and warps of a program that looks its weights up, powers of two; 16 rows a warp keep the words
        where they are multiplied.
      num_stages: the depth of its pipeline of loads.
      plain_rows, plain_warps, plain_stages: the same of a program that reads dequantized weights.
      plain_tile: its pairs; as many as ``tile`` where there is none.
    """

    tile: int
    rows: int = 64
    num_warps: int = 4
    num_stages: int = 2
    plain_rows: int = 128
    plain_warps: int = 8
    plain_stages: int = 3
    plain_tile: int | None = None

    @property
    def tiles(self) -> tuple[int, int]:
        """Pairs of a program that looks its weights up, and of one that reads dequantized ones."""
        return self.tile, self.plain_tile or self.tile


@dataclass(frozen=True)
class Part:
    """A power of two of a tile's slots.

    Attributes:
      slot_T, there_T, pair_T: int32, bool, int32: each slot's place in the tile, whether it is used, and by which pair.
    """

    slot_T: jax.Array
    there_T: jax.Array
    pair_T: jax.Array


def parts_of(tile: int, pairs, first, count) -> list[Part]:
    """Returns the parts of a tile of ``tile`` slots, powers of two that add up to it, largest first.

    Args:
      pairs: ref int32[P], the pairs by expert.
      first, count: where the tile's begin, and how many they are.
    """
    parts, start = [], 0
    for bit in reversed(range(tile.bit_length())):
        if tile >> bit & 1:
            slot_T = start + jnp.arange(1 << bit, dtype=jnp.int32)
            there_T = slot_T < count
            parts.append(Part(slot_T, there_T, load(pairs.at[first + slot_T], mask=there_T, other=jnp.int32(0))))
            start += 1 << bit
    return parts


def zero_sums(num_rows: int, parts: list[Part]) -> list[jax.Array]:
    return [jnp.zeros((num_rows, part.slot_T.size), jnp.float32) for part in parts]


def add_products(sums: list[jax.Array], w_RC: jax.Array, x, columns_C, parts: list[Part], pairs_per_row: int) -> list:
    """Returns sums + w x^T, float32 [R, slots of a part] each; exact products, also of float32 operands.

    Args:
      w_RC: weights.
      x: ref of the inputs; pair p has row p // ``pairs_per_row``.
      columns_C: int32, which of their columns.
    """
    precision = lax.Precision.HIGHEST if w_RC.dtype == jnp.float32 else None
    added = []
    for sum_RT, part in zip(sums, parts, strict=True):
        there_TC = jnp.broadcast_to(part.there_T[:, None], (part.there_T.size, columns_C.size))
        x_TC = load(x.at[(part.pair_T // pairs_per_row)[:, None], columns_C[None]], mask=there_TC, other=0.0)
        dims = (((1,), (1,)), ((), ()))
        product_RT = lax.dot_general(w_RC, x_TC, dims, precision=precision, preferred_element_type=jnp.float32)
        added.append(sum_RT + product_RT)
    return added


def write(out_ref, out, y_QT: jax.Array, program, rows, num_rows: int, part: Part) -> None:
    """Stores a program's results as columns of ``out``, Q for each program; zeros where no row exists.

    Args:
      out_ref, out: ref of the result [P, ..], its shape and dtype.
      y_QT: results of a part, of all the program's rows or of pairs of them.
      program, rows, num_rows: which of the programs, ref of the rows that they take, and how many each takes.
    """
    q_Q = jnp.arange(y_QT.shape[0], dtype=jnp.int32)
    exists_Q, column_Q = rows[program * num_rows + q_Q] >= 0, program * y_QT.shape[0] + q_Q
    y_QT = jnp.where(exists_Q[:, None], y_QT, 0.0).astype(out.dtype)
    inside_QT = part.there_T[None] & (column_Q < out.shape[1])[:, None]
    place_T = jnp.where(part.there_T, part.pair_T, out.shape[0] + part.slot_T)  # masked ones are past the end
    store(out_ref.at[place_T[None], column_Q[:, None]], y_QT, mask=inside_QT)
