# SPDX-License-Identifier: Apache-2.0
"""What the packing of traces is held to its definition on."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import KernelCase
from pallas_kernels.expert_trace import reference
from pallas_kernels.expert_trace.api import unpack_trace

NUM_EXPERTS, K = 60, 4


def make_args(num_layers: int, num_tokens: int, width: int, seed: int) -> tuple:
    """Returns (ids, weights, residuals, squares), a tuple of all layers each; the first token's ids select nothing."""
    rng = np.random.default_rng(seed)
    shape = num_layers, num_tokens, K
    ids_LTK = rng.integers(0, NUM_EXPERTS, shape) + NUM_EXPERTS * np.arange(num_layers)[:, None, None]
    ids_LTK[:, 0] = NUM_EXPERTS * num_layers
    residuals_LTD = jnp.asarray(rng.standard_normal((num_layers, num_tokens, width), np.float32), jnp.bfloat16)
    weights_LTK, h_squares_LTK = (jnp.asarray(rng.random(shape), jnp.float32) for _ in range(2))
    return tuple(map(tuple, (jnp.asarray(ids_LTK, jnp.int32), weights_LTK, residuals_LTD, h_squares_LTK)))


def call(run, ids, weights, residuals, h_squares, **options):
    """Returns what was packed; ids one-hot, so that a wrong one is a large error."""
    firsts = tuple(NUM_EXPERTS * layer for layer in range(len(ids)))
    ids_TLK, *others = unpack_trace(run(ids, weights, residuals, h_squares, firsts, NUM_EXPERTS, **options))
    return jax.nn.one_hot(ids_TLK, NUM_EXPERTS + 1), *others


def cases(interpret: bool) -> list[KernelCase]:
    """Returns the steps of a model: of one token and of a batch, or of a small one where kernels are interpreted."""
    from pallas_kernels.expert_trace import pallas_triton  # JAX may be without Triton: ask only when it is wanted

    sizes = [(2, 5, 96)] if interpret else [(24, num_tokens, 2048) for num_tokens in (1, 16)]
    return [
        KernelCase(
            kernel="expert_trace",
            name=f"{num_layers} layers, {num_tokens} tokens of {width}",
            make_args=partial(make_args, num_layers, num_tokens, width),
            run=partial(call, pallas_triton.pack_trace, interpret=interpret),
            reference=partial(call, reference.pack_trace),
            tolerance=1e-5,
        )
        for num_layers, num_tokens, width in sizes
    ]
