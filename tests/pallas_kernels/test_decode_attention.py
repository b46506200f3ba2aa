# SPDX-License-Identifier: Apache-2.0
"""Decoding's kernel, which rotates, writes and attends: interpreted against the definition, compiled by -m gpu."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import api, pallas_triton, reference
from pallas_kernels.paged_attention.cases import TOLERANCE, random_cache
from pallas_kernels.paged_attention.layout import KVLayout, from_words
from pallas_kernels.paged_attention.pallas_triton_decode import DecodeConfig

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
M, SCALE = 16, 0.3
CONFIG = DecodeConfig(tile_tokens=32, split_tokens=256)
POSITIONS = [255, 256, 0, -1, 319]  # both sides of a split's border, a first token, a row that is not in use


def relative_error(out, ref):
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return np.linalg.norm(out - ref) / np.linalg.norm(ref)


def worst_row(out, ref):
    return max(relative_error(o, r) for o, r in zip(out, ref, strict=True) if np.any(np.asarray(r)))


def make_step(layout, dtype, group, positions, window=0, seed=1):
    """Returns the arrays of ``decode_attention``; what lies where the new keys and values go is NaN."""
    first = [max(0, last - window + 1) if window else 0 for last in positions]  # blocks behind the window: given back
    arena, table = random_cache(layout, positions, first)
    rng = np.random.default_rng(seed)
    shape, heads = (len(positions), layout.head_dim), layout.num_kv_heads
    q, k, v = (
        jnp.asarray(1.001 * rng.standard_normal((shape[0], count, shape[1])), dtype)
        for count in (group * heads, heads, heads)
    )
    angles = rng.uniform(0, 6, (shape[0], shape[1] // 2))
    cos, sin = (jnp.asarray(turn, jnp.float32) for turn in (np.cos(angles), np.sin(angles)))
    places, there = np.maximum(positions, 0), np.asarray(positions) >= 0
    frames = np.asarray(table)[np.arange(len(places)), places // layout.block_tokens]
    frames = np.where(there[:, None], frames, len(arena))
    nan = jnp.full(k.shape, jnp.nan, layout.dtype)
    arena = reference.write_kv(arena, frames, places % layout.block_tokens, nan, nan, layout)
    return arena, q, k, v, cos, sin, jnp.asarray(positions, jnp.int32), table


@partial(jax.jit, static_argnums=(8, 9), static_argnames=("soft_cap", "config", "interpret"))
def run(arena, q, k, v, cos, sin, positions, table, layout, window=0, soft_cap=0.0, config=CONFIG, interpret=True):
    arrays = arena, q, k, v, cos, sin, positions, table
    return pallas_triton.decode_attention(
        *arrays, layout, SCALE, window, soft_cap, jnp.float32, config=config, interpret=interpret
    )


@partial(jax.jit, static_argnums=(8, 9), static_argnames="soft_cap")
def define(arena, q, k, v, cos, sin, positions, table, layout, window=0, soft_cap=0.0):
    arrays = arena, q, k, v, cos, sin, positions, table
    return reference.decode_attention(*arrays, layout, SCALE, window, soft_cap)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "frame_words", "group", "window", "soft_cap"),
    [
        ("float32", "float32", 512, 3, 9, 0.0),  # a group that is no power of two; a window within one tile
        ("bfloat16", "bfloat16", 128, 1, 257, 2.0),  # a window whose edge crosses a split's border
        ("bfloat16", "bfloat16", 512, 8, 0, 0.0),  # two heads in a frame
        ("bfloat16", "float32", 128, 2, 0, 0.0),  # multiplied in float32: new keys must be rounded as cached ones are
        ("float32", "bfloat16", 512, 2, 0, 0.0),
    ],
)
def test_it_equals_the_definition(kv_dtype, dtype, frame_words, group, window, soft_cap, interpret):
    layout = KVLayout(num_kv_heads=2, head_dim=M, dtype=kv_dtype, frame_words=frame_words)
    step = make_step(layout, dtype, group, POSITIONS, window)
    arena, out = run(*step, layout, window, soft_cap=soft_cap, interpret=interpret)
    expected_arena, expected = define(*step, layout, window, soft_cap=soft_cap)
    tolerance = TOLERANCE["bfloat16" if dtype == kv_dtype == "bfloat16" else "float32"]
    assert worst_row(out, expected) < tolerance
    assert not np.any(np.asarray(out[POSITIONS.index(-1)]))
    before, after, expected_after = (np.asarray(x) for x in (step[0], arena, expected_arena))
    np.testing.assert_array_equal(after != before, expected_after != before)  # nothing else is written
    written = expected_after != before
    assert np.count_nonzero(written) == 4 * layout.layer_frames * layout.heads_per_frame * layout.head_words
    values = [np.asarray(from_words(jnp.asarray(x[written]), kv_dtype), np.float64) for x in (after, expected_after)]
    assert relative_error(*values) < TOLERANCE[dtype]
    arrays = list(step)  # negative controls: the row's own value, and which way its key is turned
    arrays[3] = -arrays[3]
    assert not worst_row(out, define(*arrays, layout, window, soft_cap=soft_cap)[1]) < 10 * tolerance
    arrays = [*step[:5], -step[5], *step[6:]]
    assert not worst_row(out, define(*arrays, layout, window, soft_cap=soft_cap)[1]) < 10 * tolerance


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_next_token_sees_what_was_written(dtype, interpret):
    layout = KVLayout(num_kv_heads=2, head_dim=M, dtype=dtype, frame_words=512)
    positions = [60, 300]
    arena, *step, _, table = make_step(layout, dtype, 2, [last + 1 for last in positions])
    for offset in range(2):
        arena, out = run(arena, *step, jnp.asarray(positions) + offset, table, layout, interpret=interpret)
    assert np.all(np.isfinite(np.asarray(out)))
    rotated = reference.rotate(step[0], *step[3:])[:, None]
    seen = jnp.asarray(positions)[:, None] + 1
    expected = reference.paged_attention(arena, rotated, seen, table, layout, SCALE, 0)
    assert worst_row(out, expected[:, 0]) < TOLERANCE[dtype]
    fewer = reference.paged_attention(arena, rotated, seen - 1, table, layout, SCALE, 0)  # negative control
    assert not worst_row(out, fewer[:, 0]) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("interpret", MODES)
def test_a_row_depends_on_no_other_row(interpret):
    layout = KVLayout(num_kv_heads=2, head_dim=M, dtype="bfloat16", frame_words=128)
    positions = [300, 319, 40]
    arena, *vectors, _, table = make_step(layout, "bfloat16", 2, positions)
    together = [np.asarray(x) for x in run(arena, *vectors, jnp.asarray(positions), table, layout, interpret=interpret)]
    for row in range(3):
        alone = [x[row][None] for x in (*vectors, jnp.asarray(positions), table)]
        _, out = run(arena, *alone, layout, interpret=interpret)
        np.testing.assert_array_equal(out[0], together[1][row])
        others = np.arange(3) != row
        fewer = jnp.where(others, jnp.asarray([7, -1, 0]), jnp.asarray(positions))
        turned = [jnp.where(others.reshape(-1, *[1] * (x.ndim - 1)), -x, x) for x in vectors]
        _, out = run(arena, *turned, fewer, table, layout, interpret=interpret)
        np.testing.assert_array_equal(out[row], together[1][row])
        assert not np.array_equal(out, together[1])


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(
    ("window", "change"),
    [
        (100, {"max_programs": 1}),
        (100, {"tiles_in_flight": 2}),
        (0, {"tiles_in_flight": 3, "early_table": True}),
        (0, {"max_programs": 1, "early_table": True}),
        (0, {"max_registers": 96}),
    ],
)
def test_cuts_that_leave_the_order_of_sums_change_no_bit(window, change, interpret):
    layout = KVLayout(num_kv_heads=2, head_dim=M, dtype="bfloat16", frame_words=128)
    step = make_step(layout, "bfloat16", 2, [319, 70, 64])
    split = DecodeConfig(tile_tokens=16, split_tokens=64)
    options = {"interpret": interpret}
    first = run(*step, layout, window, config=split, **options)
    second = run(*step, layout, window, config=replace(split, **change), **options)
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)
    other = run(*step, layout, window, config=replace(split, split_tokens=32), **options)  # negative control
    assert not np.array_equal(first[1], other[1])


@pytest.mark.parametrize("interpret", MODES)
def test_heads_wider_than_a_combining_program(interpret):
    layout = KVLayout(num_kv_heads=1, head_dim=256, dtype="float32", frame_words=4096)
    step = make_step(layout, "float32", 2, [70, 31, -1])
    out = run(*step, layout, config=DecodeConfig(tile_tokens=16, split_tokens=32), interpret=interpret)[1]
    expected = define(*step, layout)[1]
    assert worst_row(out, expected) < TOLERANCE["float32"]
    swapped = jnp.concatenate([out[..., 128:], out[..., :128]], axis=-1)  # negative control: halves of heads
    assert not worst_row(swapped, expected) < 0.1


def test_the_definition_is_the_two_operations_one_after_the_other():
    layout = KVLayout(num_kv_heads=2, head_dim=M, dtype="float32", frame_words=512)
    arena, q, k, v, cos, sin, positions, table = make_step(layout, "float32", 2, [20, 0, 300])
    out_arena, out = api.decode_attention(arena, q, k, v, cos, sin, positions, table, layout, scale=SCALE, window=40)
    frames = table[np.arange(3), positions // layout.block_tokens]
    arena, q = api.rotate_and_write_kv(arena, frames, positions % layout.block_tokens, cos, sin, q, k, v, layout)
    attend = partial(api.paged_attention, arena, q[:, None], table_BGF=table, layout=layout, scale=SCALE, window=40)
    np.testing.assert_array_equal(out_arena, arena)
    np.testing.assert_array_equal(out, attend(positions_BT=positions[:, None])[:, 0])
    assert not np.array_equal(out, attend(positions_BT=positions[:, None] - 1)[:, 0])
