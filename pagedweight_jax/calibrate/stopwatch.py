# SPDX-License-Identifier: Apache-2.0
"""Where the time of a conversion goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STAGES = ("read", "calibrate", "quantize", "pack", "write")


@dataclass(frozen=True)
class Stopwatch:
    """Wall seconds by stage; programs are compiled inside the stage that runs them first.

    Stages of several threads pass at once, each stage in one thread.

    Attributes:
      seconds: by stage, in the order of a layer's life.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Adds the time of the ``with`` block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start
