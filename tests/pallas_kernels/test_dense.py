# SPDX-License-Identifier: Apache-2.0
"""Dense products: interpreted against the definition, lowered for CUDA at real sizes, compiled by -m gpu."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense import api, pallas_triton, reference
from pallas_kernels.dense.arg_specs import SPECS, abstract_args
from pallas_kernels.dense.cases import call, random_like
from pallas_kernels.dense.columns import Cut

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
EPS = 1e-6
PARTS = Cut(columns=32, depth=16, stretches=2)
CUTS = [Cut(columns=32, depth=32), Cut(columns=16, depth=16, num_warps=2, num_stages=3)]


def draw(seed, *shapes, dtype="float32", scale=1.0):
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(scale * rng.standard_normal(shape, np.float32), dtype) for shape in shapes]
    return arrays[0] if len(arrays) == 1 else arrays


def close(out, ref, dtype, relative_error):
    out, ref = jax.tree.leaves(out), jax.tree.leaves(ref)
    assert [a.shape for a in out] == [a.shape for a in ref]
    assert [a.dtype for a in out] == [a.dtype for a in ref]
    return max(relative_error(a, b) for a, b in zip(out, ref, strict=True)) < TOLERANCE[dtype]


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(
    ("dtype", "tokens", "cut"),
    [("float32", 3, CUTS[1]), ("bfloat16", 1, CUTS[0]), ("bfloat16", 16, CUTS[1]), ("bfloat16", 7, CUTS[0])],
)
def test_project_equals_the_definition(dtype, tokens, cut, interpret, relative_error):
    x, q, k, v, bias = draw(0, (tokens, 96), (96, 64), (96, 32), (96, 24), (32,), dtype=dtype)
    args = x, (q, k, v), (None, bias, None)
    out = pallas_triton.project(*args, cut=cut, interpret=interpret)
    assert close(out, reference.project(*args), dtype, relative_error)
    swapped = reference.project(x, (q, k, v), (None, -bias, None))  # negative control
    assert not close(out, swapped, dtype, relative_error)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(
    ("dtype", "tokens", "depth", "cut"),
    [
        ("float32", 16, 96, Cut(columns=32, depth=16, stretches=3)),
        ("bfloat16", 3, 104, Cut(columns=16, depth=16, stretches=4)),  # the last stretch is shorter
        ("bfloat16", 1, 40, Cut(columns=32, depth=32)),
    ],
)
def test_the_sum_of_parts_equals_the_definition(dtype, tokens, depth, cut, interpret, relative_error):
    h, w = draw(8, (tokens, depth), (depth, 72), dtype=dtype)
    parts = pallas_triton.project_parts(h, w, cut=cut, interpret=interpret)
    assert (parts.shape, parts.dtype) == ((cut.stretches, tokens, 72), jnp.float32)
    assert relative_error(parts.sum(0), reference.project_parts(h, w)[0]) < 1e-5  # nothing is rounded to bfloat16
    first = -(-depth // (cut.stretches * cut.depth)) * cut.depth
    assert relative_error(parts[0], reference.project_parts(h[:, :first], w[:first])[0]) < 1e-5
    assert not relative_error(parts.sum(0), reference.project_parts(h[:, ::-1], w)[0]) < 1e-2  # negative control


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(
    ("dtype", "tokens", "activation", "cut"),
    [
        ("float32", 1, "silu", CUTS[0]),
        ("bfloat16", 16, "gelu_pytorch_tanh", CUTS[1]),
        ("bfloat16", 9, "silu", CUTS[0]),
    ],
)
def test_gated_equals_the_definition(dtype, tokens, activation, cut, interpret, relative_error):
    x, gate, up = draw(3, (tokens, 50), (50, 44), (50, 44), dtype=dtype)
    gate, up = gate / 4, up / 4  # where activations bend
    out = pallas_triton.gated(x, gate, up, activation, cut=cut, interpret=interpret)
    assert close(out, reference.gated(x, gate, up, activation), dtype, relative_error)
    swapped = reference.gated(x, up, gate, activation)  # negative control
    assert not close(out, swapped, dtype, relative_error)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "tokens"), [("float32", 2), ("bfloat16", 5)])
def test_logits_equal_the_definition(dtype, tokens, transposed, interpret, relative_error):
    x, head = draw(4, (tokens, 48), (48, 100), dtype=dtype)
    stored = head.T if transposed else head
    out = pallas_triton.logits(x, stored, transposed, cut=CUTS[0], interpret=interpret)
    assert out.dtype == jnp.float32
    assert relative_error(out, reference.logits(x, stored, transposed)) < 1e-5  # no rounding to bfloat16 on the way
    assert not relative_error(out, reference.logits(x, head[:, ::-1], False)) < 1e-2  # negative control


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_depends_on_no_other_row(dtype, interpret):
    x, gate, up, norm, down = draw(5, (16, 96), (96, 64), (96, 64), (96,), (64, 96), dtype=dtype)
    few = 3

    @jax.jit
    def layer(x):
        h = pallas_triton.gated(x, gate, up, "silu", cut=CUTS[0], interpret=interpret)
        parts = pallas_triton.project_parts(h, down, cut=PARTS, interpret=interpret)
        return h, *parts, *pallas_triton.add_norm(x, norm, EPS, parts, interpret=interpret)

    whole = layer(x)
    for part in (layer(x[:few]), layer(x.at[few:].set(jnp.nan))):
        for a, b in zip(part, whole, strict=True):
            np.testing.assert_array_equal(np.asarray(a[:few], np.float32), np.asarray(b[:few], np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["project", "project_parts", "gated", "down", "logits"])
def test_at_real_sizes_a_row_depends_on_no_other_row(operation):
    spec = SPECS["qwen1.5-moe"]
    x, *weights = random_like(abstract_args(spec, 16)[operation], 11)
    run = jax.jit(partial(call, pallas_triton, operation, spec))
    whole = jax.tree.leaves(run(x, *weights))
    for few in (1, 3):
        for a, b in zip(jax.tree.leaves(run(x[:few], *weights)), whole, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b[:few], np.float32))


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(("dtype", "tokens"), [("float32", 2), ("bfloat16", 5)])
def test_add_norm_equals_the_definition(dtype, tokens, interpret, relative_error):
    x, norm = draw(9, (tokens, 72), (72,), dtype=dtype)
    parts, factor, y, weights = draw(10, (3, tokens, 72), (tokens, 1), (tokens, 2, 72), (tokens, 2))
    for addends in ((None, None, None), (parts, None, None), (parts, factor, (y, weights))):
        out = pallas_triton.add_norm(x, norm, EPS, *addends, interpret=interpret)
        assert close(out, reference.add_norm(x, norm, EPS, *addends), dtype, relative_error)
    for wrong in ((parts, -factor, (y, weights)), (parts, factor, (y, weights[:, ::-1]))):  # negative controls
        assert not close(out, reference.add_norm(x, norm, EPS, *wrong), dtype, relative_error)
    n = out[0].astype(jnp.float32)
    n *= (jnp.mean(n * n, axis=1, keepdims=True) + EPS) ** -0.5
    assert relative_error(out[1], n * norm.astype(jnp.float32)) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [17, 65])
def test_more_rows_are_left_to_xla(tokens):
    """Without ``interpret`` a kernel would fail on a CPU."""
    x, w, up = draw(6, (tokens, 32), (32, 48), (32, 48))
    for name, args in (("project", (x, (w,))), ("project_parts", (x, w)), ("gated", (x, w, up)), ("logits", (x, w))):
        out, ref = (
            jax.tree.leaves(getattr(api, name)(*args, implementation=implementation))
            for implementation in ("triton", "xla")
        )
        np.testing.assert_allclose(out[0], ref[0], 1e-5, 1e-5, err_msg=name)
    if tokens > 64:
        xla, triton = (api.add_norm(x, x[0], EPS, implementation=name) for name in ("xla", "triton"))
        np.testing.assert_array_equal(xla, triton)


def cuda():
    """JAX 0.11 asks the mesh for the GPU that it lowers to; 0.10 assumes one."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


def step(spec, args):
    """Every dense product of a layer and the head, by the api."""
    triton = {"implementation": "triton"}
    x, weights, biases = args["project"]
    out = [api.project(x, weights, biases=biases, **triton)]
    out.append(api.project_parts(*args["project_parts"], **triton))
    out.append(api.logits(*args["logits"], transposed=spec.tied, **triton))
    if spec.shared_width:
        out.append(api.gated(*args["gated"], activation=spec.activation, **triton))
        out.append(api.project_parts(*args["down"], **triton))
    x, norm, parts, factor, routed = args["add_norm"]
    out.append(api.add_norm(x, norm, EPS, parts_STD=parts, factor_T1=factor, routed=routed, **triton))
    return out


@pytest.mark.parametrize(("tokens", "dtype"), [(1, "bfloat16"), (16, "bfloat16"), (3, "float32")])
@pytest.mark.parametrize("name", SPECS)
def test_real_sizes_lower_to_triton(name, tokens, dtype):
    spec = SPECS[name]
    with cuda():
        traced = jax.jit(partial(step, spec)).trace(abstract_args(spec, tokens, dtype))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('name = "project"') == 1
    assert text.count('name = "add_norm"') == 1
    assert text.count('name = "project_parts"') == (2 if spec.shared_width else 1)
    assert text.count('name = "logits"') == 1
    assert "stablehlo.dot" not in text
    assert "stablehlo.concatenate" not in text
    assert "stablehlo.transpose" not in text


def test_bad_arguments_are_refused():
    x, w = draw(7, (2, 8), (8, 4))
    with pytest.raises(ValueError, match="'cuda' is not one of"):
        api.project(x, (w,), implementation="cuda")
    with pytest.raises(ValueError, match=r"shapes disagree: rows \(2, 8\), matrices \(8, 4\), \(4, 8\)"):
        api.project(x, (w, w.T))
    with pytest.raises(ValueError, match=r"addends \[\(2, 4\)\]"):
        api.add_norm(x, x[0], EPS, parts_STD=jnp.zeros((3, 2, 4)))
    with pytest.raises(ValueError, match="shapes disagree"):
        api.project_parts(x, w.T)
    with pytest.raises(ValueError, match="'relu' is not one of"):
        api.gated(x, w, w, activation="relu")
    with pytest.raises(ValueError, match="transposed True"):
        api.logits(x, w, transposed=True)
