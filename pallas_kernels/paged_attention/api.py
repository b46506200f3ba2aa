# SPDX-License-Identifier: Apache-2.0
"""Paged attention over the arena: how KV blocks lie in frames, and the two operations on them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

SPLIT_TOKENS = 256
"""Keys are reduced in splits of this many tokens, whatever the number of rows: one reduction order per context."""

PREFERRED_BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """How one KV block of one layer lies in frames. Static.

    A block holds ``block_tokens`` tokens of a layer: its K frames, then its V frames. One frame holds some heads::

        frame  =  [heads_per_frame][block_tokens][M]      of ``dtype``

    Attributes:
      num_kv_heads, head_dim: J and M.
      dtype: numpy name of the cache's dtype.
      frame_words: uint32 words of a frame.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    frame_words: int

    def __post_init__(self):
        if (self.head_dim * jnp.dtype(self.dtype).itemsize) % 4 or self.frame_words % self.head_words:
            raise ValueError(
                f"a frame of {self.frame_words} words does not hold a whole number of {self.dtype} heads of width "
                f"{self.head_dim}"
            )

    @property
    def head_words(self) -> int:
        """uint32 words of one token's head."""
        return self.head_dim * jnp.dtype(self.dtype).itemsize // 4

    @property
    def heads_per_frame(self) -> int:
        """The most heads that leave a frame at least ``PREFERRED_BLOCK_TOKENS`` tokens of each."""
        capacity = self.frame_words // self.head_words
        fits = [h for h in range(1, self.num_kv_heads + 1) if self.num_kv_heads % h == 0 and capacity % h == 0]
        return max([h for h in fits if capacity // h >= PREFERRED_BLOCK_TOKENS], default=1)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; chosen so that a frame has no padding."""
        return self.frame_words // (self.head_words * self.heads_per_frame)

    @property
    def half_frames(self) -> int:
        """Frames that hold K (or V) of one layer of a block."""
        return self.num_kv_heads // self.heads_per_frame

    @property
    def layer_frames(self) -> int:
        """Frames of one layer of a block: K frames, then V frames."""
        return 2 * self.half_frames


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


def to_words(x: jax.Array) -> jax.Array:
    """Returns x of a 16- or 32-bit dtype as uint32 words along its last axis."""
    if x.dtype.itemsize == 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)


def from_words(words: jax.Array, dtype: str) -> jax.Array:
    """Returns uint32 words as values of ``dtype`` along the last axis."""
    x = jax.lax.bitcast_convert_type(words, jnp.dtype(dtype))
    return x if x.ndim == words.ndim else x.reshape(*words.shape[:-1], -1)


def paged_attention(
    arena_AW: jax.Array,
    q_BTHM: jax.Array,
    positions_BT: jax.Array,
    table_BGF: jax.Array,
    layout: KVLayout,
    *,
    scale: float,
    window: int = 0,
    implementation: str = "xla",
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
      implementation: "xla", the definition.

    Raises:
      ValueError: an unknown implementation.
    """
    from pallas_kernels.paged_attention import reference

    if implementation != "xla":
        raise ValueError(f"implementation {implementation!r} is not one of ['xla']")
    return reference.paged_attention(arena_AW, q_BTHM, positions_BT, table_BGF, layout, scale, window)
