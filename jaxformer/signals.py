"""Signals that end a program in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Caught:
    """The signal that came, or 0."""

    number: int = 0

    def is_set(self) -> bool:
        """Whether one came."""
        return bool(self.number)


@contextmanager
def catch_signals(*numbers: signal.Signals) -> Iterator[Caught]:
    """Note the first of these signals instead of dying of it; a second one acts as it always does.

    But SIGHUP, of a terminal that is closed, may come twice and ends nothing that a signal has begun to end; and it
    stays ignored where it was, as by nohup.
    """
    caught = Caught()
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:
        del before[signal.SIGHUP]

    def note(number: int, _: object) -> None:
        caught.number = number
        for each, handler in before.items():
            signal.signal(each, signal.SIG_IGN if each is signal.SIGHUP else handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
