"""Signals that end a program in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

SECOND: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_IGN}
"""Response to the second of several signals; the default one of the system to others."""


class ReceivedSignal:
    """The signal that came, or 0."""

    number: int = 0

    def is_set(self) -> bool:
        """Whether one came."""
        return bool(self.number)


@contextmanager
def record_signals(*numbers: signal.Signals) -> Iterator[ReceivedSignal]:
    """Note the first of these signals instead of dying of it; a second one acts as it does by default.

    But SIGHUP, of a terminal that is closed, may come twice and ends nothing that a signal has begun to end; and it
    stays ignored where it was, as by nohup.
    """
    caught = ReceivedSignal()
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers
        return
    before = _handlers(numbers)

    def note(number: int, _: object) -> None:
        caught.number = number
        for each in before:
            signal.signal(each, SECOND.get(each, signal.SIG_DFL))

    for number in before:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def raise_on_signals(*numbers: signal.Signals, message: str) -> Iterator[None]:
    """Raise `KeyboardInterrupt(message, number)` at each of these signals; SIGHUP stays ignored where it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _handlers(numbers)

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(message, number)

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handlers(numbers: Iterable[signal.Signals]) -> dict[signal.Signals, Any]:
    """Return the present handlers, without that of SIGHUP where it is ignored."""
    handlers = {number: signal.getsignal(number) for number in numbers}
    if handlers.get(signal.SIGHUP) is signal.SIG_IGN:
        del handlers[signal.SIGHUP]
    return handlers
