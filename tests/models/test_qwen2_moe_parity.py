# SPDX-License-Identifier: Apache-2.0
"""Logits against transformers' PyTorch model, through a folder that transformers wrote."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pagedweight_jax.checkpoint.hf import load_config, load_weights
from pagedweight_jax.models.transformer import dense_forward

TOLERANCE = 1e-5

dense = jax.jit(dense_forward)

CASES = {
    "plain": {},
    "renormalised": {"norm_topk_prob": True, "num_experts": 7, "num_experts_per_tok": 3},
    "odd sizes, explicit head_dim": {
        "vocab_size": 101,
        "hidden_size": 52,
        "head_dim": 10,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "moe_intermediate_size": 19,
        "shared_expert_intermediate_size": 23,
        "num_experts": 5,
        "num_experts_per_tok": 5,
    },
    "dense layers mixed in": {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "one kv head, top-1, no bias": {"num_key_value_heads": 1, "num_experts_per_tok": 1, "qkv_bias": False},
    "no grouped heads, other rope and eps": {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 321.5},
        "rms_norm_eps": 1e-2,
    },
    "tied, gelu": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "sliding windows": {"use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": 3},
    "sliding windows by layer_types": {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
}


def tokens(vocab_size, length=23, seed=5):
    return np.random.default_rng(seed).integers(0, vocab_size, length)


def torch_logits(model, tokens_T):
    with torch.no_grad():
        return model(torch.tensor(tokens_T)[None]).logits[0].float().numpy()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, save_hf, tmp_path, relative_error):
    model = save_hf(tmp_path, max_shard_size="60KB", seed=1, **CASES[case])
    config = load_config(tmp_path)
    weights = load_weights(tmp_path, config, jnp.float32)
    tokens_T = tokens(config.vocab_size)
    assert relative_error(dense(weights, tokens_T), torch_logits(model, tokens_T)) < TOLERANCE


@pytest.fixture(scope="module")
def plain(save_hf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    model = save_hf(folder, num_hidden_layers=3, use_sliding_window=True, sliding_window=4)
    weights = load_weights(folder, load_config(folder), jnp.float32)
    tokens_T = tokens(weights.config.vocab_size)
    return weights, tokens_T, torch_logits(model, tokens_T)


def swap_experts(weights):
    layer = weights.layers[1]
    experts = replace(layer.mlp.experts, down_ENC=layer.mlp.experts.down_ENC[jnp.array([1, 0, 2, 3])])
    layers = (weights.layers[0], replace(layer, mlp=replace(layer.mlp, experts=experts)), weights.layers[2])
    return replace(weights, layers=layers)


def swap_gate_and_up(weights):
    layer = weights.layers[2]
    shared = replace(layer.mlp.shared, gate_DF=layer.mlp.shared.up_DF, up_DF=layer.mlp.shared.gate_DF)
    return replace(weights, layers=(*weights.layers[:2], replace(layer, mlp=replace(layer.mlp, shared=shared))))


def swap_norms(weights):
    layer = weights.layers[0]
    swapped = replace(layer, input_norm_D=layer.post_attention_norm_D, post_attention_norm_D=layer.input_norm_D)
    return replace(weights, layers=(swapped, *weights.layers[1:]))


def drop_windows(weights):
    return replace(weights, config=replace(weights.config, windows=(0, 0, 0)))


def renormalise(weights):
    return replace(weights, config=replace(weights.config, norm_topk_prob=True))


@pytest.mark.parametrize("wrong", [swap_experts, swap_gate_and_up, swap_norms, drop_windows, renormalise])
def test_a_wrong_model_is_far_outside_the_tolerance(wrong, plain, relative_error):
    weights, tokens_T, ref_TV = plain
    assert relative_error(dense(weights, tokens_T), ref_TV) < TOLERANCE
    assert relative_error(dense(wrong(weights), tokens_T), ref_TV) > 1000 * TOLERANCE


def test_bfloat16_is_as_near_to_float32_as_pytorch_is(save_hf, tmp_path):
    model = save_hf(tmp_path, dtype="bfloat16", num_hidden_layers=3, seed=2)
    config = load_config(tmp_path)
    tokens_T = tokens(config.vocab_size, length=64)
    exact_TV = np.asarray(dense(load_weights(tmp_path, config, jnp.float32), tokens_T))
    theirs, out_TV = torch_logits(model, tokens_T), dense(load_weights(tmp_path, config), tokens_T)

    def median_error(logits_TV):  # rows whose routing flips are no measure of precision
        return np.median(np.linalg.norm(logits_TV - exact_TV, axis=-1) / np.linalg.norm(exact_TV, axis=-1))

    assert 0 < median_error(np.asarray(out_TV)) < 1.2 * median_error(theirs) < 2e-2
