# SPDX-License-Identifier: Apache-2.0
"""What an event log must show before anyone says that weights gave way to the KV cache and came back."""

from collections.abc import Sequence

from pagedweight_jax.serving.events import BoundaryEvent

LEAST_FALL_BITS = 1.0
RETURN_BITS = 0.1


def check_events(events: Sequence[BoundaryEvent]) -> list[str]:
    """Returns what the log does not show, one line each; nothing if all of it happened.

    - The device never holds more than the budget, and every byte of the arena is accounted for, at every boundary.
    - The mean bits fall by ``LEAST_FALL_BITS`` at least, and come back to within ``RETURN_BITS`` of the start.
    - Blocks of different bitwidths serve in one decode call.
    - Every request that was admitted finishes.
    """
    if not events:
        return ["there are no events"]
    problems = []
    arena_bytes = _arena_bytes(events[0])
    for event in events:
        if event.device_bytes > event.budget_bytes:
            problems.append(
                f"boundary {event.boundary}: the device holds {event.device_bytes} bytes, "
                f"the budget is {event.budget_bytes}"
            )
        if _arena_bytes(event) != arena_bytes:
            problems.append(
                f"boundary {event.boundary}: the arena's entries sum to {_arena_bytes(event)} bytes, "
                f"at the start to {arena_bytes}"
            )
    start, lowest, end = events[0].mean_bits, min(event.mean_bits for event in events), events[-1].mean_bits
    if start - lowest < LEAST_FALL_BITS:
        problems.append(f"the mean bits fell by {start - lowest:.2f} only, from {start:.2f} to {lowest:.2f}")
    if abs(end - start) > RETURN_BITS:
        problems.append(f"the mean bits ended at {end:.2f}, they began at {start:.2f}")
    if not any(event.decode_steps and len(event.blocks_by_bits) > 1 for event in events):
        problems.append("no decode call ran blocks of different bitwidths")
    lost = {n for event in events for n in event.admitted} - {n for event in events for n in event.finished}
    if lost:
        problems.append(f"requests {sorted(lost)} were admitted and never finished")
    return problems


def _arena_bytes(event: BoundaryEvent) -> int:
    return event.kv_bytes + event.weight_bytes + event.releasing_bytes + event.free_bytes
