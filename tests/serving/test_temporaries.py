# SPDX-License-Identifier: Apache-2.0
"""The guess of the programs' temporaries, which a budget is made of before anything is compiled."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pagedweight_jax.checkpoint import hf
from pagedweight_jax.checkpoint.dense import abstract_dense
from pagedweight_jax.checkpoint.layout import layouts
from pagedweight_jax.config import ServeConfig
from pagedweight_jax.serving import steps
from pagedweight_jax.serving.loading import _abstract_state
from pagedweight_jax.serving.state import make_geometry
from pagedweight_jax.serving.temporaries import estimate_temporary_bytes

DEMO = Path(__file__).parents[2] / "checkpoints" / "demo-moe"


@pytest.mark.parametrize("chunk_tokens", [256, 512])
def test_a_chunk_of_the_demo_model_takes_no_more_than_was_guessed(chunk_tokens):
    """Only the shapes are needed: nothing is loaded. Less than half the guess would be a guess too high."""
    model = hf.load_config(DEMO)
    pair = layouts(model, 3, 6, 1024)
    config = ServeConfig(memory_bytes=1 << 30, max_num_seqs=8, prefill_chunk_tokens=chunk_tokens, implementation="xla")
    geometry = make_geometry(model, pair, config.kv_dtype, config.max_num_seqs, 2048)
    weights = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), abstract_dense(model))
    state, scalar = _abstract_state(model, geometry, 10_000), jax.ShapeDtypeStruct((), jnp.int32)
    chunk = jax.ShapeDtypeStruct((chunk_tokens,), jnp.int32)
    lower = partial(steps.prefill_step.lower, weights, state, scalar, chunk, scalar, scalar)
    taken_bytes = lower(implementation="xla").compile().memory_analysis().temp_size_in_bytes
    guess_bytes = estimate_temporary_bytes(model, geometry, config, "float32")
    assert guess_bytes / 2 < taken_bytes <= guess_bytes


def test_only_blocks_of_more_than_four_bits_are_dequantized_beforehand():
    """Where kernels look all weights up on the way, the budget keeps nothing for dequantized ones."""
    model = replace(hf.load_config(DEMO), moe_intermediate_size=2048)
    experts_bytes = model.num_experts * 2 * 2048 * model.hidden_size * 2  # gate_up of all of them in bfloat16
    config = ServeConfig(memory_bytes=1 << 30, prefill_chunk_tokens=128, implementation="triton")
    guess_bytes = {}
    for max_bits in (4, 5):
        geometry = make_geometry(model, layouts(model, 3, max_bits, 4096), config.kv_dtype, 8, 2048)
        guess_bytes[max_bits] = estimate_temporary_bytes(model, geometry, config, "bfloat16")
    assert guess_bytes[4] < experts_bytes < guess_bytes[5]
