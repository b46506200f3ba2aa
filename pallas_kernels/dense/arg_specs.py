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

    ``down`` is the shared expert's ``project_parts``; the head of ``logits`` lies as ``spec.tied`` says.
    """
    D, F, V, Q = spec.hidden, spec.shared_width, spec.vocab, spec.query_width
    widths = Q, spec.kv_width, spec.kv_width

    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    x = shape(num_tokens, D)
    parts = shape(4, num_tokens, D, dtype=jnp.float32)
    factor, weights = (shape(num_tokens, n, dtype=jnp.float32) for n in (1, spec.top_k))
    routed = shape(num_tokens, spec.top_k, D, dtype=jnp.float32), weights
    found = {
        "project": (x, tuple(shape(D, N) for N in widths), tuple(shape(N) if spec.biased else None for N in widths)),
        "project_parts": (shape(num_tokens, Q), shape(Q, D)),
        "add_norm": (x, shape(D), parts, factor, routed),
        "logits": (x, shape(V, D) if spec.tied else shape(D, V)),
    }
    if F:
        found["gated"] = x, shape(D, F), shape(D, F)
        found["down"] = shape(num_tokens, F), shape(F, D)
    return found
