# SPDX-License-Identifier: Apache-2.0
"""The weights of a decoder as nested frozen dataclasses, each a pytree.

Dense matrices are stored [in, out], so that ``x @ W`` reads them. Routed experts keep the source's rows, [out, in]:
that is what the quantizer cuts into bit-planes. ``None`` stands for a part that an architecture does not have.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from pagedweight_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """Projections of one layer; N = heads x head_dim, query heads for q and o, KV heads for k and v."""

    q_DN: jax.Array
    k_DN: jax.Array
    v_DN: jax.Array
    q_bias_N: jax.Array | None
    k_bias_N: jax.Array | None
    v_bias_N: jax.Array | None
    o_ND: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MLPWeights:
    """A gated feed-forward part: a dense layer's, or the shared expert's."""

    gate_DF: jax.Array
    up_DF: jax.Array
    down_FD: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The routed experts of one layer: its linear-blocks, row = output.

    Attributes:
      gate_up_ENC: [E, 2F, D]; rows 0 .. F-1 are gate, F .. 2F-1 up.
      down_ENC: [E, D, F].
    """

    gate_up_ENC: jax.Array
    down_ENC: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MoEWeights:
    """A mixture-of-experts part; ``experts`` is None when the routed experts are paged."""

    router_DE: jax.Array
    shared: MLPWeights | None
    shared_gate_D: jax.Array | None
    experts: ExpertWeights | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    input_norm_D: jax.Array
    attention: AttentionWeights
    post_attention_norm_D: jax.Array
    mlp: MLPWeights | MoEWeights


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Weights:
    """A whole decoder; ``lm_head_DV`` is None when the head is the transposed embedding."""

    config: ModelConfig = field(metadata={"static": True})
    embed_VD: jax.Array
    layers: tuple[LayerWeights, ...]
    norm_D: jax.Array
    lm_head_DV: jax.Array | None


def without_experts(weights: Weights) -> Weights:
    """Returns the weights that stay dense on the device: all but the routed experts."""
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, experts=None)) if isinstance(layer.mlp, MoEWeights) else layer
        for layer in weights.layers
    )
    return replace(weights, layers=layers)


def init_layer(config: ModelConfig, layer: int, key: jax.Array, dtype=jnp.float32) -> LayerWeights:
    """Returns random weights of one layer: matrices N(0, 1/in), norms about 1, small biases.

    Its shapes are the definition that loaders check against (see ``jax.eval_shape``).
    """
    keys = iter(jax.random.split(key, 16))
    D, F, E = config.hidden_size, config.moe_intermediate_size, config.num_experts
    N_q, N_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(*shape, fan_in):
        return jax.random.normal(next(keys), shape, dtype) * jnp.asarray(fan_in**-0.5, dtype)

    def near(center, size):
        return center + jnp.asarray(0.1, dtype) * jax.random.normal(next(keys), (size,), dtype)

    def gated(width):
        return MLPWeights(
            gate_DF=matrix(D, width, fan_in=D), up_DF=matrix(D, width, fan_in=D), down_FD=matrix(width, D, fan_in=width)
        )

    attention = AttentionWeights(
        q_DN=matrix(D, N_q, fan_in=D),
        k_DN=matrix(D, N_kv, fan_in=D),
        v_DN=matrix(D, N_kv, fan_in=D),
        q_bias_N=near(0, N_q) if config.qkv_bias else None,
        k_bias_N=near(0, N_kv) if config.qkv_bias else None,
        v_bias_N=near(0, N_kv) if config.qkv_bias else None,
        o_ND=matrix(N_q, D, fan_in=N_q),
    )
    if config.sparse_layers[layer]:
        shared_width = config.shared_expert_intermediate_size
        mlp = MoEWeights(
            router_DE=matrix(D, E, fan_in=D),
            shared=gated(shared_width) if shared_width else None,
            shared_gate_D=matrix(D, fan_in=D) if shared_width else None,
            experts=ExpertWeights(gate_up_ENC=matrix(E, 2 * F, D, fan_in=D), down_ENC=matrix(E, D, F, fan_in=F)),
        )
    else:
        mlp = gated(config.intermediate_size)
    return LayerWeights(input_norm_D=near(1, D), attention=attention, post_attention_norm_D=near(1, D), mlp=mlp)


def init_weights(config: ModelConfig, key: jax.Array, dtype=jnp.float32) -> Weights:
    """Returns random weights, for tests and benchmarks; a whole model's worth of memory if it is not jitted.

    ``jax.jit(lambda key: without_experts(init_weights(config, key, dtype)))`` never materialises the experts.
    """
    key_embed, key_norm, key_head, key_layers = jax.random.split(key, 4)
    D, V = config.hidden_size, config.vocab_size
    scale = jnp.asarray(D**-0.5, dtype)
    return Weights(
        config=config,
        embed_VD=jax.random.normal(key_embed, (V, D), dtype) * scale,
        layers=tuple(
            init_layer(config, layer, layer_key, dtype)
            for layer, layer_key in enumerate(jax.random.split(key_layers, config.num_layers))
        ),
        norm_D=1 + jnp.asarray(0.1, dtype) * jax.random.normal(key_norm, (D,), dtype),
        lm_head_DV=None if config.tie_word_embeddings else jax.random.normal(key_head, (D, V), dtype) * scale,
    )
