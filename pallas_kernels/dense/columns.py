# SPDX-License-Identifier: Apache-2.0
"""A block of columns of ``x @ w`` for a few rows x: the loop that all dense products share, and their launch.

A program runs down the rows of its block of w with a pipeline of 16-byte loads in flight. Its block is the left operand
of tensor cores and the token rows, padded to 16, the right one: Hopper's take 64 columns of w at once, out of shared
memory. Sums of one matrix are added in one order, whatever the number of rows and whatever is in the others.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load

ROWS = 16
"""The most token rows that the kernels take; fewer are padded, so that sums are the same."""

FULL_DEVICE = 128
"""Programs that keep an H200 of 132 SMs busy."""

TILE_BYTES = 16384
"""Of the matrices in a step."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a product is cut into programs.

    Attributes:
      columns: of the matrix that a program takes, a power of two, at least 16.
      depth: rows of the matrix in a step, a power of two, at least 16.
      stretches: of the contraction, each summed by a program of its own.
      num_warps, num_stages: a power of two, and the depth of the pipeline of loads; one step less is in flight.
    """

    columns: int
    depth: int
    stretches: int = 1
    num_warps: int = 4
    num_stages: int = 4

    @property
    def params(self) -> CompilerParams:
        """What the compiler is told."""
        return CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)


def choose_cut(num_columns: int, operand, num_matrices: int = 1) -> Cut:
    """Returns the cut of ``num_columns`` in all, for programs that multiply with ``num_matrices`` at once.

    As measured on an H200: whole lines of 128 bytes of each row where that leaves most SMs a program, else fewer; three
    steps in flight of several matrices, which the shared expert multiplies with beside the routed ones, else four.
    """
    itemsize = jnp.dtype(operand).itemsize
    wide = 128 if num_columns >= 128 * FULL_DEVICE else 64
    columns = next((c for c in (wide, 32) if num_columns * 3 >= c * FULL_DEVICE * 2), 16)
    depth = TILE_BYTES // (columns * itemsize * num_matrices)
    num_warps, num_stages = 4 if columns * itemsize >= 128 else 2, 5 if num_matrices == 1 else 4
    return Cut(columns=columns, depth=min(depth, 128), num_warps=num_warps, num_stages=num_stages)


def choose_cut_of_parts(shape: tuple[int, int], operand) -> Cut:
    """Returns the cut of a matrix [C, N] whose contraction may be summed in stretches, by whoever reads the parts.

    Rows of a block are whole lines, and stretches no more than give every SM a program: their parts are read again.
    Long ones are halved, two programs an SM: beside routed experts that began before, one gets too little of the
    memory. A short stretch is in flight at once; of a longer one three steps are.
    """
    depth_total, num_columns = shape
    columns, depth = 64, 256 // jnp.dtype(operand).itemsize
    stretches = max(1, min(FULL_DEVICE // pl.cdiv(num_columns, columns), depth_total // depth, 8))
    stretches *= 2 if depth_total > 8 * depth * stretches else 1
    num_stages = 5 if depth_total <= 4 * depth * stretches else 4
    return Cut(columns=columns, depth=depth, stretches=stretches, num_warps=4, num_stages=num_stages)


def launch(kernel, name: str, programs: int, out_shape, params: CompilerParams, interpret: bool, *args):
    """Runs ``programs`` programs on whole arrays in device memory."""
    return pl.pallas_call(
        kernel,
        grid=(programs,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(args),
        out_specs=jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), out_shape),
        out_shape=out_shape,
        compiler_params=params,
        interpret=interpret,
        name=name,
    )(*args)


def operand_dtype(*arrays):
    """Returns what is multiplied in: bfloat16 where all arrays have it, else float32."""
    return jnp.dtype("bfloat16" if all(a.dtype == jnp.bfloat16 for a in arrays) else "float32")


def dot(x, y):
    """Returns the float32 product of two tiles; exact products, also of float32 operands."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def block_columns(block, cut: Cut) -> jax.Array:
    """Returns the columns of a block."""
    return block * cut.columns + jnp.arange(cut.columns, dtype=jnp.int32)


def block_place(shape: tuple[int, int], column_N: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Returns (index, mask) of a block of columns of an array [tokens, columns], with the rows of a program."""
    row_R1 = jnp.arange(ROWS, dtype=jnp.int32)[:, None]
    return (row_R1, column_N[None]), (row_R1 < shape[0]) & (column_N < shape[1])[None]


def _read(ref, row, column, limits):
    """Loads a tile; ``limits`` are (index, limit) pairs, and what lies beyond one is 0."""
    masks = [index < limit for index, limit in limits]
    if not masks:
        return ref[row, column]
    shape = jnp.broadcast_shapes(row.shape, column.shape)
    mask = jnp.broadcast_to(masks[0] if len(masks) == 1 else masks[0] & masks[1], shape)
    return load(ref.at[row, column], mask=mask, other=0.0)


def multiply(x, weights, column_N: jax.Array, cut: Cut, *, stretch=0, transposed: bool = False):
    """Returns ``x @ w`` for each matrix, float32[R, N]; of one stretch of the contraction where there are several.

    Args:
      x: reference to the token rows [T, C], at most 16.
      weights: references to matrices [C, N] of one shape, or [N, C] where ``transposed``.
      column_N: the block's columns.
      cut: how programs are cut.
      stretch: which of ``cut.stretches``.
      transposed: how the matrices lie.
    """
    num_tokens, depth_total = x.shape
    num_columns = weights[0].shape[0 if transposed else 1]
    depth, operand = cut.depth, operand_dtype(x, *weights)
    steps = pl.cdiv(depth_total, cut.stretches * depth)
    row_R1 = jnp.arange(ROWS, dtype=jnp.int32)[:, None]

    def limits(row, column, c):
        """Conditions that the shapes do not make superfluous."""
        found = [(row, num_tokens)] if row is not None and num_tokens != ROWS else []
        found += [(column, num_columns)] if column is not None and num_columns % cut.columns else []
        return found + ([(c, depth_total)] if depth_total % (cut.stretches * depth) else [])

    def read_w(w, c_C):
        if transposed:
            return _read(w, column_N[:, None], c_C[None], limits(None, column_N[:, None], c_C[None]))
        return _read(w, c_C[:, None], column_N[None], limits(None, column_N[None], c_C[:, None])).T

    def step(i, sums):
        c_C = (stretch * steps + i) * depth + jnp.arange(depth, dtype=jnp.int32)
        x_CR = _read(x, row_R1, c_C[None], limits(row_R1, None, c_C[None])).astype(operand).T
        return [total + dot(read_w(w, c_C).astype(operand), x_CR) for w, total in zip(weights, sums, strict=True)]

    zeros_NR = jnp.zeros((cut.columns, ROWS), jnp.float32)
    return [sum_NR.T for sum_NR in lax.fori_loop(0, steps, step, [zeros_NR] * len(weights))]
