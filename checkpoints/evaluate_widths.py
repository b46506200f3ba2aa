# SPDX-License-Identifier: Apache-2.0
"""What each uniform width costs the demo model: perplexity and exercises of a paged checkpoint's weights.

    pagedweight convert checkpoints/demo-moe demo.paged --bits 3..6
    python checkpoints/evaluate_widths.py demo.paged --eval EVAL [--card checkpoints/demo-moe]

Float32 throughout, so that what is measured is the width. ``--card`` writes the table into the folder's README.md and
the figures into its training/widths.json.
"""

import argparse
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from demo_card import bf16_bytes, experts_bytes
from demo_export import read_hub_folder
from demo_model import DemoConfig, Params
from evaluate_demo import Evaluator, exercise_sets, read_eval_texts
from tokenizers import Tokenizer

from pagedweight_jax.checkpoint.paged import PagedCheckpoint, open_checkpoint
from pagedweight_jax.config import DOWN, GATE_UP
from pallas_kernels.bitplane import dequantize_pages

ADDITIONS = ("addition_2_2", "addition_2_3", "addition_3_2", "addition_3_3")


def at_width(params: Params, checkpoint: PagedCheckpoint, bits: int) -> Params:
    """Returns the parameters with every routed expert as the checkpoint's pages give it at ``bits`` bits."""

    def block(layer: int, kind: int) -> np.ndarray:
        layout = checkpoint.manifest.layouts()[kind]
        pages = [checkpoint.load_pages(layer, kind, page) for page in range(bits)]
        return np.asarray(jax.vmap(partial(dequantize_pages, layout=layout))(pages))

    layers = []
    for index, layer in enumerate(params["layers"]):
        gate_ENC, up_ENC = np.split(block(index, GATE_UP), 2, axis=1)
        layers.append(layer | {"expert_gate": gate_ENC, "expert_up": up_ENC, "expert_down": block(index, DOWN)})
    return params | {"layers": layers}


def evaluate(evaluator: Evaluator, params: Params, texts: dict[str, np.ndarray], sets: dict) -> dict:
    """Returns perplexity by text and accuracy by exercise set."""
    short = replace(evaluator, length=32, batch=300)  # sums need no context
    return {
        "perplexity": {name: evaluator.perplexity(params, ids, 1)["perplexity"] for name, ids in texts.items()},
        "exercises": {
            name: (short if name in ADDITIONS else evaluator).accuracy(params, exercises)
            for name, exercises in sets.items()
        },
    }


def card_table(results: dict[str, dict], hub_config: dict) -> str:
    """Returns the card's section on quality by width, in Markdown."""
    texts = list(results["bf16"]["perplexity"])
    lines = [
        "| width | resident MB | " + " | ".join(f"{t.replace('_', ' ')} ppl" for t in texts) + " | recall | sums |",
        "|---" * (4 + len(texts)) + "|",
    ]
    for name, result in results.items():
        num_bytes = bf16_bytes(hub_config) if name == "bf16" else experts_bytes(hub_config, int(name))[2]
        cells = []
        for text in texts:
            value, base = result["perplexity"][text], results["bf16"]["perplexity"][text]
            cells.append(f"{value:.3f}" + ("" if name == "bf16" else f" ({100 * (value / base - 1):+.2f} %)"))
        recall = np.mean([v for k, v in result["exercises"].items() if k not in ADDITIONS])
        sums = np.mean([result["exercises"][k] for k in ADDITIONS])
        label = name if name == "bf16" else f"{name} bits"
        cells = [label, f"{num_bytes / 1e6:.2f}", *cells, f"{100 * recall:.1f} %", f"{100 * sums:.1f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="the paged checkpoint")
    parser.add_argument("--model", type=Path, default=Path("checkpoints/demo-moe"), help="the Hugging Face folder")
    parser.add_argument("--eval", type=Path, required=True, help="folder of evaluation texts")
    parser.add_argument("--exercises", type=int, default=300, help="exercises of each set")
    parser.add_argument("--max-windows", type=int, help="windows of each text; all by default")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--card", type=Path, help="write the table into this folder's README.md")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.checkpoint)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    cfg = DemoConfig()
    evaluator = Evaluator(cfg, tokenizer, cfg.max_position_embeddings, 8, "xla", jnp.float32)
    read = read_eval_texts(args.eval)
    if not read:
        parser.error(f"{args.eval}: none of the evaluation texts is there")
    texts = {name: np.array(evaluator.encode(text), np.int32) for name, text in read.items()}
    if args.max_windows:
        texts = {name: ids[: args.max_windows * evaluator.length] for name, ids in texts.items()}
    sets = exercise_sets(evaluator, next(iter(read.values()))[:400_000], args.exercises)
    params = read_hub_folder(args.model, cfg)
    results = {"bf16": evaluate(evaluator, params, texts, sets)}
    print("bf16", results["bf16"], flush=True)
    for bits in range(checkpoint.manifest.min_bits, checkpoint.manifest.max_bits + 1):
        results[str(bits)] = evaluate(evaluator, at_width(params, checkpoint, bits), texts, sets)
        print(bits, results[str(bits)], flush=True)
    table = card_table(results, json.loads((args.model / "config.json").read_text()))
    print(table)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    if args.card:
        write_card(args.card, results, table)


def write_card(folder: Path, results: dict, table: str) -> None:
    """Replaces the marked section of the folder's README.md, and writes training/widths.json."""
    card = folder / "README.md"
    marked = r"(<!-- quantized:begin -->\n).*(<!-- quantized:end -->)"
    card.write_text(re.sub(marked, lambda m: f"{m[1]}{table}\n{m[2]}", card.read_text(), flags=re.DOTALL))
    (folder / "training" / "widths.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
