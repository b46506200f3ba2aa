# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face folder to a paged checkpoint: calibrate once, then quantize and write layer by layer."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np

from pagedweight_jax.calibrate.any_precision import check_weights, quantize
from pagedweight_jax.calibrate.hessian import collect_moments, importance
from pagedweight_jax.calibrate.sensitivity import sensitivity
from pagedweight_jax.calibrate.text import choose_sequences, read_text, tokenize
from pagedweight_jax.checkpoint import hf
from pagedweight_jax.checkpoint.dense import named_leaves
from pagedweight_jax.checkpoint.layout import choose_frame_bytes
from pagedweight_jax.checkpoint.manifest import CalibrationRun, PagedManifest, page_name
from pagedweight_jax.checkpoint.paged import (
    PagedCheckpoint,
    Progress,
    check_output,
    nearest_folder,
    no_progress,
    open_checkpoint,
    save,
)
from pagedweight_jax.config import DOWN, GATE_UP, KINDS
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import MoEWeights
from pallas_kernels.bitplane import BlockLayout, pack_page

MIN_TOKENS = 32
"""An expert routed fewer calibration tokens counts as one of so many average tokens of its layer."""

BATCH_SEQUENCES = 4
"""Calibration sequences that go through the model together."""

PACKAGES = ("pagedweight-jax", "jax", "numpy", "orbax-checkpoint")

Report = Callable[[str], None]
"""Called with one line that the user should see."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What calibration knows about every expert.

    Attributes:
      importance_U: the columns' importance, float32 [L, E, C] for gate_up and for down.
      uncalibrated_LE: True where an expert saw too few tokens.
      tokens_LE: tokens routed to it, int64.
    """

    importance_U: tuple[np.ndarray, np.ndarray]
    uncalibrated_LE: np.ndarray
    tokens_LE: np.ndarray


def convert(
    folder: Path,
    out: Path,
    *,
    bits: tuple[int, int] = (3, 8),
    text: Path | None = None,
    samples: int = 100,
    sequence_length: int = 512,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = no_progress,
    report: Report = print,
) -> PagedCheckpoint:
    """Returns the paged checkpoint written to ``out``. The same input gives the same arrays and the same manifest.

    What can be refused is refused before the first weight is read. Calibration holds the whole model; quantization and
    writing hold the experts of one layer and the dense weights.

    Args:
      folder: a Hugging Face folder: config.json, safetensors, tokenizer.
      out: the folder to create, with the tokenizer, configurations and texts of ``folder``.
      bits: the lowest and the highest bitwidth to support.
      text: calibration text, UTF-8; None takes ``folder``/text/calibration.txt.
      samples: calibration sequences.
      sequence_length: tokens of each.
      seed: of their choice.
      overwrite: replace a paged checkpoint at ``out``.
      progress, report: what the user sees of the work.

    Raises:
      UserError: an unsupported or damaged model, bits outside 1..8, no text or too little of it, a full disk, or
        ``out`` exists.
    """
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
        ),
        versions={package: version(package) for package in PACKAGES},
    )
    _check_disk(out, manifest)
    sequences = _sequences(folder, calibration_text, manifest)
    source = hf.open_source(folder, config, report)
    calibrated = _calibrate(source, sequences, progress)
    num_uncalibrated = int(calibrated.uncalibrated_LE.sum())
    if num_uncalibrated:
        report(
            f"{num_uncalibrated} of {calibrated.uncalibrated_LE.size} experts saw fewer than {MIN_TOKENS} calibration "
            f"tokens: they take their layer's average importance"
        )
    manifest = replace(manifest, calibration=replace(manifest.calibration, uncalibrated_experts=num_uncalibrated))
    save(out, manifest, _groups(source, manifest, calibrated, progress), _carried_files(folder), overwrite)
    return open_checkpoint(out)


def _text_path(folder: Path, text: Path | None, report: Report) -> Path:
    if text is not None:
        return Path(text)
    own = folder / "text" / "calibration.txt"
    if not own.is_file():
        raise UserError(f"no calibration text: give one with --text ({own} does not exist)")
    report(f"calibration text: {own}")
    return own


def _check_disk(out: Path, manifest: PagedManifest) -> None:
    config = manifest.config
    block_bytes = sum(layout.resident_bytes(manifest.max_bits) for layout in manifest.layouts())
    needed_bytes = config.num_sparse_layers * config.num_experts * block_bytes
    folder = nearest_folder(out)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise UserError(f"{folder}: the pages take {needed_bytes} bytes, {free_bytes} are free")


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


def _calibrate(source: hf.Source, sequences: np.ndarray, progress: Progress) -> Calibrated:
    """Runs the whole model on the calibration tokens; it is let go of on return."""

    def batches() -> Iterator[np.ndarray]:
        for done in range(0, len(sequences), BATCH_SEQUENCES):
            progress("calibrate", done, len(sequences))
            yield sequences[done : done + BATCH_SEQUENCES]
        progress("calibrate", len(sequences), len(sequences))

    weights = hf.read_weights(source, progress=partial(progress, "load"))
    moments = collect_moments(weights, batches())
    gate_up_LEC, down_LEC, uncalibrated_LE = importance(moments, MIN_TOKENS)
    return Calibrated(
        importance_U=(np.asarray(gate_up_LEC, np.float32), np.asarray(down_LEC, np.float32)),
        uncalibrated_LE=np.asarray(uncalibrated_LE),
        tokens_LE=np.asarray(moments.tokens_LE),
    )


def _quantize(
    w_ENC: np.ndarray, importance_EC: np.ndarray, kind: int, layout: BlockLayout, sparse_layer: int, name: str
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the pages of one kind of linear-block by array name, and s of eq. 2, float64 [E, Q]."""
    w_ENC = w_ENC.astype(np.float32)
    quantized = quantize(w_ENC, importance_EC, layout.min_bits, layout.max_bits, name=name)
    pages = {
        page_name(sparse_layer, kind, page): pack_page(quantized.codes_ENC, quantized.luts.get(page + 1), page, layout)
        for page in range(layout.max_bits)
    }
    return pages, sensitivity(w_ENC, quantized, importance_EC, layout.min_bits, layout.max_bits)


def _groups(
    source: hf.Source, manifest: PagedManifest, calibrated: Calibrated, progress: Progress
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the arrays of the checkpoint: one sparse layer's pages at a time, then dense weights, then calibration."""
    layouts = manifest.layouts()
    num_steps = len(KINDS) * manifest.config.num_sparse_layers
    dense = named_leaves(hf.read_outer(source))
    sensitivity_LUEQ = []
    for number in range(manifest.config.num_layers):
        layer = hf.read_layer(source, number)
        if isinstance(layer.mlp, MoEWeights):
            sparse_layer = len(sensitivity_LUEQ)
            w_UENC = (layer.mlp.experts.gate_up_ENC, layer.mlp.experts.down_ENC)
            layer = replace(layer, mlp=replace(layer.mlp, experts=None))
            pages, sensitivity_UEQ = {}, []
            if not all(np.isfinite(importance_LEC[sparse_layer]).all() for importance_LEC in calibrated.importance_U):
                for w_ENC, name in zip(w_UENC, KINDS):  # a bad weight spoils its layer's importance
                    check_weights(w_ENC.astype(np.float32), f"layer {number} {name}")
                raise UserError(f"layer {number}: the activations on the calibration text are not finite")
            for kind, name in enumerate(KINDS):
                progress("quantize", len(KINDS) * sparse_layer + kind, num_steps)
                importance_EC = calibrated.importance_U[kind][sparse_layer]
                kind_pages, sensitivity_EQ = _quantize(
                    w_UENC[kind], importance_EC, kind, layouts[kind], sparse_layer, f"layer {number} {name}"
                )
                pages |= kind_pages
                sensitivity_UEQ.append(sensitivity_EQ)
            sensitivity_LUEQ.append(sensitivity_UEQ)
            yield pages
        dense |= {f"layers.{number}.{name}": leaf for name, leaf in named_leaves(layer).items()}
    progress("quantize", num_steps, num_steps)
    yield {f"dense/{name}": leaf for name, leaf in dense.items()}
    yield {
        "calibration/sensitivity": np.asarray(sensitivity_LUEQ).swapaxes(1, 2),
        "calibration/uncalibrated": calibrated.uncalibrated_LE,
        "calibration/tokens": calibrated.tokens_LE,
        "calibration/importance/gate_up": calibrated.importance_U[GATE_UP],
        "calibration/importance/down": calibrated.importance_U[DOWN],
    }


def _carried_files(folder: Path) -> dict[str, Path]:
    """What a paged checkpoint takes over from ``folder``: configurations, tokenizer, texts."""
    names = ("config.json", "generation_config.json", *hf.TOKENIZER_FILES)
    files = [folder / name for name in names] + sorted((folder / "text").rglob("*"))
    return {path.relative_to(folder).as_posix(): path for path in files if path.is_file()}
