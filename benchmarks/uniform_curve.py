# SPDX-License-Identifier: Apache-2.0
"""Paged weights against uniform widths at equal device bytes: the whole curve, and what is saved at equal quality.

    pagedweight convert checkpoints/demo-moe demo.paged --bits 3..6
    pagedweight convert checkpoints/demo-moe demo2.paged --bits 2..6
    pagedweight convert checkpoints/demo-moe demo7.paged --bits 3..7
    python benchmarks/uniform_curve.py demo.paged --low demo2.paged --high demo7.paged --text wiki=wiki.test.raw

Device bytes are all that a server holds for full contexts of every row: dense weights, tables, temporaries, KV cache
and experts. A static checkpoint needs the LUT of its width alone, and no staging memory; "all LUTs" is what the same
width takes in pages. Paged weights get that very number as their budget, and pay for LUTs and staging out of it.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from pressure_cases import (
    Case,
    Text,
    default_workers,
    full_context_bytes,
    score_all,
    sizes,
    staging_bytes,
    texts,
)

from pagedweight_jax.checkpoint.paged import open_checkpoint

GRID = (3.0, 3.5, 4.0)
"""Budgets of the curve, in bits that they leave the experts' pages beside full contexts."""

PAGED, LARGE, STATIC = "paged", "paged, staging not counted", "static mixed widths"
"""Curves. A model of usual size has hundreds of times the weights and little more staging memory than the demo."""

EQUAL = 4
"""The uniform width at which bits saved are read off."""


@dataclass(frozen=True, kw_only=True)
class Width:
    """A uniform width of one checkpoint, and the device bytes of a static server with full contexts.

    Attributes:
      own_bytes: with the LUTs of this width alone.
      all_bytes: with all LUTs up to this width, as pages hold them.
    """

    checkpoint: Path
    bits: int
    own_bytes: int
    all_bytes: int


def uniform_width(checkpoint: Path, batch: int, window_tokens: int, bits: int) -> Width:
    size = sizes(checkpoint)
    all_bytes = full_context_bytes(checkpoint, batch, window_tokens, bits) - staging_bytes(checkpoint)
    own_bytes = all_bytes - size.experts_bytes[bits] + size.own_lut_bytes[bits]
    return Width(checkpoint=checkpoint, bits=bits, own_bytes=own_bytes, all_bytes=all_bytes)


def uniform_cases(widths: Sequence[Width], scored: Sequence[Text], batch: int) -> list[Case]:
    """Uniform widths; their quality does not depend on the batch."""
    return [
        Case(
            label=f"uniform {width.bits}",
            checkpoint=width.checkpoint,
            text=text,
            batch=batch,
            memory_bytes=width.all_bytes + staging_bytes(width.checkpoint),
            mode="frozen",
            bits=width.bits,
        )
        for width, text in product(widths, scored)
    ]


def paged_cases(
    checkpoint: Path, scored: Sequence[Text], batch: int, budgets: Sequence[int], mode: str = "dynamic"
) -> list[Case]:
    label = PAGED if mode == "dynamic" else STATIC
    return [
        Case(label=label, checkpoint=checkpoint, text=text, batch=batch, memory_bytes=memory_bytes, mode=mode)
        for memory_bytes, text in product(budgets, scored)
    ]


def fitting(checkpoint: Path, batch: int, window_tokens: int, budgets: Iterable[int]) -> list[int]:
    """Returns the budgets that hold all full contexts beside the lowest bits, ascending; others serve fewer rows."""
    least_bytes = full_context_bytes(checkpoint, batch, window_tokens, open_checkpoint(checkpoint).manifest.min_bits)
    return sorted(memory_bytes for memory_bytes in budgets if memory_bytes >= least_bytes)


def mean_by_budget(records: Sequence[dict], label: str, checkpoint: str, batch: int) -> dict[int, dict]:
    """Returns {memory_bytes: figures averaged over the texts}, ascending; perplexities by their geometric mean."""
    groups: dict[int, list[dict]] = {}
    for r in records:
        if (r["label"], r["checkpoint"], r["batch"]) == (label, checkpoint, batch):
            groups.setdefault(r["memory_bytes"], []).append(r)
    return {
        memory_bytes: {
            "kl": float(np.mean([r["kl"] for r in group])),
            "perplexity": float(np.exp(np.mean(np.log([r["perplexity"] for r in group])))),
            "mean_bits": float(np.mean([r["mean_bits"] for r in group])),
            "lowest_bits": float(np.mean([r["lowest_bits"] for r in group])),
        }
        for memory_bytes, group in sorted(groups.items())
    }


def bytes_at(curve: dict[int, dict], name: str, value: float) -> int | None:
    """Returns the fewest bytes at which a curve's figure is as good as ``value``, between its points on a log scale.

    None if it never is. At the curve's lowest budget the answer is that budget: fewer were not tried.
    """
    points = sorted(curve.items())
    if points[0][1][name] <= value:
        return points[0][0]
    for (low_bytes, low), (high_bytes, high) in pairwise(points):
        if high[name] <= value < low[name]:
            share = np.log(low[name] / value) / np.log(low[name] / high[name])
            return int(low_bytes + share * (high_bytes - low_bytes))
    return None


def equal_bytes_table(widths: Sequence[Width], uniform: dict[tuple[str, int], dict], curves: dict[str, dict]) -> str:
    """Returns Markdown: each uniform width beside paged weights under its own bytes, and under its bytes in pages."""
    lines = [
        "| uniform | KL | ppl | own LUT, MiB | paged: bits | KL | ppl | all LUTs, MiB | paged: bits | KL | ppl |",
        "|---" * 11 + "|",
    ]
    for width in widths:
        name = width.checkpoint.name
        u, curve = uniform[name, width.bits], curves[name]
        cells = [f"{width.bits} bits of {name}", f"{1e3 * u['kl']:.2f}", f"{u['perplexity']:.3f}"]
        for memory_bytes in (width.own_bytes, width.all_bytes):
            p = curve.get(memory_bytes)
            cells.append(f"{memory_bytes / 2**20:.1f}")
            cells += [f"{p['mean_bits']:.2f}", f"{1e3 * p['kl']:.2f}", f"{p['perplexity']:.3f}"] if p else ["", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def saved_line(width: Width, uniform: dict, curve: dict[int, dict], num_weights: int, what: str) -> str:
    """Says how many bits a weight ``curve`` saves at the quality of a uniform width."""
    parts = []
    for name in ("kl", "perplexity"):
        needed_bytes = bytes_at(curve, name, uniform[name])
        if needed_bytes is None:
            parts.append(f"equal {name}: never reached")
            continue
        least = ">= " if needed_bytes == min(curve) else ""
        own, full = (least + f"{8 * (b - needed_bytes) / num_weights:.2f}" for b in (width.own_bytes, width.all_bytes))
        parts.append(f"equal {name}: {own} bits saved a weight (own LUT), {full} (all LUTs)")
    return f"{what} against uniform {width.bits}: " + "; ".join(parts)


def draw(path: Path, panels: dict[int, dict[str, list[tuple[float, float]]]]) -> None:
    """Writes KL over device bytes, one panel per batch; ``panels[batch][curve]`` holds (bytes, KL)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = {
        PAGED: ("o-", "#2563a8"),
        LARGE: (".:", "#2563a8"),
        STATIC: ("s--", "#7a9cc6"),
        "uniform, own LUT": ("^-", "#c2410c"),
        "uniform, all LUTs": ("v:", "#e08a5b"),
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(5.6 * len(panels), 4), sharey=True, squeeze=False)
    for axis, (batch, curves) in zip(axes[0], panels.items()):
        for name, (style, color) in styles.items():
            x, y = np.array(sorted(curves[name])).T
            axis.plot(x / 2**20, 1e3 * y, style, color=color, ms=5, label=name)
        axis.set(yscale="log", xlabel="device memory (MiB)", title=f"{batch} contexts of 2,048 tokens")
        axis.grid(alpha=0.25, which="both")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("KL from the unquantized model\n(millinats per token)")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="the paged checkpoint of the curve")
    parser.add_argument("--low", type=Path, help="one with a lower floor, for 3 bits")
    parser.add_argument("--high", type=Path, help="one with a wider top, for 5 and 6 bits")
    parser.add_argument("--model", type=Path, default=Path("checkpoints/demo-moe"), help="their Hugging Face folder")
    parser.add_argument("--text", action="append", required=True, help="NAME=PATH or NAME=PATH@WINDOWS_TO_SKIP")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--windows", type=int, default=16, help="of each text")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes of two cores each")
    parser.add_argument("--cache", type=Path, default=Path(".ablation"), help="the unquantized model's hidden states")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/uniform_curve.jsonl"))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    scored = texts(args.text, args.windows, args.window)
    widths = {batch: uniform_widths(args, batch) for batch in args.batches}
    first = args.batches[0]
    built = uniform_cases(widths[first], scored, first)
    built += paged_cases(args.checkpoint, scored, first, grid(args, first), mode="frozen")
    for batch in args.batches:
        for checkpoint in dict.fromkeys(w.checkpoint for w in widths[batch]):
            own = [w for w in widths[batch] if w.checkpoint == checkpoint]
            budgets = {memory for w in own for memory in (w.own_bytes, w.all_bytes)}
            if checkpoint == args.checkpoint:
                budgets |= set(grid(args, batch))
            built += paged_cases(checkpoint, scored, batch, fitting(checkpoint, batch, args.window, budgets))
    records = score_all(built, args.model, args.cache, args.results, workers=args.workers)
    panels = report(args, widths, records)
    if args.plot:
        draw(args.plot, panels)


def grid(args: argparse.Namespace, batch: int) -> list[int]:
    return [full_context_bytes(args.checkpoint, batch, args.window, bits) for bits in GRID]


def uniform_widths(args: argparse.Namespace, batch: int) -> list[Width]:
    """3 to 6 bits of the checkpoint; 3 of the one with a lower floor, 5 and 6 of the one with a wider top."""
    which = {args.checkpoint: (3, 4, 5, 6), args.low: (3,), args.high: (5, 6)}
    pairs = [(checkpoint, bits) for checkpoint, widths in which.items() if checkpoint for bits in widths]
    return [uniform_width(checkpoint, batch, args.window, bits) for checkpoint, bits in pairs]


def report(args: argparse.Namespace, widths: dict[int, list[Width]], records: list[dict]) -> dict[int, dict]:
    """Prints the tables and returns what ``draw`` draws."""
    first = args.batches[0]
    uniform = {}
    for width in widths[first]:
        figures = mean_by_budget(records, f"uniform {width.bits}", width.checkpoint.name, first)
        uniform[width.checkpoint.name, width.bits] = next(iter(figures.values()))
    name, num_weights = args.checkpoint.name, sizes(args.checkpoint).num_weights
    panels = {}
    for batch in args.batches:
        print(f"\n{batch} contexts of {args.window} tokens (KL in millinats per token)\n")
        curves = {}
        for checkpoint in dict.fromkeys(w.checkpoint for w in widths[batch]):
            curve = mean_by_budget(records, PAGED, checkpoint.name, batch)
            curves[checkpoint.name] = {b: curve[b] for b in fitting(checkpoint, batch, args.window, curve)}
        staging = staging_bytes(args.checkpoint)
        more_bytes = grid(args, batch)[0] - grid(args, first)[0]
        frozen = mean_by_budget(records, STATIC, name, first)
        drawn = {
            PAGED: curves[name],
            LARGE: {memory_bytes - staging: figures for memory_bytes, figures in curves[name].items()},
            STATIC: {memory_bytes + more_bytes - staging: figures for memory_bytes, figures in frozen.items()},
        }
        print(equal_bytes_table(widths[batch], uniform, curves))
        equal = next(w for w in widths[batch] if (w.checkpoint, w.bits) == (args.checkpoint, EQUAL))
        print()
        for what, curve in drawn.items():
            print(saved_line(equal, uniform[name, EQUAL], curve, num_weights, what))
        own = [w for w in widths[batch] if w.checkpoint == args.checkpoint]
        panels[batch] = {
            **{what: [(b, figures["kl"]) for b, figures in curve.items()] for what, curve in drawn.items()},
            "uniform, own LUT": [(w.own_bytes, uniform[name, w.bits]["kl"]) for w in own],
            "uniform, all LUTs": [(w.all_bytes, uniform[name, w.bits]["kl"]) for w in own],
        }
    return panels


if __name__ == "__main__":
    main()
