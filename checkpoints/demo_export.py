# SPDX-License-Identifier: Apache-2.0
"""The trained weights as a Hugging Face Qwen2-MoE folder, out and in: configs, bf16 safetensors."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from demo_model import DemoConfig, Params
from safetensors.numpy import load_file, save_file

LAYER_TENSORS = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    **{n: f"self_attn.{n}_proj.weight" for n in "qkvo"},
    **{f"{n}_bias": f"self_attn.{n}_proj.bias" for n in "qkv"},
    "router": "mlp.gate.weight",
    "shared_expert_gate": "mlp.shared_expert_gate.weight",
    **{f"shared_{n}": f"mlp.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")},
}
"""A layer's parameters and their names in its Hugging Face tensors; the routed experts are named one by one."""


def expert_tensor(expert: int, part: str) -> str:
    """The name of an expert's gate, up or down matrix within its layer."""
    return f"mlp.experts.{expert}.{part}_proj.weight"


def hub_config(cfg: DemoConfig) -> dict:
    """config.json as `transformers` reads it."""
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.shared_expert_intermediate_size,
        "num_hidden_layers": cfg.num_hidden_layers,
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.num_key_value_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": cfg.max_position_embeddings,
        "initializer_range": 0.02,
        "rms_norm_eps": cfg.rms_norm_eps,
        "use_cache": True,
        "tie_word_embeddings": True,
        "rope_theta": cfg.rope_theta,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": cfg.moe_intermediate_size,
        "shared_expert_intermediate_size": cfg.shared_expert_intermediate_size,
        "num_experts_per_tok": cfg.num_experts_per_tok,
        "num_experts": cfg.num_experts,
        "norm_topk_prob": False,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "mlp_only_layers": [],
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }


def hub_tensors(params: Params) -> dict[str, np.ndarray]:
    """Weights under their Hugging Face names, bf16; the tied head is not stored."""

    def bf16(array):
        return np.ascontiguousarray(np.asarray(array).astype(ml_dtypes.bfloat16))

    tensors = {"model.embed_tokens.weight": bf16(params["embed"]), "model.norm.weight": bf16(params["norm"])}
    for index, layer in enumerate(params["layers"]):
        prefix = f"model.layers.{index}."
        for ours, hub in LAYER_TENSORS.items():
            tensors[prefix + hub] = bf16(layer[ours])
        for part in ("gate", "up", "down"):
            for expert, matrix in enumerate(layer[f"expert_{part}"]):
                tensors[prefix + expert_tensor(expert, part)] = bf16(matrix)
    return tensors


def export_hub_folder(params: Params, cfg: DemoConfig, folder: Path) -> int:
    """Write the folder (beside an existing tokenizer) and return the safetensors file's bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hub_tensors(params), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hub_config(cfg), indent=2) + "\n")
    generation = {"eos_token_id": 0, "pad_token_id": 1, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return (folder / "model.safetensors").stat().st_size


def read_hub_folder(folder: Path, cfg: DemoConfig) -> Params:
    """The folder's weights as the training model's parameters, float32 numpy arrays: `export_hub_folder` undone."""
    tensors = {name: np.asarray(w, np.float32) for name, w in load_file(folder / "model.safetensors").items()}

    def stack(prefix: str, part: str) -> np.ndarray:
        return np.stack([tensors[prefix + expert_tensor(e, part)] for e in range(cfg.num_experts)])

    def layer(index: int) -> dict:
        prefix = f"model.layers.{index}."
        dense = {ours: tensors[prefix + hub] for ours, hub in LAYER_TENSORS.items()}
        return dense | {f"expert_{part}": stack(prefix, part) for part in ("gate", "up", "down")}

    return {
        "embed": tensors["model.embed_tokens.weight"],
        "norm": tensors["model.norm.weight"],
        "layers": [layer(index) for index in range(cfg.num_hidden_layers)],
    }
