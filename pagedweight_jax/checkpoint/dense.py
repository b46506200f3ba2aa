# SPDX-License-Identifier: Apache-2.0
"""Weights by name and without values; the dense ones are those that are not paged, all but the routed experts."""

from functools import partial
from typing import Any

import jax

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.weights import Weights, init_weights, without_experts


def abstract_weights(config: ModelConfig) -> Weights:
    """Returns a model's weights as ``jax.ShapeDtypeStruct`` leaves (dtype float32)."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(partial(init_weights, config), key)


def abstract_dense(config: ModelConfig) -> Weights:
    """Returns ``abstract_weights`` without the routed experts."""
    return without_experts(abstract_weights(config))


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the arrays of ``Weights``, or of a part of them, by dotted path, as in ``layers.0.attention.q_DN``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
