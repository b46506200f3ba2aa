# SPDX-License-Identifier: Apache-2.0
"""Products of 0/1 matrices on the tensor cores: what one instruction does, and where its operands lie.

The instruction ANDs a 16 x 256 matrix of bits with a 256 x 8 one and adds the counts of ones to 16 x 8 integers. Four
of them multiply 16 x 512 by 512 x 16 bits. Triton has no such operation, so it is inline PTX on int32 blocks of 16 rows
and 16 words. Every block that takes part has this shape and is read in runs of 16 bytes; Triton then gives thread
4 g + q of the warp rows g and g + 8, words 4q .. 4q + 3 (compiled code is held to the definition on the GPU)::

      registers of thread 4 g + q        0 .. 3: row g, words 4q .. 4q + 3        4 .. 7: row g + 8, the same words

which are the fragments that the instruction wants of its first operand (rows), of its second (rows are its columns) and
of its result, up to the order of the result's columns: element [r, 4q + u] is row r times

      column(4q + u)  =  2q + (u & 1) + 8 (u >> 1)

of the second operand. With W warps the blocks are [16 W, 16]: warp w owns rows 8w .. 8w + 7 and 8 (W + w) .. + 7.
"""

import jax
import jax.numpy as jnp

from pallas_kernels._triton import elementwise_inline_asm

ROWS = WORDS = 16
"""Rows and words of a warp's block."""


def _ptx() -> str:
    """Four instructions: sums in registers 0..7 from 8..15, rows in 16..23, columns in 24..31."""

    def registers(*numbers):
        return "{" + ", ".join(f"${n}" for n in numbers) + "}"

    def multiply(sums, rows, columns, onto):
        return (
            "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc "
            f"{registers(*sums)}, {registers(*rows)}, {registers(*columns)}, {registers(*onto)};"
        )

    low, high = (0, 1, 4, 5), (2, 3, 6, 7)
    first, second = (16, 20, 17, 21), (18, 22, 19, 23)
    return "\n".join(
        [
            multiply(low, first, (24, 25), (8, 9, 12, 13)),
            multiply(high, first, (28, 29), (10, 11, 14, 15)),
            multiply(low, second, (26, 27), low),
            multiply(high, second, (30, 31), high),
        ]
    )


PTX = _ptx()
CONSTRAINTS = ",".join(["=&r"] * 8 + ["r"] * 24)


def _like(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def column(position):
    """Returns which row of the second operand stands at ``position`` of a row of the result."""
    return 2 * (position >> 2) + (position & 1) + 8 * ((position >> 1) & 1)


def warp_and_row(index, num_warps: int):
    """Returns (warp, row of its block) of a row of an int32[16 W, 16] block."""
    return (index >> 3) & (num_warps - 1), (index & 7) + 8 * (index // (8 * num_warps))


def per_warp(block: jax.Array) -> jax.Array:
    """Returns the block as [W, 16, ...], a warp's rows together."""
    warps = block.shape[0] // ROWS
    return block.reshape(2, warps, 8, *block.shape[1:]).swapaxes(0, 1).reshape(warps, ROWS, *block.shape[1:])


def _from_per_warp(blocks: jax.Array) -> jax.Array:
    warps = blocks.shape[0]
    return blocks.reshape(warps, 2, 8, *blocks.shape[2:]).swapaxes(0, 1).reshape(warps * ROWS, *blocks.shape[2:])


def binary_dot(sums: jax.Array, rows: jax.Array, columns: jax.Array, interpret: bool = False) -> jax.Array:
    """Returns sums[r, s] + sum_w popcount(rows[r, w] & columns[column(s), w]) of each warp's block.

    Args:
      sums, rows, columns: int32[16 W, 16], W warps of a program of W warps.
      interpret: counts in plain JAX.
    """
    if interpret:
        a, b = per_warp(rows), per_warp(columns)
        counts = jnp.sum(jax.lax.population_count(a[:, :, None] & b[:, None]), axis=3)[:, :, column(jnp.arange(WORDS))]
        return sums + _from_per_warp(counts)
    [result] = elementwise_inline_asm(
        PTX, args=[sums, rows, columns], constraints=CONSTRAINTS, pack=8, result_shape_dtypes=[_like(sums)]
    )
    return result


def both(a: jax.Array, b: jax.Array, c: jax.Array, interpret: bool = False) -> jax.Array:
    """Returns a & b & c, int32, in one instruction."""
    if interpret:
        return a & b & c
    [result] = elementwise_inline_asm(
        "lop3.b32 $0, $1, $2, $3, 0x80;",
        args=[a, b, c],
        constraints="=r,r,r,r",
        pack=1,
        result_shape_dtypes=[_like(a)],
    )
    return result


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array, interpret: bool = False) -> jax.Array:
    """Returns a b + c, float32, rounded once where it is compiled."""
    if interpret:
        return a * b + c
    [result] = elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;", args=[a, b, c], constraints="=f,f,f,f", pack=1, result_shape_dtypes=[_like(c)]
    )
    return result
