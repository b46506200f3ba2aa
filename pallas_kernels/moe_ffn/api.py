# SPDX-License-Identifier: Apache-2.0
"""The routed feed-forward over weight pages: its meaning, and the choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import module_of
from pallas_kernels.moe_ffn.pages import ACTIVATIONS, WeightPages

DECODE_TOKENS = 64
"""More tokens than these are a prefill chunk: products grouped over experts, with other sums than a decode step's."""

LOOKED_UP_BITS = 4
"""Bits up to which a prefill chunk's products look their weights up; wider blocks are dequantized first. One number of
planes for all of them: a kernel with a second loop of products waits for each of its instructions."""

DEQUANTIZED_BYTES = 384 << 20
"""Bytes that dequantized weights may take in a prefill chunk, or one expert's, if those are more."""


def moe_ffn(
    arena_AW: jax.Array,
    pages: WeightPages,
    m_TD: jax.Array,
    ids_TK: jax.Array,
    *,
    activation: str = "silu",
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Returns (y_TKD, h_square_TK), both float32: the experts' outputs, and how large their activations were.

    With h_tk = act(gate[e] m_t) * (up[e] m_t) of e = ids_tk, rounded to m's dtype as it enters ``down``::

        y_tk = down[e] h_tk            h_square_tk = sum_f h_tkf^2            both 0 where the id selects nothing

    The layer's output is their sum by routing weights, sum_k w_tk y_tk, which is left to whoever adds it to something.

    Args:
      arena_AW: uint32[A, W], the arena's frames.
      pages: the layer's page map.
      m_TD: tokens' inputs, float32 or bfloat16.
      ids_TK: int32, selected experts; an id of E or more selects nothing (rows that are not in use).
      activation: a key of ``ACTIVATIONS``.
      implementation: "xla", the definition, or "triton", Pallas kernels for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation or activation, or shapes that do not agree with the layouts.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {sorted(ACTIVATIONS)}")
    if m_TD.shape[-1] != pages.gate_up.columns or pages.gate_up.rows != 2 * pages.down.columns:
        raise ValueError(
            f"shapes disagree: inputs {m_TD.shape}, gate_up {pages.gate_up.rows} x {pages.gate_up.columns}, "
            f"down {pages.down.rows} x {pages.down.columns}"
        )
    module = module_of(__package__, implementation)
    if implementation == "triton" and m_TD.shape[0] > DECODE_TOKENS:
        from pallas_kernels.moe_ffn import grouped as module  # JAX may be without Triton: only when it is wanted
    return module.moe_ffn(arena_AW, pages, m_TD, ids_TK.astype(jnp.int32), activation)
