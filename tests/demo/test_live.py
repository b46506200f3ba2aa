# SPDX-License-Identifier: Apache-2.0
"""The live view: a picture on a terminal, lines now and then elsewhere."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from pagedweight_jax.demo.live import LiveView, token_rate
from pagedweight_jax.serving.events import BoundaryEvent, EventLog

MIB = 2**20


def event(boundary, **changes):
    fields = {
        "boundary": boundary,
        "time_seconds": 0.5 * boundary,
        "rows": 2,
        "waiting": 1,
        "chunks": 0,
        "decode_steps": 4,
        "admitted": (),
        "preempted": (),
        "finished": (),
        "tokens": 8,
        "context_tokens": 100 + boundary,
        "kv_bytes": 3 * MIB,
        "weight_bytes": 5 * MIB,
        "releasing_bytes": 0,
        "free_bytes": 2 * MIB,
        "device_bytes": 15 * MIB,
        "budget_bytes": 16 * MIB,
        "free_blocks": 4,
        "pending_blocks": 0,
        "target_bytes": 0,
        "mean_bits": 6.0 - 0.1 * boundary,
        "blocks_by_bits": {5: 3, 6: 1},
        "lowered": (),
        "raised": (),
        "reloads_started": 0,
        "pages_landed": 0,
        "pages_cancelled": 0,
        "pages_offloaded": 0,
        "moved_bytes": 0,
    }
    return BoundaryEvent(**(fields | changes))


def engine(count):
    ledger = SimpleNamespace(total_bytes=15 * MIB, arena_bytes=10 * MIB, budget_bytes=16 * MIB)
    return SimpleNamespace(events=[event(b) for b in range(count)], ledger=ledger)


def test_rate_counts_the_last_boundaries():
    assert token_rate(engine(3).events) == pytest.approx(16.0)
    assert token_rate(engine(30).events) == pytest.approx(16.0)
    assert token_rate(engine(1).events) == 0
    assert token_rate([*engine(30).events, event(30, tokens=800)]) > 100


def test_lines_come_now_and_then():
    file = io.StringIO()
    running = engine(0)
    with LiveView(running, str, Console(file=file, width=120)) as view:
        for boundary in range(21):
            running.events.append(event(boundary))
            view.update([])
    lines = file.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["boundary   0", "boundary  10", "boundary  20"]
    assert "2 running, KV  3.00 MiB, weights  5.00 MiB, mean bits 4.00,   16 tokens/s" in lines[2]


def test_a_terminal_shows_memory_bits_and_text():
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system=None)
    requests = [
        SimpleNamespace(number=0, generated=[1], finish_reason="length"),
        SimpleNamespace(number=1, generated=[2, 3], finish_reason=None),
    ]
    with LiveView(engine(40), lambda tokens: f"[bold]text {tokens}\nfrom", console) as view:
        view.update(requests)
    shown = file.getvalue()
    for text in ("budget 16.0 MiB", "weights 5.0", "KV cache 3.0", "free 3.0", "1 at 6 bits, 3 at 5 bits", "2.10"):
        assert text in shown
    assert "request 1" in shown
    assert "[bold]text [2, 3] from" in shown
    bar = next(line for line in shown.splitlines() if "█████" in line)
    assert bar.count("█") == 96  # the whole budget, whatever rounding does to its parts


def test_totals_are_of_all_boundaries_however_few_the_engine_keeps():
    file = io.StringIO()
    running = engine(0)
    running.events = EventLog(kept=2)
    with LiveView(running, str, Console(file=file, width=100, force_terminal=True, color_system=None)) as view:
        for boundary in range(20):
            moves = {"lowered": ((0, 0, 0, 6, 5),) * 3, "raised": ((0, 0, 0, 5, 6),) * 2, "moved_bytes": MIB}
            running.events.append(event(boundary, finished=(boundary,), **moves))
            view.update([])
    last = file.getvalue().rpartition("requests")[2]
    assert "20 done" in last
    assert "60 blocks lowered, 40 raised, 20.0 MiB brought back" in last
