# SPDX-License-Identifier: Apache-2.0
"""The KV write as Pallas-Triton kernels: a program writes one token's keys and values into the arena, in place."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, store
from pallas_kernels.paged_attention.layout import KVLayout, require_powers_of_two, to_words
from pallas_kernels.paged_attention.pallas_triton_parts import divmod_power


def write_kv(
    arena_AW: jax.Array,
    frames_TF: jax.Array,
    slots_T: jax.Array,
    k_TJM: jax.Array,
    v_TJM: jax.Array,
    layout: KVLayout,
    *,
    num_warps: int = 4,
    interpret: bool = False,
) -> jax.Array:
    """Args and result: see ``pallas_kernels.paged_attention.api.write_kv``."""
    require_powers_of_two(layout)
    num_frames, (num_tokens, num_heads, _) = arena_AW.shape[0], k_TJM.shape
    head_words, padded_heads = layout.head_words, pl.next_power_of_2(num_heads)

    def kernel(_, frames, slots, k, v, arena):
        t = pl.program_id(0)
        head_J = jnp.minimum(jnp.arange(padded_heads, dtype=jnp.int32), num_heads - 1)  # padding writes the last again
        frame_J, place_J = divmod_power(head_J, layout.heads_per_frame)
        word_1W = jnp.arange(head_words, dtype=jnp.int32)[None]
        word_JW = ((place_J * layout.block_tokens + slots[t]) * head_words)[:, None] + word_1W
        for half, x in enumerate((k, v)):
            at_J = frames[t, half * layout.half_frames + frame_J]
            there_JW = jnp.broadcast_to((at_J < num_frames)[:, None], word_JW.shape)
            store(arena.at[at_J[:, None], word_JW], x[t, head_J[:, None], word_1W], mask=there_JW)

    words = [to_words(x.astype(layout.dtype)) for x in (k_TJM, v_TJM)]  # views, where the dtype is the cache's
    return pl.pallas_call(
        kernel,
        grid=(num_tokens,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 5,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(arena_AW.shape, arena_AW.dtype),
        input_output_aliases={0: 0},
        compiler_params=CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )(arena_AW, frames_TF, slots_T, *words)


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
    num_warps: int = 4,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.paged_attention.api.rotate_and_write_kv``."""
    require_powers_of_two(layout)
    num_frames, (num_tokens, _, head_dim) = arena_AW.shape[0], k_TJM.shape
    half_dim = head_dim // 2
    bits = jnp.dtype(f"uint{8 * jnp.dtype(layout.dtype).itemsize}")  # NaN of other frames must pass as they are

    def kernel(_, frames, slots, cos, sin, q, k, v, arena, rotated):
        t, queries = pl.program_id(0), pl.program_id(1) == 0
        column_1R = jnp.arange(half_dim, dtype=jnp.int32)[None]

        def heads(x):
            count = x.shape[1]
            head_H = jnp.minimum(jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32), count - 1)
            low_HR, high_HR = (x[t, head_H[:, None], column_1R + start] for start in (0, half_dim))
            return head_H, low_HR.astype(jnp.float32), high_HR.astype(jnp.float32)

        def turned(x):
            head_H, low_HR, high_HR = heads(x)
            cos_1R, sin_1R = cos[t, :][None], sin[t, :][None]
            return head_H, low_HR * cos_1R - high_HR * sin_1R, high_HR * cos_1R + low_HR * sin_1R

        @pl.when(queries)
        def _():
            head_H, *halves = turned(q)
            for start, x_HR in zip((0, half_dim), halves):
                rotated[t, head_H[:, None], column_1R + start] = x_HR.astype(rotated.dtype)

        @pl.when(jnp.logical_not(queries))
        def _():
            for column, (head_J, *halves) in enumerate((turned(k), heads(v))):
                frame_J, place_J = divmod_power(head_J, layout.heads_per_frame)
                at_J = frames[t, column * layout.half_frames + frame_J]
                offset_J = (place_J * layout.block_tokens + slots[t]) * head_dim
                there_JR = jnp.broadcast_to((at_J < num_frames)[:, None], halves[0].shape)
                for start, x_JR in zip((0, half_dim), halves):
                    x_JR = lax.bitcast_convert_type(x_JR.astype(layout.dtype), bits)
                    at = arena.at[at_J[:, None], offset_J[:, None] + column_1R + start]
                    store(at, x_JR, mask=there_JR)

    view = lax.bitcast_convert_type(arena_AW, bits).reshape(arena_AW.shape[0], -1)
    view, q_THM = pl.pallas_call(
        kernel,
        grid=(num_tokens, 2),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 8,
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
        out_shape=(jax.ShapeDtypeStruct(view.shape, bits), jax.ShapeDtypeStruct(q_THM.shape, q_THM.dtype)),
        input_output_aliases={0: 0},
        compiler_params=CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="rotate_and_write_kv",
    )(view, frames_TF, slots_T, cos_TR, sin_TR, q_THM, k_TJM, v_TJM)
    return to_words(view), q_THM
