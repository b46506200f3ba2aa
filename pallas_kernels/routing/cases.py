# SPDX-License-Identifier: Apache-2.0
"""What the routing kernels are held to their definition on."""

from functools import partial

import jax

from pallas_kernels.cases import KernelCase
from pallas_kernels.dense.arg_specs import DenseSpec
from pallas_kernels.dense.cases import EPS, TOLERANCE, random_like, sizes
from pallas_kernels.routing import reference
from pallas_kernels.routing.arg_specs import abstract_args


def make_args(shapes: tuple, seed: int) -> tuple:
    """Returns random x, norm, router and, where there is a shared expert, its matrices."""
    x, norm, router, *shared = random_like(shapes, seed)
    return x, norm, router, *((gate, up, last * len(last) ** -0.5) for gate, up, last in shared)


def call(module, spec: DenseSpec, x_TD, norm_D, router_DE, *shared, **options):
    """Returns what ``module`` makes of the arrays; ids one-hot, so that a wrong one is a large error."""
    args = x_TD, norm_D, EPS, router_DE, spec.top_k, spec.renormalise
    if shared:
        m, weights, ids, *more = module.norm_route_and_gate(*args, *shared, spec.activation, **options)
    else:
        m, weights, ids, *more = module.norm_and_route(*args, **options)
    return m, weights, jax.nn.one_hot(ids, spec.num_experts), *more


def cases(interpret: bool) -> list[KernelCase]:
    """Returns routing for a few token rows, alone and with the shared expert's first half."""
    from pallas_kernels.routing import pallas_triton  # JAX may be without Triton: ask only when it is wanted

    return [
        KernelCase(
            kernel="routing",
            name=f"{name}, {spec.name}, {num_tokens} tokens",
            make_args=partial(make_args, shapes),
            run=partial(call, pallas_triton, spec, interpret=interpret),
            reference=partial(call, reference, spec),
            tolerance=TOLERANCE[dtype],
        )
        for spec, num_tokens, dtype in sizes(interpret, most=pallas_triton.MAX_TOKENS)
        for shapes in [abstract_args(spec, num_tokens, dtype)]
        for name, shapes in (("norm_and_route", shapes[:3]), ("norm_route_and_gate", shapes))
        if name == "norm_and_route" or spec.shared_width
    ]
