# SPDX-License-Identifier: Apache-2.0
"""What stands between attention and the routed experts: its meaning, and the choice of implementation.

"triton" has kernels for up to ``pallas_triton.MAX_TOKENS`` rows; beyond that it is "xla".
"""

import jax

from pallas_kernels.implementation import module_of
from pallas_kernels.moe_ffn.pages import ACTIVATIONS


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
    first_T: jax.Array | None = None,
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
      first_T: int32, added to each token's ids: where its layer's experts begin among all; None for 0.
      implementation: "xla", the definition, or "triton", Pallas kernels for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, shapes that do not agree, or a k out of range.
    """
    _check(m_TD, k, router_DE, *(() if shared_gate_D is None else (shared_gate_D,)))
    return module_of(__package__, implementation).route(m_TD, router_DE, k, renormalise, shared_gate_D, first_T)


def norm_and_route(
    x_TD: jax.Array,
    norm_D: jax.Array,
    eps: float,
    router_DE: jax.Array,
    k: int,
    renormalise: bool,
    *,
    first_T: jax.Array | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (m [T, D] in x's dtype, weights float32[T, K], ids int32[T, K]): the normed rows and their experts.

    The weights are the softmax over all E experts, in float32, largest first; of equal ones the lower id comes first.

    Args:
      x_TD: token rows before the norm.
      norm_D, eps: the RMS norm.
      router_DE: the router's matrix.
      k: experts per token, at most E.
      renormalise: divide the k weights by their sum.
      first_T: int32, added to each token's ids: where its layer's experts begin among all; None for 0.
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, shapes that do not agree, or a k out of range.
    """
    _check(x_TD, k, router_DE, norm_D)
    return module_of(__package__, implementation).norm_and_route(x_TD, norm_D, eps, router_DE, k, renormalise, first_T)


def norm_route_and_gate(
    x_TD: jax.Array,
    norm_D: jax.Array,
    eps: float,
    router_DE: jax.Array,
    k: int,
    renormalise: bool,
    shared: tuple[jax.Array, jax.Array, jax.Array],
    *,
    activation: str = "silu",
    first_T: jax.Array | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (m, weights, ids, h, factor): ``norm_and_route`` and the first half of the shared expert, in one kernel.

    ``h = act(m @ gate) * (m @ up)``, [T, F] in x's dtype, and ``factor = sigmoid(m . shared_gate)``, float32[T, 1], are
    what ``pallas_kernels.dense.api.project_add`` needs for the other half. Reading its weights hides the routing.

    Args: as of ``norm_and_route``, and
      shared: gate [D, F], up [D, F] and shared_gate [D].
      activation: a key of ``ACTIVATIONS``.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {sorted(ACTIVATIONS)}")
    _check(x_TD, k, router_DE, norm_D, *shared)
    run = module_of(__package__, implementation).norm_route_and_gate
    return run(x_TD, norm_D, eps, router_DE, k, renormalise, shared, activation, first_T)
