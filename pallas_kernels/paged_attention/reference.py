# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain JAX: an online softmax over splits of the context. The definition."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.layout import SPLIT_TOKENS, KVLayout, from_words, to_words


def write_kv(
    arena_AW: jax.Array,
    frames_TF: jax.Array,
    slots_T: jax.Array,
    k_TJM: jax.Array,
    v_TJM: jax.Array,
    layout: KVLayout,
) -> jax.Array:
    """Args and result: see ``pallas_kernels.paged_attention.api.write_kv``."""
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


def rotate(x_THM: jax.Array, cos_TR: jax.Array, sin_TR: jax.Array) -> jax.Array:
    """Returns x with pair (i, i + M/2) of each head turned by angle i, in x's dtype; products and sums are float32."""
    low, high = jnp.split(x_THM.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x_THM.dtype)


def rotate_and_write_kv(
    arena_AW: jax.Array,
    frames_TF: jax.Array,
    slots_T: jax.Array,
    cos_TR: jax.Array,
    sin_TR: jax.Array,
    q_THM: jax.Array,
    k_TJM: jax.Array,
    v_TJM: jax.Array,
    layout: KVLayout,
) -> tuple[jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.paged_attention.api.rotate_and_write_kv``."""
    arena_AW = write_kv(arena_AW, frames_TF, slots_T, rotate(k_TJM, cos_TR, sin_TR), v_TJM, layout)
    return arena_AW, rotate(q_THM, cos_TR, sin_TR)


def read_kv(arena_AW: jax.Array, frames_BGF: jax.Array, layout: KVLayout) -> tuple[jax.Array, jax.Array]:
    """Returns (k, v) of the named blocks, each float32[B, S, J, M] with S = G * block_tokens."""
    num_rows, num_blocks, _ = frames_BGF.shape
    frames = lax.optimization_barrier(arena_AW[frames_BGF])
    kv = from_words(frames, layout.dtype).reshape(
        num_rows, num_blocks, 2, layout.num_kv_heads, layout.block_tokens, layout.head_dim
    )
    kv = kv.transpose(2, 0, 1, 4, 3, 5).reshape(2, num_rows, -1, layout.num_kv_heads, layout.head_dim)
    return kv[0].astype(jnp.float32), kv[1].astype(jnp.float32)


def paged_attention(
    arena_AW: jax.Array,
    q_BTHM: jax.Array,
    positions_BT: jax.Array,
    table_BGF: jax.Array,
    layout: KVLayout,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
    dtype=jnp.float32,
) -> jax.Array:
    """Args and result: see ``pallas_kernels.paged_attention.api.paged_attention``.

    A split that a query does not see leaves its running maximum, sum and output exactly as they were, so the result of
    a row does not depend on how far the other rows' contexts reach.
    """
    num_rows, num_queries, _, head_dim = q_BTHM.shape
    num_blocks = table_BGF.shape[1]
    split_blocks = max(1, min(SPLIT_TOKENS // layout.block_tokens, num_blocks))
    num_splits = -(-num_blocks // split_blocks)
    pad = num_splits * split_blocks - num_blocks
    table_BGF = jnp.pad(table_BGF, ((0, 0), (0, pad), (0, 0)))  # the last split's missing blocks are never visible
    q_BTJHM = q_BTHM.astype(jnp.float32).reshape(num_rows, num_queries, layout.num_kv_heads, -1, head_dim) * scale
    split_tokens = split_blocks * layout.block_tokens
    position = positions_BT[:, :, None, None, None]

    def add_split(split, carry):
        peak, total, out = carry
        frames = lax.dynamic_slice_in_dim(table_BGF, split * split_blocks, split_blocks, axis=1)
        k_BSJM, v_BSJM = read_kv(arena_AW, frames, layout)
        scores = jnp.einsum("BTJHM,BSJM->BTJHS", q_BTJHM, k_BSJM, precision=lax.Precision.HIGHEST)
        if soft_cap:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        key_position = split * split_tokens + jnp.arange(split_tokens)
        seen = key_position <= position
        if window:
            seen &= key_position > position - window
        scores = jnp.where(seen, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        shift = jnp.where(jnp.isneginf(new_peak), 0.0, new_peak)
        p = jnp.exp(scores - shift[..., None])
        keep = jnp.exp(peak - shift)
        # Slots that no query of a row sees hold whatever was there, NaN included: 0 * NaN must not reach the sum.
        seen_BS11 = jnp.any(seen, axis=1).reshape(num_rows, -1, 1, 1)
        weighted = jnp.einsum(
            "BTJHS,BSJM->BTJHM", p, jnp.where(seen_BS11, v_BSJM, 0.0), precision=lax.Precision.HIGHEST
        )
        out = out * keep[..., None] + weighted
        return new_peak, total * keep + jnp.sum(p, axis=-1), out

    shape = q_BTJHM.shape[:-1]
    carry = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(q_BTJHM.shape))
    used_splits = jnp.minimum(num_splits, jnp.max(positions_BT) // split_tokens + 1)
    _, total, out = lax.fori_loop(0, used_splits, add_split, carry)
    return (out / jnp.where(total == 0.0, 1.0, total)[..., None]).reshape(q_BTHM.shape).astype(dtype)


def decode_attention(
    arena_AW: jax.Array,
    q_BHM: jax.Array,
    k_BJM: jax.Array,
    v_BJM: jax.Array,
    cos_BR: jax.Array,
    sin_BR: jax.Array,
    positions_B: jax.Array,
    table_BGF: jax.Array,
    layout: KVLayout,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
    dtype=jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.paged_attention.api.decode_attention``."""
    places_B = jnp.maximum(positions_B, 0)
    frames_BF = table_BGF[jnp.arange(len(places_B)), places_B // layout.block_tokens]
    frames_BF = jnp.where(positions_B[:, None] < 0, arena_AW.shape[0], frames_BF)  # dropped
    arena_AW, q_BHM = rotate_and_write_kv(
        arena_AW, frames_BF, places_B % layout.block_tokens, cos_BR, sin_BR, q_BHM, k_BJM, v_BJM, layout
    )
    out_BTHM = paged_attention(
        arena_AW, q_BHM[:, None], positions_B[:, None], table_BGF, layout, scale, window, soft_cap, dtype
    )
    return arena_AW, out_BTHM[:, 0]
