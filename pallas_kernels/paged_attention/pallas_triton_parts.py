# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels share: sizes, places of splits, and the steps of the online softmax."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.layout import KVLayout

LOG2_E = 1.4426950408889634

MIN_ROWS = 16
"""Rows of a matrix instruction: fewer queries are padded."""


def divmod_power(position, size: int):
    """Returns (position // size, position % size) for a power of two and a position >= 0."""
    return position >> (size.bit_length() - 1), position & (size - 1)


def dot(x, y, contract: tuple[int, int]):
    """Returns the float32 product of two tiles; exact products, also of float32 operands."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = ((contract[:1], contract[1:]), ((), ()))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def operand_dtype(q_dtype, layout: KVLayout):
    """Returns what tiles are multiplied in: the dtype of queries and cache where they agree, else float32."""
    return jnp.dtype(q_dtype) if q_dtype == layout.dtype else jnp.dtype("float32")


def split_count(layout: KVLayout, num_blocks: int, queries: int, split_tokens: int, window: int) -> int:
    """Returns P, the most splits that ``queries`` neighbouring queries see."""
    num_splits = pl.cdiv(num_blocks * layout.block_tokens, split_tokens)
    return min(num_splits, pl.cdiv(window + queries - 1, split_tokens) + 1) if window else num_splits


def split_at(slot, first_split, num_splits: int):
    """Returns the split, of the ``num_splits`` from ``first_split`` on, whose results lie at ``slot``."""
    return first_split + (slot + num_splits - first_split % num_splits) % num_splits


def scaled(score, scale: float, soft_cap: float):
    """Returns products of queries and keys as scores in units of log 2."""
    if soft_cap:
        return soft_cap * LOG2_E * jnp.tanh(score * (scale / soft_cap))
    return score * (scale * LOG2_E)


def shift_of(peak):
    """Returns what to subtract before ``exp2``: the peak, or 0 where nothing was seen."""
    return jnp.where(peak == -jnp.inf, 0.0, peak)


def no_keys(rows: int, head_dim: int) -> tuple:
    """Returns the largest score, the sum of 2^score and the values' weighted sum of no keys."""
    return jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((rows, head_dim), jnp.float32)


def add_keys(carry: tuple, score_RS, read_values) -> tuple:
    """Returns the carry of ``no_keys`` with the keys of a tile; ``read_values`` returns their values, [S, M]."""
    peak_R, total_R, out_RM = carry
    new_peak_R = jnp.maximum(peak_R, jnp.max(score_RS, axis=1))
    shift_R = shift_of(new_peak_R)
    p_RS = jnp.exp2(score_RS - shift_R[:, None])
    keep_R = jnp.exp2(peak_R - shift_R)
    v_SM = read_values()
    added_RM = dot(p_RS.astype(v_SM.dtype), v_SM, (1, 0))
    return new_peak_R, total_R * keep_R + jnp.sum(p_RS, axis=1), out_RM * keep_R[:, None] + added_RM
