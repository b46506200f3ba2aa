# SPDX-License-Identifier: Apache-2.0
"""The mixed-precision MoE feed-forward in plain JAX: the definition that the kernels are held to."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitplane import BlockLayout, dequantize_pages
from pallas_kernels.moe_ffn.pages import ACTIVATIONS, WeightPages


def read_block(arena_AW: jax.Array, frames_F: jax.Array, bits: jax.Array, layout: BlockLayout) -> jax.Array:
    """Returns one block's weights, float32[N, C], at its run-time bitwidth; only resident planes are read.

    Args:
      arena_AW: uint32 frames.
      frames_F: int32, the block's frame list.
      bits: int32 scalar in min_bits..max_bits.
      layout: the block's layout.
    """

    def at(num_pages):
        def read():
            starts = layout.page_starts
            frames = arena_AW[frames_F[: starts[num_pages]]]
            return dequantize_pages([frames[starts[p] : starts[p + 1]] for p in range(num_pages)], layout)

        return read

    return lax.switch(bits - layout.min_bits, [at(b) for b in range(layout.min_bits, layout.max_bits + 1)])


def _project(x_TC: jax.Array, w_NC: jax.Array) -> jax.Array:
    """Returns x W^T, float32[T, N]: products in x's dtype (never TF32), sums in float32."""
    return jnp.einsum(
        "TC,NC->TN",
        x_TC,
        w_NC.astype(x_TC.dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def moe_ffn(
    arena_AW: jax.Array,
    pages: WeightPages,
    m_TD: jax.Array,
    ids_TK: jax.Array,
    activation: str,
) -> tuple[jax.Array, jax.Array]:
    """Returns (y_TKD, h_square_TK), both float32: down[e_k] h_tk, and |h_tk|^2 of each selected expert, else 0.

    h_tk = act(gate[e_k] m_t) * (up[e_k] m_t). Loops over the experts that some token uses, in ascending order, and
    dequantizes each once. The order and the shapes do not depend on the other rows' tokens, so neither does a row's
    result.

    Args and errors: see ``pallas_kernels.moe_ffn.api.moe_ffn``.
    """
    num_experts = pages.bits_EU.shape[0]
    act = ACTIVATIONS[activation]
    used_E = jnp.zeros(num_experts, bool).at[ids_TK].set(True, mode="drop")
    order_E = jnp.argsort(~used_E, stable=True)  # used experts first, ascending

    def run_expert(e, y_TKD, h_square_TK):
        gate_up_NC = read_block(arena_AW, pages.gate_up_frames_EF[e], pages.bits_EU[e, 0], pages.gate_up)
        down_NC = read_block(arena_AW, pages.down_frames_EF[e], pages.bits_EU[e, 1], pages.down)
        gate_up_TN = _project(m_TD, gate_up_NC)
        gate_TF, up_TF = jnp.split(gate_up_TN, 2, axis=-1)
        h_TF = (act(gate_TF) * up_TF).astype(m_TD.dtype)
        down_TD = _project(h_TF, down_NC)
        chosen_TK = ids_TK == e
        h_square_T = jnp.sum(jnp.square(h_TF.astype(jnp.float32)), axis=-1)
        y_TKD = jnp.where(chosen_TK[..., None], down_TD[:, None], y_TKD)
        return y_TKD, jnp.where(chosen_TK, h_square_T[:, None], h_square_TK)

    def body(i, found):
        e = order_E[i]
        return lax.cond(used_E[e], lambda found: run_expert(e, *found), lambda found: found, found)

    found = jnp.zeros((*ids_TK.shape, pages.down.rows), jnp.float32), jnp.zeros(ids_TK.shape, jnp.float32)
    return lax.fori_loop(0, min(num_experts, ids_TK.size), body, found)
