# SPDX-License-Identifier: Apache-2.0
"""Named attention shapes of real models: what tests lower and benchmarks time."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.layout import KVLayout


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention of the layers of one geometry.

    Attributes:
      num_heads, num_kv_heads, head_dim: H, J and M.
      frame_words: uint32 words of the model's arena frame.
      window: sliding window in tokens, 0 for none.
      scale: factor on the scores; 0 means head_dim ** -0.5.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    frame_words: int = 4096
    window: int = 0
    scale: float = 0.0

    def layout(self, dtype: str = "bfloat16") -> KVLayout:
        return KVLayout(
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype, frame_words=self.frame_words
        )

    @property
    def score_scale(self) -> float:
        return self.scale or self.head_dim**-0.5


SPECS = {
    spec.name: spec
    for spec in (
        AttentionSpec(name="qwen1.5-moe", num_heads=16, num_kv_heads=16, head_dim=128),
        AttentionSpec(name="mixtral-8x7b", num_heads=32, num_kv_heads=8, head_dim=128),
        AttentionSpec(
            name="gemma-4-26b sliding",
            num_heads=16,
            num_kv_heads=8,
            head_dim=256,
            frame_words=2048,
            window=1024,
            scale=1.0,
        ),
        AttentionSpec(
            name="gemma-4-26b full", num_heads=16, num_kv_heads=2, head_dim=512, frame_words=2048, scale=1.0
        ),
    )
}


def abstract_args(
    spec: AttentionSpec, num_rows: int, num_tokens: int, context: int, num_frames: int, dtype: str = "bfloat16"
) -> tuple:
    """Returns the shapes of ``paged_attention``'s arrays: arena, q_BTHM, positions_BT, table_BGF."""
    shape, layout = jax.ShapeDtypeStruct, spec.layout(dtype)
    num_blocks = -(-context // layout.block_tokens)
    return (
        shape((num_frames, spec.frame_words), jnp.uint32),
        shape((num_rows, num_tokens, spec.num_heads, spec.head_dim), dtype),
        shape((num_rows, num_tokens), jnp.int32),
        shape((num_rows, num_blocks, layout.layer_frames), jnp.int32),
    )
