"""Handlers for signals that shut a program down cleanly."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HANGUP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
"""SIGHUP, sent when a terminal closes, on systems that have it; Windows does not."""
STOPPING = (signal.SIGINT, signal.SIGTERM, *HANGUP)
"""Signals that stop training cleanly."""
AFTER_FIRST: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    **dict.fromkeys(HANGUP, signal.SIG_IGN),
}
"""Handlers after a first signal; the system's default for others."""


class ReceivedSignal:
    """The first received signal."""

    number: int = 0
    """Number of the signal; 0 for none."""

    def __int__(self) -> int:
        return self.number

    def is_set(self) -> bool:
        """Return True if a signal was received."""
        return bool(self.number)


@contextmanager
def record_signals(*numbers: signal.Signals) -> Iterator[ReceivedSignal]:
    """Record the first of these signals; a second one has its default effect, except that a second SIGHUP is ignored.
    If SIGHUP was ignored before, as under nohup, it remains ignored."""
    received = ReceivedSignal()

    def record(number: int, _: object) -> None:
        received.number = number
        for other in numbers:
            if signal.getsignal(other) is not signal.SIG_IGN:
                signal.signal(other, AFTER_FIRST.get(other, signal.SIG_DFL))

    with _handle_signals(numbers, record):
        yield received


@contextmanager
def raise_on_signals(*numbers: signal.Signals, message: str) -> Iterator[None]:
    """Raise `KeyboardInterrupt(message, number)` at each of these signals; an ignored SIGHUP remains ignored."""

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(message, number)

    with _handle_signals(numbers, interrupt):
        yield


@contextmanager
def _handle_signals(numbers: tuple[signal.Signals, ...], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Set a handler, except for an ignored SIGHUP, and restore the previous handlers at the end. Outside the main
    thread, the only one that may set handlers, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    before = {n: current for n, current in before.items() if n not in HANGUP or current is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
