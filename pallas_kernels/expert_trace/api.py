# SPDX-License-Identifier: Apache-2.0
"""What the routed experts of all layers saw of each token, as one array: its meaning, and the choice of implementation.

A step that hands a few small arrays per layer to its caller pays a launch for each; packed, it pays one for all.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.implementation import module_of


def pack_trace(
    ids: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    residuals: Sequence[jax.Array],
    h_squares: Sequence[jax.Array],
    firsts: Sequence[int],
    num_experts: int,
    *,
    into: tuple[jax.Array, jax.Array] | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Returns int32[T, L, 3K + 1]: of each token and layer its K ids, and the bits of K weights, K |h|^2 and of |x|^2.

    Args:
      ids: of each layer the selected experts, int32[T, K].
      weights: of each layer the routing weights, float32[T, K].
      residuals: of each layer x, the residual stream behind it, [T, D].
      h_squares: of each layer |h|^2, float32[T, K].
      firsts: what each layer's ids begin at. Others than the E from there select nothing and become ``num_experts``.
      num_experts: E.
      into: (int32[N, T, L, 3K + 1], n): write it there, as the n-th, and return all N; None for an array of its own.
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, or lists of different lengths.
    """
    run = module_of(__package__, implementation).pack_trace
    if not len(ids) == len(weights) == len(residuals) == len(h_squares) == len(firsts):
        counts = ", ".join(str(len(values)) for values in (ids, weights, residuals, h_squares, firsts))
        raise ValueError(f"ids, weights, residuals, squares and firsts of {counts} layers")
    return run(tuple(ids), tuple(weights), tuple(residuals), tuple(h_squares), tuple(firsts), num_experts, into)


def unpack_trace(packed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (ids [.., K], weights [.., K], |h|^2 [.., K], |x|^2 [..]) of what ``pack_trace`` packed."""
    k = packed.shape[-1] // 3
    floats = lax.bitcast_convert_type(packed, jnp.float32)
    return packed[..., :k], floats[..., k : 2 * k], floats[..., 2 * k : 3 * k], floats[..., 3 * k]
