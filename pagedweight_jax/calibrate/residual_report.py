# SPDX-License-Identifier: Apache-2.0
"""How well damage is predicted for sequences that calibration has not seen: numbers, and a figure."""

from pathlib import Path

import numpy as np

from pagedweight_jax.calibrate.residual import HeldOut, r_squared
from pagedweight_jax.calibrate.residual_policy import rank_correlation
from pagedweight_jax.config import KINDS
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.calibration import ResidualHeads

PREDICTIONS = {"g": "by_damage_NLEUR", "usage": "by_usage_NLEUR", "prompt": "by_prompt_NLEUR"}
"""What a prediction knows, by name: the global damage; and how much the sequence used the expert; and its prompt."""

MOST_POINTS = 20_000


def held_out_report(held_out: HeldOut, heads: ResidualHeads, max_bits: int) -> list[dict]:
    """Returns one record a kind and one-bit reduction, JSON: how the predictions fit log D over sequences and blocks.

    ``spread`` is the root mean square of log(D / g); ``r2`` and ``spearman`` have an entry for each prediction.
    """
    r2 = {name: r_squared(held_out.measured_NLEUR, getattr(held_out, field)) for name, field in PREDICTIONS.items()}
    records = []
    for u, r in np.ndindex(heads.confidence_UR.shape):
        measured, *predicted = (
            getattr(held_out, field)[..., u, r].ravel() for field in ("measured_NLEUR", *PREDICTIONS.values())
        )
        used = np.isfinite(measured) & np.isfinite(predicted[-1])
        ranks = [rank_correlation(one[used], measured[used]) for one in predicted]
        records.append(
            {
                "kind": KINDS[u],
                "from_bits": max_bits - r,
                "to_bits": max_bits - r - 1,
                "examples": int(used.sum()),
                "spread": _rounded(np.sqrt(np.mean(np.square(measured - predicted[0])[used]))),
                "r2": {name: _rounded(value_UR[u, r]) for name, value_UR in r2.items()},
                "spearman": {name: _rounded(rank) for name, rank in zip(PREDICTIONS, ranks)},
                "confidence": _rounded(heads.confidence_UR[u, r]),
                "weights": [_rounded(w) for w in heads.weight_URX[u, r]],
            }
        )
    return records


def _rounded(value: float) -> float:
    return round(float(value), 4)


def check_figure(path: Path) -> None:
    """Raises UserError unless a figure can be written to ``path``."""
    from matplotlib.figure import Figure

    suffix, supported = path.suffix[1:].lower(), sorted(Figure().canvas.get_supported_filetypes())
    if suffix not in supported:
        raise UserError(f"{path}: its suffix must say which kind of figure, one of {', '.join(supported)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path}: no such folder")


def draw_held_out(path: Path, held_out: HeldOut, title: str) -> None:
    """Writes a figure: measured against predicted damage of held-out sequences, a panel for each prediction.

    A point is one reduction of one block for one sequence; at most ``MOST_POINTS`` are drawn, evenly spread.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(PREDICTIONS), figsize=(11, 3.9), sharey=True, sharex=True)
    labels = {
        "g": "global damage g",
        "usage": "g, and the relative routing mass",
        "prompt": "g, routing mass and prompt residual",
    }
    for axis, (name, field) in zip(axes, PREDICTIONS.items()):
        bounds = []
        for u, kind in enumerate(KINDS):
            measured, predicted = (
                getattr(held_out, attribute)[..., u, :].ravel() for attribute in ("measured_NLEUR", field)
            )
            used = np.isfinite(measured) & np.isfinite(predicted)
            step = max(1, used.sum() // (MOST_POINTS // len(KINDS)))
            x, y = (np.exp(array[used][::step]) for array in (predicted, measured))
            axis.plot(x, y, ".", ms=1.6, alpha=0.25, color=f"C{u}", rasterized=True, label=kind)
            bounds += [x.min(), x.max(), y.min(), y.max()]
        axis.plot([min(bounds), max(bounds)], [min(bounds), max(bounds)], color="0.3", lw=0.8)
        measured, predicted = held_out.measured_NLEUR, getattr(held_out, field)
        used = np.isfinite(measured) & np.isfinite(predicted)
        rank = rank_correlation(predicted[used], measured[used])
        error = np.sqrt(np.mean(np.square(measured - predicted)[used]))
        axis.set(xscale="log", yscale="log", xlabel="predicted damage of a sequence")
        axis.set_title(f"{labels[name]}\nSpearman {rank:.3f}, off by a factor of {np.exp(error):.2f}", fontsize=9)
    axes[0].set_ylabel("measured damage of the sequence")
    legend = axes[0].legend(markerscale=6, fontsize=8, loc="upper left")
    for handle in legend.legend_handles:
        handle.set_alpha(1)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
