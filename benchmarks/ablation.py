# SPDX-License-Identifier: Apache-2.0
"""What each part of the system is worth: the paper's Table 4 on the demo model, under two memory budgets.

    pagedweight convert checkpoints/demo-moe demo.paged --bits 3..6 && pagedweight calibrate demo.paged ...
    python benchmarks/ablation.py demo.paged --text wiki=wiki.test.raw --text books=books.jsonl.xz

A budget is named by the bits that it leaves the experts beside full contexts. Every row serves the same windows under
the same budget: KL is paired token by token, so small differences mean something.
"""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
from pressure_cases import Case, Text, default_workers, full_context_bytes, score_all, texts

from pagedweight_jax.config import PlannerConfig

FULL = "full system"
UNIFORM = "uniform bits, no movement"
ROWS: dict[str, dict] = {
    FULL: {},
    "without routing statistics": {"planner": PlannerConfig(routing_statistics=False)},
    "without prompt residual": {"planner": PlannerConfig(prompt_residual=False)},
    "without both": {"planner": PlannerConfig(routing_statistics=False, prompt_residual=False)},
    "without global sensitivity": {
        "planner": PlannerConfig(global_sensitivity=False, routing_statistics=False, prompt_residual=False)
    },
    "without page movement": {"mode": "frozen"},
    UNIFORM: {"mode": "frozen", "planner": PlannerConfig(global_sensitivity=False)},
}
"""What differs from the full system. The last row is what is left without global sensitivity and page movement."""


def cases(checkpoint: Path, scored: Sequence[Text], batch: int, budgets: Sequence[float]) -> list[Case]:
    built = []
    for bits, (label, fields), text in product(budgets, ROWS.items(), scored):
        memory_bytes = full_context_bytes(checkpoint, batch, text.window_tokens, bits)
        built.append(
            Case(label=label, checkpoint=checkpoint, text=text, batch=batch, memory_bytes=memory_bytes, **fields)
        )
    return built


def table(records: Sequence[dict], budgets: dict[int, float]) -> str:
    """Returns Markdown: per budget the KL and perplexity of each row and text, and the change from the full system.

    The change comes with its standard error over windows, which are paired.
    """
    names = list(dict.fromkeys(r["text"] for r in records))
    lines = []
    for memory_bytes, bits in budgets.items():
        rows = {(r["label"], r["text"]): r for r in records if r["memory_bytes"] == memory_bytes}
        lines += [
            f"\n{memory_bytes / 2**20:.1f} MiB, {bits:g} bits at full context (KL in millinats a token, perplexity)\n",
            "| | mean bits | " + " | ".join(f"{name} KL | {name} ppl" for name in names) + " | KL, all | change |",
            "|---" * (2 * len(names) + 4) + "|",
        ]
        base_W = _kl_of_windows(rows, FULL, names)
        for label in ROWS:
            if not all((label, name) in rows for name in names):
                continue
            cells = [f"{1e3 * rows[label, n]['kl']:.2f} | {rows[label, n]['perplexity']:.3f}" for n in names]
            kl_W = _kl_of_windows(rows, label, names)
            mean_bits = np.mean([rows[label, name]["mean_bits"] for name in names])
            change = "" if label == FULL else _change(kl_W, base_W)
            cells = [label, f"{mean_bits:.2f}", *cells, f"{1e3 * kl_W.mean():.2f}", change]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _kl_of_windows(rows: dict, label: str, names: Sequence[str]) -> np.ndarray:
    return np.concatenate([rows[label, name]["kl_windows"] for name in names])


def _change(kl_W: np.ndarray, base_W: np.ndarray) -> str:
    change_W = 100 * (kl_W - base_W) / base_W.mean()
    error = change_W.std(ddof=1) / len(change_W) ** 0.5 if len(change_W) > 1 else 0.0
    return f"{change_W.mean():+.1f} ± {error:.1f} %"


def draw(path: Path, records: Sequence[dict], budgets: dict[int, float]) -> None:
    """Writes bars of KL, averaged over the texts, one panel per budget; whiskers are standard errors over windows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(budgets), figsize=(5.2 * len(budgets), 3.4), sharey=True, squeeze=False)
    for axis, (memory_bytes, bits) in zip(axes[0], budgets.items()):
        for place, label in enumerate(ROWS):
            kl_W = 1e3 * np.concatenate(
                [r["kl_windows"] for r in records if (r["label"], r["memory_bytes"]) == (label, memory_bytes)] or [[]]
            )
            if not len(kl_W):
                continue
            color = "#2563a8" if label == FULL else "#9fb8d3"
            error = kl_W.std(ddof=1) / len(kl_W) ** 0.5 if len(kl_W) > 1 else 0.0
            axis.barh(place, kl_W.mean(), xerr=error, color=color, ecolor="#555555", height=0.7)
            axis.text(kl_W.mean() + error, place, f" {kl_W.mean():.2f}", va="center", fontsize=8)
        axis.set_yticks(range(len(ROWS)), list(ROWS), fontsize=9)
        axis.set_title(f"{memory_bytes / 2**20:.0f} MiB ({bits:g} bits at full context)", fontsize=10)
        axis.set_xlabel("KL from the unquantized model, millinats per token", fontsize=9)
        axis.margins(x=0.14)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="paged, with its policy")
    parser.add_argument("--model", type=Path, default=Path("checkpoints/demo-moe"), help="its Hugging Face folder")
    parser.add_argument("--text", action="append", required=True, help="NAME=PATH or NAME=PATH@WINDOWS_TO_SKIP")
    parser.add_argument("--budgets", type=float, nargs="+", default=[3.25, 4.0], help="bits left at full context")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--windows", type=int, default=16, help="of each text")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes of two cores each")
    parser.add_argument("--cache", type=Path, default=Path(".ablation"), help="the unquantized model's hidden states")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/ablation.jsonl"))
    parser.add_argument("--schedules", type=Path, help="folder for every case's schedule")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    scored = texts(args.text, args.windows, args.window)
    built = cases(args.checkpoint, scored, args.batch, args.budgets)
    records = score_all(
        built, args.model, args.cache, args.results, workers=args.workers, schedules=args.schedules
    )
    budgets = {full_context_bytes(args.checkpoint, args.batch, args.window, bits): bits for bits in args.budgets}
    print(table(records, budgets))
    if args.plot:
        draw(args.plot, records, budgets)


if __name__ == "__main__":
    main()
