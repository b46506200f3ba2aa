# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run, drawn from its event log: who had the memory, at what precision, and how fast it went."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from pagedweight_jax.demo.style import BLUE, GREEN, ORANGE, RATE_BOUNDARIES, SKY, VERMILION
from pagedweight_jax.errors import UserError
from pagedweight_jax.serving.events import BoundaryEvent

matplotlib.use("Agg")
from matplotlib import pyplot as plt

GREY = "#D9D9D9"
MIB = 2**20


def draw_timeline(events: Sequence[BoundaryEvent], path: Path, title: str = "") -> None:
    """Draws ``events`` to ``path`` (PNG, or what its suffix says).

    Raises:
      UserError: fewer than two events, or a suffix that stands for no kind of figure.
    """
    if len(events) < 2:
        raise UserError(f"timeline: need at least 2 events, got {len(events)}")
    seconds_N = np.array([event.time_seconds for event in events])
    seconds_N -= seconds_N[0]
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    panels = {_draw_memory: 4.2, _draw_bits: 1.9, _draw_widths: 1.5, _draw_moves: 1.4, _draw_rate: 1.4}
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            len(panels), 1, sharex=True, figsize=(9, 9), height_ratios=tuple(panels.values()), layout="constrained"
        )
        for draw, axis in zip(panels, axes):
            axis.grid(axis="y", color="0.9", linewidth=0.8)
            draw(axis, seconds_N, events)
        axes[0].set_xlim(0, seconds_N[-1])
        axes[-1].set_xlabel("seconds")
        figure.align_ylabels(axes)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error
        finally:
            plt.close(figure)


def _values(events: Sequence[BoundaryEvent], name: str) -> np.ndarray:
    return np.array([getattr(event, name) for event in events])


def _legend(axis, handles, labels, below: float, columns: int) -> None:
    axis.legend(
        handles,
        labels,
        loc="upper center",
        bbox_to_anchor=(0.5, below),
        ncols=columns,
        frameon=False,
        fontsize=8,
        handlelength=1.2,
        columnspacing=1.4,
    )


def _draw_memory(axis, seconds_N, events) -> None:
    weights_N, kv_N = _values(events, "weight_bytes"), _values(events, "kv_bytes")
    releasing_N, free_N = _values(events, "releasing_bytes"), _values(events, "free_bytes")
    beside_N = _values(events, "device_bytes") - weights_N - kv_N - releasing_N - free_N
    fixed = beside_N.min()
    layers = [  # from the bottom up: the KV cache hangs from the arena's end and meets the weights
        ("fixed: dense weights, tables, temporaries", np.full_like(beside_N, fixed), GREY),
        ("expert weights", weights_N, BLUE),
        ("just released", releasing_N, SKY),
        ("free", free_N, "white"),
        ("KV cache", kv_N, ORANGE),
        ("pages in transfer", beside_N - fixed, GREEN),
    ]
    names, values, colours = zip(*layers)
    areas = axis.stackplot(seconds_N, [v / MIB for v in values], colors=colours, step="post", linewidth=0)
    areas[3].set(edgecolor="0.6", linewidth=0.5)
    budget = events[0].budget_bytes / MIB
    axis.axhline(budget, color="black", linewidth=1.2)
    place = {"xycoords": ("axes fraction", "data"), "fontsize": 8}
    axis.annotate(f"budget {budget:.1f} MiB", (0.995, budget), ha="right", va="bottom", **place)
    axis.set_ylim(0, 1.07 * budget)
    axis.set_ylabel("device memory, MiB")
    _legend(axis, areas[::-1], names[::-1], below=-0.02, columns=3)


def _draw_bits(axis, seconds_N, events) -> None:
    bits_N = _values(events, "mean_bits")
    axis.plot(seconds_N, bits_N, color=BLUE, drawstyle="steps-post", linewidth=1.8)
    low, last = int(bits_N.argmin()), len(bits_N) - 1
    for place, offset, side in ((0, 3, "left"), (low, -11, "center"), (last, 3, "right")):
        at = (seconds_N[place], bits_N[place])
        axis.annotate(f"{bits_N[place]:.2f}", at, (0, offset), textcoords="offset points", ha=side, fontsize=8)
    margin = 0.25 * max(float(np.ptp(bits_N)), 0.4)
    axis.set_ylim(bits_N.min() - margin, bits_N.max() + margin)
    axis.set_ylabel("mean bits")


def _draw_widths(axis, seconds_N, events) -> None:
    widths = sorted({bits for event in events for bits in event.blocks_by_bits})
    total = sum(events[0].blocks_by_bits.values())
    shares = [[100 * event.blocks_by_bits.get(bits, 0) / total for event in events] for bits in widths]
    colours = plt.get_cmap("Blues")(np.linspace(0.25, 0.9, len(widths)))
    areas = axis.stackplot(seconds_N, shares, colors=colours, step="post", linewidth=0)
    axis.set_ylim(0, 100)
    axis.set_ylabel("blocks, %")
    _legend(axis, areas, [f"{bits} bits" for bits in widths], below=-0.02, columns=len(widths))


def _draw_moves(axis, seconds_N, events) -> None:
    raised_N = [len(event.raised) for event in events]
    lowered_N = [-len(event.lowered) for event in events]
    up = axis.vlines(seconds_N, 0, raised_N, color=GREEN, linewidth=2)
    down = axis.vlines(seconds_N, lowered_N, 0, color=VERMILION, linewidth=2)
    axis.axhline(0, color="0.4", linewidth=0.8)
    arrivals = [at for event, at in zip(events, seconds_N) if event.admitted]
    finishes = [at for event, at in zip(events, seconds_N) if event.finished]
    low, high = axis.get_ylim()
    (come,) = axis.plot(arrivals, [high] * len(arrivals), "v", color="0.35", markersize=4.5, clip_on=False)
    (gone,) = axis.plot(finishes, [high] * len(finishes), "^", color="0.6", markersize=4.5, clip_on=False)
    axis.set_ylim(low, high)
    axis.yaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
    axis.set_ylabel("blocks moved")
    names = ("blocks raised", "blocks lowered", "request arrives", "request ends")
    _legend(axis, (up, down, come, gone), names, below=-0.02, columns=len(names))


def _draw_rate(axis, seconds_N, events) -> None:
    tokens_N = np.cumsum(_values(events, "tokens"))
    back_N = np.maximum(np.arange(len(events)) - RATE_BOUNDARIES, 0)
    rate_N = (tokens_N - tokens_N[back_N]) / np.maximum(seconds_N - seconds_N[back_N], 1e-9)
    axis.fill_between(seconds_N, rate_N, color=BLUE, alpha=0.2, linewidth=0)
    axis.plot(seconds_N, rate_N, color=BLUE, linewidth=1.2)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("tokens/s")
