# SPDX-License-Identifier: Apache-2.0
"""What the routing kernels are held to their definition on."""

from functools import partial

import jax

from pallas_kernels.cases import KernelCase
from pallas_kernels.dense.arg_specs import DenseSpec
from pallas_kernels.dense.cases import TOLERANCE, random_like, sizes
from pallas_kernels.routing import reference
from pallas_kernels.routing.arg_specs import abstract_args


def make_args(shapes: tuple, seed: int) -> tuple:
    """Returns random m, router and, where there is a shared expert, its gate."""
    m, router, *shared_gate = random_like(shapes, seed)
    return m, router, *(gate * len(gate) ** -0.5 for gate in shared_gate)


def call(module, spec: DenseSpec, m_TD, router_DE, shared_gate_D=None, **options):
    """Returns what ``module`` makes of the arrays; ids one-hot, so that a wrong one is a large error."""
    found = module.route(m_TD, router_DE, spec.top_k, spec.renormalise, shared_gate_D, **options)
    weights, ids, *factor = [array for array in found if array is not None]
    return weights, jax.nn.one_hot(ids, spec.num_experts), *factor


def cases(interpret: bool) -> list[KernelCase]:
    """Returns routing for a few token rows."""
    from pallas_kernels.routing import pallas_triton  # JAX may be without Triton: ask only when it is wanted

    return [
        KernelCase(
            kernel="routing",
            name=f"{spec.name}, {num_tokens} tokens",
            make_args=partial(make_args, abstract_args(spec, num_tokens, dtype)),
            run=partial(call, pallas_triton, spec, interpret=interpret),
            reference=partial(call, reference, spec),
            tolerance=TOLERANCE[dtype],
        )
        for spec, num_tokens, dtype in sizes(interpret, most=pallas_triton.MAX_TOKENS)
    ]
