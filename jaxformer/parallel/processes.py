"""Multi-process training with `jax.distributed`: startup, shutdown, and communication between processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, SupportsInt

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.config.fields import Positive, Range, check_fields
from jaxformer.errors import UserError

CONNECT_SECONDS = 60
"""Timeout for all processes to start and connect."""
LOST_PROCESS = re.compile(
    "^(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): |gloo|coordination|heartbeat|devices failed", re.IGNORECASE
)
"""Pattern of the runtime's errors after another process has ended."""
SKIP_METADATA = "TPU_SKIP_MDS_QUERY"
"""Environment variable that JAX sets if there is no TPU; without it, JAX queries Google's metadata server for other
hosts."""
NO_CLUSTER = "coordinator_address"
"""Part of JAX's error message if it detects no cluster."""
MAX_TEXT_BYTES = 4096
"""Maximum size in UTF-8 of a text in `all_gather`."""


@dataclass(frozen=True)
class DistributedOptions:
    """Addresses of the processes, which are detected automatically under SLURM, Open MPI and on TPU pods."""

    coordinator: str | None = None
    """Address HOST:PORT on which process 0 listens."""
    processes: Annotated[int, Range(most=2**20)] | None = None
    """Number of processes."""
    process: int | None = None
    """Index of this process, from 0."""
    heartbeat_seconds: Annotated[Positive, Range(most=86_400)] = 30
    """Seconds without a heartbeat after which a process counts as lost, and the run ends."""

    def __post_init__(self) -> None:
        check_fields(self, "distributed.")
        given = [self.coordinator, self.processes, self.process]
        if any(x is not None for x in given) and any(x is None for x in given):
            names = "`distributed.coordinator`, `distributed.processes` and `distributed.process`"
            raise UserError(f"{names} must be given together.")
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not (host and port.isdecimal() and 0 < int(port) < 2**16):
                raise UserError(f"`distributed.coordinator` is {self.coordinator!r}; it must be HOST:PORT.")
        if self.processes is not None and self.process is not None and not 0 <= self.process < self.processes:
            limit = f"of {self.processes} processes it must be at least 0 and below {self.processes}"
            raise UserError(f"`distributed.process` is {self.process}; {limit}.")


def connect(options: DistributedOptions, environment: Mapping[str, str] = os.environ) -> None:
    """Connect to the other processes, if there are any, within `CONNECT_SECONDS`. Call it before any JAX array is
    created.

    Raises:
      UserError: process 0 cannot be reached, or its port is taken.
    """
    use_metadata = options.coordinator is None and count_processes(environment) == 1
    if use_metadata and SKIP_METADATA in environment:
        return
    bound = None if options.coordinator is None else bind_address(options.coordinator)
    if options.coordinator is not None:
        _check_address(options.coordinator, bound, options.process == 0)
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM; `AsyncMax` does that here
    timeout = f"error: not all processes of this run connected within {CONNECT_SECONDS} s; start all of them."
    try:
        with exit_on_abort(timeout):
            jax.distributed.initialize(
                options.coordinator,
                options.processes,
                options.process,
                coordinator_bind_address=bound,
                initialization_timeout=CONNECT_SECONDS,
                heartbeat_timeout_seconds=options.heartbeat_seconds,
                shutdown_timeout_seconds=options.heartbeat_seconds,
            )
    except (RuntimeError, ValueError, OSError) as error:
        if use_metadata and NO_CLUSTER in str(error):
            return
        hint = f"; to train on this machine only, set {SKIP_METADATA}=1" if use_metadata else ""
        problem = "the processes of this run could not connect to each other"
        raise UserError(f"{problem}: {_first_line(error)}{hint}") from error


def bind_address(coordinator: str) -> str | None:
    """Return the address on which process 0 listens: `coordinator` if its host is `localhost` or a loopback address,
    else None for all interfaces. Other names are not resolved, because a machine may resolve its own name to
    127.0.1.1."""
    is_loopback = re.match(r"localhost:|127\.[\d.]+:|\[::1\]:", coordinator)
    return coordinator if is_loopback else None


def _check_address(coordinator: str, bound: str | None, is_main: bool) -> None:
    """Raise `UserError` if process 0 cannot listen, or does not answer within `CONNECT_SECONDS`, where the runtime
    would abort."""
    host, _, port = coordinator.rpartition(":")
    if is_main:
        try:
            family = socket.AF_INET6 if bound and ":" in host else socket.AF_INET
            socket.create_server((host.strip("[]") if bound else "", int(port)), family=family).close()
        except OSError as error:
            raise UserError(f"process 0 cannot listen on port {port} ({error}); choose another one.") from error
        return
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                problem = f"process 0 does not respond at {coordinator} after {CONNECT_SECONDS} s ({error})"
                raise UserError(f"{problem}; start it, or correct `distributed.coordinator`.") from error
            time.sleep(0.2)


@contextmanager
def exit_on_abort(message: str, status: int = 1) -> Iterator[None]:
    """Exit with a message and a status if the runtime aborts this process inside the context.

    Once another process is lost, the runtime aborts in a thread of its own, where Python cannot catch an exception.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def end(_: int) -> None:
        os.write(2, f"{message}\n".encode() if message else b"")
        os._exit(status)

    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    before = set_handler(signal.SIGABRT, ctypes.cast(end, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGABRT, before)


@contextmanager
def exit_on_lost_process(advice: str) -> Iterator[None]:
    """Exit at once with status 1 and a message if another process is lost inside the context.

    A collective that waits for the lost process fails at once, or after `heartbeat_seconds`.
    """
    if not jax.distributed.is_initialized():
        yield
        return
    message = f"error: another process of this run has ended or does not respond; its own output says why; {advice}"
    with exit_on_abort(message):
        try:
            yield
        except (jax.errors.JaxRuntimeError, multihost_utils.ProcessFailureError, ValueError) as error:
            if not LOST_PROCESS.search(str(error)):
                raise
            _flush()
            os.write(2, f"{_first_line(error)}\n{message}\n".encode())
            os._exit(1)


def shutdown(status: int) -> int:
    """Return the exit status or, in a multi-process job, exit with it once all processes call this function, or after
    `heartbeat_seconds`, in which case the others exit through `exit_on_lost_process`.

    It exits without the interpreter's clean-up, which would wait for the threads of an unfinished save, and for devices
    in a collective with lost processes: a result is read from one device, while others may not even have started.
    """
    if jax.distributed.is_initialized():
        _flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # silences the runtime's errors
        with exit_on_abort("", status), contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()
        os._exit(status)
    return status


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def barrier() -> None:
    """Wait for all processes, without a timeout while they are alive; a collective on CPUs would wait for at most 30 s.

    Raises:
      ProcessFailureError: a process is lost.
    """
    if jax.process_count() > 1:
        with multihost_utils.live_devices(jax.devices()) as alive:
            pass
        if lost := set(jax.devices()) - set(alive):
            raise multihost_utils.ProcessFailureError(lost)


def count_processes(environment: Mapping[str, str]) -> int:
    """Return the number of processes that SLURM, Open MPI or, on TPUs, Kubernetes started; 1 without any of them."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    hosts = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES", ""))
    slices = environment.get("MEGASCALE_NUM_SLICES", "")
    return len(hosts.split(",")) * (int(slices) if slices.isdecimal() else 1)


def is_main_process() -> bool:
    """Return True for process 0, which writes the logs."""
    return jax.process_index() == 0


def broadcast(text: str) -> str:
    """Return the text of process 0 on all processes."""
    return all_gather(text)[0]


def all_gather(text: str) -> list[str]:
    """Return the texts of all processes on every process; each has at most `MAX_TEXT_BYTES`."""
    if jax.process_count() == 1:
        return [text]
    encoded = text.encode()
    padded = np.zeros(MAX_TEXT_BYTES, np.uint8)
    padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    barrier()
    return [bytes(row).rstrip(b"\0").decode() for row in multihost_utils.process_allgather(padded)]


class AsyncMax:
    """Asynchronous all-reduce of the maximum of one small integer per process.

    A signal reaches one process, but all must stop after the same step.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._sharded = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._max = jax.jit(lambda numbers: numbers.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._n_processes, self._n_devices = jax.process_count(), mesh.size

    def reduce(self, number: SupportsInt) -> SupportsInt:
        """Return the maximum over all processes, for a single one `number` itself; converting it to `int` waits for
        their calls."""
        if self._n_processes == 1:
            return number
        shard = lambda index: np.full(len(range(self._n_devices)[index[0]]), int(number), np.int32)  # noqa: E731
        return self._max(jax.make_array_from_callback((self._n_devices,), self._sharded, shard))
