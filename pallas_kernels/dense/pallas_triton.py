# SPDX-License-Identifier: Apache-2.0
"""Dense products of few token rows on NVIDIA GPUs: Pallas-Triton kernels that read each matrix once.

Under the names of ``reference.py``. One program takes a block of columns and all of the contraction; see ``columns``.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load, store
from pallas_kernels.dense import reference
from pallas_kernels.dense.columns import (
    MAX_TOKENS,
    Cut,
    block_columns,
    block_place,
    choose_cut,
    multiply,
    operand_dtype,
)
from pallas_kernels.moe_ffn.pages import ACTIVATIONS


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


def _norm_scale(square_R1, depth: int, eps: float):
    return lax.rsqrt(square_R1 / depth + eps)


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
    num_tokens, depth = x_TD.shape
    if num_tokens > MAX_TOKENS:
        return reference.project(x_TD, weights, norm_D, eps, biases)
    cut = cut or choose_cut(num_tokens, sum(w.shape[1] for w in weights), operand_dtype(x_TD, *weights))
    blocks = [pl.cdiv(w.shape[1], cut.columns) for w in weights]
    norms = () if norm_D is None else (norm_D,)
    present = [bias for bias in biases if bias is not None]

    def kernel(x, *refs):
        refs = iter(refs)
        norm = None if norm_D is None else next(refs)
        matrices = [next(refs) for _ in weights]
        bias_refs = [None if bias is None else next(refs) for bias in biases]

        def run(block, w, bias, out):
            column_N = block_columns(block, cut)
            at, mask = block_place(out.shape, column_N)
            if bias is not None:  # ahead of the loop, so that nothing waits for it behind the loop
                bias_N = load(bias.at[column_N], mask=column_N < out.shape[1], other=0.0).astype(jnp.float32)
            (y_RN,), square_R1 = multiply(x, [w], column_N, cut, norm=norm)
            if norm is not None:
                y_RN *= _norm_scale(square_R1, depth, eps)
            if bias is not None:
                y_RN += bias_N[None]
            store(out.at[at], y_RN.astype(out.dtype), mask=mask)

        program, start = pl.program_id(0), 0
        for w, bias, out, count in zip(matrices, bias_refs, refs, blocks, strict=True):
            here = (program >= start) & (program < start + count)
            pl.when(here)(lambda args=(program - start, w, bias, out): run(*args))
            start += count

    out_shape = tuple(jax.ShapeDtypeStruct((num_tokens, w.shape[1]), x_TD.dtype) for w in weights)
    return launch(kernel, "project", sum(blocks), out_shape, cut, interpret, x_TD, *norms, *weights, *present)


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
    if len(h_TC) > MAX_TOKENS:
        return reference.project_add(h_TC, w_CD, residual_TD, factor_T1, addend_TD)
    cut = cut or choose_cut(len(h_TC), w_CD.shape[1], operand_dtype(h_TC, w_CD))
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
        (y_RN,), _ = multiply(h, [w], column_N, cut)
        if factor_T1 is not None:
            y_RN = factor_R1 * y_RN
        if addend_TD is not None:
            y_RN = addend_RN + y_RN
        store(out.at[at], residual_RN + y_RN.astype(out.dtype), mask=mask)

    out_shape = jax.ShapeDtypeStruct(residual_TD.shape, residual_TD.dtype)
    programs = pl.cdiv(w_CD.shape[1], cut.columns)
    return launch(kernel, "project_add", programs, out_shape, cut, interpret, h_TC, w_CD, residual_TD, *present)


def gate_columns(block, x, norm, gate, up, out, eps: float, activation: str, cut: Cut) -> None:
    """Writes one block of columns of ``act(norm(x) @ gate) * (norm(x) @ up)``; all but ``block`` are references."""
    column_N = block_columns(block, cut)
    at, mask = block_place(out.shape, column_N)
    (gate_RN, up_RN), square_R1 = multiply(x, [gate, up], column_N, cut, norm=norm)
    if norm is not None:
        scale_R1 = _norm_scale(square_R1, x.shape[1], eps)
        gate_RN, up_RN = gate_RN * scale_R1, up_RN * scale_R1
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
    if num_tokens > MAX_TOKENS:
        return reference.gated(x_TD, gate_DF, up_DF, activation, norm_D, eps)
    cut = cut or choose_cut(num_tokens, width, operand_dtype(x_TD, gate_DF))
    norms = () if norm_D is None else (norm_D,)

    def kernel(x, gate, up, *refs):
        *norm, out = refs
        gate_columns(pl.program_id(0), x, norm[0] if norm else None, gate, up, out, eps, activation, cut)

    out_shape = jax.ShapeDtypeStruct((num_tokens, width), x_TD.dtype)
    programs = pl.cdiv(width, cut.columns)
    return launch(kernel, "gated", programs, out_shape, cut, interpret, x_TD, gate_DF, up_DF, *norms)


def logits(
    x_TD: jax.Array, head: jax.Array, transposed: bool, *, cut: Cut | None = None, interpret: bool = False
) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.api.logits``."""
    num_tokens, num_columns = x_TD.shape[0], head.shape[0 if transposed else 1]
    if num_tokens > MAX_TOKENS:
        return reference.logits(x_TD, head, transposed)
    cut = cut or choose_cut(num_tokens, num_columns, operand_dtype(x_TD, head))

    def kernel(x, w, out):
        column_N = block_columns(pl.program_id(0), cut)
        at, mask = block_place(out.shape, column_N)
        (y_RN,), _ = multiply(x, [w], column_N, cut, transposed=transposed)
        store(out.at[at], y_RN, mask=mask)

    out_shape = jax.ShapeDtypeStruct((num_tokens, num_columns), jnp.float32)
    return launch(kernel, "logits", pl.cdiv(num_columns, cut.columns), out_shape, cut, interpret, x_TD, head)
