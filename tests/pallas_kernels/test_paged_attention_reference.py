# SPDX-License-Identifier: Apache-2.0
"""Paged attention and the KV write against plain softmax attention in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.api import paged_attention, write_kv
from pallas_kernels.paged_attention.layout import KVLayout

H, J, M, FRAME_WORDS = 4, 2, 16, 128


def relative_error(out, ref):
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return np.linalg.norm(out - ref) / np.linalg.norm(ref)


def softmax_attention(q_THM, k_SJM, v_SJM, positions, scale, window):
    out = np.zeros(q_THM.shape)
    for t, i in enumerate(positions):
        keys = np.arange(max(0, i - window + 1) if window else 0, i + 1)
        for h in range(H):
            scores = k_SJM[keys, h // (H // J)].astype(np.float64) @ q_THM[t, h] * scale
            p = np.exp(scores - scores.max())
            out[t, h] = p / p.sum() @ v_SJM[keys, h // (H // J)]
    return out


def cached_rows(rng, layout, lengths):
    """Returns (arena, table_BGF, k, v) with each row's tokens written one call at a time into random frames."""
    blocks = -(-max(lengths) // layout.block_tokens)
    num_frames = len(lengths) * blocks * layout.layer_frames + 5
    table = rng.permutation(num_frames)[: len(lengths) * blocks * layout.layer_frames]
    table = table.reshape(len(lengths), blocks, -1).astype(np.int32)
    arena = jnp.array(rng.integers(0, 2**32, (num_frames, FRAME_WORDS), dtype=np.uint32))  # NaN among the poison
    k = [rng.normal(size=(n, J, M)).astype(np.float32) for n in lengths]
    v = [rng.normal(size=(n, J, M)).astype(np.float32) for n in lengths]
    for row, n in enumerate(lengths):
        positions = np.arange(n)
        frames = table[row, positions // layout.block_tokens]
        arena = write_kv(arena, frames, positions % layout.block_tokens, k[row], v[row], layout)
    if layout.dtype == "bfloat16":
        k, v = ([np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32) for x in rows] for rows in (k, v))
    return arena, table, k, v


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 9])
def test_decode_equals_softmax_attention(dtype, window):
    rng = np.random.default_rng(3)
    layout = KVLayout(num_kv_heads=J, head_dim=M, dtype=dtype, frame_words=FRAME_WORDS)
    lengths = [300, 1, 64, 17]
    arena, table, k, v = cached_rows(rng, layout, lengths)
    q = rng.normal(size=(4, 1, H, M)).astype(np.float32)
    positions = np.array(lengths)[:, None] - 1
    out = paged_attention(arena, q, positions, table, layout, scale=0.3, window=window)
    for row in range(4):
        ref = softmax_attention(q[row], k[row], v[row], positions[row], 0.3, window)
        assert relative_error(out[row], ref) < 1e-5
        if lengths[row] > 1:
            swapped = softmax_attention(q[row], v[row], k[row], positions[row], 0.3, window)
            assert relative_error(out[row], swapped) > 1e-2


def test_prefill_chunk_equals_softmax_attention_and_padding_is_zero():
    rng = np.random.default_rng(4)
    layout = KVLayout(num_kv_heads=J, head_dim=M, dtype="float32", frame_words=FRAME_WORDS)
    arena, table, k, v = cached_rows(rng, layout, [290])
    q = rng.normal(size=(1, 40, H, M)).astype(np.float32)
    positions = np.where(np.arange(40) < 30, 260 + np.arange(40), -1)[None]
    out = paged_attention(arena, q, positions, table, layout, scale=0.25)
    ref = softmax_attention(q[0, :30], k[0], v[0], positions[0, :30], 0.25, 0)
    assert relative_error(out[0, :30], ref) < 1e-5
    assert not np.any(np.asarray(out[0, 30:]))


def test_a_row_does_not_depend_on_how_far_the_others_reach():
    rng = np.random.default_rng(6)
    layout = KVLayout(num_kv_heads=J, head_dim=M, dtype="bfloat16", frame_words=FRAME_WORDS)
    arena, table, _, _ = cached_rows(rng, layout, [40, 700])
    q = rng.normal(size=(2, 1, H, M)).astype(np.float32)
    run = jax.jit(lambda positions: paged_attention(arena, q, positions, table, layout, scale=0.25))
    together = run(np.array([[39], [699]]))
    alone = run(np.array([[39], [-1]]))
    assert np.array_equal(together[0], alone[0])
    assert not np.any(np.asarray(alone[1]))


def test_frames_out_of_range_are_dropped():
    layout = KVLayout(num_kv_heads=J, head_dim=M, dtype="bfloat16", frame_words=FRAME_WORDS)
    arena = jnp.arange(4 * FRAME_WORDS, dtype=jnp.uint32).reshape(4, FRAME_WORDS)
    k = jnp.ones((1, J, M))
    after = write_kv(arena, np.full((1, layout.layer_frames), 4, np.int32), np.zeros(1, np.int32), k, k, layout)
    assert np.array_equal(after, arena)
    written = write_kv(arena, np.arange(layout.layer_frames)[None], np.zeros(1, np.int32), k, k, layout)
    assert not np.array_equal(written, arena)


@pytest.mark.parametrize(
    ("heads", "width", "frame_words", "expected"),
    [(2, 64, 512, (16, 1, 4)), (16, 128, 4096, (16, 4, 8)), (8, 256, 2048, (16, 1, 16)), (2, 64, 4096, (64, 2, 2))],
)
def test_blocks_fill_their_frames(heads, width, frame_words, expected):
    layout = KVLayout(num_kv_heads=heads, head_dim=width, dtype="bfloat16", frame_words=frame_words)
    assert (layout.block_tokens, layout.heads_per_frame, layout.layer_frames) == expected
    assert layout.block_tokens * layout.heads_per_frame * layout.head_words == frame_words


def test_a_head_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="whole number"):
        KVLayout(num_kv_heads=2, head_dim=48, dtype="bfloat16", frame_words=512)
