# SPDX-License-Identifier: Apache-2.0
"""Paged attention over the arena: the two operations on KV blocks."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.layout import KVLayout, to_words


def write_kv(
    arena_AW: jax.Array,
    frames_TF: jax.Array,
    slots_T: jax.Array,
    k_TJM: jax.Array,
    v_TJM: jax.Array,
    layout: KVLayout,
) -> jax.Array:
    """Returns the arena with K and V of T tokens written; donate the arena and it is updated in place.

    Args:
      arena_AW: uint32 frames.
      frames_TF: int32[T, layer_frames], the frames of each token's block in this layer; frames of A or more are
        dropped (rows that are not in use).
      slots_T: int32, each token's place in its block.
      k_TJM, v_TJM: the layer's new keys (after rope) and values.
      layout: the cache's layout.
    """
    num_tokens = k_TJM.shape[0]
    kv = jnp.stack([k_TJM, v_TJM], axis=1).astype(layout.dtype)
    kv = kv.reshape(num_tokens, layout.layer_frames, layout.heads_per_frame, layout.head_dim)
    words = to_words(kv)
    offsets = (
        jnp.arange(layout.heads_per_frame)[:, None] * (layout.block_tokens * layout.head_words)
        + jnp.arange(layout.head_words)[None]
    )
    offsets = slots_T[:, None, None, None] * layout.head_words + offsets
    return arena_AW.at[frames_TF[:, :, None, None], offsets].set(words, mode="drop")


def paged_attention(
    arena_AW: jax.Array,
    q_BTHM: jax.Array,
    positions_BT: jax.Array,
    table_BGF: jax.Array,
    layout: KVLayout,
    *,
    scale: float,
    window: int = 0,
) -> jax.Array:
    """Returns causal attention of each query over its row's cached keys, float32[B, T, H, M].

    Key j is visible to the query at position i if j <= i, and i - window < j where a window is set. The keys of the
    queries themselves must already be in the cache. Softmax in float32.

    Args:
      arena_AW: uint32 frames.
      q_BTHM: T queries per row (1 in decode, a chunk in prefill), after rope.
      positions_BT: int32, each query's position; a negative one sees nothing and returns zeros.
      table_BGF: int32[B, G, layer_frames], the frames of each row's blocks in this layer.
      layout: the cache's layout.
      scale: factor on the scores.
      window: sliding window in tokens, 0 for none.
    """
    return reference.paged_attention(arena_AW, q_BTHM, positions_BT, table_BGF, layout, scale, window)
