# SPDX-License-Identifier: Apache-2.0
"""The engine: a numpy planner and scheduler that step between jitted calls.

One ``step`` is one safe boundary and the calls that follow it::

    retire     frames given up at the last boundary become reusable
    land       pages that arrived enter the arena, then their blocks' bits rise
    schedule   rows, chunks and KV blocks for the next calls
    plan       Algorithm 1: lower bits and free pages under pressure, or start reloads above the high watermark
    dispatch   prefill chunks, then the decode loop
    collect    the tokens of the previous step, while the device runs this one
"""

import time
from dataclasses import dataclass, replace

import jax
import numpy as np

from pagedweight_jax.checkpoint.paged import PagedCheckpoint, Progress, no_progress
from pagedweight_jax.config import ServeConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.paging.arena import FREE, KV, RETIRED, WEIGHT
from pagedweight_jax.paging.invariants import check_invariants
from pagedweight_jax.paging.mover import PageMover
from pagedweight_jax.planning.observation import KVPressure, Observation
from pagedweight_jax.planning.planner import plan_reload, plan_step, target_bytes_from_kv_pressure
from pagedweight_jax.planning.queue import MovePlan, PlanQueue
from pagedweight_jax.serving.events import BoundaryEvent
from pagedweight_jax.serving.kv_blocks import KVBlocks
from pagedweight_jax.serving.ledger import tree_bytes
from pagedweight_jax.serving.loading import BATCH_PAGES, load
from pagedweight_jax.serving.request import Request, SamplingParams, token_ids
from pagedweight_jax.serving.residency import Residency
from pagedweight_jax.serving.scheduler import Chunk, Schedule, Scheduler, padded
from pagedweight_jax.serving.state import MAX_STOP_IDS


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    """Results that the host has not read yet.

    Attributes:
      first_tokens: the token after each finished prompt.
      scores: (request, its preemptions when the chunk ran, log-probabilities, how many count).
      tokens_NB: a decode call's tokens; ``rows``: the requests that they belong to.
    """

    first_tokens: tuple[tuple[Request, jax.Array], ...] = ()
    scores: tuple[tuple[Request, int, jax.Array, int], ...] = ()
    tokens_NB: jax.Array | None = None
    rows: tuple[tuple[int, Request], ...] = ()


class Engine:
    """Serves requests from one checkpoint within one memory budget.

    Args and errors: see ``loading.load``.

    Attributes:
      ledger: what the device holds.
      events: one record per boundary, oldest first.
    """

    def __init__(
        self,
        checkpoint: PagedCheckpoint,
        config: ServeConfig,
        device: jax.Device | None = None,
        progress: Progress = no_progress,
    ):
        device = device or jax.devices()[0]
        loaded = load(checkpoint, config, device, progress)
        self.config = config
        self.model = checkpoint.manifest.config
        self.ledger = loaded.ledger
        self.events: list[BoundaryEvent] = []
        self.weights = loaded.weights
        self.state = loaded.state
        self.programs = loaded.programs
        self.allocator = loaded.allocator
        self.calibration = loaded.calibration
        self.host_bytes = loaded.pool.host_bytes
        self.blocks = KVBlocks(loaded.state.geometry, loaded.allocator)
        self.scheduler = Scheduler(
            self.blocks, chunk_tokens=config.prefill_chunk_tokens, steps_per_call=config.steps_per_call
        )
        mover = PageMover(
            loaded.pool,
            loaded.table.layouts,
            num_frames=loaded.allocator.num_frames,
            device=device,
            batch_pages=BATCH_PAGES,
            max_staged_bytes=loaded.ledger.staging_bytes,
        )
        self.residency = Residency(loaded.table, loaded.allocator, mover, loaded.programs, loaded.update_frames)
        self._queue = PlanQueue.start(loaded.table.committed_LEU)
        self._in_flight = _InFlight()
        self._boundary = 0
        self._next_number = 0
        self._start_seconds = time.perf_counter()

    def close(self) -> None:
        """Ends the page mover's thread."""
        self.residency.mover.close()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(self, prompt: tuple[int, ...], params: SamplingParams | None) -> Request:
        """Queues a request and returns its record; without ``params`` the prompt is scored, not continued.

        Raises:
          UserError: no token ids, or ones outside the vocabulary, or a context that can never fit.
        """
        prompt = token_ids(prompt, self.model.vocab_size)
        least = 1 if params else 2
        if len(prompt) < least:
            raise UserError(f"a prompt needs at least {least} token{'s' * (least > 1)}, got {len(prompt)}")
        stops = params.stop_ids(self.model.eos_token_ids) if params else ()
        request = Request(number=self._next_number, prompt=prompt, params=params, stops=stops)
        context_tokens = request.max_context_tokens
        if context_tokens > self.config.max_model_len:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and {context_tokens - len(prompt)} to generate make "
                f"{context_tokens}, max_model_len is {self.config.max_model_len}"
            )
        needed, most = self.blocks.blocks_for(context_tokens), self._most_blocks()
        if needed > most:
            raise UserError(
                f"a context of {context_tokens} tokens takes {needed} KV blocks, "
                f"the arena holds {most} beside the weights"
            )
        self._next_number += 1
        self.scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request at this boundary, waiting or running; its row and blocks are free at once. Idempotent."""
        if request.finish_reason:
            return
        request.cancelled = True
        if request.row is not None:
            self._assign_row(request.row, SamplingParams(), ())
        self.scheduler.finish(request)

    def step(self) -> list[Request]:
        """Runs one boundary and its calls; returns the requests whose last token the host saw."""
        residency = self.residency
        residency.retire()
        self.state, raised, landed, cancelled, moved_bytes = residency.land(self.state)
        schedule = self.scheduler.schedule(may_wait=self._dynamic and residency.can_release)
        observation = self._observe()
        lowered, offloaded, started = self._plan(observation)
        in_flight = self._dispatch(schedule)
        finished, num_tokens = self._collect(self._in_flight)
        self._in_flight = in_flight
        frame_bytes = self.state.geometry.frame_bytes
        committed_LEU = residency.table.committed_LEU
        self.events.append(
            BoundaryEvent(
                boundary=self._boundary,
                time_seconds=time.perf_counter() - self._start_seconds,
                rows=len(self.scheduler.running),
                waiting=len(self.scheduler.waiting),
                chunks=len(schedule.chunks),
                decode_steps=self.config.steps_per_call if schedule.decode else 0,
                admitted=tuple(r.number for r in schedule.admitted),
                preempted=tuple(r.number for _, r in schedule.preempted),
                finished=tuple(r.number for r in finished),
                tokens=num_tokens,
                context_tokens=sum(r.num_tokens for r in self.scheduler.running.values()),
                kv_bytes=self.allocator.count(KV) * frame_bytes,
                weight_bytes=self.allocator.count(WEIGHT) * frame_bytes,
                releasing_bytes=self.allocator.count(RETIRED) * frame_bytes,
                free_bytes=self.allocator.count(FREE) * frame_bytes,
                device_bytes=self._held_bytes(),
                budget_bytes=self.ledger.budget_bytes,
                free_blocks=observation.kv.free_blocks,
                pending_blocks=observation.kv.pending_blocks,
                target_bytes=target_bytes_from_kv_pressure(observation.kv, self.config.planner),
                mean_bits=residency.mean_bits,
                blocks_by_bits={int(b): int(n) for b, n in zip(*np.unique(committed_LEU, return_counts=True))},
                lowered=lowered,
                raised=raised,
                reloads_started=started,
                pages_landed=landed,
                pages_cancelled=cancelled,
                pages_offloaded=offloaded,
                moved_bytes=moved_bytes,
            )
        )
        self._boundary += 1
        return finished

    def freeze(self) -> None:
        """Ends page movement: what is on its way is dropped, and from here on bits change by ``lower_to`` alone.

        Raises:
          RuntimeError: the engine has work; it was accepted for all the memory that lower bits could give.
        """
        if self.has_work:
            raise RuntimeError("an engine can be frozen only while it has no requests")
        self.config = replace(self.config, mode="frozen")
        self._lower(self.residency.table.committed_LEU)

    def lower_to(self, bits: int) -> None:
        """Lowers every block that runs at more than ``bits`` bits to it, at this boundary: uniform widths by hand.

        Raises:
          UserError: bits that the checkpoint does not have.
        """
        table = self.residency.table
        if not table.min_bits <= bits <= table.max_bits:
            raise UserError(f"bits {bits}: the checkpoint has {table.min_bits}..{table.max_bits}")
        self._lower(np.minimum(table.desired_LEU, bits))

    def _lower(self, desired_LEU: np.ndarray) -> None:
        table = self.residency.table
        plan = MovePlan.between(table.desired_LEU, desired_LEU, table.bytes_UQ, table.min_bits)
        self.residency.retire()
        self.state, _, _ = self.residency.lower(self.state, plan)

    def check_invariants(self) -> None:
        """Raises AssertionError unless every frame of the arena is accounted for."""
        check_invariants(self.residency.table, self.allocator, self.blocks.frames())

    @property
    def _dynamic(self) -> bool:
        return self.config.mode == "dynamic" and self.config.planner.page_movement

    def _held_bytes(self) -> int:
        """Device bytes at this moment, counted from the arrays themselves."""
        arrays_bytes = tree_bytes(self.weights) + tree_bytes(self.state)
        return arrays_bytes + self.residency.mover.staged_bytes + self.ledger.temporary_bytes

    def _most_blocks(self) -> int:
        """KV blocks that fit beside the weights: at their floor if they may move, else as they are."""
        table = self.residency.table
        bits_LEU = np.full_like(table.committed_LEU, table.min_bits) if self._dynamic else table.committed_LEU
        starts_UB = np.array([layout.page_starts for layout in table.layouts])
        weight_frames = sum(int(starts_UB[u, bits_LEU[..., u]].sum()) for u in range(len(table.layouts)))
        return (self.allocator.num_frames - weight_frames) // self.state.geometry.frames_per_block

    def _observe(self) -> Observation:
        geometry = self.state.geometry
        released_frames = self.allocator.count(RETIRED) + self.residency.unwanted_frames
        kv = KVPressure(
            free_blocks=self.blocks.free_blocks,
            pending_blocks=self.scheduler.pending_blocks(),
            releasing_blocks=released_frames // geometry.frames_per_block,
            block_bytes=geometry.block_bytes,
        )
        return Observation(boundary=self._boundary, kv=kv)

    def _plan(self, observation: Observation):
        """Returns (lowered blocks, pages given up, reloads started)."""
        if not self._dynamic:
            return (), 0, 0
        planner, table = self.config.planner, self.residency.table
        self._queue, plan = plan_step(table, observation, self.calibration, self._queue, planner)
        if plan is not None:
            self.state, lowered, offloaded = self.residency.lower(self.state, plan)
            return lowered, offloaded, 0
        plan = plan_reload(table, observation, self.calibration, self._queue, planner)
        return (), 0, self.residency.reload(plan)

    def _dispatch(self, schedule: Schedule) -> _InFlight:
        for row, _ in schedule.preempted:
            self._assign_row(row, SamplingParams(), ())
        for request in schedule.admitted:
            self._assign_row(request.row, request.params or SamplingParams(), request.stops)
        if self.blocks.changed:
            # A copy: steps donate the table, and the host goes on writing to its own.
            table_BGLF = jax.device_put(self.blocks.table_BGLF.copy(), self.state.arena_AW.sharding)
            self.state = self.state.replace(block_tables_BGLF=table_BGLF)
            self.blocks.changed = False
        first_tokens, scores = [], []
        for chunk in schedule.chunks:
            if chunk.request.params is None:
                scores.append(self._score(chunk))
            else:
                token = self._prefill(chunk)
                if chunk.last:
                    first_tokens.append((chunk.request, token))
        tokens_NB, rows = None, ()
        if schedule.decode:
            rows = tuple((row, r) for row, r in self.scheduler.running.items() if r.decoding)
            self.state, tokens_NB, _ = self.programs.decode(self.weights, self.state)
        return _InFlight(first_tokens=tuple(first_tokens), scores=tuple(scores), tokens_NB=tokens_NB, rows=rows)

    def _assign_row(self, row: int, params: SamplingParams, stops: tuple[int, ...]) -> None:
        stop_ids_S = np.full(MAX_STOP_IDS, -1, np.int32)
        stop_ids_S[: len(stops)] = stops
        self.state = self.programs.assign_row(
            self.state, np.int32(row), np.float32(params.temperature), np.uint32(params.seed), stop_ids_S
        )

    def _prefill(self, chunk: Chunk) -> jax.Array:
        self.state, token, _ = self.programs.prefill(
            self.weights,
            self.state,
            np.int32(chunk.request.row),
            padded(chunk.tokens, self.config.prefill_chunk_tokens),
            np.int32(len(chunk.tokens)),
            np.int32(chunk.request.remaining_tokens if chunk.last else 0),
        )
        return token

    def _score(self, chunk: Chunk) -> tuple[Request, int, jax.Array, int]:
        request, num_tokens = chunk.request, len(chunk.tokens)
        targets = request.prompt[chunk.start + 1 : chunk.start + 1 + num_tokens]
        self.state, logprobs_T, _ = self.programs.score(
            self.weights,
            self.state,
            np.int32(request.row),
            padded(chunk.tokens, self.config.prefill_chunk_tokens),
            padded(targets, self.config.prefill_chunk_tokens),
            np.int32(num_tokens),
        )
        return request, request.num_preemptions, logprobs_T, len(targets)

    def _collect(self, in_flight: _InFlight) -> tuple[list[Request], int]:
        """Reads a step's results, waiting for that step alone; returns (requests that ended, tokens generated)."""
        arrived: list[tuple[Request, list[int]]] = [(r, [int(token)]) for r, token in in_flight.first_tokens]
        if in_flight.tokens_NB is not None:
            tokens_NB = np.asarray(in_flight.tokens_NB)
            arrived += [(r, [int(t) for t in tokens_NB[:, row] if t >= 0]) for row, r in in_flight.rows]
        num_tokens = 0
        ended: dict[int, Request] = {}
        for request, tokens in arrived:
            if request.finish_reason:  # it ended in the step before; its row was silent in this one
                continue
            request.generated += tokens
            num_tokens += len(tokens)
            if request.finish_reason:
                ended[request.number] = request
        for request, num_preemptions, logprobs_T, count in in_flight.scores:
            if request.num_preemptions == num_preemptions and not request.finish_reason:
                request.logprobs += np.asarray(logprobs_T)[:count].tolist()
                if request.finish_reason:
                    ended[request.number] = request
        for request in ended.values():
            self.scheduler.finish(request)
        return list(ended.values()), num_tokens
