# SPDX-License-Identifier: Apache-2.0
"""What the demo asks of the server: eight requests that arrive, grow and leave one after another.

Everything is counted in boundaries and tokens, nothing in seconds, so that every run is the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SHARES = np.array([0.7, 1.2, 0.8, 1.4, 1.0, 0.7, 1.2, 1.0])
"""How long each prompt is, against their mean. Its length is the number of requests."""

RECALL = {1: "garden", 3: "river", 6: "captain"}
"""Requests that end by asking for a code which their first line gave."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """When requests come and how long they stay.

    Attributes:
      spacing: boundaries between two arrivals.
      stay: boundaries for which each generates.
    """

    spacing: int
    stay: int


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request to come.

    Attributes:
      boundary: when it is added.
      prompt: token ids.
      max_tokens: how many it generates, whatever they are.
      answer: the text that should come first, or None.
    """

    boundary: int
    prompt: tuple[int, ...]
    max_tokens: int
    answer: str | None


def make_workload(
    text: Sequence[int],
    encode: Callable[[str], list[int]],
    *,
    peak_tokens: int,
    max_model_len: int,
    steps_per_call: int,
    pace: Pace,
    seed: int = 0,
) -> list[Arrival]:
    """Returns the requests, in order of arrival. When the first one leaves, all are there with ``peak_tokens`` tokens.

    Args:
      text: tokens that prompts are cut from, one after the other, around and around.
      encode: text to tokens, without begin or end tokens.
      peak_tokens: context over all requests at the peak; prompts take what generation does not.
      max_model_len: longest context of one request.
      steps_per_call: decode steps between two boundaries.
      pace: arrivals and lengths of stay.
      seed: of the codes to recall.
    """
    rng = np.random.default_rng(seed)
    count = len(SHARES)
    max_tokens = pace.stay * steps_per_call
    generated_tokens = steps_per_call * sum(pace.stay - pace.spacing * i for i in range(count))
    mean_tokens = max(0, peak_tokens - generated_tokens) / count
    arrivals, start = [], 0
    for i, share in enumerate(SHARES):
        length = int(np.clip(mean_tokens * share, 8, max_model_len - max_tokens))
        head, tail, answer = [], [], None
        if i in RECALL:
            code = int(rng.integers(100, 1000))
            head = encode(f"The code for {RECALL[i]} is {code}.\n")
            tail = encode(f"\nThe code for {RECALL[i]} is")
            answer = f" {code}."
        if len(head) + len(tail) >= length:
            head, tail, answer = [], [], None
        body = length - len(head) - len(tail)
        piece = np.take(text, np.arange(start, start + body), mode="wrap").tolist()
        start += body
        arrivals.append(
            Arrival(boundary=pace.spacing * i, prompt=(*head, *piece, *tail), max_tokens=max_tokens, answer=answer)
        )
    return arrivals
