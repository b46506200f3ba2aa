# SPDX-License-Identifier: Apache-2.0
"""The grouped MoE kernels: interpreted against the definition, lowered for CUDA at real sizes, compiled by -m gpu."""

import contextlib
import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitplane import BlockLayout, dequantize_pages
from pallas_kernels.moe_ffn import api, grouped, grouped_products, reference
from pallas_kernels.moe_ffn.arg_specs import SPECS, MoESpec, abstract_args
from pallas_kernels.moe_ffn.grouped_dequantize import dequantize
from pallas_kernels.moe_ffn.grouped_order import loaded_rows, make_tiles, order_columns, order_inputs
from pallas_kernels.moe_ffn.grouped_weights import look_up_bytes, look_up_plainly, split_bytes
from pallas_kernels.moe_ffn.pages import WeightPages

POISON = 0xFFFFFFFF  # as codes all ones, as float16 NaN
E = 7
MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
# C/32 of 5 and 3 words: whole chunks, and chunks that are partly empty; LUT rows span many of the small frames.
TINY = MoESpec(name="tiny", hidden_size=160, expert_width=96, num_experts=E, top_k=2, frame_words=512, max_bits=4)
SMALL = grouped.Config(tile=16, rows=32, num_stages=1, plain_rows=32, plain_warps=4, plain_stages=1)


def relative_error(out, ref):
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return np.linalg.norm(out - ref) / np.linalg.norm(ref)


def assert_equal(found, expected, tolerance=1e-5):
    """Both outputs agree, the whole and the worst row."""
    for out, ref in zip(found, expected, strict=True):
        out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
        assert relative_error(out, ref) < tolerance
        scale = np.linalg.norm(ref) / len(ref) ** 0.5
        limit = 2 * tolerance * np.maximum(np.linalg.norm(ref, axis=1), scale)
        assert (np.linalg.norm(out - ref, axis=1) < limit).all()


def random_pages(spec, bits_EU, seed=0):
    """Returns (arena, pages): random planes and LUTs in frames in random order, poison wherever nothing is resident."""
    rng = np.random.default_rng(seed)
    num_frames = E * sum(layout.block_frames for layout in spec.layouts) + 5
    arena = np.full((num_frames, spec.frame_words), POISON, np.uint32)
    free, tables = rng.permutation(num_frames).astype(np.int32), []
    for kind, layout in enumerate(spec.layouts):
        frames_EF, free = np.split(free, [E * layout.block_frames])
        frames_EF = frames_EF.reshape(E, -1)
        for e, bits in enumerate(bits_EU[:, kind]):
            for page in range(bits):
                frames = frames_EF[e, layout.page_starts[page] : layout.page_starts[page + 1]]
                words = np.full(frames.size * spec.frame_words, POISON, np.uint32)
                words[: layout.plane_words] = rng.integers(0, 2**32, layout.plane_words, dtype=np.uint32)
                if layout.has_lut(page):
                    entries = rng.standard_normal(2 * layout.lut_words(page)).astype(np.float16).view(np.uint32)
                    words[layout.lut_offset_words(page) :][: entries.size] = entries
                arena[frames] = words.reshape(frames.size, -1)
        tables.append(jnp.asarray(frames_EF))
    gate_up, down = spec.layouts
    pages = WeightPages(
        bits_EU=jnp.asarray(bits_EU, jnp.int32),
        gate_up_frames_EF=tables[0],
        down_frames_EF=tables[1],
        gate_up=gate_up,
        down=down,
    )
    return jnp.asarray(arena), pages


def random_bits(spec, seed=1):
    return np.random.default_rng(seed).integers(spec.min_bits, spec.max_bits + 1, (E, 2))


def random_tokens(spec, num_tokens, dtype=jnp.float32):
    """Returns (m_TD, ids_TK); expert 3 has no tokens, the id E selects nothing."""
    rng = np.random.default_rng(2)
    ids = rng.permuted(np.tile([0, 1, 2, 4, 5, 6, E], (num_tokens, 1)), axis=1)[:, : spec.top_k]
    m_TD = rng.standard_normal((num_tokens, spec.hidden_size)) * spec.hidden_size**-0.5
    return jnp.asarray(m_TD, dtype), jnp.asarray(ids, jnp.int32)


@partial(jax.jit, static_argnames=("activation", "config", "interpret"))
def run(arena, pages, m_TD, ids_TK, activation="silu", config=SMALL, interpret=True):
    return grouped.moe_ffn(arena, pages, m_TD, ids_TK, activation, config, interpret=interpret)


@partial(jax.jit, static_argnames="activation")
def define(arena, pages, m_TD, ids_TK, activation="silu"):
    return reference.moe_ffn(arena, pages, m_TD, ids_TK, activation)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(("min_bits", "max_bits", "frame_words"), [(2, 4, 512), (3, 5, 128), (6, 6, 128), (7, 8, 256)])
def test_bitwidths_at_random_equal_the_definition(min_bits, max_bits, frame_words, interpret):
    spec = dataclasses.replace(TINY, min_bits=min_bits, max_bits=max_bits, frame_words=frame_words)
    arena, pages = random_pages(spec, random_bits(spec))
    tokens = random_tokens(spec, 37)
    found = run(arena, pages, *tokens, interpret=interpret)
    assert_equal(found, define(arena, pages, *tokens))
    frames = pages.gate_up_frames_EF
    wrong = dataclasses.replace(pages, gate_up_frames_EF=frames.at[0].set(frames[1]))  # negative control
    for out, ref in zip(found, define(arena, wrong, *tokens), strict=True):
        assert not relative_error(out, ref) < 1e-2


@pytest.mark.parametrize("interpret", MODES)
def test_experts_dequantized_a_few_at_a_time_give_the_same(interpret, monkeypatch):
    spec = dataclasses.replace(TINY, hidden_size=64, expert_width=32, min_bits=4, max_bits=6)
    arena, pages = random_pages(spec, np.stack([4 + np.arange(E) % 3, 6 - np.arange(E) % 3], axis=1))
    tokens = random_tokens(spec, 20)
    together = run(arena, pages, *tokens, interpret=interpret)
    monkeypatch.setattr(grouped, "DEQUANTIZED_BYTES", 4 * 4 * 256 * 128)  # four experts' gate_up
    apart = jax.jit(partial(grouped.moe_ffn, activation="silu", config=SMALL, interpret=interpret))
    for a, b in zip(apart(arena, pages, *tokens), together, strict=True):
        np.testing.assert_array_equal(a, b)
    text = str(apart.trace(arena, pages, *tokens).jaxpr)
    assert text.count("dequantize_gate_up") == 2


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("tiles", [{"tile": 32}, {"plain_tile": 32}, {"tile": 48, "plain_tile": 16}])
def test_both_ways_have_tiles_of_their_own(tiles, interpret):
    spec = dataclasses.replace(TINY, hidden_size=64, expert_width=32, max_bits=6)  # looked up and dequantized
    arena, pages = random_pages(spec, random_bits(spec))
    tokens = random_tokens(spec, 37)
    config = dataclasses.replace(SMALL, **tiles)
    assert_equal(run(arena, pages, *tokens, config=config, interpret=interpret), define(arena, pages, *tokens))


@pytest.mark.parametrize("interpret", MODES)
def test_looking_weights_up_a_chunk_ahead_gives_the_same(interpret, monkeypatch):
    spec = dataclasses.replace(TINY, hidden_size=1152, expert_width=32, min_bits=3)  # two tiles of words, in two frames
    arena, pages = random_pages(spec, random_bits(spec))
    tokens = random_tokens(spec, 20)
    found = []
    for chunks in (1, 100):
        monkeypatch.setattr(grouped_products, "LOOK_AHEAD_CHUNKS", chunks)
        layer = jax.jit(partial(grouped.moe_ffn, activation="silu", config=SMALL, interpret=interpret))
        found.append(layer(arena, pages, *tokens))
    assert_equal(found[0], define(arena, pages, *tokens))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("interpret", MODES)
def test_dequantized_weights_are_the_definitions(interpret):
    spec = dataclasses.replace(TINY, min_bits=4, max_bits=8)
    arena, pages = random_pages(spec, np.array([[5, 6], [6, 7], [7, 8], [8, 5], [4, 4], [8, 8], [6, 6]]))
    layout, frames_EF, rows_Q = pages.gate_up, pages.gate_up_frames_EF, grouped.down_rows(pages.gate_up, 32)
    call = partial(dequantize, layout=layout, kind=0, experts=range(1, 4), dtype=jnp.float32, interpret=interpret)
    count_E = jnp.ones(E, jnp.int32)
    found = jax.jit(call)(arena, frames_EF=frames_EF, bits_EU=pages.bits_EU, count_E=count_E, rows_Q=rows_Q)
    columns = order_columns(np.arange(layout.columns)[None], layout, fill=-1)[0]
    for e in (1, 2, 3):
        starts = layout.page_starts[: pages.bits_EU[e, 0] + 1]
        page_list = [arena[frames_EF[e, a:b]] for a, b in itertools.pairwise(starts)]
        expected = np.asarray(dequantize_pages(page_list, dataclasses.replace(layout, interleaved=False)))
        w_QC = np.asarray(found[e - 1])[: layout.rows]
        np.testing.assert_array_equal(w_QC[:, columns >= 0], expected[:, columns[columns >= 0]])
        assert (w_QC[:, columns >= 0] != expected).any()  # negative control: the order of columns


@pytest.mark.gpu
def test_every_bitwidth_in_one_call_in_bfloat16():
    spec = dataclasses.replace(TINY, hidden_size=1184, expert_width=704, max_bits=8)
    arena, pages = random_pages(spec, np.stack([2 + np.arange(E), 8 - np.arange(E)], axis=1))
    tokens = random_tokens(spec, 777, jnp.bfloat16)
    found = run(arena, pages, *tokens, config=None, interpret=False)
    expected = define(arena, pages, tokens[0].astype(jnp.float32), *tokens[1:])
    assert_equal(found, expected, tolerance=1e-2)


@pytest.mark.parametrize("interpret", MODES)
def test_bfloat16_inputs_and_gelu(interpret):
    arena, pages = random_pages(TINY, random_bits(TINY))
    tokens = random_tokens(TINY, 20, jnp.bfloat16)
    found = run(arena, pages, *tokens, activation="gelu_pytorch_tanh", interpret=interpret)
    expected = define(arena, pages, tokens[0].astype(jnp.float32), *tokens[1:], activation="gelu_pytorch_tanh")
    assert_equal(found, expected, tolerance=1e-2)


@pytest.mark.parametrize("interpret", MODES)
def test_a_row_depends_on_no_other_row(interpret):
    spec = dataclasses.replace(TINY, max_bits=6)  # looked up and dequantized
    arena, pages = random_pages(spec, random_bits(spec))
    m_TD, ids_TK = random_tokens(spec, 37)
    together = [np.asarray(a) for a in run(arena, pages, m_TD, ids_TK, interpret=interpret)]
    for kept in (np.arange(37) == 5, np.arange(37) % 3 == 0):
        m, ids = jnp.where(kept[:, None], m_TD, jnp.nan), jnp.where(kept[:, None], ids_TK, E)
        alone = [np.asarray(a) for a in run(arena, pages, m, ids, interpret=interpret)]
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a[kept], b[kept])
            assert not a[~kept].any(), "rows that select nothing are zero, whatever they hold"


@pytest.mark.parametrize("interpret", MODES)
def test_all_tokens_on_one_expert_and_none_at_all(interpret):
    arena, pages = random_pages(TINY, random_bits(TINY))
    m_TD, ids_TK = random_tokens(TINY, 37)
    for e in (3, E):
        ids_TK = jnp.full_like(ids_TK, E).at[:, 0].set(e)
        found = run(arena, pages, m_TD, ids_TK, interpret=interpret)
        if e < E:
            assert_equal(found, define(arena, pages, m_TD, ids_TK))
        else:
            assert not any(np.asarray(a).any() for a in found)


IDS = {
    "mixed": np.random.default_rng(0).choice([0, 1, 2, 4, 4, 4, 5, 6, E], 5000).astype(np.int32),
    "one expert": np.full(5000, 3, np.int32),
    "nobody": np.full(300, E, np.int32),
}


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("name", IDS)
def test_pairs_are_sorted_by_expert_and_cut_into_tiles(name, interpret):
    ids, expected = IDS[name], np.argsort(IDS[name], kind="stable")
    tiles = jax.jit(partial(make_tiles, num_experts=E, tile=16, interpret=interpret))(ids)
    pairs, expert, first, count, count_E = (np.asarray(array) for array in jax.tree.leaves(tiles))
    num_pairs = int((ids < E).sum())
    np.testing.assert_array_equal(count_E, np.bincount(ids, minlength=E + 1)[:E])
    np.testing.assert_array_equal(pairs[:num_pairs], expected[:num_pairs])
    assert ((expert >= 0) & (expert <= E)).all()
    used = expert < E
    covered = [np.arange(f, f + c) for f, c in zip(first[used], count[used], strict=True)]
    np.testing.assert_array_equal(np.concatenate([[], *covered]), np.arange(num_pairs))
    assert ((count[used] > 0) & (count[used] <= 16)).all()
    for e, f, c in zip(expert[used], first[used], count[used], strict=True):
        assert (ids[expected[f : f + c]] == e).all()


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(("columns", "dtype"), [(160, "float32"), (1408, "bfloat16"), (2048, "bfloat16")])
def test_inputs_are_put_in_order(columns, dtype, interpret):
    layout = BlockLayout(32, columns, False, 2, 8, 2048)
    x_XC = jnp.asarray(np.random.default_rng(0).standard_normal((3, columns)), dtype)
    found = jax.jit(partial(order_inputs, layout=layout, interpret=interpret))(x_XC)
    np.testing.assert_array_equal(found, order_columns(x_XC, layout))
    assert (found[:, :columns] != x_XC).any()  # negative control


@pytest.mark.parametrize("columns", [96, 160, 704, 1408, 2048, 2816])
def test_positions_hold_each_column_once(columns):
    layout = BlockLayout(32, columns, False, 2, 8, 2048)
    placed = order_columns(np.arange(columns)[None], layout, fill=-1)[0]
    assert placed.size % 128 == 0
    np.testing.assert_array_equal(np.sort(placed[placed >= 0]), np.arange(columns))
    x_XC = np.random.default_rng(0).standard_normal((3, columns)).astype(np.float32)
    expected = np.where(placed < 0, 0, x_XC[:, placed])
    np.testing.assert_array_equal(order_columns(jnp.asarray(x_XC), layout), expected)


@pytest.mark.parametrize(("rows", "warps"), [(32, 4), (64, 4), (128, 4), (128, 8)])
def test_each_row_is_loaded_once(rows, warps):
    np.testing.assert_array_equal(np.sort(loaded_rows(rows, warps)), np.arange(rows))


@pytest.mark.parametrize("planes", [2, 3, 4, 5, 6])
def test_permuting_bytes_looks_codes_up(planes):
    rng = np.random.default_rng(planes)
    words = [jnp.asarray(rng.integers(-(2**31), 2**31, (2, 4)), jnp.int32) for _ in range(planes)]
    lut_RK = jnp.asarray(rng.integers(-(2**31), 2**31, (2, max(2 ** (planes - 1), 4))), jnp.int32)
    expected = look_up_plainly(words, lut_RK)
    pairs = jnp.split(lut_RK, lut_RK.shape[1], axis=1)
    np.testing.assert_array_equal(look_up_bytes(words, split_bytes(pairs, True), True), expected)
    assert (look_up_bytes(words[::-1], split_bytes(pairs, True), True) != expected).any()  # negative control


def cuda_device():
    """JAX 0.11 asks the mesh for the GPU that it lowers to; 0.10 assumes one."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize("name", SPECS)
def test_prefill_of_real_sizes_lowers_to_triton(name):
    spec = dataclasses.replace(SPECS[name], min_bits=4, max_bits=5)
    args = abstract_args(spec, 2048, num_frames=600_000)
    with cuda_device():
        run = jax.jit(partial(api.moe_ffn, activation=spec.activation, implementation="triton"))
        lowered = run.trace(*args).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count('name = "grouped_gate_up"') == 1
    assert text.count('name = "grouped_down"') == 1
    groups = text.count('name = "dequantize_gate_up"')
    assert groups == text.count('name = "plain_gate_up"')
    assert groups == {"qwen1.5-moe": 2, "mixtral-8x7b": 8, "gemma-4-26b": 3}[name]
    y, h_square = lowered.out_info
    assert y.shape == (2048, spec.top_k, spec.hidden_size)
    assert h_square.shape == (2048, spec.top_k)
