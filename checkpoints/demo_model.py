# SPDX-License-Identifier: Apache-2.0
"""The demo model for training: Qwen2-MoE in plain JAX, float32 masters, bf16 compute.

Every token visits all experts and the router's weights are zero but for its top-k: the same function as
sparse routing, with no token dropped, and at this size one large matrix product beats a sorted dispatch.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

Params = dict


@dataclass(frozen=True)
class DemoConfig:
    """Shape of the model; the names are those of Hugging Face's config.json."""

    vocab_size: int = 4096
    hidden_size: int = 320
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 256
    shared_expert_intermediate_size: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048


def init_params(key: jax.Array, cfg: DemoConfig) -> Params:
    """Float32 weights, stored [out, in] as in the checkpoint; layers is a list of dicts."""
    keys = iter(jax.random.split(key, 1 + 12 * cfg.num_hidden_layers))
    D, E, F = cfg.hidden_size, cfg.num_experts, cfg.moe_intermediate_size
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    shared_width = cfg.shared_expert_intermediate_size
    into_residual = (2 * cfg.num_hidden_layers) ** -0.5

    def weight(*shape, scale=1.0):
        return jax.random.normal(next(keys), shape) * (0.5 * scale * shape[-1] ** -0.5)

    def layer():
        return {
            "input_norm": jnp.ones(D),
            "post_norm": jnp.ones(D),
            "q": weight(q_width, D),
            "k": weight(kv_width, D),
            "v": weight(kv_width, D),
            "o": weight(D, q_width, scale=into_residual),
            "q_bias": jnp.zeros(q_width),
            "k_bias": jnp.zeros(kv_width),
            "v_bias": jnp.zeros(kv_width),
            "router": weight(E, D),
            "expert_gate": weight(E, F, D),
            "expert_up": weight(E, F, D),
            "expert_down": weight(E, D, F, scale=2 * into_residual),
            "shared_gate": weight(shared_width, D),
            "shared_up": weight(shared_width, D),
            "shared_down": weight(D, shared_width, scale=into_residual),
            "shared_expert_gate": jnp.zeros((1, D)),
        }

    embed = jax.random.normal(next(keys), (cfg.vocab_size, D)) * 0.02
    return {"embed": embed, "norm": jnp.ones(D), "layers": [layer() for _ in range(cfg.num_hidden_layers)]}


def num_parameters(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def rms_norm(x, weight, eps):
    """Statistics in float32, then the weight in the compute precision (as Qwen2-MoE)."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


def rope(x_BTHM, cos_TM, sin_TM):
    """Rotary embedding in the half layout: dimension i turns with i + d/2."""
    a, b = jnp.split(x_BTHM, 2, axis=-1)
    cos, sin = cos_TM[None, :, None, :].astype(x_BTHM.dtype), sin_TM[None, :, None, :].astype(x_BTHM.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_table(length: int, head_dim: int, theta: float):
    """cos and sin, each [length, head_dim / 2], float32."""
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angle = np.arange(length)[:, None] * frequency
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def attention(p, x_BTD, cos, sin, cfg: DemoConfig, implementation: str):
    """Causal attention of whole sequences, [B, T, D]; `implementation` as `jax.nn.dot_product_attention` names it."""
    B, T, _ = x_BTD.shape
    q = (x_BTD @ p["q"].T + p["q_bias"]).reshape(B, T, cfg.num_attention_heads, cfg.head_dim)
    k = (x_BTD @ p["k"].T + p["k_bias"]).reshape(B, T, cfg.num_key_value_heads, cfg.head_dim)
    v = (x_BTD @ p["v"].T + p["v_bias"]).reshape(B, T, cfg.num_key_value_heads, cfg.head_dim)
    out = jax.nn.dot_product_attention(
        rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True, implementation=implementation
    )
    return out.reshape(B, T, -1) @ p["o"].T


def route(p, x_TD, top_k: int):
    """Router weights [T, E], zero outside the top-k and not renormalised; probabilities [T, E]; logits [T, E]."""
    logits = jnp.einsum("td,ed->te", x_TD, p["router"], preferred_element_type=jnp.float32)
    probs = jax.nn.softmax(logits, axis=-1)
    kth = jax.lax.top_k(jax.lax.stop_gradient(probs), top_k)[0][:, -1:]
    return jnp.where(probs >= kth, probs, 0.0), probs, logits


def experts(p, x_TD, weights_TE):
    """sum_e w_e down_e(silu(gate_e x) * up_e x); the weight is applied before `down`, which is linear."""
    gate = jnp.einsum("td,efd->tef", x_TD, p["expert_gate"])
    up = jnp.einsum("td,efd->tef", x_TD, p["expert_up"])
    hidden = jax.nn.silu(gate) * up * weights_TE[:, :, None].astype(x_TD.dtype)
    return jnp.einsum("tef,edf->td", hidden, p["expert_down"])


def shared_expert(p, x_TD):
    """The shared expert's part, [T, D], behind its own gate."""
    hidden = jax.nn.silu(x_TD @ p["shared_gate"].T) * (x_TD @ p["shared_up"].T)
    return jax.nn.sigmoid(x_TD @ p["shared_expert_gate"].T) * (hidden @ p["shared_down"].T)


def forward(params: Params, ids_BT, cfg: DemoConfig, implementation: str = "xla", dtype=jnp.bfloat16):
    """Final hidden states [B, T, D] and the routers' (weights, probs, logits), one per layer, each [B*T, E]."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    B, T = ids_BT.shape
    cos, sin = rope_table(T, cfg.head_dim, cfg.rope_theta)
    save_products = jax.checkpoint_policies.dots_saveable
    moe = jax.checkpoint(lambda p, m, w: experts(p, m, w) + shared_expert(p, m), policy=save_products)
    x, routed = params["embed"][ids_BT], []
    for p in params["layers"]:
        x = x + attention(p, rms_norm(x, p["input_norm"], cfg.rms_norm_eps), cos, sin, cfg, implementation)
        m_TD = rms_norm(x, p["post_norm"], cfg.rms_norm_eps).reshape(B * T, -1)
        route_l = route(p, m_TD, cfg.num_experts_per_tok)
        x = x + moe(p, m_TD, route_l[0]).reshape(x.shape)
        routed.append(route_l)
    return rms_norm(x, params["norm"], cfg.rms_norm_eps), routed


def next_token_nats(params: Params, hidden_BTD, targets_BT):
    """Cross-entropy in nats [B, T] and whether the likeliest token is the target [B, T]; tied head."""
    embed = params["embed"].astype(hidden_BTD.dtype)
    logits = jnp.einsum("btd,vd->btv", hidden_BTD, embed, preferred_element_type=jnp.float32)
    target = jnp.take_along_axis(logits, targets_BT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target, jnp.argmax(logits, axis=-1) == targets_BT


def routing_losses(routed, cfg: DemoConfig):
    """Load-balancing loss (1 when even), router z-loss, and the least load of any expert over the even share."""
    balance, z, least = 0.0, 0.0, jnp.inf
    for weights, probs, logits in routed:
        load_E = jnp.mean(weights > 0, axis=0) / cfg.num_experts_per_tok
        balance += cfg.num_experts * jnp.sum(jax.lax.stop_gradient(load_E) * jnp.mean(probs, axis=0))
        z += jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
        least = jnp.minimum(least, jnp.min(load_E) * cfg.num_experts)
    return balance / len(routed), z / len(routed), least
