# SPDX-License-Identifier: Apache-2.0
"""Rival importances H_nc of a weight: what each predicts for a block is  s = sum_nc H_nc (W_nc - W^b_nc)^2.

Of a token t that is routed to the expert with weight r, let x be a linear-block's input, z = W x its output, y the
layer's expert sum, and g = dL/dz, which contains r. Sums run over the expert's tokens::

    mean            sum x_c^2 / tokens          an expert that sees few tokens weighs as much as any other
    sum             sum x_c^2
    routed          sum r^2 x_c^2               exact for down: its error joins y multiplied by r
    local           sum |dy/dz_n|^2 x_c^2       the same for gate_up, which reaches y through h and down
    relative        sum |dy/dz_n|^2 x_c^2 / |residual|^2          y beside the residual behind the layer
    relative rows   its marginals' product, a row factor times a column factor
    relative columns    its mean over the rows
    fisher rows     sum g_n^2 . sum x_c^2 / tokens                a row factor from the whole network
    fisher          sum g_n^2 x_c^2             the Fisher diagonal

The labels of the Fishers are drawn from the model's own distribution, so that half of E[g g'] is the KL's second order;
"text" takes the text's next tokens.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.calibrate.routed import routed_experts
from pagedweight_jax.models.attention import dense_attention, project_qkv
from pagedweight_jax.models.layers import activation, matmul, rms_norm
from pagedweight_jax.models.moe import shared_expert
from pagedweight_jax.models.transformer import logits
from pagedweight_jax.models.weights import Weights
from pallas_kernels.routing.reference import top_experts

FISHERS = ("fisher rows", "fisher", "fisher rows, text", "fisher, text")
PROXIES = ("mean", "sum", "routed", "local", "relative", "relative rows", "relative columns", *FISHERS)


def before_experts(weights: Weights, layer: int, x_TD: jax.Array) -> tuple[jax.Array, tuple]:
    """Returns one sequence's residual after a sparse layer's attention and (m_TD, ids_TK, weights_TK)."""
    config, w = weights.config, weights.layers[layer]
    a_TD = rms_norm(x_TD, w.input_norm_D, config.rms_norm_eps)
    qkv = project_qkv(a_TD, w.attention, jnp.arange(len(x_TD)), config)
    o_THM = dense_attention(*qkv, config.head_dim**-0.5, config.windows[layer])
    x_TD = x_TD + matmul(o_THM.reshape(len(x_TD), -1), w.attention.o_ND)
    m_TD = rms_norm(x_TD, w.post_attention_norm_D, config.rms_norm_eps)
    weights_TK, ids_TK = top_experts(m_TD, w.mlp.router_DE, config.num_experts_per_tok, config.norm_topk_prob)
    return x_TD, (m_TD, ids_TK, weights_TK)


def after_experts(weights: Weights, layer: int, x_TD: jax.Array, routed: tuple) -> jax.Array:
    """Returns the residual behind the layer."""
    w, act = weights.layers[layer].mlp, activation(weights.config.hidden_act)
    return x_TD + routed_experts(*routed, w.experts, act) + shared_expert(routed[0], w, act)


def tail(weights: Weights, layer: int, x_TD: jax.Array) -> jax.Array:
    """Returns the log-probabilities, float32 [T, V], from the residual before ``layer`` (or behind the last one)."""
    for later in range(layer, weights.config.num_layers):
        x_TD = after_experts(weights, later, *before_experts(weights, later, x_TD))
    return jax.nn.log_softmax(logits(weights, rms_norm(x_TD, weights.norm_D, weights.config.rms_norm_eps)), axis=-1)


def trace(weights: Weights, tokens_T: jax.Array, probe_LTD: jax.Array | None = None) -> tuple[jax.Array, list]:
    """Returns log-probabilities [T, V] and per layer (residual behind it, m_TD, ids_TK, weights_TK).

    ``probe_LTD`` is added to the layers' expert sums: its gradient is theirs.
    """
    x_TD, seen = weights.embed_VD[tokens_T], []
    for layer in range(weights.config.num_layers):
        x_TD, routed = before_experts(weights, layer, x_TD)
        x_TD = after_experts(weights, layer, x_TD, routed)
        x_TD = x_TD if probe_LTD is None else x_TD + probe_LTD[layer]
        seen.append((x_TD, *routed))
    return tail(weights, weights.config.num_layers, x_TD), seen


def _expert_sums(x_TD, m_TD, ids_TK, weights_TK, G_FTD, gate_up_NC, down_NC, e, act):
    """Returns {(proxy, kind): H_NC, up to a scale per proxy} of one expert and one sequence, and its tokens.

    G_FTD holds the gradients of y for drawn and for text labels.
    """
    mask_T1 = (ids_TK == e).any(-1)[:, None].astype(jnp.float32)
    r_T1 = jnp.sum(jnp.where(ids_TK == e, weights_TK, 0), -1)[:, None]
    gate_TF, up_TF = jnp.split(matmul(m_TD, gate_up_NC.T), 2, axis=-1)
    slope_TF = jax.vjp(act, gate_TF)[1](jnp.ones_like(gate_TF))[0]
    h_TF = act(gate_TF) * up_TF
    to_h_TN = jnp.concatenate([slope_TF * up_TF, act(gate_TF)], -1)  # dh/dz
    column_N = jnp.tile(jnp.sum(jnp.square(down_NC), 0), 2)
    inverse_T1 = 1 / jnp.mean(jnp.square(x_TD), -1, keepdims=True)

    def outer(rows_TN, x2_TC):
        return matmul(rows_TN.T, x2_TC)

    sums = {}
    for kind, x2_TC in enumerate((jnp.square(m_TD), jnp.square(h_TF))):
        local_TN = r_T1**2 * (jnp.square(to_h_TN) * column_N if kind == 0 else jnp.ones_like(m_TD))
        r2x2_TC = r_T1**2 * x2_TC
        sums["sum", kind] = jnp.sum(mask_T1 * x2_TC, 0)
        sums["routed", kind] = jnp.sum(r2x2_TC, 0)
        sums["local", kind] = outer(local_TN, x2_TC)
        sums["relative", kind] = outer(local_TN * inverse_T1, x2_TC)
        for G_TD, label in zip(G_FTD, ("", ", text")):
            y_TD = r_T1 * G_TD
            g2_TN = jnp.square(y_TD if kind else jnp.tile(matmul(y_TD, down_NC), 2) * to_h_TN)
            sums["fisher row" + label, kind] = jnp.sum(g2_TN, 0)
            sums["fisher" + label, kind] = outer(g2_TN, x2_TC)
    return sums, jnp.sum(mask_T1)


@jax.jit
def _sequence_sums(weights: Weights, tokens_T: jax.Array, key: jax.Array):
    config, act = weights.config, activation(weights.config.hidden_act)
    zeros_LTD = jnp.zeros((config.num_layers, len(tokens_T), config.hidden_size))

    def loss(probe_LTD, labels_T):
        logp_TV, seen = trace(weights, tokens_T, probe_LTD)
        labels_T = jax.random.categorical(key, logp_TV) if labels_T is None else labels_T
        return -jnp.sum(jnp.take_along_axis(logp_TV, labels_T[:, None], -1)[:-1]), seen

    drawn_LTD, seen = jax.grad(loss, has_aux=True)(zeros_LTD, None)
    text_LTD, _ = jax.grad(loss, has_aux=True)(zeros_LTD, jnp.roll(tokens_T, -1))
    sums_L = []
    for layer, w in enumerate(weights.layers):
        G_FTD = jnp.stack([drawn_LTD[layer], text_LTD[layer]])

        def one(operands, layer=layer, G_FTD=G_FTD):
            return _expert_sums(*seen[layer], G_FTD, *operands, act)

        experts = w.mlp.experts
        sums_L.append(jax.lax.map(one, (experts.gate_up_ENC, experts.down_ENC, jnp.arange(config.num_experts))))
    return sums_L


def importances(weights: Weights, sequences: Iterable[np.ndarray]) -> list[dict[tuple[str, int], np.ndarray]]:
    """Returns per layer {(proxy, kind): H_ENC or H_E1C}, averaged over all tokens of the text, for every proxy."""
    total, num_tokens = None, 0
    for i, tokens_T in enumerate(sequences):
        sums = jax.device_get(_sequence_sums(weights, jnp.asarray(tokens_T), jax.random.key(i)))
        total = sums if total is None else jax.tree.map(np.add, total, sums)
        num_tokens += len(tokens_T)
    return [_finish(sums, np.maximum(tokens_E, 1), num_tokens) for sums, tokens_E in total]


def _finish(sums: dict, tokens_E: np.ndarray, num_tokens: int) -> dict[tuple[str, int], np.ndarray]:
    finished = {}
    for kind in (0, 1):
        tokens_E11 = tokens_E[:, None, None]
        sum_E1C, routed_E1C = sums["sum", kind][:, None], sums["routed", kind][:, None]
        relative_ENC = sums["relative", kind]
        columns_E1C, rows_EN1 = relative_ENC.mean(1, keepdims=True), relative_ENC.mean(2, keepdims=True)
        H = {
            "mean": sum_E1C / tokens_E11 * num_tokens,
            "sum": sum_E1C,
            "routed": routed_E1C,
            "local": sums["local", kind],
            "relative": relative_ENC,
            "relative rows": rows_EN1 * columns_E1C / np.maximum(columns_E1C.mean(2, keepdims=True), 1e-30),
            "relative columns": columns_E1C,
        }
        for label in ("", ", text"):
            H["fisher rows" + label] = sums["fisher row" + label, kind][..., None] * sum_E1C / tokens_E11 / 2
            H["fisher" + label] = sums["fisher" + label, kind] / 2
        finished |= {(proxy, kind): H[proxy] / num_tokens for proxy in PROXIES}
    return finished
