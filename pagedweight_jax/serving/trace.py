# SPDX-License-Identifier: Apache-2.0
"""What the routed experts saw: collected raw in every layer, added up once per call.

For token t and its k-th expert e = id_tk, the router gave the weight r_tk, and what the expert adds to the residual
stream res_t behind the layer is of the *relative size* s_tk (``planning.signals`` says why)::

    s_gate_up  =  r / |res|        s_down  =  r |h| / |res|

h being the activation that down reads; gate_up's inputs come out of a norm, and are alike. A step only packs a few
numbers per token; one reduction per call turns them into sums per expert::

    mass = sum r        norm = sum s        square = sum s^2        max = max s

No scatter is involved, and sums are added up in one order: the same call gives the same sums, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pagedweight_jax.config import KINDS, ModelConfig
from pagedweight_jax.models.moe import relative_sizes
from pallas_kernels.expert_trace.api import pack_trace, unpack_trace


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExpertTrace:
    """Tokens as the routed experts saw them, in the L sparse layers.

    Attributes:
      ids_TLK: int32, the experts that each token took; E for tokens that are not there.
      weights_TLK: float32, r.
      residual_square_TL: float32, |res|^2.
      h_square_TLK: float32, |h|^2.
    """

    ids_TLK: jax.Array
    weights_TLK: jax.Array
    residual_square_TL: jax.Array
    h_square_TLK: jax.Array

    @classmethod
    def of_packed(cls, packed: jax.Array) -> "ExpertTrace":
        """Returns the trace of a result of ``pack_layers``, with whatever axes it has in front."""
        ids_TLK, weights_TLK, h_square_TLK, residual_square_TL = unpack_trace(packed)
        return cls(
            ids_TLK=ids_TLK,
            weights_TLK=weights_TLK,
            residual_square_TL=residual_square_TL,
            h_square_TLK=h_square_TLK,
        )


def pack_layers(
    layers: Sequence[tuple[jax.Array, jax.Array, jax.Array, jax.Array]],
    firsts: Sequence[int],
    num_experts: int,
    implementation: str = "xla",
    into: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Returns the trace of L layers' (ids_TK, weights_TK, x_TD, h_square_TK) as one array, int32[T, L, 3K + 1].

    Args:
      layers: what each layer's experts saw, and the residual stream behind the layer.
      firsts: what each layer's ids begin at.
      num_experts: E.
      implementation: ``xla`` or ``triton``.
      into: of several steps, and which of them this is; None for an array of its own.
    """
    return pack_trace(*zip(*layers), firsts, num_experts, into=into, implementation=implementation)


def trace_shape(config: ModelConfig, num_tokens: int) -> tuple[int, int, int]:
    """Returns the shape of what ``pack_layers`` packs of so many tokens."""
    return num_tokens, config.num_sparse_layers, 3 * config.num_experts_per_tok + 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RoutingSums:
    """A call's tokens added up per expert and kind of linear-block (0 gate_up, 1 down).

    A decode call's sums have one more axis, B, in front: each row's own.

    Attributes:
      mass_LE: float32, summed routing weights r.
      count_LE: float32, routed tokens.
      norm_LEU, square_LEU: float32, sums of s and s^2.
      max_LEU: float32, the largest s.
    """

    mass_LE: jax.Array
    count_LE: jax.Array
    norm_LEU: jax.Array
    square_LEU: jax.Array
    max_LEU: jax.Array


def routing_sums(trace: ExpertTrace, num_experts: int) -> RoutingSums:
    """Returns the sums of a trace over all its tokens; ids of ``num_experts`` or more count nothing."""
    chosen_TLKE = trace.ids_TLK[..., None] == jnp.arange(num_experts)
    weights_TLK = trace.weights_TLK
    sizes = relative_sizes(weights_TLK, trace.residual_square_TL, trace.h_square_TLK)

    def add(values_TLK):
        return jnp.sum(jnp.where(chosen_TLKE, values_TLK[..., None], 0.0), axis=(0, 2))

    def largest(values_TLK):
        return jnp.max(jnp.where(chosen_TLKE, values_TLK[..., None], 0.0), axis=(0, 2))

    return RoutingSums(
        mass_LE=add(weights_TLK),
        count_LE=add(jnp.ones_like(weights_TLK)),
        norm_LEU=jnp.stack([add(size_TLK) for size_TLK in sizes], axis=-1),
        square_LEU=jnp.stack([add(size_TLK**2) for size_TLK in sizes], axis=-1),
        max_LEU=jnp.stack([largest(size_TLK) for size_TLK in sizes], axis=-1),
    )


def row_sums(trace: ExpertTrace, num_experts: int) -> RoutingSums:
    """Returns each row's sums, [B, ..], of a trace of N steps of B rows, [N, B, L, ..]."""
    return jax.vmap(partial(routing_sums, num_experts=num_experts), in_axes=1)(trace)


def sums_bytes(num_layers: int, num_experts: int) -> int:
    """Device bytes of one row's or one chunk's ``RoutingSums``."""
    return 4 * num_layers * num_experts * (2 + 3 * len(KINDS))
