# SPDX-License-Identifier: Apache-2.0
"""Do routing masses and prompt residuals predict damage better? Predicted against measured, text by text.

    pagedweight convert checkpoints/demo-moe demo.paged --bits 3..6
    pagedweight calibrate demo.paged
    python benchmarks/damage_domains.py demo.paged wiki.txt code.txt --results benchmarks/results/damage_domains.jsonl

Measured as in ``damage_check``: the rise of the KL divergence when one block loses a bit and all others have max bits,
on windows of each text. The planner predicts it with ``score_damage``, from calibration text and

    text        the routing and norms of the text's windows themselves      against the KL of those windows
    after       those of a window's first half                              against the KL of its second half

with the global damage alone, with routing, and with the prompt residual as well. ``proxy`` is the weighted error
with the measured tokens' own importances: what a perfect prediction of it would score.

What better predictions buy: on longer windows the planner frees a share of the bytes after the first half; the blocks
that it lowers cost the second half some of that proxy. ``best`` knows the second half.
"""

import argparse
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import damage_proxies as proxies
import jax
import jax.numpy as jnp
import numpy as np
from damage_model import Model, read_model
from record import Results, append_result
from scipy.stats import spearmanr

from pagedweight_jax.calibrate.residual import merge_spans, request_signals
from pagedweight_jax.calibrate.residual_policy import SHARES, lowered_by, planner_damage
from pagedweight_jax.calibrate.search import NEUTRAL
from pagedweight_jax.calibrate.sequences import SequenceStatistics, measure_sequences
from pagedweight_jax.calibrate.text import read_text, tokenize
from pagedweight_jax.checkpoint.draft import open_draft
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, open_checkpoint
from pagedweight_jax.checkpoint.policy import load_calibration
from pagedweight_jax.config import DOWN, GATE_UP
from pagedweight_jax.evaluate.perplexity import split_windows
from pagedweight_jax.models.layers import activation, mlp, rms_norm
from pagedweight_jax.models.moe import shared_expert
from pagedweight_jax.models.transformer import logits
from pagedweight_jax.models.weights import MLPWeights
from pagedweight_jax.paging.table import bytes_table
from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.planning.policy import Policy

WINDOW_TOKENS = 512
LONG_TOKENS = 2048
HALVES = 2
STARTED = time.perf_counter()


def _experts(m_TD, ids_TK, weights_TK, experts, act):
    """All experts on all tokens: more work than needed, in three large products, which a GPU does in no time."""
    r_TE = jnp.sum(jax.nn.one_hot(ids_TK, len(experts.down_ENC)) * weights_TK[..., None], axis=1)
    product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    gate_ETF, up_ETF = jnp.split(product("TD,END->ETN", m_TD, experts.gate_up_ENC), 2, axis=-1)
    return product("ETF,EDF->TD", act(gate_ETF) * up_ETF * r_TE.T[..., None], experts.down_ENC)


def _layer(weights, w, x_BTD):
    """Returns what leaves a layer, and what its experts saw, (m_BTD, ids_BTK, weights_BTK)."""
    act, alone = activation(weights.config.hidden_act), replace(weights, layers=(w,))
    x_BTD, routed = jax.vmap(lambda x_TD: proxies.before_experts(alone, 0, x_TD))(x_BTD)
    m_TD, *flat = (array.reshape(-1, array.shape[-1]) for array in routed)
    y_TD = _experts(m_TD, *flat, w.mlp.experts, act) + shared_expert(m_TD, w.mlp, act)
    return x_BTD + y_TD.reshape(x_BTD.shape), routed


def _log_probabilities(weights, x_BTD):
    hidden_BTD = rms_norm(x_BTD, weights.norm_D, weights.config.rms_norm_eps)
    return jax.nn.log_softmax(logits(weights, hidden_BTD), axis=-1)


def _stacked(weights):
    """Returns the layers' weights, stacked: one program serves all layers."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights.layers)


@jax.jit
def _trace(weights, windows_BT):
    """Returns log-probabilities, and of all layers the (residual behind it, m, ids, weights), stacked."""

    def run(x_BTD, w):
        x_BTD, routed = _layer(weights, w, x_BTD)
        return x_BTD, (x_BTD, *routed)

    x_BTD, seen_L = jax.lax.scan(run, weights.embed_VD[windows_BT], _stacked(weights))
    return _log_probabilities(weights, x_BTD), seen_L


@jax.jit
def _kl_by_half(logp_BTV, reference_BTV):
    """KL to the reference, nats per token, [B, halves]."""
    kl_BT = jnp.sum(jnp.exp(reference_BTV) * (reference_BTV - logp_BTV), axis=-1)
    return kl_BT.reshape(len(kl_BT), HALVES, -1).mean(axis=-1)


@jax.jit
def _one_block_kl(weights, layer, expert, new, reference_BTV, seen_L):
    """KL [B, halves] with one expert (gate_up_NC, down_NC) replaced, from the layer's cached states on."""
    act, layers = activation(weights.config.hidden_act), _stacked(weights)
    experts = layers.mlp.experts
    x_BTD, m_BTD, ids_BTK, weights_BTK = (array[layer] for array in seen_L)

    def run(gate_up_NC, down_NC):
        gate_FD, up_FD = jnp.split(gate_up_NC, 2)
        m_TD = m_BTD.reshape(-1, m_BTD.shape[-1])
        return mlp(m_TD, MLPWeights(gate_DF=gate_FD.T, up_DF=up_FD.T, down_FD=down_NC.T), act).reshape(m_BTD.shape)

    def later(number, x_BTD):
        return _layer(weights, jax.tree.map(lambda leaf: leaf[number], layers), x_BTD)[0]

    r_BT1 = jnp.sum(jnp.where(ids_BTK == expert, weights_BTK, 0), axis=-1, keepdims=True)
    change_BTD = run(*new) - run(experts.gate_up_ENC[layer, expert], experts.down_ENC[layer, expert])
    x_BTD = jax.lax.fori_loop(layer + 1, len(weights.layers), later, x_BTD + r_BT1 * change_BTD)
    return _kl_by_half(_log_probabilities(weights, x_BTD), reference_BTV)


def measure(model: Model, windows_BT: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """Returns the rise of KL of every one-bit reduction, [B, halves, L, experts, U, R], R from max bits down."""
    config, widths = model.weights.config, sorted(model.quantized, reverse=True)
    reference_BTV, _ = _trace(model.weights, windows_BT)
    base = model.at(np.full((config.num_layers, config.num_experts, 2), model.max_bits, np.uint8))
    logp_BTV, seen_L = _trace(base, windows_BT)
    base_BH = np.asarray(_kl_by_half(logp_BTV, reference_BTV), np.float64)
    kl = np.empty((*base_BH.shape, config.num_layers, len(experts), 2, len(widths)))
    kl[...] = base_BH[..., None, None, None, None]
    waiting = {}
    for layer, kind, (q, bits) in product(range(config.num_layers), (GATE_UP, DOWN), enumerate(widths)):
        for i, expert in enumerate(experts if q else ()):
            new = tuple(model.block(layer, expert, u, bits if u == kind else widths[0]) for u in (GATE_UP, DOWN))
            waiting[layer, i, kind, q] = _one_block_kl(base, layer, expert, new, reference_BTV, seen_L)
    for (layer, i, kind, q), kl_BH in waiting.items():
        kl[:, :, layer, i, kind, q] = kl_BH
    return np.diff(kl, axis=-1)


def sequence_statistics(checkpoint: PagedCheckpoint, windows_BT: np.ndarray, span_tokens: int) -> SequenceStatistics:
    with TemporaryDirectory() as folder, open_draft(Path(folder) / "windows", {}) as draft:
        return measure_sequences(checkpoint, windows_BT, span_tokens, draft)


def policies(calibration: Calibration) -> dict[str, Policy]:
    return {
        "g": NEUTRAL,
        "routing": replace(calibration.policy, alpha=0.0),
        "routing and prompt": calibration.policy,
    }


def predictions(calibration: Calibration, seen: SequenceStatistics, tokens: int) -> dict[str, list[np.ndarray]]:
    """Returns by name what the planner says, [L, E, U, R]: of all windows as one batch, and of each."""
    requests = [request_signals(seen, n, tokens) for n in range(len(seen))]
    return {
        name: [planner_damage(replace(calibration, policy=policy), *batch) for batch in (requests, *zip(requests))]
        for name, policy in policies(calibration).items()
    }


def lowering_costs(checkpoint: PagedCheckpoint, calibration: Calibration, windows_BT: np.ndarray) -> dict:
    """Returns by name what freeing each of ``SHARES`` of the bytes costs second halves, relative to g alone."""
    half_tokens = windows_BT.shape[1] // HALVES
    statistics = sequence_statistics(checkpoint, windows_BT, half_tokens)
    before, after = merge_spans(statistics, 0, 1), merge_spans(statistics, 1, 2).damage_NZLEUR[:, 0]
    bytes_UQ = bytes_table(checkpoint.manifest.layouts())
    num_blocks, R = after[0, ..., 0, 0].size, after.shape[-1]
    releasable_bytes = num_blocks * int((bytes_UQ[:, -1] - bytes_UQ[:, 0]).sum())
    costs = {}
    for name, policy in (*policies(calibration).items(), ("best", NEUTRAL)):
        costs[name] = np.zeros(len(SHARES))
        for n, t in np.ndindex(len(windows_BT), len(SHARES)):
            known = replace(calibration, policy=policy)
            if name == "best":
                s_LEUQ = np.cumsum(np.concatenate([np.zeros_like(after[n, ..., :1]), after[n]], -1), -1)[..., ::-1]
                known = replace(known, sensitivity_LEUQ=s_LEUQ)
            signals = request_signals(before, n, half_tokens)
            lost_LEU = lowered_by(known, signals, bytes_UQ, int(SHARES[t] * releasable_bytes))
            costs[name][t] += after[n][np.arange(R) < lost_LEU[..., None]].sum()
    return {name: np.round(cost / costs["g"], 4).tolist() for name, cost in costs.items()}


def correlations(predicted_LEUR: np.ndarray, measured_LEUR: np.ndarray) -> dict:
    """Returns Spearman's coefficient over all actions, in every layer, and of every step over its blocks."""

    def rho(*index):
        return round(float(spearmanr(predicted_LEUR[index].ravel(), measured_LEUR[index].ravel())[0]), 4)

    L, *_, R = predicted_LEUR.shape
    return {
        "overall": rho(...),
        "layers": [rho(layer) for layer in range(L)],
        "steps": [rho(..., r) for r in range(R)],
    }


def averaged(records: list[dict]) -> dict:
    return {key: np.mean([record[key] for record in records], axis=0).round(4).tolist() for key in records[0]}


def check_text(
    model: Model, checkpoint: PagedCheckpoint, calibration: Calibration, windows_BT: np.ndarray, experts: np.ndarray
) -> tuple[dict, np.ndarray, dict[str, np.ndarray]]:
    """Returns the record, the measured rises of the text, and the predictions for it."""
    rise = measure(model, windows_BT, experts)
    print(f"{time.perf_counter() - STARTED:.0f} s: measured", flush=True)
    statistics = sequence_statistics(checkpoint, windows_BT, WINDOW_TOKENS // HALVES)
    print(f"{time.perf_counter() - STARTED:.0f} s: statistics", flush=True)
    whole, first, second = (merge_spans(statistics, *spans) for spans in ((0, 2), (0, 1), (1, 2)))
    text = {name: both[0] for name, both in predictions(calibration, whole, WINDOW_TOKENS).items()}
    text["proxy"] = whole.damage_NZLEUR.mean(axis=(0, 1))
    after = {name: both[1:] for name, both in predictions(calibration, first, WINDOW_TOKENS // HALVES).items()}
    after["proxy"] = list(second.damage_NZLEUR[:, 0])
    measured_LEUR = rise.mean(axis=(0, 1))
    print(f"{time.perf_counter() - STARTED:.0f} s: predicted", flush=True)
    record = {
        "text": {name: correlations(p_LEUR[:, experts], measured_LEUR) for name, p_LEUR in text.items()},
        "after": {
            name: averaged([correlations(p_LEUR[:, experts], rise[b, 1]) for b, p_LEUR in enumerate(predicted)])
            for name, predicted in after.items()
        },
    }
    return record, measured_LEUR, {name: p_LEUR[:, experts] for name, p_LEUR in text.items()}


def plot(path: Path, measured: dict[str, np.ndarray], predicted: dict[str, dict[str, np.ndarray]]) -> None:
    """Writes a scatter of measured rises of KL against predictions, one panel for each prediction, a colour a text."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(next(iter(predicted.values())))
    figure, axes = plt.subplots(1, len(names), figsize=(3.6 * len(names), 3.8), sharey=True)
    for axis, name in zip(axes, names):
        for number, (text, measured_LEUR) in enumerate(measured.items()):
            x, y = predicted[text][name].ravel(), measured_LEUR.ravel()
            axis.plot(x, y, ".", ms=2.5, alpha=0.5, color=f"C{number}", label=text)
        x, y = (np.concatenate([one[t].ravel() for t in measured]) for one in (_column(predicted, name), measured))
        axis.set(xscale="log", yscale="log", xlabel="predicted damage")
        axis.set_title(f"{name}\nSpearman {spearmanr(x, y)[0]:.3f}", fontsize=10)
        axis.set_ylim(bottom=1e-7)
    axes[0].set_ylabel("measured rise of KL (nats per token)")
    axes[0].legend(fontsize=7, markerscale=3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _column(predicted: dict[str, dict[str, np.ndarray]], name: str) -> dict[str, np.ndarray]:
    return {text: one[name] for text, one in predicted.items()}


def spread(windows: np.ndarray, count: int) -> np.ndarray:
    return windows[np.linspace(0, len(windows) - 1, min(count, len(windows))).astype(int)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="the paged checkpoint, calibrated")
    parser.add_argument("texts", type=Path, nargs="+", help="held-out texts")
    parser.add_argument("--model", type=Path, default=Path("checkpoints/demo-moe"), help="its Hugging Face folder")
    parser.add_argument("--windows", type=int, default=8, help="windows of each text")
    parser.add_argument("--long-windows", type=int, default=8, help="longer windows of each text, for what it buys")
    parser.add_argument("--only-costs", action="store_true", help="what better predictions buy, and nothing measured")
    parser.add_argument("--experts", type=int, default=16, help="experts sampled of each layer")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--save", type=Path, help="measured rises and predictions, an .npz a text")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.checkpoint)
    config, calibration = checkpoint.manifest.config, load_calibration(checkpoint)
    model = None if args.only_costs else read_model(args.model, checkpoint)
    experts = np.sort(np.random.default_rng(0).choice(config.num_experts, args.experts, replace=False))
    print(f"{time.perf_counter() - STARTED:.0f} s: read", flush=True)
    measured, predicted = {}, {}
    results = Results(args.results)
    for path in args.texts:
        started, name = time.perf_counter(), path.name.split(".")[0]
        _, tokens = tokenize(args.model, read_text(path), config.vocab_size)
        record = {"text_name": name}
        if not args.only_costs:
            windows = spread(split_windows(tokens, WINDOW_TOKENS), args.windows)
            found, measured[name], predicted[name] = check_text(model, checkpoint, calibration, windows, experts)
            record |= {"windows": len(windows), "experts": len(experts), **found}
        long = spread(split_windows(tokens, min(LONG_TOKENS, config.max_position_embeddings)), args.long_windows)
        record["cost"] = lowering_costs(checkpoint, calibration, long) if len(long) else {}
        append_result(results, "costs" if args.only_costs else "text", record)
        if args.save and not args.only_costs:
            args.save.mkdir(parents=True, exist_ok=True)
            np.savez(args.save / f"{name}.npz", rise=measured[name], **predicted[name])
        for kind in ("text", "after") if not args.only_costs else ():
            print(name, kind, {key: (one["overall"], one["layers"]) for key, one in record[kind].items()}, flush=True)
        print(name, "cost", record["cost"], f"{time.perf_counter() - started:.0f} s", flush=True)
    if args.plot and measured:
        plot(args.plot, measured, predicted)


if __name__ == "__main__":
    main()
