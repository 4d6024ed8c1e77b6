"""Progress messages while large data is prepared."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from jaxformer.terminal import echo

INTERVAL_SECONDS = 10.0
"""Seconds between two lines; shorter actions write none."""


class Progress:
    """Progress in bytes, as lines on stderr such as "tokenizing: 512 of 2,048 MB, 9.5 MB/s, 162 s left"."""

    def __init__(self, action: str, total: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin an action on `total` bytes, None if unknown."""
        self._action, self._total, self._clock = action, total, clock
        self._done, self._start = 0, clock()
        self._next = self._start + INTERVAL_SECONDS

    def add(self, n_bytes: int) -> None:
        """Count processed bytes, and write a line when the interval has passed."""
        self._done += n_bytes
        now = self._clock()
        if now < self._next:
            return
        self._next = now + INTERVAL_SECONDS
        speed = self._done / (now - self._start)
        of = "" if self._total is None else f" of {self._total / 1e6:,.0f}"
        left = "" if self._total is None or not speed else f", {(self._total - self._done) / speed:,.0f} s left"
        echo(f"{self._action}: {self._done / 1e6:,.0f}{of} MB, {speed / 1e6:.1f} MB/s{left}", sys.stderr)
