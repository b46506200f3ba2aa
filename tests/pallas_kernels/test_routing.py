# SPDX-License-Identifier: Apache-2.0
"""Routing: interpreted against the definition, lowered for CUDA at real sizes, compiled by -m gpu."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense.columns import Cut
from pallas_kernels.routing import api, pallas_triton, reference
from pallas_kernels.routing.arg_specs import SPECS, abstract_args

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
EPS = 1e-6
CUT = Cut(columns=16, depth=32)


def draw(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def inputs(tokens, columns, experts, dtype, seed=0):
    x, norm, router = draw(seed, (tokens, columns), (columns,), (columns, experts), dtype=dtype)
    return x, norm, EPS, (router / columns**0.5).astype(dtype)


def agree(out, ref, dtype, relative_error):
    """Whether m and weights are close and all ids the same."""
    (m, weights, ids), (m_ref, weights_ref, ids_ref) = out, ref
    assert (m.dtype, weights.dtype, ids.dtype) == (m_ref.dtype, jnp.float32, jnp.int32)
    if not np.array_equal(ids, ids_ref):
        return False
    return relative_error(m, m_ref) < TOLERANCE[dtype] and relative_error(weights, weights_ref) < TOLERANCE[dtype]


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tokens", "columns", "experts", "k"),
    [
        ("float32", 1, 64, 7, 2),
        ("float32", 17, 72, 16, 16),  # every expert, in order
        ("bfloat16", 3, 200, 60, 4),
        ("bfloat16", 16, 128, 8, 1),
        ("bfloat16", 64, 64, 128, 8),
    ],
)
def test_norm_and_route_equals_the_definition(
    dtype, tokens, columns, experts, k, renormalise, interpret, relative_error
):
    x, norm, eps, router = inputs(tokens, columns, experts, dtype)
    first = 100 * jnp.arange(tokens, dtype=jnp.int32)
    out = pallas_triton.norm_and_route(x, norm, eps, router, k, renormalise, first, interpret=interpret)
    assert agree(out, reference.norm_and_route(x, norm, eps, router, k, renormalise, first), dtype, relative_error)
    swapped = reference.norm_and_route(x, norm, eps, router[:, ::-1], k, renormalise, first)  # negative control
    assert not agree(out, swapped, dtype, relative_error)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(
    ("dtype", "tokens", "columns", "experts", "width", "k"),
    [("float32", 2, 48, 6, 40, 2), ("bfloat16", 16, 128, 60, 80, 4), ("bfloat16", 17, 96, 5, 120, 3)],
)
def test_norm_route_and_gate_equals_the_definition(
    dtype, tokens, columns, experts, width, k, interpret, relative_error
):
    x, norm, eps, router = inputs(tokens, columns, experts, dtype)
    shared = [(w / columns**0.5).astype(dtype) for w in draw(1, (columns, width), (columns, width), (columns,))]
    args = x, norm, eps, router, k, True
    first = 7 - jnp.arange(tokens, dtype=jnp.int32)
    out = pallas_triton.norm_route_and_gate(*args, shared, "silu", first, cut=CUT, interpret=interpret)
    ref = reference.norm_route_and_gate(*args, shared, "silu", first)
    assert agree(out[:3], ref[:3], dtype, relative_error)
    assert relative_error(out[3], ref[3]) < TOLERANCE[dtype]
    assert relative_error(out[4], ref[4]) < TOLERANCE[dtype]
    gate, up, shared_gate = shared  # negative control
    swapped = reference.norm_route_and_gate(*args, (up, gate, -shared_gate), "silu")
    assert not relative_error(out[3], swapped[3]) < TOLERANCE[dtype]
    assert not relative_error(out[4], swapped[4]) < 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("interpret", MODES)
def test_of_equal_experts_the_lower_ids_win(interpret):
    x, norm, eps, router = inputs(4, 64, 60, "bfloat16")
    best = jnp.argmax(reference.norm_and_route(x, norm, eps, router, 60, False)[1] > 0)
    router = router.at[:, [3, 17, 41, 59]].set(10 * x[best, :, None] / norm[:, None])  # the same for four experts
    _, weights, ids = pallas_triton.norm_and_route(x, norm, eps, router, 3, False, interpret=interpret)
    np.testing.assert_array_equal(ids[best], [3, 17, 41])
    assert len(set(np.asarray(weights[best]).tolist())) == 1
    np.testing.assert_array_equal(ids, reference.norm_and_route(x, norm, eps, router, 3, False)[2])
    _, weights, ids = pallas_triton.norm_and_route(x, norm, eps, 0 * router, 4, True, interpret=interpret)
    np.testing.assert_array_equal(ids, np.tile(np.arange(4), (4, 1)))
    np.testing.assert_array_equal(weights, np.full((4, 4), 0.25))


@pytest.mark.parametrize("interpret", MODES)
def test_a_row_depends_on_no_other_row(interpret):
    x, norm, eps, router = inputs(64, 96, 60, "bfloat16")
    whole = pallas_triton.norm_and_route(x, norm, eps, router, 4, True, interpret=interpret)
    one = pallas_triton.norm_and_route(x[5:6], norm, eps, router, 4, True, interpret=interpret)
    poisoned = x.at[:5].set(jnp.nan).at[6:].set(jnp.inf)
    among = pallas_triton.norm_and_route(poisoned, norm, eps, router, 4, True, interpret=interpret)
    for a, b, c in zip(one, whole, among, strict=True):
        np.testing.assert_array_equal(np.asarray(a[0], np.float32), np.asarray(b[5], np.float32))
        np.testing.assert_array_equal(np.asarray(a[0], np.float32), np.asarray(c[5], np.float32))


def test_more_rows_are_left_to_xla():
    """Without ``interpret`` a kernel would fail on a CPU."""
    args = *inputs(pallas_triton.MAX_TOKENS + 1, 32, 8, "float32"), 2, True
    shared = draw(2, (32, 16), (32, 16), (32,))
    for name, more in (("norm_and_route", ()), ("norm_route_and_gate", (shared,))):
        out, ref = (getattr(api, name)(*args, *more, implementation=way) for way in ("triton", "xla"))
        for a, b in zip(out, ref, strict=True):
            np.testing.assert_array_equal(a, b, name)


def cuda():
    """JAX 0.11 asks the mesh for the GPU that it lowers to; 0.10 assumes one."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize(("tokens", "dtype"), [(1, "bfloat16"), (64, "bfloat16"), (3, "float32")])
@pytest.mark.parametrize("name", SPECS)
def test_real_sizes_lower_to_triton(name, tokens, dtype):
    spec = SPECS[name]

    def step(x, norm, router, *shared):
        args = x, norm, EPS, router, spec.top_k, spec.renormalise
        found = [api.norm_and_route(*args, implementation="triton")]
        for weights in shared:
            options = {"activation": spec.activation, "implementation": "triton"}
            found.append(api.norm_route_and_gate(*args, weights, **options))
        return found

    with cuda():
        lowered = jax.jit(step).trace(*abstract_args(spec, tokens, dtype)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count('name = "route"') == (2 if spec.shared_width and tokens > 16 else 1)
    few = tokens <= 16
    assert text.count('name = "route_and_gate"') == (bool(spec.shared_width) and few)
    assert ("stablehlo.dot" in text) == (bool(spec.shared_width) and not few)


def test_bad_arguments_are_refused():
    x, norm, eps, router = inputs(2, 8, 4, "float32")
    with pytest.raises(ValueError, match="'cuda' is not one of"):
        api.norm_and_route(x, norm, eps, router, 2, False, implementation="cuda")
    with pytest.raises(ValueError, match="k 5 is not between 1 and 4 experts"):
        api.norm_and_route(x, norm, eps, router, 5, False)
    with pytest.raises(ValueError, match="shapes disagree"):
        api.norm_and_route(x, norm, eps, router.T, 2, False)
    with pytest.raises(ValueError, match="'relu' is not one of"):
        api.norm_route_and_gate(x, norm, eps, router, 2, False, (router, router, norm), activation="relu")
