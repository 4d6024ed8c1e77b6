"""Work in threads while the program waits for something else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

DELAY_SECONDS = 0.1
"""Time that a body is given alone; what fails in it, such as a path, mostly does so sooner."""


@contextmanager
def meanwhile(*calls: Callable[[], Any]) -> Iterator[None]:
    """Make calls in threads of their own while the body runs, after `DELAY_SECONDS`, if it takes so long.

    The end of the body does not wait for them. Their exceptions are suppressed: what a call prepares is to be asked for
    again, by code that waits for it or meets the same exception.
    """

    def call_quietly(call: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):
            call()

    timers = [threading.Timer(DELAY_SECONDS, call_quietly, [call]) for call in calls]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
