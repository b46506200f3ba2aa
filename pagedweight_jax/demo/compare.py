# SPDX-License-Identifier: Apache-2.0
"""Paged weights beside their rivals, in one engine: the same steps, scheduler, KV cache and text for every row.

The rows are measured in the order that one engine can walk: dynamic first, then frozen at each uniform width from the
top down, at last with the unquantized experts in place of the pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from pagedweight_jax.checkpoint.paged import PagedCheckpoint, Progress
from pagedweight_jax.checkpoint.summary import summarize
from pagedweight_jax.evaluate.perplexity import Perplexity, perplexity, score_served
from pagedweight_jax.evaluate.pressure import rest
from pagedweight_jax.models.weights import Weights
from pagedweight_jax.serving import steps
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.events import BoundaryEvent
from pagedweight_jax.serving.request import SamplingParams

RATE_PROMPT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to hold the experts.

    Attributes:
      name: "bf16", "5 bits", "paged".
      bits: lowest and highest mean bits while the text was scored.
      device_bytes: all that the device holds, with every LUT from the lowest bitwidth up to the experts' own.
      own_lut_device_bytes: the same of a static checkpoint, which keeps one LUT; None where there is no such thing.
      tokens_per_second: of the decode loop with all rows busy and short contexts.
      perplexity: on held-out text.
    """

    name: str
    bits: tuple[float, float]
    device_bytes: int
    own_lut_device_bytes: int | None
    tokens_per_second: float
    perplexity: Perplexity


def compare(
    engine: Engine,
    checkpoint: PagedCheckpoint,
    dense: Weights,
    windows: np.ndarray,
    *,
    peak_kv_bytes: int,
    rate_tokens: int,
    progress: Progress,
) -> list[Row]:
    """Returns bf16, the uniform widths and paged; afterwards the engine serves the unquantized model.

    Args:
      engine: dynamic and idle.
      checkpoint: that it serves.
      dense: the source model.
      windows: held-out text, int32 [windows, tokens].
      peak_kv_bytes: KV cache that every row is charged.
      rate_tokens: tokens that each row generates to measure its speed.
      progress: called with the stage "compare".
    """
    summary = summarize(checkpoint)
    ledger = engine.ledger
    static_bytes = ledger.dense_bytes + ledger.table_bytes + ledger.temporary_bytes + peak_kv_bytes
    rows: list[Row] = []
    row_tokens = windows[:, 1:].size
    total_tokens = row_tokens * (len(summary["widths"]) + 2)

    def measure(name: str, device_bytes: int, own_lut_device_bytes: int | None, bits: int | None = None) -> None:
        done = len(rows) * row_tokens
        rate = decode_rate(engine, windows, rate_tokens)
        first = len(engine.events)
        scores = score_served(engine, windows, lambda tokens, _: progress("compare", done + tokens, total_tokens))
        seen = [event.mean_bits for event in engine.events[first:] if event.chunks] if bits is None else [bits]
        rows.append(
            Row(
                name=name,
                bits=(min(seen), max(seen)),
                device_bytes=device_bytes,
                own_lut_device_bytes=own_lut_device_bytes,
                tokens_per_second=rate,
                perplexity=perplexity(scores),
            )
        )

    measure("paged", ledger.total_bytes, None)
    rest(engine)
    engine.freeze()
    for width in reversed(summary["widths"]):
        bits = width["bits"]
        engine.lower_to(bits)
        if (engine.residency.table.committed_LEU == bits).all():  # else the budget never held this width everywhere
            own_lut_bytes = static_bytes + width["own_lut_experts_bytes"]
            measure(f"{bits} bits", static_bytes + width["experts_bytes"], own_lut_bytes, bits)
    serve_dense(engine, dense)
    decode_rate(engine, windows, 1)  # compiles
    measure("bf16", static_bytes + 2 * summary["model"]["paged_parameters"], None, 16)
    progress("compare", total_tokens, total_tokens)
    paged, *uniform, bf16 = rows
    return [bf16, *uniform, paged]


def serve_dense(engine: Engine, weights: Weights) -> None:
    """Lets the engine serve ``weights``, experts and all, outside its budget: the baseline, with the same steps."""
    engine.weights = weights
    engine.programs = replace(
        engine.programs,
        prefill=steps.prefill_step,
        score=steps.score_step,
        decode=partial(steps.decode_loop, num_steps=engine.config.steps_per_call),
    )


def decode_rate(engine: Engine, windows: np.ndarray, rate_tokens: int) -> float:
    """Returns tokens per second of the decode calls that found every row busy and nothing else to do.

    Args:
      engine: idle.
      windows: prompts are the first tokens of these.
      rate_tokens: tokens that each row generates; at least three calls' worth, or there is nothing to time.
    """
    first = len(engine.events)
    params = SamplingParams(max_tokens=rate_tokens, ignore_eos=True)
    prompts = windows[np.arange(engine.config.max_num_seqs) % len(windows), :RATE_PROMPT_TOKENS]
    for prompt in prompts.tolist():
        engine.add_request(tuple(prompt), params)
    while engine.has_work:
        engine.step()
    return full_rate(engine.events[first:], engine.config.max_num_seqs * engine.config.steps_per_call)


def full_rate(events: Sequence[BoundaryEvent], full_tokens: int) -> float:
    """Returns tokens per second over the boundaries that brought ``full_tokens`` and started nothing but decoding."""

    def timed() -> Iterator[float]:
        for before, event in pairwise(events):
            if event.tokens == full_tokens and not event.chunks and not before.chunks:
                yield event.time_seconds - before.time_seconds

    seconds = list(timed())
    return full_tokens * len(seconds) / sum(seconds) if seconds else float("nan")
