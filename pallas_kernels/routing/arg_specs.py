# SPDX-License-Identifier: Apache-2.0
"""The routers of the models of ``pallas_kernels.dense.arg_specs``."""

import jax

from pallas_kernels.dense.arg_specs import SPECS, DenseSpec

__all__ = ["SPECS", "abstract_args"]


def abstract_args(spec: DenseSpec, num_tokens: int, dtype: str = "bfloat16") -> tuple:
    """Returns the shapes of m_TD, router_DE and, where the model has a shared expert, its gate."""
    shape, D = jax.ShapeDtypeStruct, spec.hidden
    routing = shape((num_tokens, D), dtype), shape((D, spec.num_experts), dtype)
    return (*routing, shape((D,), dtype)) if spec.shared_width else routing
