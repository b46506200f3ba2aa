# SPDX-License-Identifier: Apache-2.0
"""The page mover: brings pages from the host to the device while decode steps run.

It never touches the arena. A page goes to a staging array of its own; at the next boundary the engine scatters what has
arrived into the arena, in one jitted call, and tells the page table. Offloading moves nothing here, because every page
has its copy in the host pool.
"""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pagedweight_jax.paging.host_pool import HostPool
from pallas_kernels.bitplane import WORD_BYTES, BlockLayout


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A batch of B pages of one (kind, plane), so of one shape: a jitted scatter compiles once for each of those.

    Attributes:
      pages_N4: int64, the N <= B pages (layer, expert, kind, plane) that are to land.
      frames_BF: int32, where each goes. Rows from N on hold ``num_frames``, which ``.at[].set(mode="drop")`` ignores.
      staged_B: B device arrays uint32[page_frames, frame_words], empty until the transfer is issued. Those that fill up
        the batch repeat the first one, at no cost: do not donate them.
      num_frames: frames of the arena.
    """

    pages_N4: np.ndarray
    frames_BF: np.ndarray
    staged_B: tuple[jax.Array, ...]
    num_frames: int

    def keep(self, kept_N: np.ndarray) -> "Transfer":
        """Returns the transfer with only the pages where bool[N] ``kept_N`` is true; the others do not land."""
        kept = np.flatnonzero(kept_N)
        others = np.setdiff1d(np.arange(len(self.frames_BF)), kept)
        frames_BF = np.full_like(self.frames_BF, self.num_frames)
        frames_BF[: len(kept)] = self.frames_BF[kept]
        return replace(
            self,
            pages_N4=self.pages_N4[kept],
            frames_BF=frames_BF,
            staged_B=tuple(self.staged_B[i] for i in [*kept, *others]),
        )


class PageMover:
    """Copies pages from a HostPool to the device in equal batches, from a thread of its own.

    ``start_reload`` and ``poll`` never wait. Staging memory is bounded: what is under way, what has arrived, and what
    the last ``poll`` returned (the caller lets go of it before the next one) never exceed ``max_staged_bytes``, so a
    boundary that lands its whole allowance needs room for two.

    Args:
      pool: the host's pages.
      layouts: of gate_up and down blocks.
      num_frames: frames of the arena.
      device: where pages go.
      batch_pages: B, pages of a batch. A copy of one page costs the host tens of microseconds, whatever its size.
      max_staged_bytes: device memory for staging; at least one batch of the largest page.

    Raises:
      ValueError: the bound is smaller than a batch.
    """

    def __init__(
        self,
        pool: HostPool,
        layouts: tuple[BlockLayout, BlockLayout],
        *,
        num_frames: int,
        device: jax.Device,
        batch_pages: int,
        max_staged_bytes: int,
    ):
        largest_bytes = batch_pages * max(
            layout.page_frames(plane) * layout.frame_words * WORD_BYTES
            for layout in layouts
            for plane in range(layout.max_bits)
        )
        if max_staged_bytes < largest_bytes:
            raise ValueError(
                f"a batch of {batch_pages} pages takes {largest_bytes} bytes, the bound is {max_staged_bytes}"
            )
        self._pool = pool
        self._layouts = layouts
        self._num_frames = num_frames
        self._sharding = SingleDeviceSharding(device)
        self._batch_pages = batch_pages
        self._max_staged_bytes = max_staged_bytes
        # All that the two threads share, guarded by the condition:
        self._changed = threading.Condition()
        self._waiting: deque[Transfer] = deque()  # its head stays until it is issued
        self._issued: deque[Transfer] = deque()
        self._staged_bytes = 0
        self._returned_bytes = 0
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="page-mover", daemon=True)
        self._thread.start()

    def start_reload(self, pages: np.ndarray, frames: np.ndarray) -> None:
        """Queues ``pages`` for transfer: most significant planes first, else in the order given.

        Args:
          pages: int[n, 4].
          frames: int32, where they will land, page after page, as given to ``table.begin_reload``.
        """
        transfers = list(self._batches(np.asarray(pages, np.int64).reshape(-1, 4), np.asarray(frames, np.int32)))
        with self._changed:
            if self._closed:
                raise RuntimeError("the page mover is closed")
            self._waiting.extend(transfers)
            self._changed.notify_all()

    def poll(self) -> list[Transfer]:
        """Returns the transfers that have finished since the last call, in the order of issue; never waits.

        Raises:
          RuntimeError: the thread failed; its exception is the cause.
        """
        with self._changed:
            if self._error is not None:
                raise RuntimeError("the page mover's thread failed") from self._error
            self._let_go()
            landed = []
            while self._issued and all(page.is_ready() for page in self._issued[0].staged_B):
                landed.append(self._issued.popleft())
            self._returned_bytes = sum(self._bytes(transfer) for transfer in landed)
        return landed

    @property
    def staged_bytes(self) -> int:
        """Device bytes of pages that are under way, have arrived, or were returned by the last ``poll``."""
        with self._changed:
            return self._staged_bytes

    def drain(self) -> Iterator[Transfer]:
        """Yields all that is started and not yet returned, in the order of issue, waiting for it; raises as ``poll``.

        Asking for the next one lets go of the last, so a start-up may load many times ``max_staged_bytes`` this way.
        """
        while True:
            yield from self.poll()
            with self._changed:
                self._let_go()
                self._changed.wait_for(lambda: self._issued or self._error or self._closed or not self._waiting)
                if not self._issued and self._error is None:
                    return
                staged = self._issued[0].staged_B if self._issued else ()
            jax.block_until_ready(staged)

    def close(self) -> None:
        """Ends the thread. What was not issued yet never moves; what ``poll`` has not returned is let go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _batches(self, pages: np.ndarray, frames: np.ndarray) -> Iterator[Transfer]:
        starts_UP = np.array([layout.page_starts for layout in self._layouts])
        count_n = starts_UP[pages[:, 2], pages[:, 3] + 1] - starts_UP[pages[:, 2], pages[:, 3]]
        first_n = np.cumsum(count_n) - count_n
        if frames.shape != (count_n.sum(),):
            raise ValueError(f"{len(pages)} pages take {count_n.sum()} frames, got {frames.shape}")
        for kind, plane in sorted({(k, p) for _, _, k, p in pages.tolist()}, key=lambda shape: shape[::-1]):
            rows = np.flatnonzero((pages[:, 2] == kind) & (pages[:, 3] == plane))
            columns_F = np.arange(self._layouts[kind].page_frames(plane))
            for batch in np.split(rows, range(self._batch_pages, len(rows), self._batch_pages)):
                frames_BF = np.full((self._batch_pages, columns_F.size), self._num_frames, np.int32)
                frames_BF[: len(batch)] = frames[first_n[batch, None] + columns_F]
                yield Transfer(pages_N4=pages[batch], frames_BF=frames_BF, staged_B=(), num_frames=self._num_frames)

    def _run(self) -> None:
        try:
            while (transfer := self._next()) is not None:
                pages = [self._pool.get(*page) for page in transfer.pages_N4.tolist()]
                staged = jax.device_put(pages, self._sharding)
                staged += staged[:1] * (self._batch_pages - len(staged))
                with self._changed:
                    self._waiting.popleft()
                    self._issued.append(replace(transfer, staged_B=tuple(staged)))
                    self._changed.notify_all()
        except BaseException as error:  # it is raised where somebody listens: at the next poll
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> Transfer | None:
        """Waits for a transfer to issue and for room; returns it, or None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._waiting and self._has_room(self._waiting[0])))
            if self._closed:
                return None
            self._staged_bytes += self._bytes(self._waiting[0])
            return self._waiting[0]

    def _has_room(self, transfer: Transfer) -> bool:
        return self._staged_bytes + self._bytes(transfer) <= self._max_staged_bytes

    def _bytes(self, transfer: Transfer) -> int:
        frame_bytes = self._layouts[0].frame_words * WORD_BYTES
        return len(transfer.pages_N4) * transfer.frames_BF.shape[1] * frame_bytes

    def _let_go(self) -> None:
        """What the last ``poll`` returned counts no longer. The caller holds the condition."""
        if self._returned_bytes:  # else nobody is woken: the thread would take the interpreter at every boundary
            self._staged_bytes -= self._returned_bytes
            self._returned_bytes = 0
            self._changed.notify_all()
