# SPDX-License-Identifier: Apache-2.0
"""The weights that are not paged, by name: everything but the routed experts."""

from functools import partial

import jax

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.weights import Weights, init_weights, without_experts


def abstract_dense(config: ModelConfig) -> Weights:
    """Returns a model's weights without routed experts as ``jax.ShapeDtypeStruct`` leaves (dtype float32)."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return without_experts(jax.eval_shape(partial(init_weights, config), key))


def named_leaves(weights: Weights) -> dict[str, jax.Array]:
    """Returns the arrays of ``weights`` by dotted path, as in ``layers.0.attention.q_DN``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
