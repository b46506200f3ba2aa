# SPDX-License-Identifier: Apache-2.0
"""What steps run on: the choice, and whole steps on the kernels, interpreted and lowered for CUDA on any machine."""

import re
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pagedweight_jax.config import ServeConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import init_weights, without_experts
from pagedweight_jax.paging.page_map import PageMap
from pagedweight_jax.serving import steps
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.implementation import choose_implementation
from pagedweight_jax.serving.state import init_state, make_geometry
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.dense import pallas_triton as dense
from pallas_kernels.expert_trace import pallas_triton as expert_trace
from pallas_kernels.frames import pallas_triton as frames
from pallas_kernels.moe_ffn import pallas_triton as moe_ffn
from pallas_kernels.paged_attention import pallas_triton as paged_attention
from pallas_kernels.routing import pallas_triton as routing
from pallas_kernels.tokens import pallas_triton as tokens_

KERNELS = {
    dense: ("project", "project_parts", "add_norm", "gated", "logits"),
    expert_trace: ("pack_trace",),
    frames: ("scatter_frames",),
    moe_ffn: ("moe_ffn",),
    paged_attention: ("decode_attention", "paged_attention", "rotate_and_write_kv"),
    routing: ("route",),
    tokens_: ("read_tokens", "best_of_blocks", "advance"),
}


@dataclass(frozen=True)
class Device:
    """As much of a ``jax.Device`` as the choice looks at."""

    platform: str
    compute_capability: str | None = None
    device_kind: str = "some device"


H200, OLD, OTHER, CPU = Device("gpu", "9.0"), Device("gpu", "7.5"), Device("gpu", "gfx942"), Device("cpu")


@pytest.mark.parametrize(("device", "default"), [(H200, "triton"), (OLD, "xla"), (OTHER, "xla"), (CPU, "xla")])
def test_kernels_are_the_default_where_they_run_and_an_error_where_they_do_not(device, default, tiny_config):
    assert choose_implementation(None, tiny_config(), device) == default
    assert choose_implementation("xla", tiny_config(), device) == "xla"
    if default == "triton":
        assert choose_implementation("triton", tiny_config(), device) == "triton"
    else:
        with pytest.raises(UserError, match=r"^implementation triton cannot run: it needs an NVIDIA GPU.*xla runs any"):
            choose_implementation("triton", tiny_config(), device)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"head_dim": 24}, "the model's are 24 wide"), ({"moe_intermediate_size": 20}, "the model has 40x64")],
)
def test_models_that_no_kernel_takes_run_on_xla(fields, message, tiny_config):
    assert choose_implementation(None, tiny_config(**fields), H200) == "xla"
    with pytest.raises(UserError, match=message):
        choose_implementation("triton", tiny_config(**fields), H200)


def test_names_are_checked_before_anything_is_allocated(tiny):
    with pytest.raises(UserError, match=r"implementation must be one of xla, triton, None, got 'cuda'"):
        ServeConfig(memory_bytes=1, implementation="cuda")
    with pytest.raises(UserError, match=r"implementation triton cannot run: .* the device is cpu"):
        Engine(tiny.checkpoint, ServeConfig(memory_bytes=1, implementation="triton"), jax.devices("cpu")[0])


@pytest.fixture
def interpreted(monkeypatch, compile_in_a_hurry):
    """Lets ``triton`` run anywhere, slowly; returns the names of the kernels' functions that were called."""
    called = set()

    def run(function, *args, **keywords):
        called.add(function.__name__)
        return function(*args, **(keywords | {"interpret": True}))

    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, partial(run, getattr(module, name)))
    return called


def jitted(step, implementation):
    """The step itself for ``xla``, else a program of its own: the step would keep one with interpreted kernels."""
    if implementation == "xla":
        return partial(step, implementation=implementation)
    body = partial(step.__wrapped__, implementation=implementation)
    return jax.jit(body, static_argnames=("num_steps",) if step is steps.decode_loop else ())


def decode(tiny, stepping, implementation, bits):
    """Returns (tokens of a row that goes on, of one that begins and of one that is not there, the rows' sums)."""
    prompt, step = list(range(13)), jitted(steps.prefill_step, implementation)
    state, _ = stepping.prefill(tiny.dense, stepping.start(stepping.state(bits), 1), 1, prompt, budget=9, step=step)
    state = state.replace(
        lengths_B=jnp.array([0, 13, 0]), last_tokens_B=jnp.array([5, 9, 0]), remaining_B=jnp.array([2, 9, 0])
    )
    _, tokens_NB, sums = jitted(steps.decode_loop, implementation)(tiny.dense, state, num_steps=4)
    return np.asarray(tokens_NB), sums


def test_whole_steps_on_the_kernels_give_what_xla_gives(tiny, stepping, interpreted):
    bits = stepping.random_bits(4)
    tokens, sums = decode(tiny, stepping, "triton", bits)
    assert interpreted == {name for names in KERNELS.values() for name in names} - {"scatter_frames", "logits"}
    interpreted.clear()
    expected_tokens, expected_sums = decode(tiny, stepping, "xla", bits)
    assert not interpreted
    np.testing.assert_array_equal(tokens, expected_tokens)
    assert (tokens >= 0).tolist() == [[True, True, False]] * 2 + [[False, True, False]] * 2
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), sums, expected_sums)
    _, other = decode(tiny, stepping, "xla", np.roll(bits, 1, axis=1))
    assert not np.allclose(sums.norm_LEU, other.norm_LEU, rtol=1e-2)


def test_pages_land_through_the_kernel_as_they_do_through_xla(tiny, interpreted):
    layout = tiny.checkpoint.manifest.layouts()[0]
    rng = np.random.default_rng(6)
    pages = rng.integers(0, 2**32, (3, layout.page_frames(0), layout.frame_words), dtype=np.uint32)
    count = pages.shape[0] * pages.shape[1]
    to = rng.permutation(2 * count)[:count].reshape(pages.shape[:2]).astype(np.int32)
    to[1] = 2 * count  # out of range: this page is dropped
    runs = [
        np.asarray(jitted(steps.land_pages, name)(jnp.zeros((2 * count, layout.frame_words), jnp.uint32), pages, to))
        for name in ("triton", "xla")
    ]
    np.testing.assert_array_equal(*runs)
    assert interpreted == {"scatter_frames"}
    np.testing.assert_array_equal(runs[0][to[2]], pages[2])
    assert not np.array_equal(runs[0][to[0]], pages[2])


def cuda_device():
    """A context that lowers as a process on an H200 would."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)  # sharding rules would have a say within kernels otherwise, in JAX 0.11
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=device))


def abstract_model(config, rows):
    """Returns the shapes of (weights, state) in bfloat16, with an arena of more than 2^32 bytes."""
    pair = [BlockLayout(*config.block_shape(kind), kind == 0, 3, 8, 4096) for kind in range(2)]
    geometry = make_geometry(config, pair, "bfloat16", rows, 2048)
    shape, blocks = jax.ShapeDtypeStruct, (config.num_sparse_layers, config.num_experts)
    pages = PageMap(
        bits_LEU=shape((*blocks, 2), jnp.int32),
        gate_up_frames_LEF=shape((*blocks, pair[0].block_frames), jnp.int32),
        down_frames_LEF=shape((*blocks, pair[1].block_frames), jnp.int32),
    )
    arena = shape(((5 << 30) // (4 * 4096), 4096), jnp.uint32)
    weights = jax.eval_shape(lambda: without_experts(init_weights(config, jax.random.key(0), jnp.bfloat16)))
    return weights, jax.eval_shape(partial(init_state, geometry), arena, pages)


def test_whole_steps_of_a_full_size_model_lower_to_triton(tiny_config):
    """Two layers of Qwen1.5-MoE-A2.7B's sizes; every layer lowers alike."""
    config = replace(
        tiny_config(num_layers=2, num_heads=16, num_kv_heads=16, head_dim=128, num_experts=60, num_experts_per_tok=4),
        vocab_size=151_936,
        hidden_size=2048,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    )
    scalar, chunk = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((2048,), jnp.int32)
    for step, rows, args in (
        (steps.decode_loop, 16, (8,)),
        (steps.prefill_step, 16, (scalar, chunk, scalar, scalar)),
    ):
        for implementation in ("triton", "xla"):
            weights, state = abstract_model(config, rows)
            with cuda_device():
                traced = step.trace(weights, state, *args, implementation=implementation)
                text = traced.lower(lowering_platforms=("cuda",)).as_text()
            kernels = set(re.findall(r'name = "(\w+)"', text))
            if step is steps.decode_loop:
                expected = {"read_tokens", "attend_decode", "pack_trace", "project", "gate_up", "down"}
                expected |= {"best_of_blocks", "advance"}
            else:
                expected = {"rotate_and_write_kv", "attend", "pack_trace", "grouped_down"}
            assert kernels >= expected if implementation == "triton" else not kernels & expected
