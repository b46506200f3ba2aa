# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every room's tests share."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import jax
import numpy as np
import pytest

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.weights import init_weights
from pallas_kernels import cases


def make_tiny_config(**overrides) -> ModelConfig:
    fields = {
        "family": "qwen2_moe",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "qkv_bias": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "eos_token_ids": (0,),
    } | overrides
    fields.setdefault("sparse_layers", (True,) * fields["num_layers"])
    fields.setdefault("windows", (0,) * fields["num_layers"])
    return ModelConfig(**fields)


@pytest.fixture(scope="session")
def tiny_config():
    """The function ``tiny_config(**overrides) -> ModelConfig``: Qwen2-MoE, D 64, F 32, 4 experts top-2, 2 layers."""
    return make_tiny_config


@pytest.fixture(scope="session")
def tiny_weights():
    """Float32 random weights of ``tiny_config()``."""
    return init_weights(make_tiny_config(), jax.random.key(0))


@pytest.fixture(scope="module")
def compile_in_a_hurry():
    """Leaves most of XLA's optimizations out for a file of tests on a CPU; never on a GPU."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()  # which do not tell hurried programs from others


@pytest.fixture(scope="session")
def save_hf():
    """The function ``save_hf(folder, dtype="float32", max_shard_size="1GB", **fields) -> torch model``.

    Writes a Qwen2-MoE folder as transformers does, of the sizes of ``tiny_config`` where ``fields`` (of Qwen2MoeConfig)
    do not say otherwise, with random weights large enough for every part to matter; returns the same model.
    """
    import torch
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    def save(folder, dtype="float32", max_shard_size="1GB", seed=0, **fields):
        config = Qwen2MoeConfig(
            **{
                "vocab_size": 128,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 48,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "max_position_embeddings": 512,
                "attn_implementation": "eager",
                "experts_implementation": "eager",
            }
            | fields
        )
        model = Qwen2MoeForCausalLM(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim == 1:
                    value = 0.1 * noise + (1.0 if "norm" in name else 0.0)
                else:
                    value = noise * parameter.shape[-1] ** -0.5
                parameter.data = value.to(getattr(torch, dtype))  # buffers (rotary frequencies) stay float32
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return model

    return save


@pytest.fixture(scope="session")
def save_tokenizer():
    """The function ``save_tokenizer(folder)``: a token for every printable ASCII character, 0 for all else."""
    import json

    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    def save(folder):
        vocab = {"<unk>": 0} | {chr(code): code - 31 for code in range(32, 127)}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.save(str(folder / "tokenizer.json"))
        fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))

    return save


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory, save_hf, save_tokenizer):
    """A complete Hugging Face folder: the tiny Qwen2-MoE, a tokenizer of characters, text/calibration.txt."""
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    save_hf(folder)
    save_tokenizer(folder)
    (folder / "text").mkdir()
    letters = np.random.default_rng(0).choice(list("etaoin shrdlu,."), 4096)
    (folder / "text" / "calibration.txt").write_text("".join(letters))
    return folder


@pytest.fixture
def run_cli(capsys):
    """The function ``run_cli(*argv) -> (exit code, stdout, stderr)``, of one verb of the command line."""
    from pagedweight_jax.cli import main

    def run(*argv):
        code = main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def relative_error():
    """The function ``pallas_kernels.cases.relative_error(out, ref)``, by which ``pagedweight selftest`` judges, too."""
    return cases.relative_error
