# SPDX-License-Identifier: Apache-2.0
"""The card's figures and its table of bytes, from the files that training leaves.

    python checkpoints/demo_card.py
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

INK, BLUE, ORANGE, GREY = "#222222", "#2b6cb0", "#c05621", "#a0aec0"
BITS = (3, 4, 5, 6, 7, 8)


def plot_losses(log: list[dict], step_tokens: int, path: Path) -> None:
    """Training and validation loss, and the exercises' accuracy, over tokens."""
    tokens = [row["step"] * step_tokens / 1e6 for row in log]
    looked = [row for row in log if "valid" in row]
    looked_tokens = [row["step"] * step_tokens / 1e6 for row in looked]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    left.plot(tokens, [row["text"] for row in log], color=GREY, lw=1, label="training text")
    left.plot(looked_tokens, [row["valid"] for row in looked], color=BLUE, lw=2, label="validation")
    left.set(xlabel="million tokens", ylabel="nats per token", ylim=(2.4, 5), title="Loss")
    left.legend(frameon=False)
    names = {"recall_1500": "recall, 1,500 tokens back", "addition_3_3": "3 + 3 digits", "addition_2_2": "2 + 2 digits"}
    for (name, label), color in zip(names.items(), (BLUE, ORANGE, INK), strict=True):
        right.plot(looked_tokens, [100 * row.get(name, 0) for row in looked], color=color, lw=1.6, label=label)
    right.set(xlabel="million tokens", ylabel="exact match, %", ylim=(-2, 102), title="Held-out exercises")
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_routing(mass_LE: np.ndarray, path: Path) -> None:
    """Heat map of each expert's share of its layer's router weight, in units of the even share."""
    relative = mass_LE * mass_LE.shape[1]
    figure, axes = plt.subplots(figsize=(10, 2.9), constrained_layout=True)
    image = axes.imshow(relative, cmap="viridis", vmin=0, aspect="auto")
    for layer, row in enumerate(relative):
        for expert, value in enumerate(row):
            color = "white" if value < 0.6 * relative.max() else "black"
            axes.text(expert, layer, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    axes.set(xlabel="expert", ylabel="layer", yticks=range(len(relative)), xticks=range(relative.shape[1]))
    axes.set_title("Routing mass on held-out text (1 = even share)")
    figure.colorbar(image)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _expert_blocks(config: dict) -> tuple[int, tuple[tuple[int, int], tuple[int, int]]]:
    """Experts of all layers, and the shapes of their gate_up and down matrices."""
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    return config["num_hidden_layers"] * config["num_experts"], ((2 * width, hidden), (hidden, width))


def bf16_bytes(config: dict) -> int:
    """All routed experts in bf16."""
    blocks, shapes = _expert_blocks(config)
    return blocks * sum(2 * rows * columns for rows, columns in shapes)


def experts_bytes(config: dict, bits: int, floor: int = 3) -> tuple[int, int, int]:
    """Planes, one width's own LUTs, and what paging keeps resident (planes < bits, LUTs floor..bits), all experts."""
    blocks, shapes = _expert_blocks(config)
    planes = blocks * sum(bits * rows * columns // 8 for rows, columns in shapes)
    luts = {b: blocks * sum(2 * rows * 2**b for rows, _ in shapes) for b in range(floor, bits + 1)}
    return planes, luts[bits], planes + sum(luts.values())


def bytes_table(config: dict) -> str:
    """The Markdown table of bytes by width."""
    lines = ["| bits | planes | LUT of this width | resident (floor 3) | MB |", "|---|---|---|---|---|"]
    for bits in BITS:
        planes, lut, resident = experts_bytes(config, bits)
        lines.append(f"| {bits} | {planes:,} | {lut:,} | {resident:,} | {resident / 1e6:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "demo-moe")
    folder = parser.parse_args().folder
    log = [json.loads(line) for line in (folder / "training" / "log.jsonl").read_text().splitlines()]
    results = json.loads((folder / "training" / "results.json").read_text())
    step_tokens = results["training"]["tokens"] // results["training"]["steps"]
    plot_losses(log, step_tokens, folder / "loss.png")
    plot_routing(np.array(results["perplexity"]["heldout_mixed"]["routing_mass"]), folder / "routing.png")
    print(bytes_table(json.loads((folder / "config.json").read_text())))


if __name__ == "__main__":
    main()
