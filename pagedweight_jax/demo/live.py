# SPDX-License-Identifier: Apache-2.0
"""The server as it runs: a live view on a terminal, a line now and then elsewhere."""

from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagedweight_jax.demo.style import BLUE, ORANGE, RATE_BOUNDARIES, SKY
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.events import BoundaryEvent
from pagedweight_jax.serving.request import Request
from pagedweight_jax.units import format_size

FREE, FIXED = "grey30", "grey50"
BLOCKS = "▁▂▃▄▅▆▇█"
LINE_BOUNDARIES = 10
TEXT_TOKENS = 60


class LiveView:
    """Shows an engine while it runs; call ``update`` after every step: totals are of the steps that it saw.

    Args:
      engine: what is shown.
      decode: token ids to text.
      console: a terminal gets the live view, anything else gets plain lines.
    """

    def __init__(self, engine: Engine, decode: Callable[[list[int]], str], console: Console):
        self._engine = engine
        self._decode = decode
        self._console = console
        self._done = self._lowered = self._raised = self._moved_bytes = 0
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None

    def __enter__(self) -> "LiveView":
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.__exit__(kind, value, traceback)

    def update(self, requests: Sequence[Request]) -> None:
        """Shows the last boundary; ``requests`` are all that have come so far."""
        events = self._engine.events
        self._done += len(events[-1].finished)
        self._lowered += len(events[-1].lowered)
        self._raised += len(events[-1].raised)
        self._moved_bytes += events[-1].moved_bytes
        if self._live:
            self._live.update(self._panel(events, requests))
        elif (len(events) - 1) % LINE_BOUNDARIES == 0:
            self._console.print(_line(events), highlight=False, soft_wrap=True)

    def _panel(self, events: Sequence[BoundaryEvent], requests: Sequence[Request]) -> Panel:
        event, ledger = events[-1], self._engine.ledger
        width = max(20, min(self._console.width, 110) - 4)
        fixed_bytes = ledger.total_bytes - ledger.arena_bytes
        parts = [
            ("fixed", fixed_bytes, FIXED),
            ("weights", event.weight_bytes, BLUE),
            ("KV cache", event.kv_bytes, ORANGE),
            ("releasing", event.releasing_bytes, SKY),
            ("free", event.free_bytes + ledger.budget_bytes - ledger.total_bytes, FREE),
        ]
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="bold")
        facts.add_column()
        facts.add_row("mean bits", Text(f"{event.mean_bits:.2f}  ") + _sparkline(events, width - 24))
        facts.add_row("blocks", _widths(event))
        facts.add_row(
            "requests",
            f"{event.rows} running, {event.waiting} waiting, {self._done} done; "
            f"{event.context_tokens} tokens of context; {token_rate(events):.0f} tokens/s",
        )
        facts.add_row(
            "moves",
            f"{self._lowered} blocks lowered, {self._raised} raised, {format_size(self._moved_bytes)} brought back",
        )
        body: list[RenderableType] = [_bar(parts, width), _legend(parts), Text(), facts]
        shown = next((r for r in requests if r.generated and not r.finish_reason), None)
        if shown:
            text = " ".join(self._decode(shown.generated[-TEXT_TOKENS:]).split())
            body += [Text(), Text(f"request {shown.number}  …{text[-(2 * width - 16) :]}", style="italic")]
        return Panel(Group(*body), title=f"budget {format_size(ledger.budget_bytes)}", width=width + 4)


def token_rate(events: Sequence[BoundaryEvent]) -> float:
    """Generated tokens per second over the last boundaries."""
    last = events[-RATE_BOUNDARIES - 1 :]
    seconds = last[-1].time_seconds - last[0].time_seconds
    return sum(event.tokens for event in last[1:]) / seconds if seconds else 0.0


def _line(events: Sequence[BoundaryEvent]) -> str:
    event = events[-1]
    return (
        f"boundary {len(events) - 1:3d}: {event.rows} running, KV {format_size(event.kv_bytes):>9}, "
        f"weights {format_size(event.weight_bytes):>9}, mean bits {event.mean_bits:.2f}, "
        f"{token_rate(events):4.0f} tokens/s"
    )


def _bar(parts: Sequence[tuple[str, int, str]], width: int) -> Text:
    total, bar, shown, seen = sum(size for _, size, _ in parts), Text(), 0, 0
    for _, size, colour in parts:
        seen += size
        end = round(width * seen / total)
        bar.append("█" * (end - shown), style=colour)
        shown = end
    return bar


def _legend(parts: Sequence[tuple[str, int, str]]) -> Text:
    legend = Text()
    for name, size, colour in parts:
        legend.append("■ ", style=colour)
        legend.append(f"{name} {size / 2**20:.1f}   ")
    return legend.append("MiB")


def _sparkline(events: Sequence[BoundaryEvent], width: int) -> Text:
    bits = [event.mean_bits for event in events]
    low, high = min(bits), max(bits)
    stride = -(-len(bits) // width)
    heights = [round((value - low) / max(high - low, 1e-9) * (len(BLOCKS) - 1)) for value in bits[::stride]]
    return Text("".join(BLOCKS[height] for height in heights), style=BLUE)


def _widths(event: BoundaryEvent) -> str:
    return ", ".join(f"{count} at {bits} bits" for bits, count in sorted(event.blocks_by_bits.items(), reverse=True))
