"""Work in threads while the program waits for something else."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

DELAY_SECONDS = 0.1
"""Time that a body is given alone; what fails in it, such as a path, mostly does so sooner."""


class _Call(threading.Timer):
    """Thread of a call."""


@contextmanager
def meanwhile(*calls: Callable[[], Any]) -> Iterator[None]:
    """Make calls in threads of their own while the body runs, after `DELAY_SECONDS`, if it takes so long.

    The end of the body does not wait for them. Their exceptions are suppressed: what a call prepares is to be asked for
    again, by code that waits for it or meets the same exception.
    """

    def call_quietly(call: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):
            call()

    timers = [_Call(DELAY_SECONDS, call_quietly, [call]) for call in calls]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def leave(status: int) -> NoReturn:
    """Exit with a status; at once where a call is still being made, for which the interpreter would wait."""
    if any(isinstance(thread, _Call) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
