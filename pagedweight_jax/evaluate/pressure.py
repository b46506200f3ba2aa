# SPDX-License-Identifier: Apache-2.0
"""Scoring under pressure: how a policy that changes bits while it serves gets a perplexity, and a KL divergence.

As many windows as the engine has rows are teacher-forced together, every row one chunk per boundary. Their KV cache
grows, the planner answers, and what it knows of routing and prompts comes from text already read. Before the next
windows the engine rests until its weights are back. A frozen engine is scored alike: it just does not answer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagedweight_jax.evaluate.divergence import Reference, divergence
from pagedweight_jax.evaluate.perplexity import Perplexity, TokenProgress, perplexity, silent
from pagedweight_jax.evaluate.schedule import Schedule, boundary_of
from pagedweight_jax.paging.table import IN_TRANSFER

REST_SECONDS = 0.002
"""Between the steps of an engine that only waits for its pages."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What was measured, token by token.

    Attributes:
      logprobs_WT: float64 [windows, tokens - 1].
      kl_WT: float64, KL from the unquantized model to the served one in nats, or None where there was no reference.
      schedule: bits and memory at every boundary.
    """

    logprobs_WT: np.ndarray
    kl_WT: np.ndarray | None
    schedule: Schedule

    @property
    def perplexity(self) -> Perplexity:
        return perplexity(self.logprobs_WT)

    @property
    def kl(self) -> float | None:
        """Nats per token."""
        return None if self.kl_WT is None else float(self.kl_WT.mean())

    @property
    def kl_standard_error(self) -> float | None:
        """Of the mean over windows; 0 for a single window."""
        if self.kl_WT is None:
            return None
        kl_W = self.kl_WT.mean(axis=1)
        return float(kl_W.std(ddof=1) / len(kl_W) ** 0.5) if len(kl_W) > 1 else 0.0


def score_under_pressure(
    engine, windows: np.ndarray, reference: Reference | None = None, progress: TokenProgress = silent
) -> Score:
    """Returns the score of ``windows``, int32 [windows, tokens].

    Args:
      engine: a ``serving.engine.Engine``, idle, dynamic or frozen.
      windows: ``max_num_seqs`` of them run together, in order.
      reference: the unquantized model on the same windows, for the KL divergence.
      progress: called after each boundary.

    Raises:
      UserError: windows longer than the engine's ``max_model_len``, or tokens outside its vocabulary.
      ValueError: the reference is of other windows.
    """
    if reference is not None and reference.hidden_WTD.shape[:2] != (len(windows), windows.shape[1] - 1):
        raise ValueError(f"a reference of shape {reference.hidden_WTD.shape} is not of windows {windows.shape}")
    initial_LEU, boundaries = engine.residency.table.committed_LEU.copy(), []
    rows, total = engine.config.max_num_seqs, windows[:, 1:].size
    logprobs, kl = [], []

    def remember() -> None:  # at once: the engine keeps its newest events only
        boundaries.append(boundary_of(engine.events[-1]))

    for first in range(0, len(windows), rows):
        if first:
            rest(engine, remember)
        requests = [
            engine.add_request(tuple(tokens), None, keep_hidden=reference is not None)
            for tokens in windows[first : first + rows].tolist()
        ]
        while engine.has_work:
            engine.step()
            remember()
            done = first * (windows.shape[1] - 1) + sum(len(request.logprobs) for request in requests)
            progress(done, total)
        for window, request in enumerate(requests, first):
            logprobs.append(request.logprobs)
            if reference is not None:
                hidden_TD = np.concatenate(request.hidden)[: windows.shape[1] - 1]
                kl.append(divergence(reference, window, engine.weights, hidden_TD))
    return Score(
        logprobs_WT=np.array(logprobs, np.float64),
        kl_WT=np.array(kl, np.float64) if kl else None,
        schedule=Schedule(
            budget_bytes=engine.ledger.budget_bytes, initial_LEU=initial_LEU, boundaries=tuple(boundaries)
        ),
    )


def rest(engine, on_step: Callable[[], None] = lambda: None) -> None:
    """Steps an idle engine until no page is on its way and the planner, its hysteresis over, asks for none."""
    quiet = 0
    while quiet <= engine.config.planner.hysteresis_boundaries:
        time.sleep(REST_SECONDS)
        engine.step()
        event = engine.events[-1]
        moving = event.raised or event.reloads_started or (engine.residency.table.state_LEUP == IN_TRANSFER).any()
        quiet = 0 if moving else quiet + 1
        on_step()
