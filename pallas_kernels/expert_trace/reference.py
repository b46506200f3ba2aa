# SPDX-License-Identifier: Apache-2.0
"""Definition of the packed trace."""

import jax
import jax.numpy as jnp
from jax import lax


def pack_trace(
    ids: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    h_squares: tuple[jax.Array, ...],
    firsts: tuple[int, ...],
    num_experts: int,
    into: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Args and result: see ``pallas_kernels.expert_trace.api.pack_trace``. All layers are reduced together."""
    ids_TLK, weights_TLK, residual_TLD, h_square_TLK = (
        jnp.stack(values, axis=1) for values in (ids, weights, residuals, h_squares)
    )
    ids_TLK = ids_TLK - jnp.array(firsts, jnp.int32)[:, None]
    ids_TLK = jnp.where((ids_TLK >= 0) & (ids_TLK < num_experts), ids_TLK, num_experts)
    residual_square_TL1 = jnp.sum(jnp.square(residual_TLD.astype(jnp.float32)), axis=-1, keepdims=True)
    bits = (lax.bitcast_convert_type(x, jnp.int32) for x in (weights_TLK, h_square_TLK, residual_square_TL1))
    packed = jnp.concatenate([ids_TLK, *bits], axis=-1)
    return packed if into is None else into[0].at[into[1]].set(packed)
