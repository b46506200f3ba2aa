# SPDX-License-Identifier: Apache-2.0
"""The calls that follow a boundary, and their results: dispatched now, read one boundary later."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from pagedweight_jax.models.weights import Weights
from pagedweight_jax.planning.signals import RequestSignals, observe
from pagedweight_jax.serving.programs import Programs
from pagedweight_jax.serving.request import Request
from pagedweight_jax.serving.scheduler import Chunk, Schedule, padded
from pagedweight_jax.serving.state import DecodeState
from pagedweight_jax.serving.trace import RoutingSums


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a call did for one request.

    Attributes:
      request: whose it is.
      attempt: the request's preemptions when the call ran. If it was preempted since, all but its tokens is void.
      tokens: generated ones.
      logprobs: of a scoring request; ``hidden_TD``: of one that asked for hidden states.
      read_tokens: how many tokens the model read.
      sums: of those, numpy arrays without an axis of rows; None where nobody asked.
    """

    request: Request
    attempt: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    hidden_TD: np.ndarray | None = None
    read_tokens: int
    sums: RoutingSums | None


@dataclass(frozen=True, kw_only=True)
class ChunkCall:
    """A prefill or scoring call's results on the device.

    Attributes:
      request, attempt, read_tokens: as in ``Result``.
      token: int32 scalar, the one after a prompt's last chunk; None for other chunks.
      logprobs_T: float32, of a scoring request; ``num_logprobs``: how many of them count.
      hidden_TD: of a scoring request that asked for hidden states. They are its owner's, beyond the memory budget.
      sums: the chunk's, or None.
    """

    request: Request
    attempt: int
    read_tokens: int
    token: jax.Array | None = None
    logprobs_T: jax.Array | None = None
    num_logprobs: int = 0
    hidden_TD: jax.Array | None = None
    sums: RoutingSums | None

    @property
    def arrays(self) -> list[jax.Array]:
        return jax.tree.leaves((self.token, self.logprobs_T, self.sums))

    def results(self) -> list[Result]:
        """Waits for the call and returns its result."""
        return [
            Result(
                request=self.request,
                attempt=self.attempt,
                tokens=() if self.token is None else (int(self.token),),
                logprobs=() if self.logprobs_T is None else np.asarray(self.logprobs_T)[: self.num_logprobs].tolist(),
                hidden_TD=None if self.hidden_TD is None else np.asarray(self.hidden_TD)[: self.read_tokens],
                read_tokens=self.read_tokens,
                sums=jax.device_get(self.sums),
            )
        ]


@dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """A decode call's results on the device.

    Attributes:
      rows: (row, request, attempt) of every row that was decoding.
      tokens_NB: int32, -1 where a row was silent. A row reads a token for each one that it draws.
      sums: of all rows, or None.
    """

    rows: tuple[tuple[int, Request, int], ...]
    tokens_NB: jax.Array
    sums: RoutingSums | None

    @property
    def arrays(self) -> list[jax.Array]:
        return jax.tree.leaves((self.tokens_NB, self.sums))

    def results(self) -> list[Result]:
        """Waits for the call and returns a result for each row."""
        tokens_NB, sums = np.asarray(self.tokens_NB), jax.device_get(self.sums)

        def of_row(row: int, request: Request, attempt: int) -> Result:
            tokens = tokens_NB[tokens_NB[:, row] >= 0, row].tolist()
            row_sums = jax.tree.map(lambda leaf: leaf[row], sums)
            return Result(request=request, attempt=attempt, tokens=tokens, read_tokens=len(tokens), sums=row_sums)

        return [of_row(*row) for row in self.rows]


Call = ChunkCall | DecodeCall


def dispatch(
    programs: Programs,
    weights: Weights,
    state: DecodeState,
    schedule: Schedule,
    running: Mapping[int, Request],
    *,
    chunk_tokens: int,
    keep_sums: bool,
) -> tuple[DecodeState, tuple[Call, ...]]:
    """Starts a schedule's chunks, then its decode call; returns (state, the calls).

    Args:
      programs: compiled steps.
      weights, state: what they take.
      schedule: what to start.
      running: requests by row.
      chunk_tokens: tokens that a chunk is padded to.
      keep_sums: False lets go of the sums at once.
    """
    calls: list[Call] = []
    for chunk in schedule.chunks:
        state, call = _start_chunk(programs, weights, state, chunk, chunk_tokens, keep_sums)
        calls.append(call)
    if schedule.decode:
        rows = tuple((row, r, r.num_preemptions) for row, r in running.items() if r.decoding)
        state, tokens_NB, sums = programs.decode(weights, state)
        calls.append(DecodeCall(rows=rows, tokens_NB=tokens_NB, sums=sums if keep_sums else None))
    for call in calls:
        for array in call.arrays:
            array.copy_to_host_async()
    return state, tuple(calls)


def collect(calls: Sequence[Call], half_life_tokens: float) -> tuple[list[Request], int]:
    """Writes the calls' results into their requests, waiting for these calls alone.

    Returns (requests that ended by that, tokens generated). ``half_life_tokens`` is that of the requests' signals.
    """
    ended: list[Request] = []
    num_tokens = 0
    for result in (result for call in calls for result in call.results()):
        request = result.request
        if request.finish_reason:  # it ended in the step before; its row was silent in this one
            continue
        request.generated += result.tokens
        num_tokens += len(result.tokens)
        if result.attempt == request.num_preemptions:
            request.logprobs += result.logprobs
            if result.hidden_TD is not None:
                request.hidden.append(result.hidden_TD)
            if result.sums is not None and result.read_tokens:
                before = request.signals or RequestSignals.empty(*result.sums.mass_LE.shape)
                request.signals = observe(before, result.sums, result.read_tokens, half_life_tokens)
        if request.finish_reason:
            ended.append(request)
    return ended, num_tokens


def _start_chunk(programs: Programs, weights: Weights, state: DecodeState, chunk: Chunk, size: int, keep_sums: bool):
    request, num_tokens = chunk.request, len(chunk.tokens)
    row, tokens_T, count = np.int32(request.row), padded(chunk.tokens, size), np.int32(num_tokens)
    token = logprobs_T = hidden_TD = None
    targets: tuple[int, ...] = ()
    if request.params is None:
        targets = request.prompt[chunk.start + 1 : chunk.start + 1 + num_tokens]
        state, logprobs_T, hidden_TD, sums = programs.score(weights, state, row, tokens_T, padded(targets, size), count)
    else:
        most = np.int32(request.remaining_tokens if chunk.last else 0)
        state, token, sums = programs.prefill(weights, state, row, tokens_T, count, most)
    call = ChunkCall(
        request=request,
        attempt=request.num_preemptions,
        read_tokens=num_tokens,
        token=token if chunk.last else None,
        logprobs_T=logprobs_T,
        num_logprobs=len(targets),
        hidden_TD=None if request.hidden is None else hidden_TD,
        sums=sums if keep_sums else None,
    )
    return state, call
