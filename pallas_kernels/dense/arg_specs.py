# SPDX-License-Identifier: Apache-2.0
"""Named sizes of real models' dense parts: what tests lower and benchmarks time."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """Sizes of one model.

    Attributes:
      hidden: D.
      query_width, kv_width: heads x head_dim of the query heads, and of the KV heads.
      shared_width: F of the shared expert, or of the dense layers' gated part; 0 for none.
      num_experts, top_k: E and K of the router.
      vocab: V.
      renormalise: whether the K weights are divided by their sum.
      biased: whether q, k and v have biases.
      tied: whether the head is the embedding, [V, D].
      activation: a key of ``ACTIVATIONS``.
    """

    name: str
    hidden: int
    query_width: int
    kv_width: int
    shared_width: int
    num_experts: int
    top_k: int
    vocab: int
    renormalise: bool = False
    biased: bool = False
    tied: bool = False
    activation: str = "silu"


SPECS = {
    spec.name: spec
    for spec in (
        DenseSpec(
            name="qwen1.5-moe",
            hidden=2048,
            query_width=2048,
            kv_width=2048,
            shared_width=5632,
            num_experts=60,
            top_k=4,
            vocab=151936,
            biased=True,
        ),
        DenseSpec(
            name="mixtral-8x7b",
            hidden=4096,
            query_width=4096,
            kv_width=1024,
            shared_width=0,
            num_experts=8,
            top_k=2,
            vocab=32000,
            renormalise=True,
        ),
        DenseSpec(
            name="gemma-4-26b",
            hidden=2816,
            query_width=4096,
            kv_width=2048,
            shared_width=2112,
            num_experts=128,
            top_k=8,
            vocab=262144,
            renormalise=True,
            tied=True,
            activation="gelu_pytorch_tanh",
        ),
    )
}


def abstract_args(spec: DenseSpec, num_tokens: int, dtype: str = "bfloat16") -> dict[str, tuple]:
    """Returns each operation's arrays by shape, in the order of its api.

    ``down`` is ``project_add`` with factor and addend, ``down_parts`` the shared expert's ``project_parts``; the
    head of ``logits`` lies as ``spec.tied`` says.
    """
    shape, D, F, V = jax.ShapeDtypeStruct, spec.hidden, spec.shared_width, spec.vocab
    widths = spec.query_width, spec.kv_width, spec.kv_width
    x, norm = shape((num_tokens, D), dtype), shape((D,), dtype)
    biases = tuple(shape((N,), dtype) if spec.biased else None for N in widths)
    found = {
        "project": (x, tuple(shape((D, N), dtype) for N in widths), norm, biases),
        "project_parts": (shape((num_tokens, spec.query_width), dtype), shape((spec.query_width, D), dtype)),
        "project_add": (shape((num_tokens, spec.query_width), dtype), shape((spec.query_width, D), dtype), x),
        "logits": (x, shape((V, D) if spec.tied else (D, V), dtype)),
    }
    if F:
        sums = shape((num_tokens, 1), jnp.float32), shape((num_tokens, D), jnp.float32)
        found["gated"] = x, shape((D, F), dtype), shape((D, F), dtype), norm
        found["down_parts"] = shape((num_tokens, F), dtype), shape((F, D), dtype)
        found["down"] = shape((num_tokens, F), dtype), shape((F, D), dtype), x, *sums
    return found
