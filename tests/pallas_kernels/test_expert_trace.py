# SPDX-License-Identifier: Apache-2.0
"""The packed trace: nothing is lost in it, and the kernel packs what the definition does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.expert_trace import pallas_triton, reference
from pallas_kernels.expert_trace.api import pack_trace, unpack_trace

E = 60


def layers(num_tokens, k, width, dtype=jnp.float32, count=3):
    """Returns (ids, weights, residuals, h_squares, firsts), a list of ``count`` layers each; some ids are nobody's."""
    rng = np.random.default_rng(1)
    firsts = [layer * E for layer in range(count)]
    ids = [jnp.asarray(first + rng.integers(0, E, (num_tokens, k)), jnp.int32) for first in firsts]
    ids[1] = ids[1].at[0].add(count * E)
    weights, h_squares = ([jnp.asarray(rng.random((num_tokens, k)), jnp.float32) for _ in ids] for _ in range(2))
    residuals = [jnp.asarray(rng.standard_normal((num_tokens, width)), dtype) for _ in ids]
    return ids, weights, residuals, h_squares, firsts


@pytest.mark.parametrize("pack", [reference.pack_trace, pallas_triton.pack_trace])
@pytest.mark.parametrize(("num_tokens", "k", "width", "dtype"), [(5, 4, 96, jnp.float32), (1, 3, 64, jnp.bfloat16)])
def test_every_number_comes_back(pack, num_tokens, k, width, dtype):
    *lists, firsts = layers(num_tokens, k, width, dtype)
    options = {"interpret": True} if pack is pallas_triton.pack_trace else {}
    packed = pack(*map(tuple, lists), tuple(firsts), E, **options)
    assert packed.shape == (num_tokens, 3, 3 * k + 1)
    ids_TLK, weights_TLK, h_square_TLK, residual_square_TL = unpack_trace(packed)
    ids, weights, residuals, h_squares = (np.stack(values, axis=1) for values in lists)
    assert (np.asarray(ids_TLK)[0, 1] == E).all()
    ids[0, 1] = E + firsts[1]
    np.testing.assert_array_equal(ids_TLK, ids - np.array(firsts)[:, None])
    np.testing.assert_array_equal(weights_TLK, weights)
    np.testing.assert_array_equal(h_square_TLK, h_squares)
    np.testing.assert_allclose(residual_square_TL, np.square(residuals.astype(np.float64)).sum(axis=-1), rtol=1e-6)
    assert not np.allclose(residual_square_TL, np.abs(residuals.astype(np.float64)).sum(axis=-1))


@pytest.mark.parametrize("pack", [reference.pack_trace, pallas_triton.pack_trace])
def test_a_step_is_packed_among_others(pack):
    *lists, firsts = layers(2, 4, 96)
    options = {"interpret": True} if pack is pallas_triton.pack_trace else {}
    args = *map(tuple, lists), tuple(firsts), E
    packed = pack(*args, (jnp.full((3, 2, 3, 13), 7), jnp.int32(1)), **options)
    np.testing.assert_array_equal(packed[1], pack(*args, **options))
    assert np.all(packed[jnp.array([0, 2])] == 7)
    assert not np.any(np.all(np.asarray(packed[1]) == 7, axis=-1))


def test_lists_of_different_lengths_are_refused():
    ids, weights, residuals, h_squares, firsts = layers(2, 2, 32)
    with pytest.raises(ValueError, match="of 3, 3, 2, 3, 3 layers"):
        pack_trace(ids, weights, residuals[:2], h_squares, firsts, E)
    with pytest.raises(ValueError, match="'cuda' is not one of"):
        pack_trace(ids, weights, residuals, h_squares, firsts, E, implementation="cuda")


def test_it_is_one_launch_for_all_layers():
    *lists, firsts = layers(16, 4, 2048, jnp.bfloat16, count=24)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        run = jax.jit(lambda *args: pack_trace(*args, firsts, E, implementation="triton"))
        text = run.trace(*lists).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('name = "pack_trace"') == 1


@pytest.mark.gpu
def test_the_compiled_kernel_packs_what_the_definition_does():
    *lists, firsts = layers(16, 4, 2048, jnp.bfloat16, count=24)
    packed, expected = (
        jax.jit(lambda *args, name=name: pack_trace(*args, firsts, E, implementation=name))(*lists)
        for name in ("triton", "xla")
    )
    np.testing.assert_array_equal(packed[..., :12], expected[..., :12])
    np.testing.assert_allclose(unpack_trace(packed)[3], unpack_trace(expected)[3], rtol=1e-5)
