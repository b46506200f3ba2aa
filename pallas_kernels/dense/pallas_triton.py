# SPDX-License-Identifier: Apache-2.0
"""Dense products of few token rows on NVIDIA GPUs: Pallas-Triton kernels that read each matrix once.

Under the names of ``reference.py``. One program takes a block of columns and all of the contraction, or a stretch of it
where the result may be in parts; see ``columns``.
More than 16 rows are left to XLA (cuBLAS), which is faster there. It picks a product by its shape, so up to 64 rows are
padded to 64: within 1 to 16 and within 17 to 64 rows, a row's result is the same whatever their number.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._triton import load, store
from pallas_kernels.dense import reference
from pallas_kernels.dense.add_norm import add_norm as add_norm
from pallas_kernels.dense.columns import (
    ROWS,
    Cut,
    block_columns,
    block_place,
    choose_cut,
    choose_cut_of_parts,
    launch,
    multiply,
    operand_dtype,
)
from pallas_kernels.moe_ffn.pages import ACTIVATIONS

PADDED_ROWS = 64
"""What fewer rows are padded to where XLA multiplies."""


def pad_rows(x_TD: jax.Array) -> jax.Array:
    """Returns more than 16 rows as 64, where there are fewer."""
    return jnp.pad(x_TD, ((0, max(0, PADDED_ROWS - len(x_TD))), (0, 0)))


def project(
    x_TD: jax.Array,
    weights: tuple[jax.Array, ...],
    biases: tuple[jax.Array | None, ...],
    *,
    cut: Cut | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Args and result: see ``pallas_kernels.dense.api.project``."""
    num_tokens = len(x_TD)
    if num_tokens > ROWS:
        return tuple(y[:num_tokens] for y in reference.project(pad_rows(x_TD), weights, biases))
    cut = cut or choose_cut(sum(w.shape[1] for w in weights), operand_dtype(x_TD, *weights))
    blocks = [pl.cdiv(w.shape[1], cut.columns) for w in weights]
    present = [bias for bias in biases if bias is not None]

    def kernel(x, *refs):
        refs = iter(refs)
        matrices = [next(refs) for _ in weights]
        bias_refs = [None if bias is None else next(refs) for bias in biases]

        def run(block, w, bias, out):
            column_N = block_columns(block, cut)
            at, mask = block_place(out.shape, column_N)
            if bias is not None:  # ahead of the loop, so that nothing waits for it behind the loop
                bias_N = load(bias.at[column_N], mask=column_N < out.shape[1], other=0.0).astype(jnp.float32)
            (y_RN,) = multiply(x, [w], column_N, cut)
            if bias is not None:
                y_RN += bias_N[None]
            store(out.at[at], y_RN.astype(out.dtype), mask=mask)

        program, start = pl.program_id(0), 0
        for w, bias, out, count in zip(matrices, bias_refs, refs, blocks, strict=True):
            here = (program >= start) & (program < start + count)
            pl.when(here)(lambda args=(program - start, w, bias, out): run(*args))
            start += count

    out_shape = tuple(jax.ShapeDtypeStruct((num_tokens, w.shape[1]), x_TD.dtype) for w in weights)
    return launch(kernel, "project", sum(blocks), out_shape, cut.params, interpret, x_TD, *weights, *present)


def project_parts(
    h_TC: jax.Array, w_CD: jax.Array, *, cut: Cut | None = None, interpret: bool = False
) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.api.project_parts``."""
    num_tokens, num_columns = len(h_TC), w_CD.shape[1]
    if num_tokens > ROWS:
        return reference.project_parts(pad_rows(h_TC), w_CD)[:, :num_tokens]
    cut = cut or choose_cut_of_parts(w_CD.shape, operand_dtype(h_TC, w_CD))
    blocks = pl.cdiv(num_columns, cut.columns)

    def kernel(h, w, out):
        block, stretch = pl.program_id(0) % blocks, pl.program_id(0) // blocks
        column_N = block_columns(block, cut)
        (row_R1, column_1N), mask = block_place(out.shape[1:], column_N)
        (y_RN,) = multiply(h, [w], column_N, cut, stretch=stretch)
        store(out.at[stretch, row_R1, column_1N], y_RN, mask=mask)

    out_shape = jax.ShapeDtypeStruct((cut.stretches, num_tokens, num_columns), jnp.float32)
    return launch(kernel, "project_parts", blocks * cut.stretches, out_shape, cut.params, interpret, h_TC, w_CD)


def gated(
    x_TD: jax.Array,
    gate_DF: jax.Array,
    up_DF: jax.Array,
    activation: str,
    *,
    cut: Cut | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.api.gated``."""
    num_tokens, width = x_TD.shape[0], gate_DF.shape[1]
    if num_tokens > ROWS:
        return reference.gated(pad_rows(x_TD), gate_DF, up_DF, activation)[:num_tokens]
    cut = cut or choose_cut(width, operand_dtype(x_TD, gate_DF), 2)

    def kernel(x, gate, up, out):
        column_N = block_columns(pl.program_id(0), cut)
        at, mask = block_place(out.shape, column_N)
        gate_RN, up_RN = multiply(x, [gate, up], column_N, cut)
        store(out.at[at], (ACTIVATIONS[activation](gate_RN) * up_RN).astype(out.dtype), mask=mask)

    out_shape = jax.ShapeDtypeStruct((num_tokens, width), x_TD.dtype)
    programs = pl.cdiv(width, cut.columns)
    return launch(kernel, "gated", programs, out_shape, cut.params, interpret, x_TD, gate_DF, up_DF)


def logits(
    x_TD: jax.Array, head: jax.Array, transposed: bool, *, cut: Cut | None = None, interpret: bool = False
) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.api.logits``."""
    num_tokens, num_columns = x_TD.shape[0], head.shape[0 if transposed else 1]
    if num_tokens > ROWS:
        return reference.logits(pad_rows(x_TD), head, transposed)[:num_tokens]
    cut = cut or choose_cut(num_columns, operand_dtype(x_TD, head))

    def kernel(x, w, out):
        column_N = block_columns(pl.program_id(0), cut)
        at, mask = block_place(out.shape, column_N)
        (y_RN,) = multiply(x, [w], column_N, cut, transposed=transposed)
        store(out.at[at], y_RN, mask=mask)

    out_shape = jax.ShapeDtypeStruct((num_tokens, num_columns), jnp.float32)
    return launch(kernel, "logits", pl.cdiv(num_columns, cut.columns), out_shape, cut.params, interpret, x_TD, head)
