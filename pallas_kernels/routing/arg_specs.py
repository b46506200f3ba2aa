# SPDX-License-Identifier: Apache-2.0
"""The routers of the models of ``pallas_kernels.dense.arg_specs``, and what is launched with them."""

import jax

from pallas_kernels.dense.arg_specs import SPECS, DenseSpec

__all__ = ["SPECS", "abstract_args"]


def abstract_args(spec: DenseSpec, num_tokens: int, dtype: str = "bfloat16") -> tuple:
    """Returns the shapes of x_TD, norm_D, router_DE and, where the model has a shared expert, (gate, up, its gate)."""
    shape, D, F = jax.ShapeDtypeStruct, spec.hidden, spec.shared_width
    routing = shape((num_tokens, D), dtype), shape((D,), dtype), shape((D, spec.num_experts), dtype)
    return (*routing, (shape((D, F), dtype), shape((D, F), dtype), shape((D,), dtype))) if F else routing
