# SPDX-License-Identifier: Apache-2.0
"""The demo's tables: what the budget is made of, what was asked and answered, and paged weights beside their rivals."""

from collections.abc import Callable, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from pagedweight_jax.demo.compare import Row
from pagedweight_jax.demo.workload import Arrival
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.request import Request
from pagedweight_jax.units import format_size

TEXT_WIDTH = 40
MIB = 2**20


def memory_rows(engine: Engine) -> list[tuple[str, int]]:
    """Returns (what, bytes) of an engine that has just started: its ledger, with the arena split in two."""
    ledger, event = engine.ledger, engine.events[-1]
    split = [
        (f"expert weights, now at {event.mean_bits:.2f} bits", event.weight_bytes),
        ("free for the KV cache", ledger.arena_bytes - event.weight_bytes),
    ]
    rows = ledger.rows()
    place = next(i for i, (name, _) in enumerate(rows) if name.startswith("arena"))
    return rows[:place] + split + rows[place + 1 :]


def memory_table(rows: Sequence[tuple[str, int]], host_bytes: int) -> Table:
    """Returns ``memory_rows`` as a table, and under it what the host holds."""
    budget_bytes = sum(size for _, size in rows)
    table = _table("What the memory budget is made of", ("", "bytes", "share"))
    for name, size in rows:
        table.add_row(name, format_size(size), f"{size / budget_bytes:.1%}")
    table.add_section()
    table.add_row("budget", format_size(budget_bytes), "", style="bold")
    table.caption = f"Besides, in pinned host memory: a copy of every page, {format_size(host_bytes)}."
    return table


def request_table(
    requests: Sequence[Request], arrivals: Sequence[Arrival], decode: Callable[[list[int]], str]
) -> Table:
    """Returns what every request wrote; some were asked for a code that their first line gave."""
    table = _table("What the requests wrote meanwhile", ("", "prompt", "new", "recall", "text"))
    table.columns[-1].justify = table.columns[-2].justify = "left"
    for request, arrival in zip(requests, arrivals):
        text = decode(request.generated)
        recall = ""
        if arrival.answer:
            recall = "right" if text.startswith(arrival.answer) else f"wrong, not{arrival.answer}"
        shown = " ".join(text.split())[:TEXT_WIDTH]
        table.add_row(
            str(request.number), str(len(request.prompt)), str(len(request.generated)), recall, escape(f"{shown}…")
        )
    return table


def comparison_table(rows: Sequence[Row], budget_bytes: int, peak_kv_bytes: int) -> Table:
    """Returns every row's device bytes, with the KV cache of the demo's peak, its speed and its perplexity."""

    def sized(size: int | None) -> str:
        if size is None:
            return ""
        over = f" [red](+{(size - budget_bytes) / MIB:.1f})[/red]" if size > budget_bytes else ""
        return f"{size / MIB:.1f}{over}"

    table = _table(
        "Paged weights beside static ones",
        ("experts", "bits", "device MiB", "own LUT only", "tokens/s", "perplexity"),
    )
    for row in rows:
        low, high = row.bits
        table.add_row(
            row.name,
            f"{high:.1f} to {low:.1f}" if high > low else f"{low:.0f}",
            sized(row.device_bytes),
            sized(row.own_lut_device_bytes),
            f"{row.tokens_per_second:.0f}",
            f"{row.perplexity.perplexity:.2f}",
            style="bold" if row is rows[-1] else "",
        )
    first = rows[0].perplexity
    table.caption = (
        f"Device: all that it holds with the peak's KV cache of {peak_kv_bytes / MIB:.1f} MiB, (+) above the budget of "
        f"{budget_bytes / MIB:.1f}. A static checkpoint needs the one LUT of its width only. Perplexity: "
        f"{first.windows} windows of {first.window_tokens} held-out tokens; the paged row scored them all at once, at "
        f"the bits that this left. Tokens/s: decoding 8 short requests, by XLA."
    )
    table.caption_justify = "left"
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    return table
