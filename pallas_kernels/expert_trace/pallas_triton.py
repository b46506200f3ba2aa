# SPDX-License-Identifier: Apache-2.0
"""The packed trace on NVIDIA GPUs: one launch for all layers, a program for each token of each."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load, store


def pack_trace(
    ids: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    h_squares: tuple[jax.Array, ...],
    firsts: tuple[int, ...],
    num_experts: int,
    into: tuple[jax.Array, jax.Array] | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Args and result: see ``pallas_kernels.expert_trace.api.pack_trace``."""
    num_layers, (num_tokens, k) = len(ids), ids[0].shape
    width = residuals[0].shape[1]
    arrays = *ids, *weights, *h_squares, *residuals
    place = () if into is None else (into[0], jnp.reshape(into[1], 1))
    out_shape = jax.ShapeDtypeStruct((num_tokens, num_layers, 3 * k + 1) if into is None else into[0].shape, jnp.int32)

    def kernel(*refs):
        refs, (*places, out) = refs[: len(arrays)], refs[len(arrays) :]
        layer, token = pl.program_id(0), pl.program_id(1)
        at = (places[-1][0], token, layer) if places else (token, layer)
        slot_K = jnp.arange(pl.next_power_of_2(k), dtype=jnp.int32)
        column_D = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)

        def pack(of_layer, first):
            ids_ref, *floats, m = of_layer
            id_K = load(ids_ref.at[token, slot_K], mask=slot_K < k, other=jnp.int32(0)) - first
            id_K = jnp.where((id_K >= 0) & (id_K < num_experts), id_K, num_experts)
            store(out.at[*at, slot_K], id_K, mask=slot_K < k)
            for column, ref in enumerate(floats, 1):
                x_K = load(ref.at[token, slot_K], mask=slot_K < k, other=0.0)
                x_K = lax.bitcast_convert_type(x_K, jnp.int32)
                store(out.at[*at, column * k + slot_K], x_K, mask=slot_K < k)
            m_D = load(m.at[token, column_D], mask=column_D < width, other=0.0).astype(jnp.float32)
            out[*at, 3 * k] = lax.bitcast_convert_type(jnp.sum(m_D * m_D), jnp.int32)

        for one, first in enumerate(firsts):
            pl.when(layer == one)(lambda of_layer=refs[one::num_layers], first=first: pack(of_layer, first))

    return pl.pallas_call(
        kernel,
        grid=(num_layers, num_tokens),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (len(arrays) + len(place)),
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=out_shape,
        input_output_aliases={len(arrays): 0} if place else {},
        compiler_params=CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="pack_trace",
    )(*arrays, *place)
