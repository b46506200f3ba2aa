# SPDX-License-Identifier: Apache-2.0
"""Products of 0/1 matrices on the tensor cores: what one instruction does, and where its operands lie.

The instruction ANDs a 16 x 256 matrix of bits with a 256 x 8 one and adds the counts of ones to 16 x 8 integers. Slices
of the inputs are its 16 rows and a warp's rows of weights its 8 columns; two of them multiply 512 bits. Triton has no
such operation, so it is inline PTX on int32 blocks of 8 rows and 16 words. Every block that takes part has this shape
and is read in runs of 16 bytes; Triton then gives thread 4 g + q of the warp row g, words 4q .. 4q + 3, which are the
fragments that the instruction wants of its operands (compiled code is held to the definition on the GPU). Of the result
a thread has, as registers 0 .. 3,

      slices g and g + 8 of row 2q, slices g and g + 8 of row 2q + 1.

With W warps the blocks are [8 W, 16]: warp w owns rows 8 w .. 8 w + 7.
"""

import jax
import jax.numpy as jnp

from pallas_kernels._triton import elementwise_inline_asm

ROWS = 8
"""Rows of a warp's block."""

WORDS = 16
"""Words of a block's rows."""

HALVES = 2
"""Instructions for all words of a block, each for half of them: the second would wait for the first, so others go
between them."""


def _ptx(half: int) -> str:
    """Sums in registers 0..3 from 4..7; rows in 8..11, slices in 12..15."""
    return (
        "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {$0, $2, $1, $3}, "
        f"{{$12, $13, $14, $15}}, {{${8 + 2 * half}, ${9 + 2 * half}}}, {{$4, $6, $5, $7}};"
    )


PTX = tuple(_ptx(half) for half in range(HALVES))
CONSTRAINTS = ",".join(["=r"] * 4 + ["r"] * 12)


def _like(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def binary_dot(sums: jax.Array, rows: jax.Array, slices: jax.Array, half: int, interpret: bool = False) -> jax.Array:
    """Returns sums plus the products of half of the words, as ``per_row`` shows them.

    Args:
      sums, rows: int32[8 W, 16], W warps of a program of W warps.
      slices: int32[8 W, 16], half of the words of each warp's 16 slices, as ``slice_place`` has them.
      half: which, 0 or 1.
      interpret: counts in plain JAX.
    """
    if interpret:
        warps = rows.shape[0] // ROWS
        rows_WRK = rows.reshape(warps, ROWS, 4, HALVES, 2)[:, :, :, half].reshape(warps, ROWS, 8)
        slices_WGSK = slices.reshape(warps, 8, 4, 2, 2).transpose(0, 1, 4, 2, 3).reshape(warps, 8, 2, 8)
        ones = jax.lax.population_count(slices_WGSK[:, :, None] & rows_WRK[:, None, :, None])
        return sums + jnp.sum(ones, axis=4).reshape(sums.shape)
    [result] = elementwise_inline_asm(
        PTX[half], args=[sums, rows, slices], constraints=CONSTRAINTS, pack=4, result_shape_dtypes=[_like(sums)]
    )
    return result


def slice_place(n, word):
    """Returns the place, of 256, of a word of slice n, of 16: by halves, each an operand of a warp in one stretch."""
    return 128 * (word >> 1 & 1) + 16 * (n & 7) + (word & 12) + 2 * (word & 1) + (n >> 3)


def per_row(sums: jax.Array) -> tuple:
    """Returns ((low, high) of rows 2q, the same of rows 2q + 1), int32[8 W, 4]: slices g and g + 8, [8 w + g, q]."""

    def last_two(a):
        return (half.reshape(half.shape[:-1]) for half in jnp.split(a, 2, axis=a.ndim - 1))

    low, high = last_two(sums.reshape(-1, 4, 2, 2))
    return tuple(zip(last_two(low), last_two(high), strict=True))


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
