# SPDX-License-Identifier: Apache-2.0
"""From a paged checkpoint and text to its online policy: checked first, measured layer by layer, resumable."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pagedweight_jax.calibrate.residual import HeldOut, cross_fit, text_means, whole_sequences
from pagedweight_jax.calibrate.residual_policy import Halves, first_policy, foresight_report
from pagedweight_jax.calibrate.residual_report import held_out_report
from pagedweight_jax.calibrate.search import default_moves, read_journal, search
from pagedweight_jax.calibrate.sequences import SequenceStatistics, measure_sequences
from pagedweight_jax.calibrate.text import BETWEEN, choose_sequences, read_text, tokenize
from pagedweight_jax.checkpoint.draft import open_draft
from pagedweight_jax.checkpoint.manifest import MANIFEST
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, Progress, no_progress, sha256_of
from pagedweight_jax.checkpoint.policy import OnlinePolicy, PolicyRun, write_policy
from pagedweight_jax.config import KINDS
from pagedweight_jax.errors import UserError
from pagedweight_jax.paging.table import bytes_table
from pagedweight_jax.planning.damage import global_damage
from pagedweight_jax.planning.pins import Pin, pinned_bits
from pagedweight_jax.planning.policy import Policy

SPANS = 4
"""Of equal length, in which the statistics of a sequence are kept: what comes before, what comes after."""


@dataclass(frozen=True)
class PolicyJob:
    """A measurement that can begin.

    Attributes:
      checkpoint: the model.
      run: the text.
      sequences_NS: its tokens, int32.
      journal: of the search, None for none.
      pins: experts that are to keep a bitwidth at least.
    """

    checkpoint: PagedCheckpoint
    run: PolicyRun
    sequences_NS: np.ndarray
    journal: Path | None
    pins: tuple[Pin, ...]

    @property
    def inputs(self) -> dict:
        """JSON values, all that the measurement follows from."""
        digest = sha256_of(self.checkpoint.path / MANIFEST)
        return {"checkpoint": digest, "calibration": asdict(self.run), "spans": SPANS}

    @property
    def subject(self) -> str:
        """Of the journal."""
        return json.dumps(self.inputs)


def prepare_policy(
    checkpoint: PagedCheckpoint,
    text: Sequence[Path] = (),
    *,
    samples: int = 100,
    sequence_length: int = 512,
    seed: int = 0,
    journal: Path | None = None,
    pins: Sequence[Pin] = (),
) -> PolicyJob:
    """Returns the checked measurement; no array is read, nothing is written.

    Args:
      checkpoint: the model.
      text: files or folders as ``read_text`` takes them; none takes the text that the checkpoint carries.
      samples: sequences.
      sequence_length: tokens of each, a multiple of 4.
      seed: of their choice.
      journal: search for a better policy, on one half of the sequences, and keep it if it is better on the other: every
        trial is a line of this file, and a search that was stopped goes on from it.
      pins: experts that are to keep a bitwidth at least.

    Raises:
      UserError: no text or too little of it, a size or pin that makes no sense, a checkpoint that cannot be written
        to, or a journal of another job.
    """
    manifest, config = checkpoint.manifest, checkpoint.manifest.config
    pinned_bits(pins, (config.num_sparse_layers, config.num_experts, len(KINDS)), manifest.min_bits, manifest.max_bits)
    if manifest.min_bits == manifest.max_bits:
        raise UserError(f"{checkpoint.path}: it has {manifest.max_bits} bits only, so there is nothing to choose")
    if sequence_length % SPANS or sequence_length > config.max_position_embeddings:
        raise UserError(
            f"calibration: a sequence must be a multiple of {SPANS} tokens and within the model's context of "
            f"{config.max_position_embeddings}, got {sequence_length} (--sequence-length)"
        )
    if journal is not None and samples < 4:
        raise UserError(f"calibration: a search needs 4 samples, 2 to tune on and 2 to confirm, got {samples}")
    if samples < 2:
        raise UserError(f"calibration: need 2 samples at least, one to fit and one to try it on, got {samples}")
    if not os.access(checkpoint.path, os.W_OK):
        raise UserError(f"{checkpoint.path}: not a folder that can be written to")
    own = checkpoint.path / "text" / "calibration.txt"
    if not text and not own.is_file():
        raise UserError(f"no calibration text: give one with --text ({own} does not exist)")
    joined = BETWEEN.join(read_text(Path(path)) for path in text or (own,))
    begin, tokens = tokenize(checkpoint.path, joined, config.vocab_size)
    sequences_NS = choose_sequences(begin, tokens, samples, sequence_length, seed)
    digest = hashlib.sha256(joined.encode()).hexdigest()
    run = PolicyRun(text_sha256=digest, samples=samples, sequence_length=sequence_length, seed=seed)
    job = PolicyJob(checkpoint, run, sequences_NS, journal, tuple(pins))
    if journal is not None:
        read_journal(journal, job.subject)
    return job


def make_policy(
    job: PolicyJob, *, progress: Progress = no_progress, report: Callable[[str], None] = print
) -> tuple[Path, OnlinePolicy, HeldOut]:
    """Writes the checkpoint's policy; returns its path, the policy, and the held-out predictions that tell its fit.

    What was measured lies in ``OUT.policy.partial`` until the policy is on the disk: after an interruption the same job
    goes on behind its last finished layer.

    Args:
      job: what ``prepare_policy`` returned.
      progress, report: what the user sees of the work.

    Raises:
      UserError: an array is damaged, the disk is full, or the text uses too few experts.
    """
    checkpoint, run = job.checkpoint, job.run
    manifest, span_tokens = checkpoint.manifest, run.sequence_length // SPANS
    with open_draft(checkpoint.path.with_name(checkpoint.path.name + ".policy"), job.inputs, report=report) as draft:
        statistics = measure_sequences(checkpoint, job.sequences_NS, span_tokens, draft, progress)
        whole, fallback_LEUR = whole_sequences(statistics), global_damage(checkpoint.sensitivity)
        heads, held_out = cross_fit(whole, fallback_LEUR)
        bytes_UQ = bytes_table(manifest.layouts())

        def halves(of: SequenceStatistics) -> Halves:
            return Halves.of(of, span_tokens, fallback_LEUR, heads, bytes_UQ, manifest.max_bits)

        policy, searched = first_policy(halves(statistics)), {}
        if job.journal is not None:
            policy, searched = _search(statistics, halves, policy, manifest.min_bits, job.journal, job.subject)
        online = OnlinePolicy(
            run=run,
            **vars(text_means(whole, fallback_LEUR)),
            heads=heads,
            policy=policy,
            fit={
                "held_out": held_out_report(held_out, heads, manifest.max_bits),
                "foresight": foresight_report(halves(statistics), policy),
                "search": searched,
            },
            pins=job.pins,
        )
        path = write_policy(checkpoint, online)
        shutil.rmtree(draft.folder, ignore_errors=True)  # the policy is written: a failure loses nothing
    return path, online, held_out


def _search(
    statistics: SequenceStatistics,
    halves: Callable[[SequenceStatistics], Halves],
    start: Policy,
    min_bits: int,
    journal: Path,
    subject: str,
) -> tuple[Policy, dict]:
    tune, confirm = (halves(statistics.take(np.arange(first, len(statistics), 2))) for first in (0, 1))
    result = search(
        tune.costs, default_moves(min_bits), journal, subject=subject, start=start, confirm=confirm.costs
    )
    return result.policy, result.evidence()
