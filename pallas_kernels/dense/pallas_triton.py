# SPDX-License-Identifier: Apache-2.0
"""Dense products of few token rows on NVIDIA GPUs: Pallas-Triton kernels that read each matrix once.

Under the names of ``reference.py``. One program takes a block of columns and all of the contraction; see ``columns``.
More than 16 rows are left to XLA (cuBLAS), which is faster there. It picks a product by its shape, so up to 64 rows are
padded to 64: within 1 to 16 and within 17 to 64 rows, a row's result is the same whatever their number.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load, store
from pallas_kernels.dense import reference
from pallas_kernels.dense.add_norm import add_norm as add_norm
from pallas_kernels.dense.columns import (
    ROWS,
    Cut,
    block_columns,
    block_place,
    choose_cut,
    choose_cut_of_parts,
    multiply,
    operand_dtype,
)
from pallas_kernels.moe_ffn.pages import ACTIVATIONS

PADDED_ROWS = 64
"""What fewer rows are padded to where XLA multiplies."""


def pad_rows(*arrays: jax.Array | None) -> list[jax.Array | None]:
    """Returns arrays of more than 16 rows with 64, where they had fewer."""

    def padded(array):
        missing = 0 if array is None else PADDED_ROWS - len(array)
        return jnp.pad(array, ((0, missing), (0, 0))) if missing > 0 else array

    return [padded(array) for array in arrays]


def launch(kernel, name: str, programs: int, out_shape, cut: Cut, interpret: bool, *args):
    """Runs ``programs`` programs on whole arrays in device memory."""
    return pl.pallas_call(
        kernel,
        grid=(programs,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(args),
        out_specs=jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), out_shape),
        out_shape=out_shape,
        compiler_params=CompilerParams(num_warps=cut.num_warps, num_stages=cut.num_stages),
        interpret=interpret,
        name=name,
    )(*args)


def rms_norm(x_TD: jax.Array, norm_D: jax.Array, eps: float, *, interpret: bool = False) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.reference.rms_norm``; a program takes a row."""
    num_columns = x_TD.shape[1]

    def kernel(x, norm, out):
        t, c_C = pl.program_id(0), jnp.arange(pl.next_power_of_2(num_columns), dtype=jnp.int32)
        inside_C = c_C < num_columns
        x_C = load(x.at[t, c_C], mask=inside_C, other=0.0).astype(jnp.float32)
        norm_C = load(norm.at[c_C], mask=inside_C, other=0.0).astype(out.dtype)
        scale = lax.rsqrt(jnp.sum(x_C * x_C) / num_columns + eps)
        store(out.at[t, c_C], (x_C * scale).astype(out.dtype) * norm_C, mask=inside_C)

    cut = Cut(columns=16, depth=16, num_warps=8, num_stages=1)
    out_shape = jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype)
    return launch(kernel, "rms_norm", len(x_TD), out_shape, cut, interpret, x_TD, norm_D)


def project(
    x_TD: jax.Array,
    weights: tuple[jax.Array, ...],
    norm_D: jax.Array | None,
    eps: float,
    biases: tuple[jax.Array | None, ...],
    *,
    cut: Cut | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Args and result: see ``pallas_kernels.dense.api.project``."""
    num_tokens = len(x_TD)
    if num_tokens > ROWS:
        (padded,) = pad_rows(x_TD)
        return tuple(y[:num_tokens] for y in reference.project(padded, weights, norm_D, eps, biases))
    cut = cut or choose_cut(sum(w.shape[1] for w in weights), operand_dtype(x_TD, *weights))
    blocks = [pl.cdiv(w.shape[1], cut.columns) for w in weights]
    if norm_D is not None:
        x_TD = rms_norm(x_TD, norm_D, eps, interpret=interpret)
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
    return launch(kernel, "project", sum(blocks), out_shape, cut, interpret, x_TD, *weights, *present)


def project_add(
    h_TC: jax.Array,
    w_CD: jax.Array,
    residual_TD: jax.Array,
    factor_T1: jax.Array | None,
    addend_TD: jax.Array | None,
    *,
    cut: Cut | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.api.project_add``."""
    if len(h_TC) > ROWS:
        h, *others = pad_rows(h_TC, residual_TD, factor_T1, addend_TD)
        return reference.project_add(h, w_CD, *others)[: len(h_TC)]
    cut = cut or choose_cut(w_CD.shape[1], operand_dtype(h_TC, w_CD))
    present = [array for array in (factor_T1, addend_TD) if array is not None]

    def kernel(h, w, residual, *refs):
        *refs, out = refs
        column_N = block_columns(pl.program_id(0), cut)
        at, mask = block_place(out.shape, column_N)
        row_R1 = at[0]
        # Ahead of the loop, so that nothing waits for them behind the loop.
        residual_RN = load(residual.at[at], mask=mask, other=0.0)
        addend_RN = None if addend_TD is None else load(refs[-1].at[at], mask=mask, other=0.0)
        if factor_T1 is not None:
            factor_R1 = load(refs[0].at[row_R1, jnp.zeros_like(row_R1)], mask=row_R1 < out.shape[0], other=0.0)
        (y_RN,) = multiply(h, [w], column_N, cut)
        if factor_T1 is not None:
            y_RN = factor_R1 * y_RN
        if addend_TD is not None:
            y_RN = addend_RN + y_RN
        store(out.at[at], residual_RN + y_RN.astype(out.dtype), mask=mask)

    out_shape = jax.ShapeDtypeStruct(residual_TD.shape, residual_TD.dtype)
    programs = pl.cdiv(w_CD.shape[1], cut.columns)
    return launch(kernel, "project_add", programs, out_shape, cut, interpret, h_TC, w_CD, residual_TD, *present)


def project_parts(
    h_TC: jax.Array, w_CD: jax.Array, *, cut: Cut | None = None, interpret: bool = False
) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.api.project_parts``."""
    num_tokens, num_columns = len(h_TC), w_CD.shape[1]
    if num_tokens > ROWS:
        return reference.project_parts(*pad_rows(h_TC), w_CD)[:, :num_tokens]
    cut = cut or choose_cut_of_parts(w_CD.shape, operand_dtype(h_TC, w_CD))
    blocks = pl.cdiv(num_columns, cut.columns)

    def kernel(h, w, out):
        block, stretch = pl.program_id(0) % blocks, pl.program_id(0) // blocks
        column_N = block_columns(block, cut)
        (row_R1, column_1N), mask = block_place(out.shape[1:], column_N)
        (y_RN,) = multiply(h, [w], column_N, cut, stretch=stretch)
        store(out.at[stretch, row_R1, column_1N], y_RN, mask=mask)

    out_shape = jax.ShapeDtypeStruct((cut.stretches, num_tokens, num_columns), jnp.float32)
    return launch(kernel, "project_parts", blocks * cut.stretches, out_shape, cut, interpret, h_TC, w_CD)


def gate_columns(block, m, gate, up, out, activation: str, cut: Cut) -> None:
    """Writes one block of columns of ``act(m @ gate) * (m @ up)``; all but ``block`` are references."""
    column_N = block_columns(block, cut)
    at, mask = block_place(out.shape, column_N)
    gate_RN, up_RN = multiply(m, [gate, up], column_N, cut)
    store(out.at[at], (ACTIVATIONS[activation](gate_RN) * up_RN).astype(out.dtype), mask=mask)


def gated(
    x_TD: jax.Array,
    gate_DF: jax.Array,
    up_DF: jax.Array,
    activation: str,
    norm_D: jax.Array | None,
    eps: float,
    *,
    cut: Cut | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.api.gated``."""
    num_tokens, width = x_TD.shape[0], gate_DF.shape[1]
    if num_tokens > ROWS:
        (padded,) = pad_rows(x_TD)
        return reference.gated(padded, gate_DF, up_DF, activation, norm_D, eps)[:num_tokens]
    cut = cut or choose_cut(width, operand_dtype(x_TD, gate_DF), 2)
    if norm_D is not None:
        x_TD = rms_norm(x_TD, norm_D, eps, interpret=interpret)

    def kernel(x, gate, up, out):
        gate_columns(pl.program_id(0), x, gate, up, out, activation, cut)

    out_shape = jax.ShapeDtypeStruct((num_tokens, width), x_TD.dtype)
    programs = pl.cdiv(width, cut.columns)
    return launch(kernel, "gated", programs, out_shape, cut, interpret, x_TD, gate_DF, up_DF)


def logits(
    x_TD: jax.Array, head: jax.Array, transposed: bool, *, cut: Cut | None = None, interpret: bool = False
) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.api.logits``."""
    num_tokens, num_columns = x_TD.shape[0], head.shape[0 if transposed else 1]
    if num_tokens > ROWS:
        return reference.logits(*pad_rows(x_TD), head, transposed)[:num_tokens]
    cut = cut or choose_cut(num_columns, operand_dtype(x_TD, head))

    def kernel(x, w, out):
        column_N = block_columns(pl.program_id(0), cut)
        at, mask = block_place(out.shape, column_N)
        (y_RN,) = multiply(x, [w], column_N, cut, transposed=transposed)
        store(out.at[at], y_RN, mask=mask)

    out_shape = jax.ShapeDtypeStruct((num_tokens, num_columns), jnp.float32)
    return launch(kernel, "logits", pl.cdiv(num_columns, cut.columns), out_shape, cut, interpret, x_TD, head)
