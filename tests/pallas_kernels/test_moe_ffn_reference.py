# SPDX-License-Identifier: Apache-2.0
"""The paged MoE definition against an independent float64 loop over tokens and experts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitplane import BlockLayout, pack_page
from pallas_kernels.moe_ffn.api import moe_ffn
from pallas_kernels.moe_ffn.pages import WeightPages

E, D, F, FRAME_WORDS, BITS = 5, 64, 32, 512, (3, 6)


def relative_error(out, ref):
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return np.linalg.norm(out - ref) / np.linalg.norm(ref)


def random_experts(rng, bits_EU):
    """Returns (arena, pages, dense weights per expert) with pages strewn over a poisoned arena in random order."""
    layouts = (
        BlockLayout(2 * F, D, True, *BITS, FRAME_WORDS),
        BlockLayout(D, F, False, *BITS, FRAME_WORDS),
    )
    num_frames = E * sum(layout.block_frames for layout in layouts) + 7
    arena = rng.integers(0, 2**32, (num_frames, FRAME_WORDS), dtype=np.uint32)
    free = rng.permutation(num_frames)
    tables, dense = [], []
    for kind, layout in enumerate(layouts):
        codes = rng.integers(0, 2 ** BITS[1], (E, layout.rows, layout.columns), dtype=np.uint8)
        luts = {b: rng.normal(size=(E, layout.rows, 2**b)).astype(np.float16) for b in range(BITS[0], BITS[1] + 1)}
        frames, free = free[: E * layout.block_frames].reshape(E, -1), free[E * layout.block_frames :]
        for page in range(BITS[1]):
            span = slice(*layout.page_starts[page : page + 2])
            images = pack_page(codes, luts.get(page + 1), page, layout)
            for e in range(E):
                if page < bits_EU[e, kind]:  # pages that are not resident stay poison
                    arena[frames[e, span]] = images[e]
        tables.append(frames.astype(np.int32))
        shifted = [codes[e] >> (BITS[1] - bits_EU[e, kind]) for e in range(E)]
        dense.append([np.take_along_axis(luts[bits_EU[e, kind]][e], shifted[e].astype(int), 1) for e in range(E)])
    pages = WeightPages(
        bits_EU=jnp.array(bits_EU, jnp.int32),
        gate_up_frames_EF=jnp.array(tables[0]),
        down_frames_EF=jnp.array(tables[1]),
        gate_up=layouts[0],
        down=layouts[1],
    )
    return jnp.array(arena), pages, dense


def loop(dense, m, ids):
    y, h_square = np.zeros((*ids.shape, D)), np.zeros(ids.shape)
    for t in range(len(m)):
        for k, e in enumerate(ids[t]):
            if e < E:
                gate_up = dense[0][e].astype(np.float64) @ m[t]
                gate, up = gate_up[:F], gate_up[F:]
                h = gate / (1 + np.exp(-gate)) * up
                y[t, k] = dense[1][e].astype(np.float64) @ h
                h_square[t, k] = h @ h
    return y, h_square


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", [1, 7])
def test_equals_a_loop_over_tokens_at_any_mix_of_bitwidths(seed, tokens):
    rng = np.random.default_rng(seed)
    arena, pages, dense = random_experts(rng, rng.integers(BITS[0], BITS[1] + 1, (E, 2)))
    m = rng.normal(size=(tokens, D)).astype(np.float32)
    ids = np.stack([rng.permutation(E + 1)[:2] for _ in range(tokens)])  # E itself selects nothing
    out = jax.jit(moe_ffn)(arena, pages, m, ids)
    for ours, theirs in zip(out, loop(dense, m, ids), strict=True):
        assert ours.dtype == jnp.float32
        assert relative_error(ours, theirs) < 1e-5
    wrong = [dense[0][::-1], dense[1]]
    for ours, theirs in zip(out, loop(wrong, m, ids), strict=True):
        assert relative_error(ours, theirs) > 1e-2


def test_activations_are_measured_as_they_enter_down():
    rng = np.random.default_rng(3)
    arena, pages, dense = random_experts(rng, np.full((E, 2), 6))
    m = rng.normal(size=(4, D)).astype(jnp.bfloat16)
    _, h_square = moe_ffn(arena, pages, m, np.arange(4)[:, None])
    gate, up = np.split(np.einsum("enc,ec->en", np.stack(dense[0][:4]).astype(jnp.bfloat16), m, dtype=np.float32), 2, 1)
    h = (np.asarray(jax.nn.silu(gate)) * up).astype(jnp.bfloat16).astype(np.float64)  # rounded, then squared
    np.testing.assert_allclose(h_square[:, 0], np.sum(h * h, axis=1), rtol=1e-3)


def test_a_row_does_not_depend_on_the_other_rows():
    rng = np.random.default_rng(5)
    arena, pages, _ = random_experts(rng, rng.integers(BITS[0], BITS[1] + 1, (E, 2)))
    m = rng.normal(size=(6, D)).astype(np.float32)
    ids = rng.integers(0, E, (6, 2))
    run = jax.jit(moe_ffn)
    together = run(arena, pages, m, ids)
    for row in range(6):
        alone_ids = np.where(np.arange(6)[:, None] == row, ids, E)
        alone = run(arena, pages, np.where(np.arange(6)[:, None] == row, m, 0.0), alone_ids)
        for one, all_rows in zip(alone, together, strict=True):
            chex.assert_trees_all_equal(one[row], all_rows[row])
            assert not np.any(np.delete(np.asarray(one), row, axis=0))


def test_bad_arguments_are_refused():
    rng = np.random.default_rng(1)
    arena, pages, _ = random_experts(rng, np.full((E, 2), 4))
    ids = np.zeros((1, 2), int)
    with pytest.raises(ValueError, match="shapes disagree"):
        moe_ffn(arena, pages, np.ones((1, D + 32), np.float32), ids)
    with pytest.raises(ValueError, match="activation 'relu'"):
        moe_ffn(arena, pages, np.ones((1, D), np.float32), ids, activation="relu")
    with pytest.raises(ValueError, match="implementation 'cuda'"):
        moe_ffn(arena, pages, np.ones((1, D), np.float32), ids, implementation="cuda")
