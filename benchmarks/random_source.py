# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder of random weights in the shapes of Qwen1.5-MoE-A2.7B: a shard for every layer, bfloat16.

    python benchmarks/random_source.py FOLDER               # 28.6 GB
    python benchmarks/random_source.py FOLDER --layers 2

Tensors have the names that transformers gives them, an expert's projections apart. Random numbers are drawn once and
cut at another place for every tensor: normal, with the deviation that keeps activations at their size. Tokenizer and
calibration text are the demo model's.
"""

import argparse
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16
from random_checkpoint import qwen_moe_config
from safetensors.numpy import save_file

from pagedweight_jax.checkpoint.dense import abstract_weights, named_leaves
from pagedweight_jax.checkpoint.hf import parts
from pagedweight_jax.config import ModelConfig

DEMO = Path(__file__).parents[1] / "checkpoints" / "demo-moe"
NUM_DRAWN = 1 << 24
WRITERS = 8


def hf_config(config: ModelConfig) -> dict:
    """Returns the fields of config.json."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts")
    same += ("shared_expert_intermediate_size", "num_experts_per_tok", "norm_topk_prob", "hidden_act", "rms_norm_eps")
    same += ("rope_theta", "qkv_bias", "tie_word_embeddings", "max_position_embeddings")
    return {name: getattr(config, name) for name in same} | {
        "model_type": config.family,
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "decoder_sparse_step": 1,
        "torch_dtype": "bfloat16",
    }


def write_source(folder: Path, num_layers: int, num_experts: int) -> None:
    """Writes the folder; a shard that is there already is written again."""
    config = qwen_moe_config(num_layers, num_experts)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(DEMO / "text", folder / "text", dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=1))
    drawn = np.random.default_rng(0).standard_normal(NUM_DRAWN, np.float32)
    shards = {}
    for path, leaf in named_leaves(abstract_weights(config)).items():
        words = path.split(".")
        shard = f"model-{words[1] if words[0] == 'layers' else 'outer'}.safetensors"
        shards.setdefault(shard, {}).update(parts(config, (), path, leaf.shape))

    def write(shard: str) -> None:
        rng, tensors = np.random.default_rng(sorted(shards).index(shard)), {}
        for name, shape in shards[shard].items():
            if len(shape) == 1:  # norms and biases
                tensors[name] = np.full(shape, 0 if name.endswith("bias") else 1, bfloat16)
            else:
                tensors[name] = np.resize(scaled[shape[-1]][rng.integers(NUM_DRAWN // 2) :], shape)
        save_file(tensors, folder / shard, metadata={"format": "pt"})

    widths = {shape[-1] for names in shards.values() for shape in names.values() if len(shape) > 1}
    scaled = {width: (drawn * width**-0.5).astype(bfloat16) for width in widths}
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, shards))
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=60)
    args = parser.parse_args()
    write_source(args.folder, args.layers, args.experts)


if __name__ == "__main__":
    main()
