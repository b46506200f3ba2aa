# SPDX-License-Identifier: Apache-2.0
"""The routed feed-forward over weight pages: arguments, their meaning, and the choice of implementation."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.bitplane import BlockLayout

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
"""Activations by Hugging Face's name."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class WeightPages:
    """One layer's routed experts as the kernels see them.

    Attributes:
      bits_EU: int32, committed bitwidth of each expert's gate_up and down block.
      gate_up_frames_EF, down_frames_EF: int32, each block's frames, page after page (``BlockLayout.page_starts``).
        Entries of pages that are not resident hold any valid frame; they are never used.
      gate_up, down: static layouts.
    """

    bits_EU: jax.Array
    gate_up_frames_EF: jax.Array
    down_frames_EF: jax.Array
    gate_up: BlockLayout = field(metadata={"static": True})
    down: BlockLayout = field(metadata={"static": True})


def moe_ffn(
    arena_AW: jax.Array,
    pages: WeightPages,
    m_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    *,
    activation: str = "silu",
    implementation: str = "xla",
) -> jax.Array:
    """Returns sum_k w_k down[e_k] (act(gate[e_k] m) * (up[e_k] m)), float32[T, D].

    Args:
      arena_AW: uint32[A, W], the arena's frames.
      pages: the layer's page map.
      m_TD: tokens' inputs, float32 or bfloat16.
      ids_TK: int32, selected experts; an id of E or more selects nothing (rows that are not in use).
      weights_TK: float32 routing weights.
      activation: a key of ``ACTIVATIONS``.
      implementation: "xla", the definition.

    Raises:
      ValueError: an unknown implementation or activation, or shapes that do not agree with the layouts.
    """
    from pallas_kernels.moe_ffn import reference

    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {sorted(ACTIVATIONS)}")
    if m_TD.shape[-1] != pages.gate_up.columns or pages.gate_up.rows != 2 * pages.down.columns:
        raise ValueError(
            f"shapes disagree: inputs {m_TD.shape}, gate_up {pages.gate_up.rows} x {pages.gate_up.columns}, "
            f"down {pages.down.rows} x {pages.down.columns}"
        )
    if implementation != "xla":
        raise ValueError(f"implementation {implementation!r} is not one of ['xla']")
    return reference.moe_ffn(arena_AW, pages, m_TD, ids_TK.astype(jnp.int32), weights_TK, activation)
