# SPDX-License-Identifier: Apache-2.0
"""The norm before the experts and the choice of experts: their meaning, and the choice of implementation."""

import jax

from pallas_kernels.routing import reference

IMPLEMENTATIONS = ("xla", "triton")


def norm_and_route(
    x_TD: jax.Array,
    norm_D: jax.Array,
    eps: float,
    router_DE: jax.Array,
    k: int,
    renormalise: bool,
    *,
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
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs for up to
        ``pallas_triton.MAX_TOKENS`` rows; beyond that it is "xla".

    Raises:
      ValueError: an unknown implementation, shapes that do not agree, or a k out of range.
    """
    if not x_TD.shape[-1] == norm_D.shape[0] == router_DE.shape[0]:
        raise ValueError(f"shapes disagree: rows {x_TD.shape}, norm {norm_D.shape}, router {router_DE.shape}")
    if not 1 <= k <= router_DE.shape[1]:
        raise ValueError(f"k {k} is not between 1 and {router_DE.shape[1]} experts")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
    run = reference.norm_and_route
    if implementation == "triton":
        from pallas_kernels.routing import pallas_triton  # JAX may be without Triton: ask only when it is wanted

        run = pallas_triton.norm_and_route
    return run(x_TD, norm_D, eps, router_DE, k, renormalise)
