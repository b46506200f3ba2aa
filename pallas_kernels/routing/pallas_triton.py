# SPDX-License-Identifier: Apache-2.0
"""Routing on NVIDIA GPUs: two small Pallas-Triton kernels.

The contraction with the router is short of columns, so it is cut into stretches that many programs read at once, each
in one go, 16 rows on tensor cores; then one program a row adds the parts, takes the softmax and k times the largest.
A row's result depends on no other row.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._triton import load, store
from pallas_kernels.dense.columns import ROWS, Cut, dot, operand_dtype
from pallas_kernels.dense.pallas_triton import gated, launch, rms_norm
from pallas_kernels.routing import reference

MAX_TOKENS = 64
"""More rows than that fill the device with XLA's kernels, too."""

STRETCH = 128
"""Rows of the router that a program reads."""


def route(
    m_TD: jax.Array,
    router_DE: jax.Array,
    k: int,
    renormalise: bool,
    shared_gate_D: jax.Array | None = None,
    first_T: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Args and result: see ``pallas_kernels.routing.api.route``."""
    if len(m_TD) > MAX_TOKENS:
        return reference.route(m_TD, router_DE, k, renormalise, shared_gate_D, first_T)
    parts_STE = logit_parts(m_TD, router_DE, shared_gate_D, interpret=interpret)
    shared = shared_gate_D is not None
    return choose_experts(parts_STE, router_DE.shape[1], k, renormalise, shared, first_T, interpret=interpret)


def logit_parts(
    m_TD: jax.Array, router_DE: jax.Array, shared_gate_D: jax.Array | None, *, interpret: bool = False
) -> jax.Array:
    """Returns parts of ``m @ router``, float32[S, T, E or more]; column E is the shared gate's, where there is one."""
    (num_tokens, depth), num_experts = m_TD.shape, router_DE.shape[1]
    columns = max(16, pl.next_power_of_2(num_experts + (shared_gate_D is not None)))
    operand, row_blocks, stretches = operand_dtype(m_TD, router_DE), pl.cdiv(num_tokens, ROWS), pl.cdiv(depth, STRETCH)

    def kernel(m, router, *refs):
        *shared_gate, out = refs
        block, stretch = pl.program_id(0) % row_blocks, pl.program_id(0) // row_blocks
        row_R1 = block * ROWS + jnp.arange(ROWS, dtype=jnp.int32)[:, None]
        c_C = stretch * STRETCH + jnp.arange(STRETCH, dtype=jnp.int32)
        expert_1E = jnp.arange(columns, dtype=jnp.int32)[None]
        inside_C = c_C < depth
        m_RC = load(m.at[row_R1, c_C[None]], mask=(row_R1 < num_tokens) & inside_C[None], other=0.0)
        router_mask = inside_C[:, None] & (expert_1E < num_experts)
        w_CE = load(router.at[c_C[:, None], expert_1E], mask=router_mask, other=0.0).astype(operand)
        if shared_gate:
            gate_C = load(shared_gate[0].at[c_C], mask=inside_C, other=0.0).astype(operand)
            w_CE = jnp.where(expert_1E == num_experts, gate_C[:, None], w_CE)
        mask = jnp.broadcast_to(row_R1 < num_tokens, (ROWS, columns))
        store(out.at[stretch, row_R1, expert_1E], dot(m_RC.astype(operand), w_CE), mask=mask)

    out_shape = jax.ShapeDtypeStruct((stretches, num_tokens, columns), jnp.float32)
    args = m_TD, router_DE, *(() if shared_gate_D is None else (shared_gate_D,))
    cut = Cut(columns=columns, depth=STRETCH, num_warps=4, num_stages=1)
    return launch(kernel, "router_logits", stretches * row_blocks, out_shape, cut, interpret, *args)


def choose(logit_E: jax.Array, num_experts: int, k: int, renormalise: bool) -> list[tuple[jax.Array, jax.Array]]:
    """Returns k pairs (weight, id): the largest of the softmax of the first E, of equal ones the lower id first."""
    id_E = jnp.arange(len(logit_E), dtype=jnp.int32)
    logit_E = jnp.where(id_E < num_experts, logit_E, -jnp.inf)
    e_E = jnp.exp(logit_E - jnp.max(logit_E))
    left_E = e_E / jnp.sum(e_E)
    chosen, total = [], 0.0
    for _ in range(k):
        weight = jnp.max(left_E)
        id_ = jnp.min(jnp.where(left_E == weight, id_E, num_experts - 1))  # a NaN equals nothing
        left_E = jnp.where(id_E == id_, -1.0, left_E)
        chosen.append((weight, id_))
        total += weight
    return [(weight / total, id_) for weight, id_ in chosen] if renormalise else chosen


def choose_experts(
    parts_STE: jax.Array,
    num_experts: int,
    k: int,
    renormalise: bool,
    shared: bool,
    first_T: jax.Array | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns what ``route`` does, of its logits' parts; ``shared`` says whether column E is the shared gate's."""
    stretches, num_tokens, columns = parts_STE.shape

    def kernel(parts, *refs):
        first, (weights, ids, *factor) = (None, refs) if first_T is None else (refs[0], refs[1:])
        t, offset = pl.program_id(0), 0 if first is None else first[pl.program_id(0)]
        stretch_S1 = jnp.arange(pl.next_power_of_2(stretches), dtype=jnp.int32)[:, None]
        column_E = jnp.arange(columns, dtype=jnp.int32)
        mask = jnp.broadcast_to(stretch_S1 < stretches, (len(stretch_S1), columns))
        logit_E = jnp.sum(load(parts.at[stretch_S1, t, column_E[None]], mask=mask, other=0.0), axis=0)
        for j, (weight, id_) in enumerate(choose(logit_E, num_experts, k, renormalise)):
            weights[t, j] = weight
            ids[t, j] = id_ + offset
        if shared:
            factor[0][t, 0] = jax.nn.sigmoid(jnp.sum(jnp.where(column_E == num_experts, logit_E, 0.0)))

    shapes = ((num_tokens, k), jnp.float32), ((num_tokens, k), jnp.int32), ((num_tokens, 1), jnp.float32)
    out_shape = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes[: 3 if shared else 2])
    cut = Cut(columns=columns, depth=16, num_warps=1, num_stages=1)
    args = parts_STE, *(() if first_T is None else (first_T,))
    weights_TK, ids_TK, *factor = launch(kernel, "route", num_tokens, out_shape, cut, interpret, *args)
    return weights_TK, ids_TK, factor[0] if shared else None


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
    return m_TD, *route(m_TD, router_DE, k, renormalise, None, first_T, interpret=interpret)[:2]


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
    if len(x_TD) > MAX_TOKENS:
        return reference.norm_route_and_gate(x_TD, norm_D, eps, router_DE, k, renormalise, shared, activation, first_T)
    gate_DF, up_DF, shared_gate_D = shared
    m_TD = rms_norm(x_TD, norm_D, eps, interpret=interpret)
    h_TF = gated(m_TD, gate_DF, up_DF, activation, None, 0.0, cut=cut, interpret=interpret)
    routed = route(m_TD, router_DE, k, renormalise, shared_gate_D, first_T, interpret=interpret)
    return m_TD, *routed[:2], h_TF, routed[2]
