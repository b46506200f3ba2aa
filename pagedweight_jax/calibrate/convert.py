# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face folder to a paged checkpoint, a layer at hand and one at the disk; resumable."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pagedweight_jax.calibrate.hidden import HiddenStates
from pagedweight_jax.calibrate.layer import convert_layer
from pagedweight_jax.calibrate.memory import experts_on_device, give_back, map_large_arrays
from pagedweight_jax.calibrate.prepare import MIN_TOKENS, Job, Report, check_disk, costs, prepare
from pagedweight_jax.calibrate.stopwatch import Stopwatch
from pagedweight_jax.calibrate.sweep import fisher_rows, sweep
from pagedweight_jax.checkpoint import hf
from pagedweight_jax.checkpoint.dense import named_leaves
from pagedweight_jax.checkpoint.draft import Draft, open_draft
from pagedweight_jax.checkpoint.manifest import PagedManifest
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, Progress, no_progress, open_checkpoint
from pagedweight_jax.models.weights import LayerWeights


def convert(
    folder: Path, out: Path, *, progress: Progress = no_progress, report: Report = print, **options: Any
) -> PagedCheckpoint:
    """Returns the checkpoint of ``folder``, written to ``out``: ``prepare``, whose options it takes, then ``run``."""
    return run(prepare(folder, out, report=report, **options), progress=progress, report=report)


def run(
    job: Job, *, progress: Progress = no_progress, report: Report = print, watch: Stopwatch | None = None
) -> PagedCheckpoint:
    """Returns the finished checkpoint. The same inputs give the same arrays and the same manifest.

    Layer follows layer, the embedding first: its experts see the calibration tokens, are quantized and written, and the
    hidden states that leave it are kept for the next one. Fisher rows, if asked for, are measured before that (see
    ``sweep``). The disk works beside that: it writes the layer before, then reads the layer behind. A finished layer is
    never done again: after an interruption or on a full disk, the same job goes on from ``out``.partial.

    Args:
      job: what ``prepare`` returned.
      progress, report: what the user sees of the work.
      watch: told where the time goes.

    Raises:
      UserError: a weight or an activation is not finite, the disk is full, or ``out`` exists.
    """
    watch = watch or Stopwatch()
    map_large_arrays()
    check_disk(job, costs(job).disk_bytes)
    with open_draft(job.out, job.inputs, job.overwrite, report) as draft:
        _convert_layers(draft, job, progress, watch)
        uncalibrated_LE = _finish_calibration(draft, job.manifest)
        num_uncalibrated = int(uncalibrated_LE.sum())
        if num_uncalibrated:
            report(
                f"{num_uncalibrated} of {uncalibrated_LE.size} experts saw fewer than {MIN_TOKENS} calibration "
                f"tokens: they take their layer's average importance"
            )
        calibration = replace(job.manifest.calibration, uncalibrated_experts=num_uncalibrated)
        manifest = replace(job.manifest, calibration=calibration)
        with watch("write"):
            draft.publish(manifest, _carried_files(job.source.folder), job.overwrite)
    return open_checkpoint(job.out)


def _step(layer: int) -> str:
    return f"layer-{layer:04d}"


def _embed(draft: Draft, job: Job, hidden: HiddenStates, watch: Stopwatch) -> None:
    """Finishes what is no layer's: embedding, final norm and head are written, the tokens embedded."""
    with watch("read"):
        outer = hf.read_outer(job.source)
    with hidden.write(0) as emit:
        for tokens_S in job.sequences_NS:
            emit(outer.embed_VD[tokens_S])
    dense = {f"dense/{name}": leaf for name, leaf in named_leaves(outer).items()}
    with watch("write"):
        draft.commit("outer", [dense], {})


def _convert_layers(draft: Draft, job: Job, progress: Progress, watch: Stopwatch) -> None:
    """Finishes every layer that is not finished yet."""
    config, with_fisher = job.manifest.config, job.manifest.calibration.importance == "fisher"
    shape_NSD = (*job.sequences_NS.shape, config.hidden_size)
    hidden = HiddenStates(draft.scratch, shape_NSD, job.source.shapes.embed_VD.dtype, job.ram_bytes)
    if not draft.finished("outer"):
        _embed(draft, job, hidden, watch)
    if with_fisher and not draft.finished(_step(0)):
        sweep(draft, job, hidden, progress, watch)

    def read_layer(layer: int | None, written: Future) -> LayerWeights | None:
        written.result()
        give_back()  # here: the writing held its arrays to its end
        if layer is None:
            return None
        with watch("read"):
            return hf.read_layer(job.source, layer)

    def write_layer(layer: int, arrays: tuple, written: Future) -> None:
        written.result()  # a layer that could not be written still needs its hidden states
        with watch("write"):
            draft.commit(_step(layer), *arrays)
        hidden.drop_before(layer + 1)

    layers = [layer for layer in range(config.num_layers) if not draft.finished(_step(layer))]
    # In turn the disk writes the layer before and reads the layer behind: beside the layer at hand, one is in memory.
    with ThreadPoolExecutor(1) as disk:  # left by an exception, it still writes what is computed
        written = disk.submit(give_back)  # no layer yet
        read = disk.submit(read_layer, layers[0] if layers else None, written)
        for layer, following in zip(layers, [*layers[1:], None]):
            w = experts_on_device(read.result())
            read = disk.submit(read_layer, following, written)
            fisher = fisher_rows(draft, layer) if with_fisher else {}
            arrays = convert_layer(w, job.manifest, layer, hidden, fisher, MIN_TOKENS, progress, watch)
            written = disk.submit(write_layer, layer, arrays, written)
            del w, arrays
        written.result()


def _finish_calibration(draft: Draft, manifest: PagedManifest) -> np.ndarray:
    """Writes what the layers remembered; returns uncalibrated_LE."""
    layers = [layer for layer, sparse in enumerate(manifest.config.sparse_layers) if sparse]
    remembered_L = [draft.recall(_step(layer)) for layer in layers]
    arrays = {
        f"calibration/{name}": np.stack([remembered[name] for remembered in remembered_L]) for name in remembered_L[0]
    }
    draft.commit("calibration", [arrays], {})
    return arrays["calibration/uncalibrated"]


def _carried_files(folder: Path) -> dict[str, Path]:
    """What a paged checkpoint takes over from ``folder``: configurations, tokenizer, texts."""
    names = ("config.json", "generation_config.json", *hf.TOKENIZER_FILES)
    files = [folder / name for name in names] + sorted((folder / "text").rglob("*"))
    return {path.relative_to(folder).as_posix(): path for path in files if path.is_file()}
