# SPDX-License-Identifier: Apache-2.0
"""What a step's beginning and end are held to their definition on."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import KernelCase
from pallas_kernels.dense.arg_specs import DenseSpec
from pallas_kernels.dense.cases import EPS, TOLERANCE, random_like, sizes
from pallas_kernels.tokens import reference

NUM_STEPS, STOPS = 4, 8


def rows_of(num_rows: int, rng: np.random.Generator) -> tuple:
    """Returns (last tokens, positions, lengths, remaining) of rows of which every third is idle."""
    lengths = jnp.asarray(rng.integers(1, 4096, num_rows), jnp.int32)
    remaining = jnp.asarray(rng.integers(1, 3, num_rows) * (np.arange(num_rows) % 3 < 2), jnp.int32)
    return lengths // 2, jnp.where(remaining > 0, lengths, -1), lengths, remaining


def make_args(spec: DenseSpec, num_tokens: int, dtype: str, temperature: float, seed: int) -> tuple:
    """Returns (x, head, its norm, frequencies, temperatures, seeds, rows, stop ids)."""
    shape = jax.ShapeDtypeStruct
    head = (spec.vocab, spec.hidden) if spec.tied else (spec.hidden, spec.vocab)
    shapes = shape((num_tokens, spec.hidden), dtype), shape(head, dtype), shape((spec.hidden,), dtype)
    x, head, norm = random_like(shapes, seed)
    rng = np.random.default_rng(seed)
    stops = jnp.asarray(rng.integers(-1, spec.vocab, (num_tokens, STOPS)), jnp.int32)
    of_rows = jnp.full(num_tokens, temperature, jnp.float32), jnp.arange(num_tokens, dtype=jnp.uint32)
    frequency = jnp.asarray(10_000.0 ** -np.linspace(0, 1, 64, endpoint=False), jnp.float32)
    return x, head, norm, frequency, *of_rows, rows_of(num_tokens, rng), stops


def end(module, spec: DenseSpec, x, head, norm, frequency, temperature, seed, rows, stops, **options):
    """Returns the rows and tokens behind a step whose last layer left x."""
    best = module.best_of_blocks(x, head, spec.tied, temperature, seed, rows[1], **options)
    tokens_NB = jnp.full((NUM_STEPS, len(x)), spec.vocab, jnp.int32)
    return module.advance(*best, rows, stops, tokens_NB, jnp.int32(1), **options)


def begin(module, spec: DenseSpec, x, head, norm, frequency, temperature, seed, rows, stops, **options):
    """Returns embeddings out of the head, which is one where it is tied, their norm and angles."""
    embed = head if spec.tied else head.T
    last_tokens, positions, *_ = rows
    return module.read_tokens(last_tokens % spec.vocab, jnp.abs(positions), embed, norm, EPS, frequency, **options)


def cases(interpret: bool) -> list[KernelCase]:
    """Returns the beginning of a step, and its end with the largest logits and with noise, for a few rows."""
    from pallas_kernels.tokens import pallas_triton  # JAX may be without Triton: ask only when it is wanted

    return [
        KernelCase(
            kernel="tokens",
            name=f"{name}, {spec.name}, {num_tokens} tokens",
            make_args=partial(make_args, spec, num_tokens, dtype, temperature),
            run=partial(call, pallas_triton, spec, interpret=interpret),
            reference=partial(call, reference, spec),
            tolerance=tolerance,
        )
        for spec, num_tokens, dtype in sizes(interpret, most=pallas_triton.ROWS)
        for name, call, temperature, tolerance in (
            ("read", begin, 0.0, TOLERANCE[dtype]),
            ("greedy", end, 0.0, 0.0),
            ("drawn", end, 1.0, 0.0),
        )
    ]
