# SPDX-License-Identifier: Apache-2.0
"""How KV blocks lie in the arena's frames."""

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


def require_powers_of_two(layout: KVLayout) -> None:
    """Raises ValueError unless heads and frames are, and hence blocks: so are the sides of Triton's tiles."""
    if any(size & (size - 1) for size in (layout.head_dim, layout.frame_words)):
        raise ValueError(
            f"the triton kernels need heads and frames of a power of two: heads are {layout.head_dim} wide, frames of "
            f"{layout.frame_words} words"
        )


def to_words(x: jax.Array) -> jax.Array:
    """Returns x of a 16- or 32-bit dtype as uint32 words along its last axis."""
    if x.dtype.itemsize == 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)


def from_words(words: jax.Array, dtype: str) -> jax.Array:
    """Returns uint32 words as values of ``dtype`` along the last axis."""
    x = jax.lax.bitcast_convert_type(words, jnp.dtype(dtype))
    return x if x.ndim == words.ndim else x.reshape(*words.shape[:-1], -1)
