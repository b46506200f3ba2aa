# SPDX-License-Identifier: Apache-2.0
"""The run itself: requests come at their boundaries, the engine steps, and at the end the weights come back."""

from collections.abc import Callable, Sequence

from pagedweight_jax.demo.workload import Arrival
from pagedweight_jax.evaluate.pressure import rest
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.request import Request, SamplingParams


def serve(engine: Engine, arrivals: Sequence[Arrival], on_step: Callable[[list[Request]], None]) -> list[Request]:
    """Returns the finished requests, in order of arrival, once the engine is idle and its weights have settled.

    Args:
      engine: idle.
      arrivals: in order; boundaries count from the first step of this run.
      on_step: called after every step with the requests that have come so far.
    """
    waiting, requests, boundary = list(arrivals), [], 0
    while waiting or engine.has_work:
        while waiting and waiting[0].boundary <= boundary:
            arrival = waiting.pop(0)
            params = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True)
            requests.append(engine.add_request(arrival.prompt, params))
        engine.step()
        boundary += 1
        on_step(requests)
    rest(engine, lambda: on_step(requests))
    return requests
