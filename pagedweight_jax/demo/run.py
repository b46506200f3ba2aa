# SPDX-License-Identifier: Apache-2.0
"""The whole demo: convert, serve under a budget that cannot hold everything, compare, draw."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from pagedweight_jax.calibrate.convert import convert
from pagedweight_jax.calibrate.text import read_text
from pagedweight_jax.checkpoint.hf import load_config, load_weights
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, Progress
from pagedweight_jax.checkpoint.tokenizer import load_tokenizer
from pagedweight_jax.config import ServeConfig
from pagedweight_jax.demo import report
from pagedweight_jax.demo.checks import check_events
from pagedweight_jax.demo.compare import compare
from pagedweight_jax.demo.live import LiveView
from pagedweight_jax.demo.serve import serve
from pagedweight_jax.demo.timeline import draw_timeline
from pagedweight_jax.demo.workload import SHARES, Pace, make_workload
from pagedweight_jax.errors import UserError
from pagedweight_jax.evaluate.perplexity import split_windows
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.events import write_events
from pagedweight_jax.serving.loading import budget_bytes

MIN_BITS, MAX_BITS = 3, 6
MAX_MODEL_LEN = 2048

PRESSURE = 0.85
"""At the peak the KV cache claims this share of what all weights can give."""

Bars = Callable[[], AbstractContextManager[tuple[Progress, Callable[[str], None]]]]
"""Opens progress bars: (progress, report)."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of everything: the demo proper, or one that is over in seconds."""

    samples: int
    sequence_length: int
    chunk_tokens: int
    steps_per_call: int
    pace: Pace
    rate_tokens: int
    windows: int
    window_tokens: int


FULL = Size(
    samples=64,
    sequence_length=512,
    chunk_tokens=256,
    steps_per_call=4,
    pace=Pace(spacing=6, stay=60),
    rate_tokens=24,
    windows=4,
    window_tokens=2048,
)
QUICK = Size(
    samples=16,
    sequence_length=128,
    chunk_tokens=64,
    steps_per_call=4,
    pace=Pace(spacing=2, stay=20),
    rate_tokens=16,
    windows=8,
    window_tokens=384,
)


def run_demo(
    model: Path, out: Path, *, memory_bytes: int | None, size: Size, bars: Bars, screen: Console, stdout: Console
) -> dict:
    """Returns a summary of the demo, also written to ``out``/summary.json, beside events.jsonl and timeline.png.

    ``problems`` of the summary holds what the event log should have shown and does not.

    Args:
      model: a Hugging Face folder with text/calibration.txt and text/heldout.txt.
      out: folder of the results; the paged checkpoint lies in it.
      memory_bytes: the budget; None takes what holds the top width and one full context.
      size: FULL or QUICK.
      bars: for what takes time.
      screen: where the live view goes.
      stdout: where tables go.

    Raises:
      UserError: no model, no text, no folder for the results, or a budget that is too small.
    """
    if not (model / "config.json").is_file():
        raise UserError(f"{model}: no demo model there; run this in the project's folder, or name one with --model")
    heldout = read_text(model / "text" / "heldout.txt")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file; the demo's results need a folder")
    out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    announce = partial(screen.print, highlight=False, markup=False)

    announce(f"1/4  convert {model}, {MIN_BITS} to {MAX_BITS} bits")
    with bars() as (progress, say), _timed(seconds, "convert"):
        checkpoint = convert(
            model,
            out / "model.paged",
            bits=(MIN_BITS, MAX_BITS),
            samples=size.samples,
            sequence_length=size.sequence_length,
            overwrite=True,
            progress=progress,
            report=say,
        )
    tokenizer = load_tokenizer(model)
    tokens = tokenizer(heldout, verbose=False).input_ids
    windows = split_windows(tokens, size.window_tokens, size.windows)

    announce("2/4  compile the steps, load the pages")
    with bars() as (progress, _), _timed(seconds, "load"):
        engine = Engine(checkpoint, _config(checkpoint, memory_bytes, size), progress=progress)
    try:
        engine.step()  # the log begins with an idle server
        memory = report.memory_rows(engine)
        stdout.print(report.memory_table(memory, engine.host_bytes))
        arrivals = make_workload(
            tokens[windows.size :] or tokens,
            lambda text: tokenizer(text, add_special_tokens=False).input_ids,
            peak_tokens=_peak_tokens(engine),
            max_model_len=engine.config.max_model_len,
            steps_per_call=size.steps_per_call,
            pace=size.pace,
        )

        announce(f"3/4  serve {len(arrivals)} requests that come, grow and go")
        with _timed(seconds, "serve"), LiveView(engine, tokenizer.decode, screen) as view:
            requests = serve(engine, arrivals, view.update)
        events = list(engine.events)
        write_events(out / "events.jsonl", events)
        draw_timeline(events, out / "timeline.png", "Weights give way to the KV cache, and come back")
        stdout.print(report.request_table(requests, arrivals, tokenizer.decode))

        announce("4/4  measure paged and static weights on the same text")
        peak_kv_bytes = max(event.kv_bytes for event in events)
        dense = load_weights(model, load_config(model), engine.weights.embed_VD.dtype, lambda line: None)
        with bars() as (progress, _), _timed(seconds, "compare"):
            rows = compare(
                engine,
                checkpoint,
                dense,
                windows,
                peak_kv_bytes=peak_kv_bytes,
                rate_tokens=size.rate_tokens,
                progress=progress,
            )
    finally:
        engine.close()
    stdout.print(report.comparison_table(rows, engine.ledger.budget_bytes, peak_kv_bytes))
    summary = {
        "budget_bytes": engine.ledger.budget_bytes,
        "memory": dict(memory),
        "peak_kv_bytes": peak_kv_bytes,
        "rows": [asdict(row) for row in rows],
        "seconds": seconds,
        "problems": check_events(events),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def _config(checkpoint: PagedCheckpoint, memory_bytes: int | None, size: Size) -> ServeConfig:
    config = ServeConfig(
        memory_bytes=1,
        max_num_seqs=len(SHARES),
        max_model_len=min(MAX_MODEL_LEN, checkpoint.manifest.config.max_position_embeddings),
        prefill_chunk_tokens=size.chunk_tokens,
        steps_per_call=size.steps_per_call,
    )
    if memory_bytes is None:
        memory_bytes = budget_bytes(checkpoint.manifest, config, bits=MAX_BITS, kv_tokens=config.max_model_len)
    return replace(config, memory_bytes=memory_bytes)


def _peak_tokens(engine: Engine) -> int:
    """Tokens of context that fill what is free now, and then ``PRESSURE`` of what the weights can give."""
    event, table, geometry = engine.events[-1], engine.residency.table, engine.state.geometry
    floor_bytes = table.committed_LEU[..., 0].size * int(table.bytes_UQ[:, 0].sum())
    kv_bytes = event.free_bytes + PRESSURE * (event.weight_bytes - floor_bytes)
    return int(kv_bytes / geometry.block_bytes) * geometry.kv.block_tokens
