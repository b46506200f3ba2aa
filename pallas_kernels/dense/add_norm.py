# SPDX-License-Identifier: Apache-2.0
"""The residual stream between two products: what the last ones left in parts is added up, and the rows are normed.

A Pallas-Triton kernel of one program a row, which loads all addends of its row at once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load, store
from pallas_kernels.dense import reference
from pallas_kernels.dense.columns import launch

NUM_WARPS = 8
"""Of a program."""

MAX_TOKENS = 64
"""More rows fill the device with XLA's kernels, too, and XLA adds the addends up as it makes them."""


def over_rms(x_C: jax.Array, num_columns: int, eps: float) -> jax.Array:
    """Returns a row within a kernel over its root mean square; ``x_C`` is zeros past its columns."""
    x32_C = x_C.astype(jnp.float32)
    return (x32_C * lax.rsqrt(jnp.sum(x32_C * x32_C) / num_columns + eps)).astype(x_C.dtype)


def add_norm(
    x_TD: jax.Array,
    norm_D: jax.Array,
    eps: float,
    parts_STD: jax.Array | None = None,
    factor_T1: jax.Array | None = None,
    routed: tuple[jax.Array, jax.Array] | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.dense.api.add_norm``."""
    num_tokens, num_columns = x_TD.shape
    if num_tokens > MAX_TOKENS:
        return reference.add_norm(x_TD, norm_D, eps, parts_STD, factor_T1, routed)
    args, tree = jax.tree.flatten((x_TD, norm_D, parts_STD, factor_T1, routed))

    def kernel(*refs):
        x, norm, parts, factor, routed_refs = jax.tree.unflatten(tree, refs[: len(args)])
        x_out, normed_out = refs[len(args) :]
        t, c_C = pl.program_id(0), jnp.arange(pl.next_power_of_2(num_columns), dtype=jnp.int32)
        inside_C = c_C < num_columns

        def read(ref, *row):
            return load(ref.at[*row, c_C], mask=inside_C, other=0.0)

        x_C, addends = read(x, t), []
        if routed_refs is not None:
            y, weights = routed_refs
            addends.append(reference.ordered_sum(weights[t, k] * read(y, t, k) for k in range(y.shape[1])))
        if parts is not None:
            product_C = reference.ordered_sum(read(parts, s, t) for s in range(parts.shape[0]))
            addends.append(product_C if factor is None else factor[t, 0] * product_C)
        if addends:
            x_C = x_C + reference.ordered_sum(addends).astype(x_C.dtype)
        store(x_out.at[t, c_C], x_C, mask=inside_C)
        normed_C = over_rms(x_C, num_columns, eps) * read(norm).astype(x_C.dtype)
        store(normed_out.at[t, c_C], normed_C, mask=inside_C)

    out_shape = (jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype),) * 2
    params = CompilerParams(num_warps=NUM_WARPS, num_stages=1)
    return launch(kernel, "add_norm", num_tokens, out_shape, params, interpret, *args)
