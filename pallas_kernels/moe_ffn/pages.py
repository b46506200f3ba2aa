# SPDX-License-Identifier: Apache-2.0
"""What the routed feed-forward is told about one layer: its weight pages, and the activations by name."""

from dataclasses import dataclass, field

import jax

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
