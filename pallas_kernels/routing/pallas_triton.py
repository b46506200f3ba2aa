# SPDX-License-Identifier: Apache-2.0
"""Routing on NVIDIA GPUs: two small Pallas-Triton kernels.

The contraction with the router is short of columns, so it is cut into stretches that many programs read at once, each
in one go, 16 rows on tensor cores; then one program a row adds the parts, takes the softmax and k times the largest.
A row's result depends on no other row.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load, store
from pallas_kernels.dense.columns import ROWS, dot, launch, operand_dtype
from pallas_kernels.routing import reference
from pallas_kernels.routing.reference import NOWHERE

MAX_TOKENS = 64
"""More rows than that fill the device with XLA's kernels, too."""

STRETCH_BYTES = 256
"""Of each row of m that a program reads."""


def route(
    m_TD: jax.Array,
    router_DE: jax.Array,
    k: int,
    renormalise: bool,
    shared_gate_D: jax.Array | None = None,
    first: jax.Array | None = None,
    positions_T: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Args and result: see ``pallas_kernels.routing.api.route``."""
    if len(m_TD) > MAX_TOKENS:
        return reference.route(m_TD, router_DE, k, renormalise, shared_gate_D, first, positions_T)
    parts_STE = logit_parts(m_TD, router_DE, shared_gate_D, interpret=interpret)
    shared, place = shared_gate_D is not None, (first, positions_T)
    return choose_experts(parts_STE, router_DE.shape[1], k, renormalise, shared, place, interpret=interpret)


def logit_parts(
    m_TD: jax.Array, router_DE: jax.Array, shared_gate_D: jax.Array | None, *, interpret: bool = False
) -> jax.Array:
    """Returns parts of ``m @ router``, float32[S, T, E or more]; column E is the shared gate's, where there is one."""
    (num_tokens, depth), num_experts = m_TD.shape, router_DE.shape[1]
    columns = max(16, pl.next_power_of_2(num_experts + (shared_gate_D is not None)))
    operand = operand_dtype(m_TD, router_DE)
    length = STRETCH_BYTES // operand.itemsize
    row_blocks, stretches = pl.cdiv(num_tokens, ROWS), pl.cdiv(depth, length)

    def kernel(m, router, *refs):
        *shared_gate, out = refs
        block, stretch = pl.program_id(0) % row_blocks, pl.program_id(0) // row_blocks
        row_R1 = block * ROWS + jnp.arange(ROWS, dtype=jnp.int32)[:, None]
        c_C = stretch * length + jnp.arange(length, dtype=jnp.int32)
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
    params = CompilerParams(num_warps=4, num_stages=1)
    return launch(kernel, "router_logits", stretches * row_blocks, out_shape, params, interpret, *args)


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
    place: tuple[jax.Array | None, jax.Array | None],
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns what ``route`` does, of its logits' parts.

    Args: as of ``route``, and
      shared: whether column E is the shared gate's.
      place: first and positions_T.
    """
    stretches, num_tokens, columns = parts_STE.shape
    first, positions_T = place
    args, tree = jax.tree.flatten((parts_STE, None if first is None else jnp.reshape(first, 1), positions_T))

    def kernel(*refs):
        parts, first, positions = jax.tree.unflatten(tree, refs[: len(args)])
        weights, ids, *factor = refs[len(args) :]
        t = pl.program_id(0)
        offset = 0 if first is None else first[0]
        there = True if positions is None else positions[t] >= 0
        stretch_S1 = jnp.arange(pl.next_power_of_2(stretches), dtype=jnp.int32)[:, None]
        column_E = jnp.arange(columns, dtype=jnp.int32)
        mask = jnp.broadcast_to(stretch_S1 < stretches, (len(stretch_S1), columns))
        logit_E = jnp.sum(load(parts.at[stretch_S1, t, column_E[None]], mask=mask, other=0.0), axis=0)
        for j, (weight, id_) in enumerate(choose(logit_E, num_experts, k, renormalise)):
            weights[t, j] = weight
            ids[t, j] = jnp.where(there, id_ + offset, NOWHERE)
        if shared:
            factor[0][t, 0] = jax.nn.sigmoid(jnp.sum(jnp.where(column_E == num_experts, logit_E, 0.0)))

    shapes = ((num_tokens, k), jnp.float32), ((num_tokens, k), jnp.int32), ((num_tokens, 1), jnp.float32)
    out_shape = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes[: 3 if shared else 2])
    params = CompilerParams(num_warps=1, num_stages=1)
    weights_TK, ids_TK, *factor = launch(kernel, "route", num_tokens, out_shape, params, interpret, *args)
    return weights_TK, ids_TK, factor[0] if shared else None
