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
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np

from pagedweight_jax.checkpoint.paged import PagedCheckpoint, Progress, no_progress
from pagedweight_jax.config import ServeConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.paging.invariants import check_invariants
from pagedweight_jax.paging.mover import PageMover
from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.planning.observation import KVPressure, Observation
from pagedweight_jax.planning.planner import plan_reload, plan_step, releasable_bytes
from pagedweight_jax.planning.pressure import target_bytes_from_kv_pressure
from pagedweight_jax.planning.queue import MovePlan, PlanQueue
from pagedweight_jax.planning.scoring import reads_signals
from pagedweight_jax.planning.signals import RequestSignals
from pagedweight_jax.serving.calls import Call, collect, dispatch
from pagedweight_jax.serving.events import BoundaryEvent, EventLog, MemoryUse, Moves
from pagedweight_jax.serving.kv_blocks import KVBlocks
from pagedweight_jax.serving.ledger import tree_bytes
from pagedweight_jax.serving.loading import floor_bits, load
from pagedweight_jax.serving.request import Request, SamplingParams, token_ids
from pagedweight_jax.serving.residency import Residency
from pagedweight_jax.serving.scheduler import Schedule, Scheduler
from pagedweight_jax.serving.state import MAX_STOP_IDS


class Engine:
    """Serves requests from one checkpoint within one memory budget.

    Args: see ``loading.load``, which also says what is refused.
      on_event: called with every boundary's record.

    Attributes:
      ledger: what the device holds.
      events: one record per boundary; the newest ones are kept, ``on_event`` sees all.
    """

    def __init__(
        self,
        checkpoint: PagedCheckpoint,
        config: ServeConfig,
        device: jax.Device | None = None,
        progress: Progress = no_progress,
        calibration: Calibration | None = None,
        on_event: Callable[[BoundaryEvent], None] = lambda event: None,
    ):
        device = device or jax.devices()[0]
        loaded = load(checkpoint, config, device, progress, calibration)
        # What cannot land at a boundary would wait in frames that the KV cache may need meanwhile.
        most_bytes = min(config.planner.max_reload_bytes, loaded.ledger.staging_bytes // 2)
        self.config = replace(config, planner=replace(config.planner, max_reload_bytes=most_bytes))
        self.model = checkpoint.manifest.config
        self.ledger = loaded.ledger
        self.events = EventLog()
        self.on_event = on_event
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
            batch_pages=loaded.batch_pages,
            max_staged_bytes=loaded.ledger.staging_bytes,
        )
        self.residency = Residency(loaded.table, loaded.allocator, mover, loaded.programs, loaded.update_frames)
        self._queue = PlanQueue.start(loaded.table.committed_LEU)
        self._in_flight: tuple[Call, ...] = ()
        self._boundary = 0
        self._next_number = 0
        self._arrived: list[int] = []
        self._cancelled: list[int] = []
        self._lowered_to: int | None = None
        self._start_seconds = time.perf_counter()

    def close(self) -> None:
        """Ends the page mover's thread."""
        self.residency.mover.close()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(
        self, prompt: tuple[int, ...], params: SamplingParams | None, keep_hidden: bool = False
    ) -> Request:
        """Queues a request and returns its record; without ``params`` the prompt is scored, not continued.

        With ``keep_hidden`` a scored prompt's last hidden states are brought to the host, too.

        Raises:
          UserError: no token ids, or ones outside the vocabulary, or a context that can never fit.
        """
        prompt = token_ids(prompt, self.model.vocab_size)
        least = 1 if params else 2
        if len(prompt) < least:
            raise UserError(f"a prompt needs at least {least} token{'s' * (least > 1)}, got {len(prompt)}")
        stops = params.stop_ids(self.model.eos_token_ids) if params else ()
        hidden: list[np.ndarray] | None = [] if keep_hidden else None
        request = Request(number=self._next_number, prompt=prompt, params=params, stops=stops, hidden=hidden)
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
        self._arrived.append(request.number)
        self.scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request at this boundary, waiting or running; its row and blocks are free at once. Idempotent."""
        if request.finish_reason:
            return
        request.cancelled = True
        self._cancelled.append(request.number)
        row = request.row
        self.scheduler.finish(request)  # first: it holds even where the device's state is lost
        if row is not None:
            self._assign_row(row, SamplingParams(), ())

    def step(self, record: BoundaryEvent | None = None) -> list[Request]:
        """Runs one boundary and its calls; returns the requests whose last token the host saw.

        Args:
          record: in ``replay`` mode, the boundary that is done again.

        Raises:
          UserError: the record asks for what cannot be done here.
        """
        if (record is not None) != (self.config.mode == "replay"):
            raise RuntimeError(f"a step takes a record in replay mode and only there, the mode is {self.config.mode}")
        self.residency.retire()
        moves = self._land(record)
        schedule = self._schedule(record)
        observation = self._observe()
        moves += self._plan(observation, record)
        in_flight = self._dispatch(schedule)
        finished, num_tokens = collect(self._in_flight, self.calibration.policy.half_life_tokens)
        self._in_flight = in_flight
        for request in finished:
            self.scheduler.finish(request)
        self._remember(schedule, observation, moves, finished, num_tokens)
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

        A dynamic engine begins to raise them again at its next boundary with room for it: see ``freeze``.

        Raises:
          UserError: bits that the checkpoint does not have.
        """
        table = self.residency.table
        if not table.min_bits <= bits <= table.max_bits:
            raise UserError(f"bits {bits}: the checkpoint has {table.min_bits}..{table.max_bits}")
        self._lowered_to = min(bits, self._lowered_to or bits)
        self._lower(np.minimum(table.desired_LEU, bits))

    def _lower(self, desired_LEU: np.ndarray) -> None:
        table = self.residency.table
        plan = MovePlan.between(table.desired_LEU, desired_LEU, table.bytes_UQ, table.min_bits)
        self.residency.retire()
        self.state, _ = self.residency.lower(self.state, plan)

    def check_invariants(self) -> None:
        """Raises AssertionError unless every frame of the arena is accounted for."""
        check_invariants(self.residency.table, self.allocator, self.blocks.frames())

    @property
    def _plans(self) -> bool:
        return self.config.mode == "dynamic" and self.config.planner.page_movement

    @property
    def _observes(self) -> bool:
        return self._plans and reads_signals(self.calibration, self.config.planner)

    def _held_bytes(self) -> int:
        """Device bytes at this moment, counted from the arrays themselves."""
        results = [call.arrays for call in self._in_flight]
        arrays_bytes = tree_bytes(self.weights) + tree_bytes(self.state) + tree_bytes(results)
        return arrays_bytes + self.residency.mover.staged_bytes + self.ledger.temporary_bytes

    def _most_blocks(self) -> int:
        """KV blocks that fit beside the weights: at the bits that they are sure to give way to, else as they are."""
        bits_LEU = self.residency.table.committed_LEU
        if self.config.mode != "frozen" and self.config.planner.page_movement:
            bits_LEU = np.full_like(bits_LEU, floor_bits(self.calibration, self.config))
        free_frames = self.allocator.num_frames - self.residency.frames_at(bits_LEU)
        return free_frames // self.state.geometry.frames_per_block

    def _land(self, record: BoundaryEvent | None) -> Moves:
        started = Moves() if record is None else self.residency.reload(self.residency.plan_of(record.raised))
        self.state, moves = self.residency.land(self.state, wait=record is not None)
        return started + moves

    def _schedule(self, record: BoundaryEvent | None) -> Schedule:
        if record is not None:
            return self.scheduler.schedule_as(
                num_admitted=len(record.admitted),
                num_preempted=len(record.preempted),
                calls=bool(record.chunks or record.decode_steps),
            )
        return self.scheduler.schedule(
            may_wait=self._plans and self._frames_will_come(),
            releasable_blocks=self._most_blocks() - self.blocks.used_blocks - self.blocks.free_blocks,
        )

    def _frames_will_come(self) -> bool:
        table, planner = self.residency.table, self.config.planner
        on_their_way = self.residency.releasing_frames > 0
        return on_their_way or releasable_bytes(table, self.calibration, self._queue, planner) > 0

    def _observe(self) -> Observation:
        geometry = self.state.geometry
        kv = KVPressure(
            free_blocks=self.blocks.free_blocks,
            pending_blocks=self.scheduler.pending_blocks(),
            releasing_blocks=self.residency.releasing_frames // geometry.frames_per_block,
            block_bytes=geometry.block_bytes,
        )
        silent = RequestSignals.empty(self.model.num_sparse_layers, self.model.num_experts)
        running = self.scheduler.running if self._observes else {}
        return Observation(
            boundary=self._boundary,
            kv=kv,
            requests=tuple(request.signals or silent for request in running.values()),
            kv_blocks=tuple(int(self.blocks.num_blocks_B[row]) for row in running),
        )

    def _plan(self, observation: Observation, record: BoundaryEvent | None) -> Moves:
        plan = None
        planner, table = self.config.planner, self.residency.table
        if record is not None:
            plan = self.residency.plan_of(record.lowered)
        elif self._plans:
            self._queue, plan = plan_step(table, observation, self.calibration, self._queue, planner)
        if plan is not None:
            self.state, moves = self.residency.lower(self.state, plan)
            return moves
        if self._plans:
            return self.residency.reload(plan_reload(table, observation, self.calibration, self._queue, planner))
        return Moves()

    def _dispatch(self, schedule: Schedule) -> tuple[Call, ...]:
        for row, _ in schedule.preempted:
            self._assign_row(row, SamplingParams(), ())
        for request in schedule.admitted:
            self._assign_row(request.row, request.params or SamplingParams(), request.stops)
        if self.blocks.changed:
            # A copy: steps donate the table, and the host goes on writing to its own.
            table_BGLF = jax.device_put(self.blocks.table_BGLF.copy(), self.state.arena_AW.sharding)
            self.state = self.state.replace(block_tables_BGLF=table_BGLF)
            self.blocks.changed = False
        self.state, calls = dispatch(
            self.programs,
            self.weights,
            self.state,
            schedule,
            self.scheduler.running,
            chunk_tokens=self.config.prefill_chunk_tokens,
            keep_sums=self._observes,
        )
        return calls

    def _assign_row(self, row: int, params: SamplingParams, stops: tuple[int, ...]) -> None:
        stop_ids_S = np.full(MAX_STOP_IDS, -1, np.int32)
        stop_ids_S[: len(stops)] = stops
        self.state = self.programs.assign_row(
            self.state, np.int32(row), np.float32(params.temperature), np.uint32(params.seed), stop_ids_S
        )

    def _remember(
        self, schedule: Schedule, observation: Observation, moves: Moves, finished: list[Request], num_tokens: int
    ) -> None:
        """Makes the boundary's record, and begins the next one."""
        memory = MemoryUse.of(
            self.allocator, self.state.geometry.frame_bytes, self._held_bytes(), self.ledger.budget_bytes
        )
        event = BoundaryEvent(
            boundary=self._boundary,
            time_seconds=time.perf_counter() - self._start_seconds,
            arrived=tuple(self._arrived),
            cancelled=tuple(self._cancelled),
            lower_to=self._lowered_to,
            rows=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            chunks=len(schedule.chunks),
            decode_steps=self.config.steps_per_call if schedule.decode else 0,
            admitted=tuple(r.number for r in schedule.admitted),
            preempted=tuple(r.number for _, r in schedule.preempted),
            finished=tuple(r.number for r in finished),
            tokens=num_tokens,
            context_tokens=sum(r.num_tokens for r in self.scheduler.running.values()),
            free_blocks=observation.kv.free_blocks,
            pending_blocks=observation.kv.pending_blocks,
            target_bytes=target_bytes_from_kv_pressure(observation.kv, self.config.planner),
            mean_bits=self.residency.mean_bits,
            blocks_by_bits=self.residency.blocks_by_bits,
            **vars(moves),
            **vars(memory),
        )
        self._boundary += 1
        self._arrived, self._cancelled, self._lowered_to = [], [], None
        self.events.append(event)
        self.on_event(event)
