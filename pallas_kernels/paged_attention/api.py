# SPDX-License-Identifier: Apache-2.0
"""Paged attention over the arena: the operations on KV blocks."""

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import module_of
from pallas_kernels.paged_attention.layout import KVLayout


def write_kv(
    arena_AW: jax.Array,
    frames_TF: jax.Array,
    slots_T: jax.Array,
    k_TJM: jax.Array,
    v_TJM: jax.Array,
    layout: KVLayout,
    *,
    implementation: str = "xla",
) -> jax.Array:
    """Returns the arena with K and V of T tokens written; donate the arena and it is updated in place.

    Args:
      arena_AW: uint32 frames.
      frames_TF: int32[T, layer_frames], the frames of each token's block in this layer; frames of A or more are
        dropped (rows that are not in use).
      slots_T: int32, each token's place in its block.
      k_TJM, v_TJM: the layer's new keys (after rope) and values.
      layout: the cache's layout.
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation; for "triton", heads or frames that are no power of two.
    """
    run = module_of(__package__, implementation).write_kv
    return run(arena_AW, frames_TF.astype(jnp.int32), slots_T.astype(jnp.int32), k_TJM, v_TJM, layout)


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
    *,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Returns (arena, q_THM): ``write_kv`` with the rotary embedding of queries and keys in the same kernel.

    Pair i of a head is (dimension i, dimension i + M/2); it is turned in float32 and rounded once.

    Args: as of ``write_kv``, with q and k before rope, and
      cos_TR, sin_TR: float32[T, M/2], of each token's angles: the same for all layers of one frequency.

    Raises:
      ValueError: an unknown implementation; for "triton", heads or frames that are no power of two.
    """
    run = module_of(__package__, implementation).rotate_and_write_kv
    frames_TF, slots_T = frames_TF.astype(jnp.int32), slots_T.astype(jnp.int32)
    return run(arena_AW, frames_TF, slots_T, cos_TR, sin_TR, q_THM, k_TJM, v_TJM, layout)


def paged_attention(
    arena_AW: jax.Array,
    q_BTHM: jax.Array,
    positions_BT: jax.Array,
    table_BGF: jax.Array,
    layout: KVLayout,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    dtype=jnp.float32,
    implementation: str = "xla",
) -> jax.Array:
    """Returns causal attention of each query over its row's cached keys, [B, T, H, M].

    Key j is visible to the query at position i if j <= i, and i - window < j where a window is set. The keys of the
    queries themselves must already be in the cache. Softmax in float32.

    Args:
      arena_AW: uint32 frames.
      q_BTHM: T queries per row, after rope.
      positions_BT: int32, each query's position; a negative one sees nothing and returns zeros. The others of a row
        ascend by one.
      table_BGF: int32[B, G, layer_frames], the frames of each row's blocks in this layer.
      layout: the cache's layout.
      scale: factor on the scores.
      window: sliding window in tokens, 0 for none.
      soft_cap: scores s become soft_cap tanh(s / soft_cap); 0 leaves them.
      dtype: of the result; sums are float32.
      implementation: "xla", the definition, or "triton", Pallas kernels for NVIDIA GPUs. They multiply in the cache's
        dtype where the queries have it, too, else in float32.

    Raises:
      ValueError: an unknown implementation; for "triton", heads or frames that are no power of two.
    """
    run = module_of(__package__, implementation).paged_attention
    positions_BT, table_BGF = positions_BT.astype(jnp.int32), table_BGF.astype(jnp.int32)
    return run(arena_AW, q_BTHM, positions_BT, table_BGF, layout, scale, window, soft_cap, dtype)


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
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    dtype=jnp.float32,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Returns (arena, o_BHM): ``rotate_and_write_kv`` and ``paged_attention`` of one token for each of B rows.

    A row's own key and value are rounded to the cache's dtype before they are used, as when they are read from it
    later. Donate the arena and it is updated in place.

    Args: as of the two, and
      positions_B: int32, each row's position, whose block is in the table; a negative one writes nothing, sees
        nothing and returns zeros.

    Raises:
      ValueError: an unknown implementation; for "triton", heads or frames that are no power of two.
    """
    run = module_of(__package__, implementation).decode_attention
    positions_B, table_BGF = positions_B.astype(jnp.int32), table_BGF.astype(jnp.int32)
    cache = arena_AW, q_BHM, k_BJM, v_BJM, cos_BR, sin_BR, positions_B, table_BGF, layout
    return run(*cache, scale, window, soft_cap, dtype)
