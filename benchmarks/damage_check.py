# SPDX-License-Identifier: Apache-2.0
"""Is the planner's proxy right? Predicted damage of bit reductions against the measured rise of KL and loss.

    pagedweight convert checkpoints/demo-moe demo.paged --bits 3..8
    python benchmarks/damage_check.py demo.paged --results benchmarks/results/damage_check.jsonl --plot damage_check.png

An action (i, b -> b') is measured by two states: every other block has max bits, block i has b or b' bits. Only the
layers behind the block run again. A bundle lowers a random set of blocks together. KL is that of the unquantized
model's next-token distribution to the state's, in nats per token, on held-out text. The proxies know calibration text
only (``damage_proxies``). Float32 throughout. What routing and prompts add to them is measured in ``damage_domains``.
"""

import argparse
import time
from itertools import product
from pathlib import Path

import damage_proxies as proxies
import numpy as np
from damage_model import Model, read_model
from damage_states import Scorer
from record import Results, append_result
from scipy.stats import spearmanr

from pagedweight_jax.calibrate.text import choose_sequences, read_text, tokenize
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, open_checkpoint
from pagedweight_jax.config import DOWN, GATE_UP, KINDS
from pagedweight_jax.evaluate.perplexity import split_windows
from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.planning.planner import initial_bits

WINDOW_TOKENS = 512
FIT_BITS = 4
"""At which the per-layer, per-kind scales are fitted."""

BUDGET_PROXIES = ("checkpoint", "mean", "sum", "relative", "relative columns", "fisher")
"""Those that also choose the bits of whole models."""


def sensitivities(model: Model, importances: list[dict]) -> dict[str, np.ndarray]:
    """Returns every proxy's s_i^b, float64 [L, E, U, Q]."""
    widths, config = sorted(model.quantized), model.weights.config
    s = {proxy: np.empty((config.num_layers, config.num_experts, 2, len(widths))) for proxy in proxies.PROXIES}
    for layer, kind, (q, bits) in product(range(config.num_layers), (0, 1), enumerate(widths)):
        error_ENC = model.squared_error(layer, kind, bits)
        for proxy, s_LEUQ in s.items():
            s_LEUQ[layer, :, kind, q] = (importances[layer][proxy, kind] * error_ENC).sum((1, 2), dtype=np.float64)
    return s


def fitted(model: Model, s_LEUQ: np.ndarray, rises_LU: np.ndarray) -> np.ndarray:
    """Returns s scaled by layer and kind to the measured rises of KL when all of their blocks are lowered."""
    q = sorted(model.quantized).index(FIT_BITS)
    return s_LEUQ * (rises_LU / (s_LEUQ[..., q] - s_LEUQ[..., -1]).sum(1))[:, None, :, None]


def layer_rises(scorer: Scorer) -> np.ndarray:
    """Returns the rise of KL when all blocks of a layer and kind go from max to FIT_BITS bits, [L, U]."""
    base = scorer.state(scorer.full())[0]
    rises_LU = np.empty(scorer.full().shape[::2])
    for layer, kind in np.ndindex(rises_LU.shape):
        bits_LEU = scorer.full()
        bits_LEU[layer, :, kind] = FIT_BITS
        rises_LU[layer, kind] = scorer.state(bits_LEU)[0] - base
    return rises_LU


def random_bundles(full_LEU: np.ndarray, min_bits: int, count: int) -> list[np.ndarray]:
    """Returns random states: some share of the blocks of some layers and kinds, each at random bits."""
    rng = np.random.default_rng(0)
    bundles = []
    for _ in range(count):
        bits_LEU = rng.integers(min_bits, full_LEU.max(), full_LEU.shape, np.uint8)
        chosen_LEU = rng.random(full_LEU.shape) < rng.choice([0.05, 0.2, 0.5])
        chosen_LEU &= rng.random((full_LEU.shape[0], 1, 2)) < rng.choice([0.5, 1])
        bundles.append(np.where(chosen_LEU, bits_LEU, full_LEU))
    return bundles


def of_state(s_LEUQ: np.ndarray, bits_LEU: np.ndarray, min_bits: int) -> float:
    """Returns the predicted damage of a state, in the proxy's unit."""
    q_LEU = (bits_LEU - min_bits).astype(int)
    return float((np.take_along_axis(s_LEUQ, q_LEU[..., None], -1)[..., 0] - s_LEUQ[..., -1]).sum())


def rank_correlations(g_LEUR: np.ndarray, rise_LEUR: np.ndarray, min_bits: int) -> dict:
    """Returns Spearman's coefficient over all actions, and by layer, kind and step b -> b - 1."""

    def rho(index):
        return round(float(spearmanr(g_LEUR[index].ravel(), rise_LEUR[index].ravel())[0]), 4)

    L, _, _, R = g_LEUR.shape
    return {
        "overall": rho(...),
        "layer": [rho(layer) for layer in range(L)],
        "kind": {name: rho(np.s_[:, :, u]) for u, name in enumerate(KINDS)},
        "step": {f"{min_bits + r + 1}->{min_bits + r}": rho(np.s_[..., r]) for r in range(R)},
    }


def check_singles(
    scorer: Scorer, predictions: dict[str, np.ndarray], experts: np.ndarray, results: Results
) -> np.ndarray:
    """Records the rank correlations of the actions of single blocks; returns their rises of KL, [L, experts, U, R]."""
    min_bits = min(scorer.model.quantized)
    score_LEUQ2 = scorer.single_blocks(experts)
    rise_LEUR, loss_rise_LEUR = np.moveaxis(-np.diff(score_LEUQ2, axis=3), -1, 0)
    append_result(
        results,
        "measured",
        {
            "windows": len(scorer.windows_BT),
            "window_tokens": WINDOW_TOKENS,
            "experts": experts.tolist(),
            "kl_rise_LEUR": [float(f"{x:.4g}") for x in rise_LEUR.ravel()],
            "shape": rise_LEUR.shape,
            "kl_against_loss": rank_correlations(rise_LEUR, loss_rise_LEUR, min_bits),
        },
    )
    for proxy, s_LEUQ in predictions.items():
        g_LEUR = -np.diff(s_LEUQ[:, experts], axis=3)
        record = {"proxy": proxy, "kl": rank_correlations(g_LEUR, rise_LEUR, min_bits)}
        record["loss"] = rank_correlations(g_LEUR, loss_rise_LEUR, min_bits)["overall"]
        ratio_LU = rise_LEUR[..., 0].sum(1) / g_LEUR[..., 0].sum(1)  # 4 -> 3 bits, the largest rises
        record["kl_per_predicted"] = {name: [float(f"{x:.4g}") for x in ratio_LU[:, u]] for u, name in enumerate(KINDS)}
        append_result(results, "single blocks", record)
        print(f"{proxy:32} {record['kl']['overall']:.3f} loss {record['loss']:.3f} {record['kl']}", flush=True)
    return rise_LEUR


def check_bundles(scorer: Scorer, predictions: dict[str, np.ndarray], count: int, results: Results) -> None:
    """Records how the sum of the predictions follows the KL of random sets of blocks lowered together."""
    min_bits = min(scorer.model.quantized)
    bundles = random_bundles(scorer.full(), min_bits, count)
    rises = np.array([scorer.state(bits_LEU) for bits_LEU in bundles]) - scorer.state(scorer.full())
    for proxy, s_LEUQ in predictions.items():
        predicted = [of_state(s_LEUQ, bits_LEU, min_bits) for bits_LEU in bundles]
        rho = {name: round(float(spearmanr(predicted, rises[:, i])[0]), 4) for i, name in enumerate(("kl", "loss"))}
        append_result(results, "bundles", {"proxy": proxy, "count": count, "spearman": rho})
        print(f"bundles {proxy:32} {rho}", flush=True)


def check_budgets(
    scorer: Scorer, predictions: dict[str, np.ndarray], checkpoint: PagedCheckpoint, results: Results, label: str
) -> None:
    """Records KL and perplexity of ``initial_bits`` at the bytes of uniform widths, for every proxy, and of uniform."""
    manifest = checkpoint.manifest
    widths = range(manifest.min_bits, manifest.max_bits + 1)
    bytes_UQ = np.array([[layout.resident_bytes(b) for b in widths] for layout in manifest.layouts()], np.int64)
    num_blocks = scorer.full()[..., 0].size
    _, loss = scorer.score(scorer.model.weights)
    append_result(results, "unquantized", {"perplexity": round(float(np.exp(loss)), 4)})
    for bits in (4, 5):
        budget_bytes = num_blocks * int(bytes_UQ[:, bits - manifest.min_bits].sum())
        states = {"uniform": np.full_like(scorer.full(), bits)}
        for proxy, s_LEUQ in predictions.items():
            calibration = Calibration(
                sensitivity_LEUQ=np.maximum(s_LEUQ, 0), min_bits=manifest.min_bits, max_bits=manifest.max_bits
            )
            states[proxy] = initial_bits(calibration, bytes_UQ, budget_bytes)
        for proxy, bits_LEU in states.items():
            kl, loss = scorer.state(bits_LEU)
            used_bytes = sum(
                int(bytes_UQ[u, bits_LEU[..., u].astype(int) - manifest.min_bits].sum()) for u in (GATE_UP, DOWN)
            )
            record = {
                "checkpoint": label,
                "bits": bits,
                "proxy": proxy,
                "expert_bytes": used_bytes,
                "kl": float(f"{kl:.5g}"),
                "perplexity": round(float(np.exp(loss)), 4),
                "mean_bits_LU": bits_LEU.mean(1).round(2).tolist(),
            }
            append_result(results, "budget", record)
            print(record, flush=True)


def plot(path: Path, rise_LEUR: np.ndarray, predictions: dict[str, np.ndarray], experts: np.ndarray) -> None:
    """Writes a scatter of measured against predicted damage, one panel per proxy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(predictions), figsize=(4.2 * len(predictions), 3.8), sharey=True)
    for axis, (proxy, s_LEUQ) in zip(np.atleast_1d(axes), predictions.items()):
        g_LEUR = -np.diff(s_LEUQ[:, experts], axis=3)
        for layer, kind in np.ndindex(g_LEUR.shape[::2]):
            label = f"layer {layer}" if kind == GATE_UP else None
            x, y, marker = g_LEUR[layer, :, kind], rise_LEUR[layer, :, kind], "ox"[kind]
            axis.plot(x.ravel(), y.ravel(), marker, color=f"C{layer}", ms=3.5, alpha=0.7, label=label)
        rho = spearmanr(g_LEUR.ravel(), rise_LEUR.ravel())[0]
        axis.set(xscale="log", yscale="log", xlabel="predicted damage", title=f"{proxy}: Spearman {rho:.2f}")
        axis.set_ylim(bottom=1e-7)
    axes[0].set_ylabel("measured rise of KL (nats per token)")
    axes[0].legend(fontsize=7, title="o gate_up, x down", title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="the paged checkpoint")
    parser.add_argument("--model", type=Path, default=Path("checkpoints/demo-moe"), help="its Hugging Face folder")
    parser.add_argument("--windows", type=int, default=4, help="held-out windows for actions and bundles")
    parser.add_argument("--budget-windows", type=int, default=24, help="held-out windows for whole models")
    parser.add_argument("--sequences", type=int, default=32, help="calibration sequences of the proxies")
    parser.add_argument("--experts", type=int, default=8, help="experts sampled of each layer")
    parser.add_argument("--bundles", type=int, default=48, help="random sets of blocks")
    parser.add_argument("--only-budgets", action="store_true", help="with the checkpoint's own sensitivities alone")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    started, results = time.perf_counter(), Results(args.results)
    checkpoint = open_checkpoint(args.checkpoint)
    config = checkpoint.manifest.config
    model = read_model(args.model, checkpoint)
    _, tokens = tokenize(args.model, read_text(args.model / "text" / "heldout.txt"), config.vocab_size)
    windows = split_windows(tokens, WINDOW_TOKENS)
    begin, tokens = tokenize(args.model, read_text(args.model / "text" / "calibration.txt"), config.vocab_size)
    sequences = choose_sequences(begin, tokens, args.sequences, WINDOW_TOKENS, seed=0)

    predictions = {"checkpoint": checkpoint.sensitivity}
    if not args.only_budgets:
        predictions |= sensitivities(model, proxies.importances(model.weights, sequences))
        rises_LU = layer_rises(Scorer.on(model, sequences[:4]))
        for proxy in ("mean", "sum", "routed", "relative"):
            predictions[f"{proxy}, scaled"] = fitted(model, predictions[proxy], rises_LU)
        scorer = Scorer.on(model, _spread(windows, args.windows))
        experts = np.sort(np.random.default_rng(0).choice(config.num_experts, args.experts, replace=False))
        rise_LEUR = check_singles(scorer, predictions, experts, results)
        check_bundles(scorer, predictions, args.bundles, results)
        if args.plot:
            shown = ("mean", "sum", "relative")
            plot(args.plot, rise_LEUR, {proxy: predictions[proxy] for proxy in shown}, experts)
    scorer = Scorer.on(model, _spread(windows, args.budget_windows))
    whole = {proxy: s_LEUQ for proxy, s_LEUQ in predictions.items() if proxy in BUDGET_PROXIES}
    check_budgets(scorer, whole, checkpoint, results, args.checkpoint.name)
    print(f"{time.perf_counter() - started:.0f} s")


def _spread(windows: np.ndarray, count: int) -> np.ndarray:
    return windows[np.linspace(0, len(windows) - 1, count).astype(int)]


if __name__ == "__main__":
    main()
