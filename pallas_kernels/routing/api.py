# SPDX-License-Identifier: Apache-2.0
"""What stands between attention and the routed experts: its meaning, and the choice of implementation.

"triton" has kernels for up to ``pallas_triton.MAX_TOKENS`` rows; beyond that it is "xla".
"""

import jax

from pallas_kernels.implementation import module_of


def _check(x_TD: jax.Array, k: int, router_DE: jax.Array, *others: jax.Array) -> None:
    if any(x_TD.shape[-1] != w.shape[0] for w in (router_DE, *others)):
        shapes = ", ".join(str(w.shape) for w in (router_DE, *others))
        raise ValueError(f"shapes disagree: rows {x_TD.shape}, router and others {shapes}")
    if not 1 <= k <= router_DE.shape[1]:
        raise ValueError(f"k {k} is not between 1 and {router_DE.shape[1]} experts")


def route(
    m_TD: jax.Array,
    router_DE: jax.Array,
    k: int,
    renormalise: bool,
    *,
    shared_gate_D: jax.Array | None = None,
    first: jax.Array | None = None,
    positions_T: jax.Array | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (weights float32[T, K], ids int32[T, K], factor): the experts of each row, and the shared one's gate.

    The weights are the softmax over all E experts, in float32, largest first; of equal ones the lower id comes first.
    ``factor = sigmoid(m . shared_gate)``, float32[T, 1], or None without a shared gate.

    Args:
      m_TD: token rows after the norm.
      router_DE: the router's matrix.
      k: experts per token, at most E.
      renormalise: divide the k weights by their sum.
      shared_gate_D: weights of the shared expert's gate; None where there is none.
      first: int32 scalar, where the layer's experts begin among all: the id of the first of them; None for 0.
      positions_T: int32; a negative one is a token that is not there, whose ids are ``NOWHERE``. None if all are there.
      implementation: "xla", the definition, or "triton", Pallas kernels for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, shapes that do not agree, or a k out of range.
    """
    _check(m_TD, k, router_DE, *(() if shared_gate_D is None else (shared_gate_D,)))
    run = module_of(__package__, implementation).route
    return run(m_TD, router_DE, k, renormalise, shared_gate_D, first, positions_T)
