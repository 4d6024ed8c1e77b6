"""Traces of a few training steps, recorded with `jax.profiler` for xprof and Perfetto."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import jax

from jaxformer.errors import os_error_reason
from jaxformer.files import write_atomically
from jaxformer.train.setup import TrainState

PROFILE = "profile"
"""Folder of traces in the run's folder."""
SESSIONS = Path("plugins", "profile")
"""Folder below a log folder in which xprof and TensorBoard look for traces, one folder per trace."""
FILES = {"*.xplane.pb": ".xplane.pb", "perfetto_trace.json.gz": ".trace.json.gz"}
"""Files of a trace as JAX writes them, and the suffixes that follow the process name in their final names."""


class Profiler:
    """Context manager for training, whose `begin` and `end` around each step record a trace of some steps per process.

    A trace is either complete or absent. If it cannot be written, training continues. When the context ends early, as
    after Ctrl-C, a trace of the steps so far is written.
    """

    def __init__(self, folder: Path, steps: range, start: int, print_line: Callable[[str], None]) -> None:
        """Configure the trace; `begin` starts it.

        Args:
          folder: the run's folder.
          steps: consecutive steps to trace, counted from 1; steps up to `start` are not run again.
          start: step at which training begins.
          print_line: function that receives a line about the trace, or about the failure to write it.
        """
        self._folder, self._steps, self._start, self._print_line = folder / PROFILE, steps, start, print_line
        self._scratch: tempfile.TemporaryDirectory | None = None
        self._first = self._last = 0

    def __enter__(self) -> Profiler:
        if self._steps and self._start >= self._steps[-1]:
            self._print_line(f"no trace: training starts after step {self._start:,}, past {_words(self._steps)}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._first:
            self._stop()

    def begin(self, step: int, state: TrainState) -> float:
        """Start the trace before its first step, once the device has computed the state; return the seconds spent on
        starting."""
        if step not in self._steps or self._first:
            return 0.0
        jax.block_until_ready(state)
        began = time.perf_counter()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing every Python call would slow the steps down
        try:
            self._scratch = tempfile.TemporaryDirectory(prefix="jaxformer-")
            jax.profiler.start_trace(self._scratch.name, create_perfetto_trace=True, profiler_options=options)
            self._first = self._last = step
        except (OSError, RuntimeError) as error:  # RuntimeError in a program that is already being traced
            if self._scratch is not None:
                self._scratch.cleanup()
            self._give_up(error)
        return time.perf_counter() - began

    def end(self, step: int, state: TrainState) -> float:
        """Write the trace after its last step, once the device has computed the state; return the seconds spent on
        writing."""
        if not self._first:
            return 0.0
        self._last = step
        if step < self._steps[-1]:
            return 0.0
        jax.block_until_ready(state)
        began = time.perf_counter()
        self._stop()
        return time.perf_counter() - began

    def _stop(self) -> None:
        """Write the trace of the steps since `begin`."""
        assert self._scratch is not None
        steps, self._first = range(self._first, self._last + 1), 0
        session = self._folder / SESSIONS / f"steps-{steps[0]}-{steps[-1]}"
        name = f"{socket.gethostname()}_{jax.process_index()}"
        files = {pattern: session / f"{name}{end}" for pattern, end in FILES.items()}
        with self._scratch as scratch:
            try:
                jax.profiler.stop_trace()
                self._folder.mkdir(exist_ok=True)  # no parents: a vanished run folder is not recreated
                session.mkdir(parents=True, exist_ok=True)
                for pattern, file in files.items():
                    write_atomically(file, next(Path(scratch).rglob(pattern)).read_bytes())
                self._print_line(f"trace of {_words(steps)}: {session}")
            except BaseException as error:
                with suppress(OSError):
                    for file in files.values():
                        file.unlink(missing_ok=True)
                    session.rmdir()
                if not isinstance(error, OSError | ValueError | RuntimeError | StopIteration):  # such as Ctrl-C
                    raise
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        reason = os_error_reason(error) or " ".join(str(error).split())
        self._steps = range(0)
        self._print_line(f"no trace in {self._folder}: {reason or 'it has no files'}; training continues")


def _words(steps: range) -> str:
    return f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
