# SPDX-License-Identifier: Apache-2.0
"""Scores under pressure, many at a time: what ``ablation.py`` and ``uniform_curve.py`` share.

A case is one engine, one memory budget and one text. Cases run in processes of a few cores each, or side by side on one
GPU; the unquantized model is run once per text and remembered on disk. Compiling takes longer than scoring and depends
on the size of the arena, so all budgets of a batch get the same arena, and what a budget does not have is withheld.
"""

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from queue import Queue

import numpy as np
from record import Results, append_result

from pagedweight_jax.calibrate.text import read_text, tokenize
from pagedweight_jax.checkpoint import hf
from pagedweight_jax.checkpoint.paged import open_checkpoint, sha256_of
from pagedweight_jax.checkpoint.policy import load_calibration
from pagedweight_jax.checkpoint.summary import summarize
from pagedweight_jax.config import PlannerConfig, ServeConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.evaluate.divergence import Reference, reference
from pagedweight_jax.evaluate.perplexity import perplexity, score_dense, split_windows
from pagedweight_jax.evaluate.pressure import Score, score_under_pressure
from pagedweight_jax.evaluate.schedule import write_schedule
from pagedweight_jax.models.weights import Weights, without_experts
from pagedweight_jax.paging.arena import KV
from pagedweight_jax.planning.policy import Policy
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.loading import budget_bytes
from pagedweight_jax.serving.staging import plan_staging
from pagedweight_jax.serving.state import Geometry, make_geometry

CHUNK_TOKENS = 128
CORES = 2
"""Of each worker process."""

SHOWN = ("label", "text", "batch", "memory_bytes", "kl", "mean_bits", "error", "seconds")


@dataclass(frozen=True, kw_only=True)
class Text:
    """Windows of one file; ``skip`` windows are left out before them."""

    name: str
    path: Path
    windows: int
    window_tokens: int
    skip: int = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to serve one text.

    Attributes:
      label: of the row in a table.
      checkpoint: paged.
      text: what is scored.
      batch: windows together.
      memory_bytes: budget.
      mode: "dynamic" or "frozen".
      bits: one width for all blocks (frozen), or None for those that the budget gives.
      planner: switches.
      policy: instead of the checkpoint's.
    """

    label: str
    checkpoint: Path
    text: Text
    batch: int
    memory_bytes: int
    mode: str = "dynamic"
    bits: int | None = None
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    policy: Policy | None = None

    @property
    def names(self) -> dict:
        """What tells the case from others, as it is read back from JSON."""
        fields = asdict(self) | {"checkpoint": self.checkpoint.name, "text": self.text.name}
        return json.loads(json.dumps(fields | {"windows": self.text.windows, "skip": self.text.skip}))


def serve_config(batch: int, window_tokens: int, memory_bytes: int = 1, **fields) -> ServeConfig:
    chunk_tokens = min(CHUNK_TOKENS, window_tokens)
    return ServeConfig(
        memory_bytes=memory_bytes,
        max_num_seqs=batch,
        max_model_len=window_tokens,
        prefill_chunk_tokens=chunk_tokens,
        **fields,
    )


def full_context_bytes(checkpoint: Path, batch: int, window_tokens: int, bits: float) -> int:
    """Returns the budget that holds ``bits`` bits, between two widths in proportion, beside ``batch`` full contexts."""
    manifest, config = open_checkpoint(checkpoint).manifest, serve_config(batch, window_tokens)
    low = int(min(bits, manifest.max_bits - 1))
    low_bytes, high_bytes = (
        budget_bytes(manifest, config, bits=b, kv_tokens=batch * window_tokens) for b in (low, low + 1)
    )
    return int(low_bytes + (bits - low) * (high_bytes - low_bytes))


def most_config(checkpoint: Path, batch: int, window_tokens: int) -> ServeConfig:
    """Returns a configuration of the largest budget, which the engines of all budgets share."""
    max_bits = open_checkpoint(checkpoint).manifest.max_bits
    most_bytes = full_context_bytes(checkpoint, batch, window_tokens, max_bits)
    return serve_config(batch, window_tokens, most_bytes, dtype="float32")


def _geometry(checkpoint: Path, config: ServeConfig) -> Geometry:
    manifest = open_checkpoint(checkpoint).manifest
    rows, length = config.max_num_seqs, config.max_model_len
    return make_geometry(manifest.config, manifest.layouts(), config.kv_dtype, rows, length)


def arena_bytes(case: Case) -> int:
    """Returns what the budget of a case leaves to KV cache and pages."""
    config = most_config(case.checkpoint, case.batch, case.text.window_tokens)
    geometry, max_bits = _geometry(case.checkpoint, config), open_checkpoint(case.checkpoint).manifest.max_bits
    kv_bytes = case.batch * geometry.blocks_per_row * geometry.block_bytes
    return case.memory_bytes - config.memory_bytes + sizes(case.checkpoint).experts_bytes[max_bits] + kv_bytes


def staging_bytes(checkpoint: Path) -> int:
    """Returns the memory for pages on their way, which a static server does not need."""
    manifest = open_checkpoint(checkpoint).manifest
    num_experts = manifest.config.num_sparse_layers * manifest.config.num_experts
    return plan_staging(manifest.layouts(), num_experts).total_bytes


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of all routed experts by width: with every LUT up to that width, as paging keeps them, or with its own."""

    experts_bytes: dict[int, int]
    own_lut_bytes: dict[int, int]
    num_weights: int


def sizes(checkpoint: Path) -> Sizes:
    summary = summarize(open_checkpoint(checkpoint))
    return Sizes(
        experts_bytes={width["bits"]: width["experts_bytes"] for width in summary["widths"]},
        own_lut_bytes={width["bits"]: width["own_lut_experts_bytes"] for width in summary["widths"]},
        num_weights=summary["model"]["paged_parameters"],
    )


# In the worker processes


@functools.cache
def _windows(text: Text, model: Path) -> np.ndarray:
    _, tokens = tokenize(model, read_text(text.path), hf.load_config(model).vocab_size)
    windows = split_windows(tokens, text.window_tokens, text.skip + text.windows)[text.skip :]
    if len(windows) < text.windows:
        raise SystemExit(f"{text.path}: {len(windows)} windows behind the first {text.skip}, need {text.windows}")
    return windows


def _weights(model: Path) -> Weights:
    return hf.load_weights(model, hf.load_config(model), np.float32, lambda line: None)


@functools.cache
def _model_digest(model: Path) -> str:
    files = [model / "config.json", *sorted(model.glob("*.safetensors"))]
    return "".join(sha256_of(file) for file in files)


def _cached(text: Text, model: Path, cache: Path) -> Path:
    """The file of these tokens and weights, whatever their names."""
    digest = hashlib.sha256(_model_digest(model).encode() + _windows(text, model).tobytes()).hexdigest()
    return cache / f"{text.name}-{text.skip}-{text.windows}x{text.window_tokens}-{digest[:16]}.npz"


def unquantized(text: Text, model: Path, cache: Path) -> dict:
    """Returns the unquantized model's perplexity on the text; its hidden states are left in ``cache``."""
    path = _cached(text, model, cache)
    if not path.exists():
        weights, windows = _weights(model), _windows(text, model)
        ref = reference(weights, windows)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{os.getpid()}-{path.name}")
        np.savez(partial, hidden_WTD=ref.hidden_WTD, logprobs_WT=score_dense(weights, windows))
        partial.replace(path)
    with np.load(path) as arrays:
        return {"text": text.name, **asdict(perplexity(arrays["logprobs_WT"]))}


@functools.cache
def _reference(text: Text, model: Path, folder: Path) -> Reference:
    with np.load(_cached(text, model, folder)) as arrays:
        return Reference(weights=without_experts(_weights(model)), hidden_WTD=arrays["hidden_WTD"])


@functools.cache
def _most_arena_bytes(checkpoint: Path, batch: int, window_tokens: int) -> int:
    engine = Engine(open_checkpoint(checkpoint), most_config(checkpoint, batch, window_tokens))
    engine.close()
    return engine.ledger.arena_bytes


def score(case: Case, model: Path, cache: Path) -> tuple[Score, int]:
    """Returns the score of a case and the bytes that were withheld from its engine.

    An engine of ``memory_bytes`` would start with the same bits and have the same frames for KV cache and pages.
    """
    checkpoint, window_tokens = open_checkpoint(case.checkpoint), case.text.window_tokens
    calibration = load_calibration(checkpoint)
    if case.policy is not None:
        calibration = replace(calibration, policy=case.policy)
    config = most_config(case.checkpoint, case.batch, window_tokens)
    config = replace(config, mode=case.mode, bits=case.bits, planner=case.planner)
    geometry = _geometry(case.checkpoint, config)
    withheld_blocks = 0
    if case.bits is None:
        surplus_bytes = _most_arena_bytes(case.checkpoint, case.batch, window_tokens) - arena_bytes(case)
        withheld_blocks = -(-surplus_bytes // geometry.block_bytes)
        first_blocks = case.batch * geometry.blocks_per_row
        if case.mode == "dynamic":
            first_blocks = min(first_blocks, config.planner.high_watermark_blocks + 1)
        config = replace(config, kv_tokens=(first_blocks + withheld_blocks) * geometry.kv.block_tokens)
    engine = Engine(checkpoint, config, calibration=calibration)
    try:
        engine.allocator.take(withheld_blocks * geometry.frames_per_block, KV)
        result = score_under_pressure(engine, _windows(case.text, model), _reference(case.text, model, cache))
    finally:
        engine.close()
    return result, withheld_blocks * geometry.block_bytes


def record(case: Case, model: Path, cache: Path, schedules: Path | None = None) -> dict:
    """Returns a case's figures as one JSON object, or under ``error`` why there are none."""
    started = time.perf_counter()
    try:
        result, withheld_bytes = score(case, model, cache)
    except UserError as error:
        return case.names | {"error": str(error)}
    schedule = result.schedule
    kl_W = result.kl_WT.mean(axis=1)
    last = result.kl_WT[:, -(result.kl_WT.shape[1] // 4) :]
    row = case.names | {
        "perplexity": round(result.perplexity.perplexity, 5),
        "kl": float(f"{result.kl:.6g}"),
        "kl_last_quarter": float(f"{last.mean():.6g}"),
        "kl_windows": [float(f"{kl:.6g}") for kl in kl_W],
        "mean_bits": round(schedule.mean_bits, 4),
        "lowest_bits": round(schedule.lowest_bits, 4),
        "peak_device_bytes": max(b.device_bytes for b in schedule.boundaries) - withheld_bytes,
        "boundaries": sum(b.chunks > 0 for b in schedule.boundaries),
        "seconds": round(time.perf_counter() - started, 1),
    }
    if schedules is not None:
        schedules.mkdir(parents=True, exist_ok=True)
        name = "-".join((case.text.name, str(case.batch), str(case.memory_bytes), case.label)).replace(" ", "_")
        write_schedule(schedules / f"{name}.json", schedule, row)
    return row


def _pin(first_cores: Queue) -> None:
    """Gives a worker its own cores, before XLA counts them."""
    cores = sorted(os.sched_getaffinity(0))
    first = first_cores.get()
    os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(CORES)})


@contextmanager
def processes(workers: int) -> Iterator[Callable]:
    """Yields ``run(function, items, *args)``; that yields ``function(item, *args)`` in order, from worker processes."""
    context = get_context("spawn")
    first_cores = context.Manager().Queue()
    for worker in range(workers):
        first_cores.put(CORES * worker)
    with ProcessPoolExecutor(workers, context, _pin, (first_cores,)) as pool:
        yield lambda function, items, *args: pool.map(function, items, *([arg] * len(items) for arg in args))


def score_all(
    cases: Sequence[Case], model: Path, cache: Path, results: Path, *, workers: int, schedules: Path | None = None
) -> list[dict]:
    """Returns the cases' figures that there are, from ``results`` or measured now and appended there.

    The unquantized model is scored on every text first. A file of results is of one version of the code: delete it.
    """

    def key(row: dict) -> str:
        return json.dumps({name: row.get(name) for name in cases[0].names}, sort_keys=True)

    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    known = {key(row): row for row in map(json.loads, lines) if row["name"] == "case"}
    missing = [case for case in cases if key(case.names) not in known]
    missing_texts = list({case.text.name: case.text for case in missing}.values())
    appended = Results(results)
    with processes(workers) as run:
        for row in run(unquantized, missing_texts, model, cache):
            print(json.dumps(row), flush=True)
            append_result(appended, "unquantized", row)
        for row in run(record, missing, model, cache, schedules):
            print({name: row.get(name) for name in SHOWN}, flush=True)
            append_result(appended, "case", row)
            known[key(row)] = row
    return [row for row in (known[key(case.names)] for case in cases) if "error" not in row]


def default_workers() -> int:
    return max(1, len(os.sched_getaffinity(0)) // CORES)


def texts(arguments: Iterable[str], windows: int, window_tokens: int) -> list[Text]:
    """Returns the texts named on a command line as NAME=PATH or NAME=PATH@SKIP."""
    read = []
    for argument in arguments:
        name, _, place = argument.partition("=")
        path, _, skip = place.partition("@")
        text = Text(name=name, path=Path(path), windows=windows, window_tokens=window_tokens, skip=int(skip or 0))
        read.append(text)
    return read
