# SPDX-License-Identifier: Apache-2.0
"""Who runs at the next call: admission in order of arrival, chunks of prompts, room for the next tokens, preemption."""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from pagedweight_jax.errors import UserError
from pagedweight_jax.serving.kv_blocks import KVBlocks
from pagedweight_jax.serving.request import Request


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One prefill call: tokens ``start .. start + len(tokens) - 1`` of a request; the last one begins decoding."""

    request: Request
    start: int
    tokens: tuple[int, ...]
    last: bool


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a boundary decided.

    Attributes:
      chunks: prefill calls, in order.
      decode: True to run the decode loop.
      admitted: requests that got a row.
      preempted: (row, request) of those that lost theirs.
    """

    chunks: tuple[Chunk, ...] = ()
    decode: bool = False
    admitted: tuple[Request, ...] = ()
    preempted: tuple[tuple[int, Request], ...] = ()


class Scheduler:
    """Queues and rows. A request is in exactly one of ``waiting`` and ``running``.

    A decode call of n steps reserves 2 n tokens per row, because the host sees a call's tokens one call late.
    """

    def __init__(self, blocks: KVBlocks, *, chunk_tokens: int, steps_per_call: int):
        self.blocks = blocks
        self.chunk_tokens = chunk_tokens
        self.steps_per_call = steps_per_call
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Forgets a finished request; takes its row and blocks back."""
        if request.row is None:  # its last tokens were in flight when it was preempted
            self.waiting.remove(request)
        else:
            self._leave_row(request)
        request.signals = None  # the record may be kept for long

    def _leave_row(self, request: Request) -> None:
        del self.running[request.row]
        self.blocks.release(request.row)
        request.row = None

    def _context_tokens(self, request: Request) -> int:
        """Tokens that the request's blocks must hold once the next call has run."""
        if request.decoding:
            end = request.num_tokens + 2 * self.steps_per_call
        else:
            end = min(request.prefilled_tokens + self.chunk_tokens, request.num_tokens)
            if end == request.num_tokens:  # a decode call follows at the same boundary
                end += self.steps_per_call
        return min(end, request.max_context_tokens)

    def pending_blocks(self) -> int:
        """Blocks that growth will take: what running rows still lack, and the first waiting request if a row is free.

        Running rows lack the next chunk of their prompt, or what ``schedule`` did not find for them; the tokens of the
        next decode calls are taken before they are needed, and what follows them is the low watermark's business.
        """
        pending = sum(self.blocks.missing_blocks(row, self._context_tokens(r)) for row, r in self.running.items())
        if self.waiting and len(self.running) < len(self.blocks.num_blocks_B):
            pending += self._admission_blocks(self.waiting[0])
        return pending

    def _admission_blocks(self, request: Request) -> int:
        tokens = request.num_tokens + 2 * self.steps_per_call
        return self.blocks.blocks_for(min(tokens, request.max_context_tokens))

    def schedule(self, may_wait: bool, releasable_blocks: int = 0) -> Schedule:
        """Decides a boundary and takes the KV blocks that it needs.

        Args:
          may_wait: True if weights can still give way, or frames are about to become reusable: when a row finds no
            block, the boundary then passes without a call, for a call steps every row. Otherwise the youngest request
            is preempted and will be computed again.
          releasable_blocks: KV blocks that weights could still give up.
        """
        preempted: list[tuple[int, Request]] = []
        stalled = False
        for request in self._by_arrival():
            while request.row is not None and not self._grow(request):
                if may_wait:
                    stalled = True
                    break
                preempted.append(self._preempt_youngest())
        if stalled:
            return Schedule()
        return self._calls([] if preempted else self._admit(releasable_blocks), preempted)

    def schedule_as(self, *, num_admitted: int, num_preempted: int, calls: bool) -> Schedule:
        """Decides a boundary as it was decided before, and takes the KV blocks that it needs.

        Args:
          num_admitted, num_preempted: how many requests got a row and lost it.
          calls: whether any call followed.

        Raises:
          UserError: a row finds no block.
        """
        preempted = [self._preempt_youngest() for _ in range(num_preempted)]
        if not calls:
            return Schedule(preempted=tuple(preempted))
        for request in self._by_arrival():
            if not self._grow(request):
                raise UserError(f"the arena has no KV block for request {request.number}")
        return self._calls(self._admit(math.inf, num_admitted), preempted)

    def _grow(self, request: Request) -> bool:
        return self.blocks.grow(request.row, self._context_tokens(request))

    def _calls(self, admitted: list[Request], preempted: list[tuple[int, Request]]) -> Schedule:
        prefilling = [r for r in self._by_arrival() if not r.decoding and r.prefilled_tokens < r.num_tokens]
        chunks = tuple(self._next_chunk(r) for r in prefilling)
        decode = any(r.decoding for r in self.running.values())
        return Schedule(chunks=chunks, decode=decode, admitted=tuple(admitted), preempted=tuple(preempted))

    def _by_arrival(self) -> list[Request]:
        return sorted(self.running.values(), key=lambda r: r.number)

    def _admit(self, releasable_blocks: float, most: int | None = None) -> list[Request]:
        """Gives rows to waiting requests in order, at most ``most``, and takes the blocks of their next call.

        A request is admitted while all prompts fit into the free blocks, or while all that every request may grow to
        fits into these and the releasable ones: then no row will ever have to be preempted for it.
        """
        admitted = []
        free_rows = [row for row in range(len(self.blocks.num_blocks_B)) if row not in self.running][:most]
        prompt_blocks = sum(self.blocks.missing_blocks(row, r.num_tokens) for row, r in self.running.items())
        context_blocks = sum(self.blocks.missing_blocks(row, r.max_context_tokens) for row, r in self.running.items())
        while self.waiting and free_rows:
            request, row = self.waiting[0], free_rows[0]
            prompt_blocks += self._admission_blocks(request)
            context_blocks += self.blocks.blocks_for(request.max_context_tokens)
            free_blocks = self.blocks.free_blocks
            if prompt_blocks > free_blocks and context_blocks > free_blocks + releasable_blocks:
                break
            if not self.blocks.grow(row, self._context_tokens(request)):
                break
            request.row = free_rows.pop(0)
            self.running[row] = self.waiting.popleft()
            admitted.append(request)
            held_blocks = int(self.blocks.num_blocks_B[row])
            prompt_blocks -= held_blocks
            context_blocks -= held_blocks
        return admitted

    def _next_chunk(self, request: Request) -> Chunk:
        tokens = request.tokens
        start, end = request.prefilled_tokens, min(request.prefilled_tokens + self.chunk_tokens, len(tokens))
        request.prefilled_tokens = end
        last = end == len(tokens)
        request.decoding = last and request.params is not None
        return Chunk(request=request, start=start, tokens=tokens[start:end], last=last)

    def _preempt_youngest(self) -> tuple[int, Request]:
        request = max(self.running.values(), key=lambda r: r.number)
        row = request.row
        self._leave_row(request)
        request.begin_again()
        self.waiting.appendleft(request)
        return row, request


def padded(tokens: tuple[int, ...], length: int) -> np.ndarray:
    """Returns int32[length], the tokens followed by zeros."""
    out = np.zeros(length, np.int32)
    out[: len(tokens)] = tokens
    return out
