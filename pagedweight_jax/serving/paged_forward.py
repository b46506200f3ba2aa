# SPDX-License-Identifier: Apache-2.0
"""The forward pass of the served model: KV cache and routed experts are read from the arena.

A layer is a function of its own under ``jit``, with what tells layers apart as operands: it is traced and lowered once
for all layers that are alike, and so are its kernels.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pagedweight_jax.models.layers import activation, rope_frequencies
from pagedweight_jax.models.moe import dense_experts
from pagedweight_jax.models.transformer import following_norms, layer_addends, one_addend
from pagedweight_jax.models.weights import LayerWeights, MoEWeights, Weights
from pagedweight_jax.serving.state import DecodeState
from pagedweight_jax.serving.trace import pack_layers
from pallas_kernels.dense.api import add_norm
from pallas_kernels.moe_ffn.api import moe_ffn
from pallas_kernels.moe_ffn.pages import WeightPages
from pallas_kernels.paged_attention.api import decode_attention, paged_attention, rotate_and_write_kv
from pallas_kernels.tokens.api import read_tokens

MERGE_TOKENS = 64
"""Up to here, launches count: kernels are given the tables of all layers at once, for a slice would be a copy."""


def weight_pages(state: DecodeState, layer: int, *, merged: bool) -> WeightPages:
    """Returns the pages of a layer among the sparse ones; the same of all layers, a view, where they are ``merged``."""
    tables = state.page_map.bits_LEU, state.page_map.gate_up_frames_LEF, state.page_map.down_frames_LEF
    bits_EU, gate_up_frames_EF, down_frames_EF = (
        table.reshape(-1, table.shape[-1]) if merged else table[layer] for table in tables
    )
    return WeightPages(
        bits_EU=bits_EU,
        gate_up_frames_EF=gate_up_frames_EF,
        down_frames_EF=down_frames_EF,
        gate_up=state.geometry.gate_up,
        down=state.geometry.down,
    )


def layer_tables(table_RGLF: jax.Array) -> list[jax.Array]:
    """Returns each layer's block table, [R, G, F]: copies, which a loop over steps makes once, before it begins."""
    return [table_RGLF[:, :, layer] for layer in range(table_RGLF.shape[2])]


def paged_forward(
    weights: Weights,
    state: DecodeState,
    tables: list[jax.Array],
    tokens_RT: jax.Array,
    positions_RT: jax.Array,
    implementation: str,
    trace: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (arena, hidden_RTD, packed trace): the model on R rows of T tokens each, over the paged cache.

    Args:
      weights, state: the model's dense weights, and where its pages and cache are. Routed experts that are among the
        weights are used in the place of pages: the unquantized baseline.
      tables: int32, the block table of these rows in each layer, from ``layer_tables``.
      tokens_RT: int32.
      positions_RT: int32. A negative position is a token that is not there: it writes no KV, selects no expert, and its
        output means nothing.
      implementation: ``xla`` or ``triton``.
      trace: the packed traces of several steps, and which of them this is; None for an array of its own.
    """
    config, kv = weights.config, state.geometry.kv
    num_rows, num_tokens = tokens_RT.shape
    positions_T = positions_RT.reshape(-1)
    places_T = jnp.maximum(positions_T, 0)
    row_T, block_T = jnp.repeat(jnp.arange(num_rows), num_tokens), places_T // kv.block_tokens
    slots_T = places_T % kv.block_tokens
    which = {"implementation": implementation}
    x_TD, n_TD, *angles = read_tokens(
        tokens_RT.reshape(-1), positions_T, weights.embed_VD, weights.layers[0].input_norm_D, config.rms_norm_eps,
        jnp.asarray(rope_frequencies(config.head_dim, config.rope_theta)), **which,
    )  # fmt: skip

    @partial(jax.jit, static_argnames="window")
    def run_layer(
        w: LayerWeights, next_norm_D, x_TD, n_TD, arena_AW, table_RGF, pages: WeightPages | None, first,
        *, window,
    ):  # fmt: skip
        """Returns (arena, hidden states, their norm for the next layer, what the experts saw)."""

        def attend(carry, _, q_THM, k_TJM, v_TJM):
            arena_AW, seen = carry
            cut = {"scale": config.head_dim**-0.5, "window": window, "dtype": q_THM.dtype} | which
            if num_tokens == 1:
                arena_AW, o_RHM = decode_attention(
                    arena_AW, q_THM, k_TJM, v_TJM, *angles, positions_T, table_RGF, kv, **cut
                )
                return (arena_AW, seen), o_RHM
            frames_TF = jnp.where(positions_T[:, None] < 0, len(arena_AW), table_RGF[row_T, block_T])  # dropped
            arena_AW, q_THM = rotate_and_write_kv(
                arena_AW, frames_TF, slots_T, *angles, q_THM, k_TJM, v_TJM, kv, **which
            )
            q_RTHM = q_THM.reshape(num_rows, num_tokens, *q_THM.shape[1:])
            o_RTHM = paged_attention(arena_AW, q_RTHM, positions_RT, table_RGF, kv, **cut)
            return (arena_AW, seen), o_RTHM.reshape(q_THM.shape)

        def routed(carry, _, m_TD, ids_TK, weights_TK):
            arena_AW, _ = carry
            if pages is None:
                act = activation(config.hidden_act)
                y_TD, h_square_TK = dense_experts(m_TD, ids_TK, weights_TK, w.mlp.experts, act)
                addend = one_addend(y_TD)
            else:
                y_TKD, h_square_TK = moe_ffn(arena_AW, pages, m_TD, ids_TK, activation=config.hidden_act, **which)
                addend = y_TKD, weights_TK
            return (arena_AW, (ids_TK, weights_TK, h_square_TK)), addend

        (arena_AW, seen), x_TD, addends = layer_addends(
            config, 0, w, x_TD, n_TD, None, (arena_AW, None), attend, routed, implementation, (first, positions_T)
        )
        with jax.named_scope("next_norm"):
            x_TD, n_TD = add_norm(x_TD, next_norm_D, config.rms_norm_eps, **addends, **which)
        return arena_AW, x_TD, n_TD, seen

    paged = [w.mlp.experts is None for w in weights.layers if isinstance(w.mlp, MoEWeights)]
    merged = implementation == "triton" and positions_T.size <= MERGE_TOKENS and all(paged)
    firsts = [config.num_experts * layer if merged else 0 for layer in range(len(paged))]
    arena_AW, seen = state.arena_AW, []
    layers = zip(weights.layers, following_norms(weights), tables, config.windows, strict=True)
    for w, next_norm_D, table_RGF, window in layers:
        pages, first = None, jnp.int32(0)
        if isinstance(w.mlp, MoEWeights):
            first = jnp.int32(firsts[len(seen)])
            pages = weight_pages(state, len(seen), merged=merged) if w.mlp.experts is None else None
        arena_AW, x_TD, n_TD, of_layer = run_layer(
            w, next_norm_D, x_TD, n_TD, arena_AW, table_RGF, pages, first, window=window
        )
        if of_layer is not None:
            ids_TK, weights_TK, h_square_TK = of_layer
            seen.append((ids_TK, weights_TK, x_TD, h_square_TK))
    packed = pack_layers(seen, firsts, config.num_experts, implementation, trace)
    return arena_AW, n_TD.reshape(num_rows, num_tokens, -1), packed
