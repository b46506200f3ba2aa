# SPDX-License-Identifier: Apache-2.0
"""The demo's requests: as much context as asked for, when asked for, and the same every time."""

from dataclasses import replace

import pytest

from pagedweight_jax.demo.workload import RECALL, SHARES, Pace, make_workload

TEXT = list(range(1000, 1500))
PACE = Pace(spacing=6, stay=60)
FIELDS = {"peak_tokens": 8000, "max_model_len": 2048, "steps_per_call": 4, "pace": PACE}


def encode(text):
    return [ord(character) for character in text]


def workload(**changes):
    return make_workload(TEXT, encode, **(FIELDS | changes))


def test_all_are_there_with_the_peak_when_the_first_leaves():
    arrivals = workload()
    first_leaves = arrivals[0].boundary + PACE.stay
    assert arrivals[-1].boundary < first_leaves
    context = [len(a.prompt) + 4 * (first_leaves - a.boundary) for a in arrivals]
    assert sum(context) == pytest.approx(8000, abs=len(SHARES))
    assert {a.max_tokens for a in arrivals} == {240}
    assert [a.boundary for a in arrivals] == [6 * i for i in range(8)]


def test_no_context_exceeds_the_model():
    arrivals = workload(peak_tokens=100_000)
    assert {len(a.prompt) + a.max_tokens for a in arrivals} == {2048}
    assert min(len(a.prompt) for a in workload(peak_tokens=0)) == 8


def test_prompts_are_consecutive_pieces_and_some_ask_for_a_code():
    arrivals = workload()
    start = 0
    for i, arrival in enumerate(arrivals):
        piece = [token for token in arrival.prompt if token >= 1000]
        assert piece == [TEXT[(start + j) % len(TEXT)] for j in range(len(piece))]
        start += len(piece)
        words = "".join(chr(token) for token in arrival.prompt if token < 1000)
        assert (arrival.answer is None) == (i not in RECALL)
        if arrival.answer:
            key = RECALL[i]
            assert words == f"The code for {key} is{arrival.answer}\n\nThe code for {key} is"
    assert workload() == arrivals
    other = workload(seed=1)
    assert [a.answer for a in other] != [a.answer for a in arrivals]
    assert [replace(a, prompt=(), answer=None) for a in other] == [replace(a, prompt=(), answer=None) for a in arrivals]
