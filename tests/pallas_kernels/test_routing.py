# SPDX-License-Identifier: Apache-2.0
"""Routing: interpreted against the definition, lowered for CUDA at real sizes, compiled by -m gpu."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.routing import api, pallas_triton, reference
from pallas_kernels.routing.arg_specs import SPECS, abstract_args

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def draw(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def inputs(tokens, columns, experts, dtype, seed=0):
    """Returns m, router, shared gate."""
    m, router, shared_gate = draw(seed, (tokens, columns), (columns, experts), (columns,), dtype=dtype)
    return m, (router / columns**0.5).astype(dtype), (shared_gate / columns**0.5).astype(dtype)


def agree(out, ref, dtype, relative_error):
    """Whether weights, and factors where there are any, are close and all ids the same."""
    (weights, ids, *factor), (weights_ref, ids_ref, *factor_ref) = ([a for a in x if a is not None] for x in (out, ref))
    assert (weights.dtype, ids.dtype, len(factor)) == (jnp.float32, jnp.int32, len(factor_ref))
    if not np.array_equal(ids, ids_ref):
        return False
    pairs = (weights, weights_ref), *zip(factor, factor_ref, strict=True)
    return all(relative_error(a, b) < TOLERANCE[dtype] for a, b in pairs)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tokens", "columns", "experts", "k"),
    [
        ("float32", 1, 64, 7, 2),
        ("float32", 17, 272, 16, 16),  # every expert, in order
        ("bfloat16", 3, 200, 60, 4),
        ("bfloat16", 16, 128, 8, 1),
        ("bfloat16", 64, 384, 128, 8),
    ],
)
def test_route_equals_the_definition(dtype, tokens, columns, experts, k, renormalise, interpret, relative_error):
    m, router, shared_gate = inputs(tokens, columns, experts, dtype)
    place = jnp.int32(700), jnp.where(jnp.arange(tokens) % 3 == 1, -1, 5)  # some tokens are not there
    args = k, renormalise, *((shared_gate, *place) if renormalise else (None, None, None))
    out, ref = pallas_triton.route(m, router, *args, interpret=interpret), reference.route(m, router, *args)
    assert agree(out, ref, dtype, relative_error)
    swapped = reference.route(m, router[:, ::-1], *args)  # negative controls
    assert not agree(out, swapped, dtype, relative_error)
    if renormalise:
        assert np.all(np.asarray(ref[1])[1::3] == reference.NOWHERE)
        other_gate = reference.route(m, router, k, True, -shared_gate)
        assert not agree(out, (*ref[:2], other_gate[2]), dtype, relative_error)


@pytest.mark.parametrize("interpret", MODES)
def test_of_equal_experts_the_lower_ids_win(interpret):
    m, router, _ = inputs(4, 64, 60, "bfloat16")
    best = 2
    router = router.at[:, [3, 17, 41, 59]].set(m[best, :, None])  # the same for four experts
    weights, ids, _ = pallas_triton.route(m, router, 3, False, interpret=interpret)
    np.testing.assert_array_equal(ids[best], [3, 17, 41])
    assert len(set(np.asarray(weights[best]).tolist())) == 1
    np.testing.assert_array_equal(ids, reference.route(m, router, 3, False)[1])
    weights, ids, _ = pallas_triton.route(m, 0 * router, 4, True, interpret=interpret)
    np.testing.assert_array_equal(ids, np.tile(np.arange(4), (4, 1)))
    np.testing.assert_array_equal(weights, np.full((4, 4), 0.25))


@pytest.mark.parametrize("interpret", MODES)
def test_a_row_depends_on_no_other_row(interpret):
    m, router, shared_gate = inputs(64, 296, 60, "bfloat16")
    poisoned = m.at[:5].set(jnp.nan).at[6:].set(jnp.inf)
    whole, one, few, among = (
        pallas_triton.route(rows, router, 4, True, shared_gate, interpret=interpret)
        for rows in (m, m[5:6], m[:16], poisoned)
    )
    for a, *others in zip(one, whole, few, among, strict=True):
        for b in others:
            np.testing.assert_array_equal(np.asarray(a[0]), np.asarray(b[5]))
    weights, ids, factor = (np.asarray(a) for a in among)
    assert np.isnan(weights[0]).all()  # what is not a number stays so
    assert np.isnan(factor[0]).all()
    assert ((ids >= 0) & (ids < 60)).all()


def test_more_rows_are_left_to_xla():
    """Without ``interpret`` a kernel would fail on a CPU."""
    m, router, shared_gate = inputs(pallas_triton.MAX_TOKENS + 1, 32, 8, "float32")
    out, ref = (
        api.route(m, router, 2, True, shared_gate_D=shared_gate, implementation=way) for way in ("triton", "xla")
    )
    for a, b in zip(out, ref, strict=True):
        np.testing.assert_array_equal(a, b)


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

    def step(m, router, shared_gate=None):
        place = {"first": jnp.int32(60), "positions_T": jnp.zeros(tokens, jnp.int32)}
        optional = {"shared_gate_D": shared_gate, **place, "implementation": "triton"}
        return api.route(m, router, spec.top_k, spec.renormalise, **optional)

    with cuda():
        lowered = jax.jit(step).trace(*abstract_args(spec, tokens, dtype)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count('name = "route"') == text.count('name = "router_logits"') == 1
    assert "stablehlo.dot" not in text


def test_bad_arguments_are_refused():
    m, router, shared_gate = inputs(2, 8, 4, "float32")
    with pytest.raises(ValueError, match="'cuda' is not one of"):
        api.route(m, router, 2, False, implementation="cuda")
    with pytest.raises(ValueError, match="k 5 is not between 1 and 4 experts"):
        api.route(m, router, 5, False)
    with pytest.raises(ValueError, match="shapes disagree"):
        api.route(m, router.T, 2, False)
    with pytest.raises(ValueError, match="shapes disagree"):
        api.route(m, router, 2, False, shared_gate_D=shared_gate[:4])
