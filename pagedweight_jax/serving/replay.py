# SPDX-License-Identifier: Apache-2.0
"""A dynamic run once more, from its record: the same bits at the same boundaries, hence the same tokens.

A dynamic run depends on when requests come and when pages happen to arrive. Its events hold all of that: which requests
came, got rows and lost them at each boundary, and which blocks changed their bits. A replay takes these decisions from
there. It reads no clock, and where a block was raised it waits for the pages.
"""

from collections.abc import Iterable, Sequence

from pagedweight_jax.errors import UserError
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.events import BoundaryEvent
from pagedweight_jax.serving.request import Request, SamplingParams

REPEATED = (
    "chunks",
    "decode_steps",
    "admitted",
    "preempted",
    "finished",
    "tokens",
    "raised",
    "lowered",
    "blocks_by_bits",
)
"""Fields of a boundary that must come out as recorded."""


def replay(
    engine: Engine,
    events: Iterable[BoundaryEvent],
    work: Sequence[tuple[Sequence[int], SamplingParams | None]],
) -> list[Request]:
    """Returns the requests of ``work``, served as ``events`` say.

    Args:
      engine: new, in ``replay`` mode, else configured as the recorded one was.
      events: all of the recorded engine's, from its first boundary on.
      work: (prompt, params) of its requests in the order of their arrival; their tokens are not in the record.

    Raises:
      UserError: the record does not belong to this checkpoint, configuration or work, with the first boundary that
        shows it.
    """
    requests: list[Request] = []
    for event in events:
        where = f"replay of boundary {event.boundary}"
        if event.boundary != len(engine.events):
            raise UserError(f"{where}: boundary {len(engine.events)} is next; a record begins at 0 and misses none")
        try:
            for number in event.arrived:
                if number != len(requests) or number >= len(work):
                    raise UserError(f"request {number} arrives, {len(requests)} of {len(work)} have")
                requests.append(engine.add_request(*work[number]))
            for number in event.cancelled:
                engine.cancel(requests[number])
            if event.lower_to is not None:
                engine.lower_to(event.lower_to)
            engine.step(event)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        for name in REPEATED:
            ours, theirs = getattr(engine.events[-1], name), getattr(event, name)
            if ours != theirs:
                raise UserError(f"{where}: {name} {ours}, recorded {theirs}")
    unfinished = sum(not request.finish_reason for request in requests)
    if unfinished or len(requests) < len(work):
        raise UserError(
            f"replay: the record ends after boundary {len(engine.events) - 1}, when {len(requests)} of {len(work)} "
            f"requests have come and {unfinished} of those are not finished"
        )
    return requests
