# SPDX-License-Identifier: Apache-2.0
"""Routing on NVIDIA GPUs: Pallas-Triton kernels, alone or in the shadow of the shared expert's first half.

A routing program takes 16 rows of m: it multiplies them with the router on tensor cores, then takes the softmax and k
times the largest. It reads little and waits long; the programs of the shared expert, launched with it, read much, and
the launch takes as long as they do. A row's result depends on no other row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import load, store
from pallas_kernels.dense.columns import ROWS, Cut, choose_cut, dot, operand_dtype
from pallas_kernels.dense.pallas_triton import gate_columns, gated, launch, rms_norm
from pallas_kernels.routing import reference

MAX_TOKENS = 64
"""More rows than that fill the device with XLA's kernels, too."""

TILE_BYTES = 8192
"""Of the router in a step: its pipeline takes no more shared memory than that of the shared expert's programs."""


def choose(logits_RE: jax.Array, k: int, renormalise: bool) -> list[tuple[jax.Array, jax.Array]]:
    """Returns k pairs (weight_R, id_R): the softmax's largest, of equal ones the lower id first."""
    num_experts = logits_RE.shape[1]
    id_RE = jnp.broadcast_to(jnp.arange(num_experts, dtype=jnp.int32)[None], logits_RE.shape)
    e_RE = jnp.exp(logits_RE - jnp.max(logits_RE, axis=1)[:, None])
    left_RE = e_RE / jnp.sum(e_RE, axis=1)[:, None]
    chosen, total_R = [], 0.0
    for _ in range(k):
        weight_R = jnp.max(left_RE, axis=1)
        id_R = jnp.min(jnp.where(left_RE == weight_R[:, None], id_RE, num_experts), axis=1)
        left_RE = jnp.where(id_RE == id_R[:, None], -1.0, left_RE)
        chosen.append((weight_R, id_R))
        total_R += weight_R
    return [(weight_R / total_R, id_R) for weight_R, id_R in chosen] if renormalise else chosen


def route_rows(block, ins, outs, k: int, renormalise: bool) -> None:
    """Routes one block of 16 rows.

    Args:
      block: its number.
      ins: references to m, router, and shared_gate and first, which may be None.
      outs: references to weights, ids and factor, which is None with shared_gate.
      k, renormalise: as of ``pallas_kernels.routing.api.norm_and_route``.
    """
    m, router, shared_gate, first = ins
    weights, ids, factor = outs
    (num_tokens, num_columns), num_experts = m.shape, router.shape[1]
    operand = operand_dtype(m, router)
    padded_experts = max(16, pl.next_power_of_2(num_experts))
    depth = min(128, max(16, TILE_BYTES // (padded_experts * operand.itemsize)))
    row_R = block * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    first_R = 0 if first is None else load(first.at[row_R], mask=row_R < num_tokens, other=0)
    there_R1 = (row_R < num_tokens)[:, None]
    expert_1E = jnp.arange(padded_experts, dtype=jnp.int32)[None]

    def add_products(i, sums):
        c_C = i * depth + jnp.arange(depth, dtype=jnp.int32)
        inside_C = c_C < num_columns
        m_RC = load(m.at[row_R[:, None], c_C[None]], mask=there_R1 & inside_C[None], other=0.0).astype(operand)
        inside_CE = inside_C[:, None] & (expert_1E < num_experts)
        router_CE = load(router.at[c_C[:, None], expert_1E], mask=inside_CE, other=0.0).astype(operand)
        products = [dot(m_RC, router_CE)]
        if shared_gate is not None:  # as a matrix of equal rows: loads of whatever is multiplied are pipelined
            c_RC, inside_RC = (jnp.broadcast_to(x_C[None], m_RC.shape) for x_C in (c_C, inside_C))
            gate_RC = load(shared_gate.at[c_RC], mask=inside_RC, other=0.0).astype(operand)
            products.append(dot(m_RC, gate_RC.T))
        return [total + product for total, product in zip(sums, products, strict=True)]

    widths = [padded_experts] if shared_gate is None else [padded_experts, ROWS]
    zeros = [jnp.zeros((ROWS, width), jnp.float32) for width in widths]
    logits_RE, *gates = lax.fori_loop(0, pl.cdiv(num_columns, depth), add_products, zeros)
    logits_RE = jnp.where(expert_1E < num_experts, logits_RE, -jnp.inf)
    for j, (weight_R, id_R) in enumerate(choose(logits_RE, k, renormalise)):
        store(weights.at[row_R, j], weight_R, mask=row_R < num_tokens)
        store(ids.at[row_R, j], id_R + first_R, mask=row_R < num_tokens)
    for gate_RR in gates:  # equal columns
        store(factor.at[row_R, 0], jax.nn.sigmoid(jnp.max(gate_RR, axis=1)), mask=row_R < num_tokens)


def _out_shapes(num_tokens: int, k: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes of weights, ids and factor."""
    shapes = ((num_tokens, k), jnp.float32), ((num_tokens, k), jnp.int32), ((num_tokens, 1), jnp.float32)
    return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def norm_and_route(
    x_TD: jax.Array,
    norm_D: jax.Array,
    eps: float,
    router_DE: jax.Array,
    k: int,
    renormalise: bool,
    first_T: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.routing.api.norm_and_route``."""
    if len(x_TD) > MAX_TOKENS:
        return reference.norm_and_route(x_TD, norm_D, eps, router_DE, k, renormalise, first_T)

    m_TD = rms_norm(x_TD, norm_D, eps, interpret=interpret)
    return m_TD, *_route(m_TD, router_DE, None, first_T, k, renormalise, interpret)


def _take(refs: list, *arrays: jax.Array | None) -> list:
    """Returns the next references for those arrays that there are, None for the others."""
    return [None if array is None else refs.pop(0) for array in arrays]


def _route(m_TD, router_DE, shared_gate_D, first_T, k: int, renormalise: bool, interpret: bool) -> list[jax.Array]:
    """Returns the weights and ids, and where there is a shared gate its factor."""
    optional = shared_gate_D, first_T

    def kernel(m, router, *refs):
        refs = list(refs)
        ins = m, router, *_take(refs, *optional)
        route_rows(pl.program_id(0), ins, (*refs, None)[:3], k, renormalise)

    out_shape = _out_shapes(len(m_TD), k)[: 2 if shared_gate_D is None else 3]
    cut = Cut(columns=16, depth=16, num_warps=4, num_stages=5)
    programs = pl.cdiv(len(m_TD), ROWS)
    present = [array for array in optional if array is not None]
    return launch(kernel, "route", programs, out_shape, cut, interpret, m_TD, router_DE, *present)


def norm_route_and_gate(
    x_TD: jax.Array,
    norm_D: jax.Array,
    eps: float,
    router_DE: jax.Array,
    k: int,
    renormalise: bool,
    shared: tuple[jax.Array, jax.Array, jax.Array],
    activation: str,
    first_T: jax.Array | None = None,
    *,
    cut: Cut | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.routing.api.norm_route_and_gate``."""
    num_tokens, width = len(x_TD), shared[0].shape[1]
    if num_tokens > MAX_TOKENS:
        return reference.norm_route_and_gate(x_TD, norm_D, eps, router_DE, k, renormalise, shared, activation, first_T)
    gate_DF, up_DF, shared_gate_D = shared
    m_TD = rms_norm(x_TD, norm_D, eps, interpret=interpret)
    if num_tokens > ROWS:
        h_TF = gated(m_TD, gate_DF, up_DF, activation, None, 0.0)
        weights_TK, ids_TK, factor_T1 = _route(m_TD, router_DE, shared_gate_D, first_T, k, renormalise, interpret)
        return m_TD, weights_TK, ids_TK, h_TF, factor_T1
    cut = cut or choose_cut(width, operand_dtype(x_TD, gate_DF), 2)

    def kernel(m, router, gate, up, shared_gate, *refs):
        refs, program = list(refs), pl.program_id(0)
        ins = m, router, shared_gate, *_take(refs, first_T)
        weights, ids, factor, h = refs
        pl.when(program == 0)(lambda: route_rows(0, ins, (weights, ids, factor), k, renormalise))
        pl.when(program > 0)(lambda: gate_columns(program - 1, m, gate, up, h, activation, cut))

    out_shape = *_out_shapes(num_tokens, k), jax.ShapeDtypeStruct((num_tokens, width), x_TD.dtype)
    programs = 1 + pl.cdiv(width, cut.columns)
    args = m_TD, router_DE, *shared, *(() if first_T is None else (first_T,))
    weights_TK, ids_TK, factor_T1, h_TF = launch(kernel, "route_and_gate", programs, out_shape, cut, interpret, *args)
    return m_TD, weights_TK, ids_TK, h_TF, factor_T1
