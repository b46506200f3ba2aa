# SPDX-License-Identifier: Apache-2.0
"""What a conversion follows from, checked before any weight is read; and what it will cost."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pagedweight_jax.calibrate.fisher import CHUNK_TOKENS
from pagedweight_jax.calibrate.layer import BATCH_SEQUENCES
from pagedweight_jax.calibrate.text import choose_sequences, read_text, tokenize
from pagedweight_jax.checkpoint import hf
from pagedweight_jax.checkpoint.draft import ARRAY_BYTES, check_output, nearest_folder
from pagedweight_jax.checkpoint.layout import choose_frame_bytes
from pagedweight_jax.checkpoint.manifest import (
    FORMAT_VERSION,
    IMPORTANCES,
    CalibrationRun,
    PagedManifest,
    expected_arrays,
)
from pagedweight_jax.checkpoint.paged import partial_folder
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import without_experts
from pagedweight_jax.units import format_size
from pallas_kernels.bitplane import LAYOUT_VERSION

MIN_TOKENS = 32
"""An expert routed fewer calibration tokens takes its layer's average importance."""

RAM_BYTES = 4 << 30
"""Hidden states up to this size are held in memory."""

PROGRAM_BYTES = 768 << 20
"""What Python, JAX, compiled programs and the quantizer's tables take, about: the demo model peaks at 789 MiB."""

GPU_PROGRAM_BYTES = 9 << 28
"""The same with a GPU, its libraries and page-locked memory: a full-size conversion peaked at 4.9 GB."""

QUANTIZER_BYTES = 100
"""What a GPU's quantizer takes for every weight of the linear-block at hand: XLA says 92."""

PACKAGES = ("pagedweight-jax", "jax", "numpy", "orbax-checkpoint")

Report = Callable[[str], None]
"""Called with one line that the user should see."""


@dataclass(frozen=True)
class Job:
    """A conversion that can begin.

    Attributes:
      source: the model's files.
      out: the folder to create.
      manifest: of the checkpoint, without arrays and coverage.
      sequences_NS: calibration tokens, int32.
      overwrite: a paged checkpoint at ``out`` may be replaced.
      ram_bytes: hidden states beyond this are read from their file as they are needed.
    """

    source: hf.Source
    out: Path
    manifest: PagedManifest
    sequences_NS: np.ndarray
    overwrite: bool
    ram_bytes: int

    @property
    def inputs(self) -> dict[str, object]:
        """Everything that the checkpoint's arrays follow from, by names that a user knows."""
        stats = {path.name: path.stat() for path in set(self.source.files.values())}
        manifest = self.manifest
        return {
            "source": {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()},
            "configuration": asdict(manifest.config),
            "range of bits": (manifest.min_bits, manifest.max_bits, manifest.frame_bytes),
            "calibration": asdict(manifest.calibration),
            "choice of tokens": hashlib.sha256(self.sequences_NS.tobytes()).hexdigest(),
            "version": {"format": FORMAT_VERSION, "layout": LAYOUT_VERSION} | manifest.versions,
            "device": jax.local_devices()[0].device_kind,
        }


@dataclass(frozen=True)
class Costs:
    """What a conversion reads, writes and holds, in bytes.

    Attributes:
      read_bytes: the source's weights.
      pages_bytes: the checkpoint's pages.
      dense_bytes: its other weights.
      hidden_bytes: the hidden states of all calibration tokens; three times this is on the disk while a layer runs, and
        once for each layer and twice more (gradients) while Fisher rows are measured.
      hidden_in_memory: they are held in memory as well, else mapped.
      layer_bytes: the weights of the largest layer.
      disk_bytes: the most that the conversion takes on the disk.
      ram_bytes: about the most that it takes in memory.
      device_bytes: about the most that it takes on a GPU; 0 without one.
    """

    read_bytes: int
    pages_bytes: int
    dense_bytes: int
    hidden_bytes: int
    hidden_in_memory: bool
    layer_bytes: int
    disk_bytes: int
    ram_bytes: int
    device_bytes: int


def prepare(
    folder: Path,
    out: Path,
    *,
    bits: tuple[int, int] = (3, 8),
    text: Path | None = None,
    samples: int = 100,
    sequence_length: int = 512,
    seed: int = 0,
    importance: str = "inputs",
    overwrite: bool = False,
    ram_bytes: int = RAM_BYTES,
    report: Report = print,
) -> Job:
    """Returns the checked conversion; no weight is read, nothing is written.

    Args:
      folder: a Hugging Face folder: config.json, safetensors, tokenizer.
      out: the folder to create.
      bits: the lowest and the highest bitwidth to support.
      text: calibration text, see ``read_text``; None takes ``folder``/text/calibration.txt.
      samples: calibration sequences.
      sequence_length: tokens of each.
      seed: of their choice.
      importance: what an error is weighted by: "inputs", the inputs' second moments; "fisher", the squared gradients of
        the loss at the outputs as well, for which every layer is read three times instead of once.
      overwrite: a paged checkpoint at ``out`` may be replaced.
      ram_bytes: hidden states beyond this are read from their file as they are needed.
      report: gets what the user should see.

    Raises:
      UserError: an unsupported or damaged model, bits outside 1..8, no text or too little of it, or ``out`` exists.
    """
    if importance not in IMPORTANCES:
        raise UserError(f"importance {importance!r}: one of {', '.join(IMPORTANCES)}")
    folder, out = Path(folder), Path(out)
    check_output(out, overwrite)
    config = hf.load_config(folder)
    frame_bytes = choose_frame_bytes(config, *bits)
    calibration_text = read_text(_text_path(folder, text, report))
    manifest = PagedManifest(
        config=config,
        min_bits=bits[0],
        max_bits=bits[1],
        frame_bytes=frame_bytes,
        calibration=CalibrationRun(
            text_sha256=hashlib.sha256(calibration_text.encode()).hexdigest(),
            samples=samples,
            sequence_length=sequence_length,
            seed=seed,
            min_tokens=MIN_TOKENS,
            uncalibrated_experts=0,
            importance=importance,
        ),
        versions={package: version(package) for package in PACKAGES},
    )
    sequences_NS = _sequences(folder, calibration_text, manifest)
    return Job(hf.open_source(folder, config, report), out, manifest, sequences_NS, overwrite, ram_bytes)


def costs(job: Job) -> Costs:
    """Returns what the conversion costs, from the headers alone."""
    config, layouts, shapes = job.manifest.config, job.manifest.layouts(), job.source.shapes
    layer_bytes = max(map(_nbytes, shapes.layers))
    kind_weights = [config.num_experts * layout.rows * layout.columns for layout in layouts]
    layer_pages_bytes = config.num_experts * sum(layout.resident_bytes(job.manifest.max_bits) for layout in layouts)
    pages_bytes = config.num_sparse_layers * layer_pages_bytes
    dense_bytes = _nbytes(without_experts(shapes))
    hidden_bytes = job.sequences_NS.size * config.hidden_size * shapes.embed_VD.dtype.itemsize
    in_memory = hidden_bytes <= job.ram_bytes
    S = job.sequences_NS.shape[1]
    attention_bytes = 2 * BATCH_SEQUENCES * config.num_heads * S * S * 4  # scores and probabilities
    on_gpu = jax.default_backend() == "gpu"
    # Beside the layer at hand the disk has the pages of the layer before, then the layer behind. Without a GPU: the
    # layer as it was read and as XLA has it; then codes, LUTs, what packs them, and pages.
    at_the_disk_bytes = max(layer_bytes, layer_pages_bytes)
    running_bytes = at_the_disk_bytes + (layer_bytes if on_gpu else 2 * layer_bytes + attention_bytes)
    quantizing_bytes = at_the_disk_bytes + layer_pages_bytes + (0 if on_gpu else layer_bytes + 4 * max(kind_weights))
    block_bytes = QUANTIZER_BYTES * max(layout.rows * layout.columns for layout in layouts)
    device_bytes = layer_bytes + max(attention_bytes, 4 * max(kind_weights) + block_bytes)
    outer_bytes = _nbytes(replace(shapes, layers=()))
    with_fisher = job.manifest.calibration.importance == "fisher"
    head_bytes = with_fisher * 4 * 4 * CHUNK_TOKENS * config.vocab_size  # logits, probabilities and their gradients
    device_bytes = max(device_bytes, with_fisher * (outer_bytes + head_bytes))
    top_bytes = 2 * outer_bytes + head_bytes  # once more to transpose, to save and to differentiate
    program_bytes = GPU_PROGRAM_BYTES if on_gpu else PROGRAM_BYTES
    scratch_bytes = hidden_bytes * (config.num_layers + 3 if with_fisher else 3)
    files_bytes = ARRAY_BYTES * len(expected_arrays(job.manifest))  # what small arrays take beside their values
    return Costs(
        read_bytes=_nbytes(shapes) * (3 if with_fisher else 1),
        pages_bytes=pages_bytes,
        dense_bytes=dense_bytes,
        hidden_bytes=hidden_bytes,
        hidden_in_memory=in_memory,
        layer_bytes=layer_bytes,
        disk_bytes=pages_bytes + dense_bytes + files_bytes + scratch_bytes,
        ram_bytes=program_bytes + max(running_bytes, quantizing_bytes, top_bytes) + in_memory * hidden_bytes,
        device_bytes=on_gpu * device_bytes,
    )


def _nbytes(shapes: Any) -> int:
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def device_peak_bytes() -> int:
    """Returns the most that this process has held on JAX's default device; 0 where that is host memory."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def check_disk(job: Job, needed_bytes: int) -> None:
    """Raises UserError if less is free than the conversion takes."""
    folder = nearest_folder(job.out)
    kept_bytes = sum(path.stat().st_size for path in partial_folder(job.out).rglob("*") if path.is_file())
    free_bytes = shutil.disk_usage(folder).free + kept_bytes
    if needed_bytes > free_bytes:
        needed, free = format_size(needed_bytes), format_size(free_bytes)
        raise UserError(f"{folder}: the conversion takes up to {needed} of disk, {free} are free")


def _text_path(folder: Path, text: Path | None, report: Report) -> Path:
    if text is not None:
        return Path(text)
    own = folder / "text" / "calibration.txt"
    if not own.is_file():
        raise UserError(f"no calibration text: give one with --text ({own} does not exist)")
    report(f"calibration text: {own}")
    return own


def _sequences(folder: Path, text: str, manifest: PagedManifest) -> np.ndarray:
    """Calibration tokens, int32 [samples, sequence_length]."""
    run, config = manifest.calibration, manifest.config
    if run.sequence_length > config.max_position_embeddings:
        raise UserError(
            f"calibration: sequences of {run.sequence_length} tokens exceed the model's context of "
            f"{config.max_position_embeddings} (--sequence-length)"
        )
    begin, tokens = tokenize(folder, text, config.vocab_size)
    return choose_sequences(begin, tokens, run.samples, run.sequence_length, run.seed)
