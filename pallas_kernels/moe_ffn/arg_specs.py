# SPDX-License-Identifier: Apache-2.0
"""Named shapes of real models: what tests lower and benchmarks time."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.pages import WeightPages


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Routed experts of one model.

    Attributes:
      hidden_size, expert_width: D and F.
      num_experts, top_k: E and K.
      activation: a key of ``ACTIVATIONS``.
      frame_words: uint32 words of the arena frame that pads its pages least.
      min_bits, max_bits: supported bitwidths.
    """

    name: str
    hidden_size: int
    expert_width: int
    num_experts: int
    top_k: int
    activation: str = "silu"
    frame_words: int = 4096
    min_bits: int = 2
    max_bits: int = 8

    @property
    def layouts(self) -> tuple[BlockLayout, BlockLayout]:
        """Layouts of gate_up [2F, D] and down [D, F]."""
        bits_and_frame = self.min_bits, self.max_bits, self.frame_words
        return (
            BlockLayout(2 * self.expert_width, self.hidden_size, True, *bits_and_frame),
            BlockLayout(self.hidden_size, self.expert_width, False, *bits_and_frame),
        )


SPECS = {
    spec.name: spec
    for spec in (
        MoESpec(name="qwen1.5-moe", hidden_size=2048, expert_width=1408, num_experts=60, top_k=4),
        MoESpec(name="mixtral-8x7b", hidden_size=4096, expert_width=14336, num_experts=8, top_k=2),
        MoESpec(
            name="gemma-4-26b",
            hidden_size=2816,
            expert_width=704,
            num_experts=128,
            top_k=8,
            activation="gelu_pytorch_tanh",
            frame_words=2048,
        ),
    )
}


def abstract_args(spec: MoESpec, num_tokens: int, num_frames: int, dtype=jnp.bfloat16) -> tuple:
    """Returns the shapes of ``moe_ffn``'s arguments: arena, pages, m_TD, ids_TK, weights_TK."""
    shape = jax.ShapeDtypeStruct
    gate_up, down = spec.layouts
    pages = WeightPages(
        bits_EU=shape((spec.num_experts, 2), jnp.int32),
        gate_up_frames_EF=shape((spec.num_experts, gate_up.block_frames), jnp.int32),
        down_frames_EF=shape((spec.num_experts, down.block_frames), jnp.int32),
        gate_up=gate_up,
        down=down,
    )
    return (
        shape((num_frames, spec.frame_words), jnp.uint32),
        pages,
        shape((num_tokens, spec.hidden_size), dtype),
        shape((num_tokens, spec.top_k), jnp.int32),
        shape((num_tokens, spec.top_k), jnp.float32),
    )
