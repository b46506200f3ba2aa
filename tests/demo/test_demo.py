# SPDX-License-Identifier: Apache-2.0
"""The whole demo on a tiny model: weights give way to the KV cache, come back, and the log says so."""

import io
import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pagedweight_jax.cli import main
from pagedweight_jax.demo.checks import check_events
from pagedweight_jax.demo.run import QUICK, run_demo
from pagedweight_jax.demo.timeline import draw_timeline
from pagedweight_jax.errors import UserError
from pagedweight_jax.serving.events import read_events, write_events


@pytest.fixture(scope="module")
def model(hf_folder, tmp_path_factory):
    """The tiny model with a held-out text."""
    folder = shutil.copytree(hf_folder, tmp_path_factory.mktemp("demo") / "model")
    letters = np.random.default_rng(1).choice(list("etaoin shrdlu,."), 4096)
    (folder / "text" / "heldout.txt").write_text("".join(letters))
    return folder


@pytest.fixture(scope="module")
def demo(model, tmp_path_factory):
    """(summary, output folder, what was printed)."""
    out, stdout, screen = tmp_path_factory.mktemp("demo") / "out", io.StringIO(), io.StringIO()
    summary = run_demo(
        model,
        out,
        memory_bytes=None,
        size=QUICK,
        bars=lambda: nullcontext((lambda stage, done, total: None, lambda line: None)),
        screen=Console(file=screen, width=100),
        stdout=Console(file=stdout, width=100),
    )
    return summary, out, stdout.getvalue(), screen.getvalue()


@pytest.fixture(scope="module")
def events(demo):
    return read_events(demo[1] / "events.jsonl")


def test_mean_bits_fall_by_one_at_least_and_return(events):
    bits = [event.mean_bits for event in events]
    assert min(bits) <= bits[0] - 1
    assert abs(bits[-1] - bits[0]) <= 0.1
    assert bits[0] == 6.0


def test_blocks_of_different_widths_serve_at_once(events):
    assert any(event.decode_steps and event.rows and len(event.blocks_by_bits) > 1 for event in events)


def test_the_ledger_never_exceeds_the_budget(demo, events):
    budget_bytes = demo[0]["budget_bytes"]
    arena = {event.kv_bytes + event.weight_bytes + event.releasing_bytes + event.free_bytes for event in events}
    assert len(arena) == 1
    assert all(event.device_bytes <= event.budget_bytes == budget_bytes for event in events)
    assert all(min(event.kv_bytes, event.weight_bytes, event.free_bytes) >= 0 for event in events)
    top_bytes, peak_bytes = events[0].weight_bytes, max(event.kv_bytes for event in events)
    assert top_bytes + peak_bytes > arena.pop()  # the budget does not hold the top width and the KV cache together


def test_all_requests_finish_and_the_server_falls_idle(events):
    admitted = {n for event in events for n in event.admitted}
    assert admitted == {n for event in events for n in event.finished} == set(range(8))
    assert (events[-1].rows, events[-1].kv_bytes, events[-1].waiting) == (0, 0, 0)


def test_the_log_passes_the_demos_own_check(demo, events):
    assert check_events(events) == demo[0]["problems"] == []


def test_the_recorded_run_of_the_readme_passes_it_too():
    recorded = read_events(Path(__file__).parents[2] / "docs" / "timeline.jsonl")
    assert check_events(recorded) == []
    assert max(len(event.blocks_by_bits) for event in recorded) >= 3


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda e: [replace(x, mean_bits=max(x.mean_bits, 5.5)) for x in e], "fell by 0.50 only"),
        (lambda e: [*e, replace(e[-1], mean_bits=5.8)], "ended at 5.80"),
        (lambda e: [replace(x, blocks_by_bits={5: 8}) for x in e], "no decode call ran blocks of different"),
        (lambda e: [*e, replace(e[-1], device_bytes=e[-1].budget_bytes + 1)], "the budget is"),
        (lambda e: [*e, replace(e[-1], kv_bytes=e[-1].kv_bytes + 1)], "the arena's entries sum to"),
        (lambda e: [*e, replace(e[-1], admitted=(77,))], r"requests \[77\] were admitted"),
        (lambda e: [], "there are no events"),
    ],
)
def test_the_check_sees_what_is_missing(events, spoil, problem):
    problems = check_events(spoil(events))
    assert len(problems) == 1
    assert re.search(problem, problems[0])


def test_the_rows_compare_like_with_like(demo):
    rows = {row["name"]: row for row in demo[0]["rows"]}
    assert list(rows) == ["bf16", "6 bits", "5 bits", "4 bits", "3 bits", "paged"]
    assert rows["paged"]["device_bytes"] <= demo[0]["budget_bytes"]
    device = [rows[name]["device_bytes"] for name in ("6 bits", "5 bits", "4 bits", "3 bits")]
    assert device == sorted(device, reverse=True)
    assert all(rows[f"{b} bits"]["own_lut_device_bytes"] < rows[f"{b} bits"]["device_bytes"] for b in (4, 5, 6))
    nats = {name: np.log(row["perplexity"]["perplexity"]) for name, row in rows.items()}
    assert abs(nats["6 bits"] - nats["bf16"]) < abs(nats["3 bits"] - nats["bf16"])
    assert {(r["perplexity"]["windows"], r["perplexity"]["window_tokens"]) for r in rows.values()} == {(8, 384)}
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    assert min(rows["paged"]["bits"]) < 6  # it scored under pressure of its own making


def test_tables_summary_and_figure_are_there(demo):
    summary, out, stdout, screen = demo
    assert json.loads((out / "summary.json").read_text()) == json.loads(json.dumps(summary))
    for text in ("What the memory budget is made of", "dense weights", "free for the KV cache", "budget", "paged"):
        assert text in stdout
    assert "boundary  10:" in screen
    assert (out / "timeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sum(summary["memory"].values()) == summary["budget_bytes"]


def test_events_survive_the_file(events, tmp_path):
    write_events(tmp_path / "again.jsonl", events)
    assert read_events(tmp_path / "again.jsonl") == events
    assert any(event.lowered for event in events)
    assert any(event.raised for event in events)


def test_the_timeline_is_drawn_from_the_log(demo, tmp_path, capsys):
    log = demo[1] / "events.jsonl"
    assert main(["plot", "timeline", str(log), "-o", str(tmp_path / "t.svg"), "--title", "A run"]) == 0
    assert "<svg" in (tmp_path / "t.svg").read_text()
    (tmp_path / "broken.jsonl").write_text('{"boundary": 1}\n')
    assert main(["plot", "timeline", str(tmp_path / "broken.jsonl"), "-o", str(tmp_path / "t.svg")]) == 2
    assert main(["plot", "timeline", str(log), "-o", str(tmp_path / "t.nothing")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "not an event log" in errors[0]
    with pytest.raises(UserError, match="at least 2 events, got 1"):
        draw_timeline(read_events(log)[:1], tmp_path / "t.png")


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["the mean bits fell by 0.00 only"], 1)])
def test_a_demo_without_its_trade_fails(problems, code, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pagedweight_jax.demo.run.run_demo", lambda *args, **options: {"problems": problems})
    assert main(["demo", "--out", str(tmp_path), "--json"]) == code
    out, err = capsys.readouterr()
    assert json.loads(out) == {"problems": problems}
    assert err == "".join(f"pagedweight: {tmp_path / 'events.jsonl'}: {problem}\n" for problem in problems)


def test_a_missing_model_is_one_line(tmp_path, capsys):
    assert main(["demo", "--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_results_that_are_a_file_are_refused_and_kept(tmp_path, capsys):
    out = tmp_path / "out"
    out.write_text("mine")
    model = tmp_path / "model"
    (model / "text").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "text" / "heldout.txt").write_text("It was a dark night.")
    assert main(["demo", "--model", str(model), "--out", str(out)]) == 2
    assert "a file; the demo's results need a folder" in capsys.readouterr().err
    assert out.read_text() == "mine"
