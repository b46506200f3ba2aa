# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C between two steps of an engine, and not in the middle of one."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back and yields a function that lets it through: it raises KeyboardInterrupt if one came.

    A step gives away the arrays that the step before returned. An interrupt in its middle would leave neither, and an
    engine without memory. A second one while the first is held goes through at once, for a step that does not end.
    Python tells the main thread alone of signals; elsewhere, and where Ctrl-C means something else, nothing is held.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    held = []

    def hold(*interrupt) -> None:
        if held:
            handler(*interrupt)
        else:
            held.append(interrupt)

    def let_through() -> None:
        if held:
            handler(*held.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, handler)
        let_through()  # also where an error ends the body: whoever mends that one must not go on
