# SPDX-License-Identifier: Apache-2.0
"""What the dense kernels are held to their definition on."""

from collections.abc import Iterator
from functools import partial

import jax

from pallas_kernels.cases import KernelCase
from pallas_kernels.dense import reference
from pallas_kernels.dense.arg_specs import SPECS, DenseSpec, abstract_args

EPS = 1e-6
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Float32 sums in another order; a result that rounds to the next bfloat16 now and then."""

UNROUNDED = "logits", "project_parts", "down"
"""Operations whose results are float32."""

TINY = DenseSpec(  # several steps down each matrix, and a part of one
    name="tiny",
    hidden=600,
    query_width=520,
    kv_width=40,
    shared_width=56,
    num_experts=7,
    top_k=3,
    vocab=100,
    renormalise=True,
    biased=True,
)


def sizes(interpret: bool, most: int) -> Iterator[tuple[DenseSpec, int, str]]:
    """Yields (sizes, token rows, dtype): of real models, or small ones where kernels are interpreted.

    Args:
      interpret: whether they are.
      most: rows that are still few.
    """
    if interpret:
        yield TINY, most, "bfloat16"
        return
    for spec in SPECS.values():
        yield spec, 1, "bfloat16"
        yield spec, most, "bfloat16"
    yield SPECS["qwen1.5-moe"], 3, "float32"


def random_like(abstract, seed: int):
    """Returns normal values in the place of each shape; a matrix [in, out] keeps the size of what it is applied to."""
    leaves, tree = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    scales = [leaf.shape[0] ** -0.5 if leaf.ndim == 2 else 1.0 for leaf in leaves]
    values = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return tree.unflatten([scale * value for scale, value in zip(scales, values, strict=True)])


def call(module, operation: str, spec: DenseSpec, *args, **options):
    """Returns what ``module`` makes of an operation's arrays, as ``abstract_args`` lists them; the sum of parts."""
    match operation:
        case "add_norm":
            x, norm, *addends = args
            return module.add_norm(x, norm, EPS, *addends, **options)
        case "gated":
            return module.gated(*args, spec.activation, **options)
        case "logits":
            return module.logits(*args, spec.tied, **options)
        case "project":
            return module.project(*args, **options)
    return module.project_parts(*args, **options).sum(0)


def cases(interpret: bool) -> list[KernelCase]:
    """Returns every product of a layer and of the head, for a few token rows."""
    from pallas_kernels.dense import columns, pallas_triton  # JAX may be without Triton: ask only when it is wanted

    return [
        KernelCase(
            kernel="dense",
            name=f"{operation}, {spec.name}, {num_tokens} tokens",
            make_args=partial(random_like, shapes),
            run=partial(call, pallas_triton, operation, spec, interpret=interpret),
            reference=partial(call, reference, operation, spec),
            tolerance=TOLERANCE["float32" if operation in UNROUNDED else dtype],
        )
        for spec, num_tokens, dtype in sizes(interpret, most=columns.ROWS)
        for operation, shapes in abstract_args(spec, num_tokens, dtype).items()
    ]
