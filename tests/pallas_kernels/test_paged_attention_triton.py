# SPDX-License-Identifier: Apache-2.0
"""Triton attention: interpreted against the definition, lowered for CUDA at real sizes, compiled by -m gpu."""

import contextlib
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import api, pallas_triton, reference
from pallas_kernels.paged_attention.arg_specs import SPECS, abstract_args
from pallas_kernels.paged_attention.cases import TOLERANCE, random_cache
from pallas_kernels.paged_attention.layout import KVLayout, from_words
from pallas_kernels.paged_attention.pallas_triton_attend import Config

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
M, SCALE = 16, 0.3
DECODE = Config(rows=16, tile_tokens=32, split_tokens=256)
LAST = [255, 256, 0, -1, 319]  # both sides of a split's border, one token, a row that is not in use


def relative_error(out, ref):
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return np.linalg.norm(out - ref) / np.linalg.norm(ref)


def worst_row(out, ref):
    return max(relative_error(o, r) for o, r in zip(out, ref, strict=True) if np.any(np.asarray(r)))


def queries(layout, rows, tokens, group, seed=1):
    shape = (rows, tokens, group * layout.num_kv_heads, layout.head_dim)
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), layout.dtype)


@partial(jax.jit, static_argnames=("layout", "window", "soft_cap", "config", "interpret"))
def run(arena, q, positions, table, layout, window=0, soft_cap=0.0, config=None, interpret=True):
    return pallas_triton.paged_attention(
        arena, q, positions, table, layout, SCALE, window, soft_cap, jnp.float32, config=config, interpret=interpret
    )


@partial(jax.jit, static_argnames=("layout", "window", "soft_cap"))
def define(arena, q, positions, table, layout, window=0, soft_cap=0.0):
    return reference.paged_attention(arena, q, positions, table, layout, SCALE, window, soft_cap)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "frame_words", "group", "window", "soft_cap"),
    [
        ("float32", "float32", 512, 3, 9, 0.0),  # a group that is no power of two; a window within one tile
        ("bfloat16", "bfloat16", 128, 1, 257, 2.0),  # a window whose edge crosses a split's border
        ("bfloat16", "bfloat16", 512, 8, 0, 0.0),  # two heads in a frame
        ("bfloat16", "float32", 128, 2, 0, 0.0),  # multiplied in float32
    ],
)
def test_decode_equals_the_definition(kv_dtype, dtype, frame_words, group, window, soft_cap, interpret):
    layout = KVLayout(num_kv_heads=2, head_dim=M, dtype=kv_dtype, frame_words=frame_words)
    first = [max(0, last - window + 1) if window else 0 for last in LAST]  # blocks behind the window are given back
    arena, table = random_cache(layout, LAST, first)
    q = 1.001 * queries(layout, len(LAST), 1, group).astype(dtype)  # no values of bfloat16
    positions = jnp.asarray(LAST)[:, None]
    out = run(arena, q, positions, table, layout, window, soft_cap, DECODE, interpret)
    assert worst_row(out, define(arena, q, positions, table, layout, window, soft_cap)) < TOLERANCE[dtype]
    assert not np.any(np.asarray(out[LAST.index(-1)]))
    swapped = jnp.roll(table, layout.half_frames, axis=2)  # negative control: V as K
    assert not worst_row(out, define(arena, q, positions, swapped, layout, window, soft_cap)) < 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(
    ("dtype", "window", "config"),
    [
        ("float32", 0, Config(rows=16, tile_tokens=32, split_tokens=64)),
        ("bfloat16", 0, Config(rows=64, tile_tokens=32, split_tokens=512)),  # one split: no second kernel
        ("bfloat16", 33, Config(rows=32, tile_tokens=16, split_tokens=64)),
    ],
)
def test_a_chunk_equals_the_definition(dtype, window, config, interpret):
    layout = KVLayout(num_kv_heads=2, head_dim=M, dtype=dtype, frame_words=128)
    arena, table = random_cache(layout, [269, 5])
    offsets = np.arange(48)
    positions = jnp.asarray([np.where(offsets < 40, 230 + offsets, -1), np.where(offsets < 6, offsets, -1)])
    q = queries(layout, 2, 48, 2)
    out = run(arena, q, positions, table, layout, window, 0.0, config, interpret)
    ref = define(arena, q, positions, table, layout, window)
    assert worst_row(out.reshape(96, -1), ref.reshape(96, -1)) < TOLERANCE[dtype]
    assert not np.any(np.asarray(out)[np.asarray(positions) < 0])
    late = define(arena, q, positions + 1, table, layout, window)  # negative control: one key too many
    assert not worst_row(out.reshape(96, -1), late.reshape(96, -1)) < 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("tokens", [1, 20])
def test_a_row_depends_on_no_other_row(tokens, interpret):
    layout = KVLayout(num_kv_heads=2, head_dim=M, dtype="bfloat16", frame_words=128)
    config = DECODE if tokens == 1 else Config(rows=32, tile_tokens=16, split_tokens=128)
    arena, table = random_cache(layout, [300, 319, 40])
    q = queries(layout, 3, tokens, 2)
    positions = jnp.asarray([[300], [319], [40]]) - np.arange(tokens)[::-1]
    together = np.asarray(run(arena, q, positions, table, layout, 0, 0.0, config, interpret))
    for row in range(3):
        other = np.arange(3)[:, None] != row
        fewer = jnp.where(other, jnp.where(positions % 2 == 0, 7, -1) if tokens == 1 else -1, positions)
        q_alone = jnp.where(other[..., None, None], 2 * q, q)
        alone = np.asarray(run(arena, q_alone, fewer, table, layout, 0, 0.0, config, interpret))
        np.testing.assert_array_equal(alone[row], together[row])
        assert not np.array_equal(alone, together)
    if tokens > 1:  # nor on the other queries of its own row
        last = jnp.where(np.arange(tokens) == tokens - 1, positions, -1)
        alone = np.asarray(run(arena, q, last, table, layout, 0, 0.0, config, interpret))
        np.testing.assert_array_equal(alone[:, -1], together[:, -1])


@pytest.mark.parametrize("interpret", MODES)
def test_programs_that_visit_several_splits_change_nothing(interpret):
    layout = KVLayout(num_kv_heads=2, head_dim=M, dtype="bfloat16", frame_words=128)
    arena, table = random_cache(layout, [319, 70])
    q, positions = queries(layout, 2, 1, 2), jnp.asarray([[319], [70]])
    split = Config(rows=16, tile_tokens=16, split_tokens=32)
    few = dataclasses.replace(split, max_programs=1)
    out, visited = (run(arena, q, positions, table, layout, 100, 0.0, c, interpret) for c in (split, few))
    np.testing.assert_array_equal(out, visited)
    assert worst_row(visited, define(arena, q, positions, table, layout, 100)) < 1e-2


@pytest.mark.parametrize("interpret", MODES)
def test_heads_wider_than_a_combining_program(interpret):
    layout = KVLayout(num_kv_heads=1, head_dim=256, dtype="float32", frame_words=4096)
    arena, table = random_cache(layout, [70, 31, -1])
    q, positions = queries(layout, 3, 1, 2), jnp.asarray([[70], [31], [-1]])
    split = Config(rows=16, tile_tokens=16, split_tokens=32)
    out = run(arena, q, positions, table, layout, 0, 0.0, split, interpret)
    assert worst_row(out, define(arena, q, positions, table, layout)) < TOLERANCE["float32"]
    swapped = jnp.concatenate([out[..., 128:], out[..., :128]], axis=-1)  # negative control: halves of heads
    assert not worst_row(swapped, define(arena, q, positions, table, layout)) < 0.1


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(("dtype", "heads", "frame_words"), [("float32", 6, 128), ("bfloat16", 2, 512)])
def test_written_keys_lie_where_the_definition_puts_them(dtype, heads, frame_words, interpret):
    layout = KVLayout(num_kv_heads=heads, head_dim=M, dtype=dtype, frame_words=frame_words)
    rng = np.random.default_rng(0)
    num_frames = 5 * layout.layer_frames + 3
    arena = jnp.asarray(rng.integers(0, 2**32, (num_frames, frame_words), dtype=np.uint32))
    frames = rng.permutation(num_frames)[: 5 * layout.layer_frames].reshape(5, -1).astype(np.int32)
    frames[2] = num_frames  # a row that is not in use
    frames, slots = jnp.asarray(frames), jnp.asarray(rng.integers(0, layout.block_tokens, 5), jnp.int32)
    k, v = (jnp.asarray(rng.standard_normal((5, heads, M)), jnp.float32) for _ in range(2))
    out = pallas_triton.write_kv(arena, frames, slots, k, v, layout, interpret=interpret)
    np.testing.assert_array_equal(out, reference.write_kv(arena, frames, slots, k, v, layout))
    assert not np.array_equal(out, reference.write_kv(arena, frames, slots, v, k, layout))  # negative control


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotating_while_writing_equals_the_definition(dtype, interpret):
    layout = KVLayout(num_kv_heads=3, head_dim=M, dtype=dtype, frame_words=128)
    rng = np.random.default_rng(0)
    num_frames = 4 * layout.layer_frames + 3
    arena = jnp.asarray(rng.integers(0, 2**32, (num_frames, 128), dtype=np.uint32))
    frames = rng.permutation(num_frames)[: 4 * layout.layer_frames].reshape(4, -1).astype(np.int32)
    frames[1] = num_frames  # a row that is not in use
    frames, slots = jnp.asarray(frames), jnp.asarray(rng.integers(0, layout.block_tokens, 4), jnp.int32)
    angle = rng.uniform(0, 6, (4, M // 2))
    cos, sin = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    q, k, v = (jnp.asarray(rng.standard_normal((4, heads, M)), dtype) for heads in (6, 3, 3))
    out, q_out = pallas_triton.rotate_and_write_kv(
        arena, frames, slots, cos, sin, q, k, v, layout, interpret=interpret
    )
    ref, q_ref = reference.rotate_and_write_kv(arena, frames, slots, cos, sin, q, k, v, layout)
    assert worst_row(q_out, q_ref) < TOLERANCE[dtype]
    written = np.asarray(out) != np.asarray(arena)
    assert np.count_nonzero(written) == np.count_nonzero(np.asarray(ref) != np.asarray(arena))
    values = [np.asarray(from_words(jnp.asarray(np.asarray(x)[written]), dtype), np.float64) for x in (out, ref)]
    assert relative_error(*values) < TOLERANCE[dtype]
    _, backwards = reference.rotate_and_write_kv(arena, frames, slots, cos, -sin, q, k, v, layout)
    assert not worst_row(q_out, backwards) < 10 * TOLERANCE[dtype]  # negative control


def cuda_device():
    """JAX 0.11 asks the mesh for the GPU that it lowers to; 0.10 assumes one."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize(("rows", "tokens", "dtype"), [(16, 1, "bfloat16"), (1, 2048, "bfloat16"), (2, 1, "float32")])
@pytest.mark.parametrize("name", SPECS)
def test_real_sizes_lower_to_triton(name, rows, tokens, dtype):
    spec = SPECS[name]
    layout = spec.layout(dtype)
    arena, q, positions, table = abstract_args(spec, rows, tokens, context=4096, num_frames=600_000, dtype=dtype)

    which = {"implementation": "triton"}

    def step(arena, q, k, v, positions, table, slots, frames, angles):
        options = {"scale": spec.score_scale, "window": spec.window} | which
        if tokens == 1:
            new = q[:, 0], k, v, angles, angles, positions[:, 0]
            return api.decode_attention(arena, *new, table, layout, **options)
        arena = api.write_kv(arena, frames, slots, k, v, layout, **which)
        return arena, api.paged_attention(arena, q, positions, table, layout, **options)

    shape, num_tokens = jax.ShapeDtypeStruct, rows * tokens
    kv = shape((num_tokens, spec.num_kv_heads, spec.head_dim), dtype)
    slots, angles = shape((num_tokens,), jnp.int32), shape((num_tokens, spec.head_dim // 2), jnp.float32)
    frames = shape((num_tokens, layout.layer_frames), jnp.int32)
    with cuda_device():
        traced = jax.jit(step, donate_argnums=0).trace(arena, q, kv, kv, positions, table, slots, frames, angles)
        lowered = traced.lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    kernels = ("attend_decode", "combine") if tokens == 1 else ("write_kv", "attend")
    assert [text.count(f'name = "{kernel}"') for kernel in kernels] == [1, 1]
    assert lowered.out_info[1].shape == (q.shape[:1] + q.shape[2:] if tokens == 1 else q.shape)


@pytest.mark.parametrize(("head_dim", "frame_words"), [(192, 192 * 16), (16, 16 * 24)])
def test_heads_and_frames_that_are_no_power_of_two_are_refused(head_dim, frame_words):
    layout = KVLayout(num_kv_heads=1, head_dim=head_dim, dtype="float32", frame_words=frame_words)
    arena, table = random_cache(layout, [3])
    q, angles = queries(layout, 1, 1, 1), jnp.zeros((1, head_dim // 2))
    write = arena, table[:, 0], jnp.zeros(1, jnp.int32)
    attend = partial(api.paged_attention, arena, q, jnp.full((1, 1), 3), table, layout, scale=1.0)
    assert np.all(np.isfinite(attend(implementation="xla")))  # the definition takes any
    heads = q[:, 0], q[:, 0], q[:, 0]
    for call in (
        attend,
        partial(api.decode_attention, arena, *heads, angles, angles, jnp.full(1, 3), table, layout, scale=1.0),
        partial(api.write_kv, *write, q[:, 0], q[:, 0], layout),
        partial(api.rotate_and_write_kv, *write, angles, angles, *heads, layout),
    ):
        with pytest.raises(ValueError, match=f"heads are {head_dim} wide, frames of {frame_words} words"):
            call(implementation="triton")


def test_an_unknown_implementation_is_refused():
    layout = KVLayout(num_kv_heads=1, head_dim=M, dtype="float32", frame_words=128)
    arena, table = random_cache(layout, [3])
    q = queries(layout, 1, 1, 1)
    with pytest.raises(ValueError, match="'cuda' is not one of"):
        api.paged_attention(arena, q, jnp.zeros((1, 1)), table, layout, scale=1.0, implementation="cuda")
    with pytest.raises(ValueError, match="'cuda' is not one of"):
        api.write_kv(arena, table[:, 0], jnp.zeros(1), q[:, 0], q[:, 0], layout, implementation="cuda")
