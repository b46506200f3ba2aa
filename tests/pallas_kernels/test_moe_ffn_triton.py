# SPDX-License-Identifier: Apache-2.0
"""The Triton MoE kernels: interpreted against the definition, lowered for CUDA at real sizes, compiled by -m gpu."""

import contextlib
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases import relative_error
from pallas_kernels.moe_ffn import api, reference
from pallas_kernels.moe_ffn.arg_specs import POISON, SPECS, MoESpec, abstract_args, random_pages, random_tokens
from pallas_kernels.moe_ffn.pallas_triton import APART_TOKENS, moe_ffn

E = 7  # one expert per bitwidth 2..8
MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
# C/32 of 5 and 3 words: two bands each; LUT rows of a program span many of the small frames.
TINY = MoESpec(name="tiny", hidden_size=160, expert_width=96, num_experts=E, top_k=2, frame_words=512)


def assert_equal(found, expected, limit=1e-5):
    for out, ref in zip(found, expected, strict=True):
        assert relative_error(out, ref) < limit


@partial(jax.jit, static_argnames=("activation", "interpret"))
def run(arena, pages, m_TD, ids_TK, activation="silu", interpret=True):
    return moe_ffn(arena, pages, m_TD, ids_TK, activation, interpret=interpret)


@partial(jax.jit, static_argnames="activation")
def define(arena, pages, m_TD, ids_TK, activation):
    return reference.moe_ffn(arena, pages, m_TD, ids_TK, activation)


def mixed_bits(shift):
    """Expert e at 2 + e bits in gate_up; in down the same bitwidths, shifted."""
    gate_up = np.arange(E)
    return np.stack([gate_up, (gate_up + shift) % E], axis=1) + 2


@pytest.mark.parametrize("interpret", MODES)
def test_every_mix_of_bitwidths_equals_the_definition(interpret):
    tokens = random_tokens(TINY, 4)
    for shift in range(E):  # all 49 pairs of bitwidths
        arena, pages = random_pages(TINY, mixed_bits(shift), seed=shift)
        found = run(arena, pages, *tokens, interpret=interpret)
        assert_equal(found, define(arena, pages, *tokens, activation="silu"))
        frames = pages.gate_up_frames_EF
        wrong = dataclasses.replace(pages, gate_up_frames_EF=frames.at[0].set(frames[1]))  # negative control
        y, h_square = define(arena, wrong, *tokens, activation="silu")
        assert not relative_error(found[0], y) < 1e-2
        assert not relative_error(found[1], h_square) < 1e-2


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(
    ("min_bits", "max_bits", "frame_words", "activation"),
    [(2, 4, 128, "gelu_pytorch_tanh"), (5, 8, 256, "silu"), (3, 8, 128, "silu")],
)
def test_every_range_of_bits_and_size_of_frame(min_bits, max_bits, frame_words, activation, interpret):
    spec = dataclasses.replace(TINY, min_bits=min_bits, max_bits=max_bits, frame_words=frame_words)
    arena, pages = random_pages(spec, np.random.default_rng(3).integers(min_bits, max_bits + 1, (E, 2)))
    tokens = random_tokens(spec, 4)
    found = run(arena, pages, *tokens, activation=activation, interpret=interpret)
    assert_equal(found, define(arena, pages, *tokens, activation=activation))


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(("hidden_size", "expert_width"), [(2816, 32), (32, 1408)], ids=["gate_up", "down"])
def test_rows_of_several_chunks(hidden_size, expert_width, interpret):
    sizes = {"hidden_size": hidden_size, "expert_width": expert_width, "frame_words": 1024}
    spec = dataclasses.replace(TINY, num_experts=2, **sizes)
    arena, pages = random_pages(spec, np.array([[3, 6], [6, 4]]))
    tokens = random_tokens(spec, 3)
    found = run(arena, pages, *tokens, interpret=interpret)
    assert_equal(found, define(arena, pages, *tokens, activation="silu"))


@pytest.mark.parametrize("interpret", MODES)
def test_a_row_depends_on_no_other_row(interpret):
    arena, pages = random_pages(TINY, mixed_bits(1))
    m_TD, ids_TK = random_tokens(TINY, 4)
    together, h_square = (np.asarray(a) for a in run(arena, pages, m_TD, ids_TK, interpret=interpret))
    for row in range(4):
        other = np.arange(4)[:, None] != row
        m, ids = jnp.where(other, jnp.nan, m_TD), jnp.where(other, E, ids_TK)
        alone, squares = (np.asarray(a) for a in run(arena, pages, m, ids, interpret=interpret))
        np.testing.assert_array_equal(alone[row], together[row])
        np.testing.assert_array_equal(squares[row], h_square[row])
        for rest in (alone, squares):
            assert not np.delete(rest, row, axis=0).any(), "rows that select nothing are zero, whatever they hold"
        single, _ = run(arena, pages, *(a[row : row + 1] for a in (m_TD, ids_TK)), interpret=interpret)
        np.testing.assert_array_equal(single[0], together[row])


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("bits", [3, 6], ids=["sums", "look-up"])
def test_a_row_does_not_depend_on_how_many_there_are(bits, interpret):
    sizes = {"hidden_size": 32, "expert_width": 32, "num_experts": 2, "min_bits": bits, "max_bits": bits}
    spec = dataclasses.replace(TINY, **sizes)
    arena, pages = random_pages(spec, np.full((2, 2), bits))
    tokens = random_tokens(spec, APART_TOKENS + 4)  # programs for each expert; below, for each pair
    together = run(arena, pages, *tokens, interpret=interpret)
    for n in (1, APART_TOKENS):
        fewer = run(arena, pages, *(a[:n] for a in tokens), interpret=interpret)
        for few, many in zip(fewer, together, strict=True):
            np.testing.assert_array_equal(few, many[:n])
            assert not np.array_equal(few, many[1 : n + 1])  # negative control: rows differ


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("num_tokens", [1, 9, 17])
def test_all_tokens_on_one_expert_and_none_at_all(num_tokens, interpret):
    arena, pages = random_pages(TINY, mixed_bits(3))
    m_TD, ids_TK = random_tokens(TINY, num_tokens)
    for e in (2, E):
        ids_TK = jnp.full_like(ids_TK, E).at[:, 0].set(e)
        found = run(arena, pages, m_TD, ids_TK, interpret=interpret)
        if e < E:
            assert_equal(found, define(arena, pages, m_TD, ids_TK, activation="silu"))
        else:
            assert not any(np.asarray(a).any() for a in found)


@pytest.mark.parametrize("interpret", MODES)
def test_bfloat16_inputs(interpret):
    arena, pages = random_pages(TINY, mixed_bits(2))
    m_TD, ids_TK = random_tokens(TINY, 4)
    y, h_square = run(arena, pages, m_TD.astype(jnp.bfloat16), ids_TK, interpret=interpret)
    expected = define(arena, pages, m_TD, ids_TK, activation="silu")
    assert relative_error(y, expected[0]) < 1e-2
    assert relative_error(h_square, expected[1]) < 1e-2


@pytest.mark.gpu
def test_an_arena_beyond_two_to_the_31_words():
    arena, pages = random_pages(TINY, mixed_bits(4))
    first = 2**31 // TINY.frame_words
    large = jnp.full((first + len(arena), TINY.frame_words), POISON, jnp.uint32).at[first:].set(arena)
    moved = dataclasses.replace(
        pages, gate_up_frames_EF=pages.gate_up_frames_EF + first, down_frames_EF=pages.down_frames_EF + first
    )
    tokens = random_tokens(TINY, 4)
    found = run(large, moved, *tokens, interpret=False)
    assert_equal(found, define(arena, pages, *tokens, activation="silu"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 64])
@pytest.mark.parametrize("name", SPECS)
def test_real_sizes_equal_the_definition(name, num_tokens):
    spec = dataclasses.replace(SPECS[name], num_experts=E, top_k=2)
    compiled = partial(run, *random_pages(spec, mixed_bits(num_tokens)), activation=spec.activation, interpret=False)
    arena, pages = compiled.args
    m_TD, ids_TK = random_tokens(spec, num_tokens)
    expected = define(arena, pages, m_TD, ids_TK, activation=spec.activation)
    # Slices of two's complement are sums of some sqrt(C) times their result, added in float32: 1.3e-5 is left of the
    # worst of 64 rows of Qwen's 2,048 columns, 5e-5 of 128 rows of Mixtral's 14,336, with down alone.
    assert_equal(compiled(m_TD, ids_TK), expected, limit=1e-4 if spec.expert_width > 8192 else 2e-5)
    m_TD = m_TD.astype(jnp.bfloat16)
    together, _ = compiled(m_TD, ids_TK)
    assert relative_error(together, expected[0]) < 1e-2
    row = num_tokens - 1
    alone, _ = compiled(m_TD[row:], ids_TK[row:])
    np.testing.assert_array_equal(alone[0], together[row], "a row depends on how many there are")


def cuda_device():
    """JAX 0.11 asks the mesh for the GPU that it lowers to; 0.10 assumes one."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize("num_tokens", [1, 8])
@pytest.mark.parametrize("name", SPECS)
def test_real_sizes_lower_to_triton(name, num_tokens):
    spec = SPECS[name]
    args = abstract_args(spec, num_tokens, num_frames=600_000)
    with cuda_device():
        run = jax.jit(partial(api.moe_ffn, activation=spec.activation, implementation="triton"))
        lowered = run.trace(*args).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count('name = "gate_up"') == 1
    assert text.count('name = "down"') == 1
    y, h_square = lowered.out_info
    assert y.shape == (num_tokens, spec.top_k, spec.hidden_size)
    assert h_square.shape == (num_tokens, spec.top_k)
