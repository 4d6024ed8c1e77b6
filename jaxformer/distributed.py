"""Several processes that train one model: `jax.distributed` and what they must agree on."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.errors import UserError
from jaxformer.fields import check_fields

PATIENCE = 60
"""Seconds that the processes have to find each other: they do not start together to the second."""
LOST = re.compile(
    "^(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): |gloo|coordination|heartbeat|devices failed", re.IGNORECASE
)
"""What the runtime's errors say when another process is gone."""
SKIP_METADATA = "TPU_SKIP_MDS_QUERY"
"""JAX sets this variable where it sees no TPU. Where it sees one, it asks Google's metadata server for other hosts."""
NOT_AROUND = "coordinator_address"
"""What JAX's error names if nothing tells it of other processes."""
LONGEST_TEXT = 4096
"""Bytes of a text that one process tells the others."""


@dataclass(frozen=True)
class DistributedOptions:
    """Where the processes find each other; found out by itself under SLURM, Open MPI and on TPU pods."""

    coordinator: str | None = None
    """HOST:PORT on which process 0 listens."""
    processes: int | None = None
    """How many there are."""
    process: int | None = None
    """The number of this one, from 0."""
    heartbeat_seconds: int = 30
    """A process that is silent for so long is given up, and the run ends."""

    def __post_init__(self) -> None:
        check_fields(self)
        given = [self.coordinator, self.processes, self.process]
        if any(x is not None for x in given) and any(x is None for x in given):
            raise UserError("distributed.coordinator, distributed.processes and distributed.process go together.")
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not (host and port.isdecimal() and 0 < int(port) < 2**16):
                raise UserError(f"distributed.coordinator is {self.coordinator!r}; it must be HOST:PORT.")
            try:
                host.encode("idna")  # as the resolver does
            except UnicodeError as error:
                raise UserError(
                    f"distributed.coordinator is {self.coordinator!r}, whose host is no name: its parts are of 1 to 63 "
                    "characters; correct it."
                ) from error
        if self.heartbeat_seconds < 1:
            raise UserError(f"distributed.heartbeat_seconds is {self.heartbeat_seconds}; it must be at least 1.")
        if self.processes is not None and self.process is not None and not 0 <= self.process < self.processes:
            raise UserError(
                f"distributed.process is {self.process}; of {self.processes} processes it must be at least 0 and "
                f"below {self.processes}."
            )


def connect(options: DistributedOptions, environment: Mapping[str, str] = os.environ) -> None:
    """Join the other processes, if there are any, and wait for them up to `PATIENCE`; to be called before the first
    array is made.

    Raises:
      UserError: process 0 cannot be reached, or its port is taken.
    """
    by_metadata = options.coordinator is None and count_processes(environment) == 1
    if by_metadata and SKIP_METADATA in environment:
        return
    bound = None if options.coordinator is None else bind_address(options.coordinator)
    if options.coordinator is not None:
        _check_address(options.coordinator, bound, options.process == 0)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself; `AsyncMax` serves here
    try:
        with exit_on_abort(
            f"error: not all processes of this run came together within {PATIENCE} s; start all of them."
        ):
            jax.distributed.initialize(
                options.coordinator, options.processes, options.process, coordinator_bind_address=bound,
                initialization_timeout=PATIENCE, heartbeat_timeout_seconds=options.heartbeat_seconds,
                shutdown_timeout_seconds=options.heartbeat_seconds,
            )  # fmt: skip
    except (RuntimeError, ValueError, OSError) as error:
        if by_metadata and NOT_AROUND in str(error):
            return
        hint = f"; to train on this machine alone, set {SKIP_METADATA}=1" if by_metadata else ""
        raise UserError(f"the processes of this run do not find each other: {_first_line(error)}{hint}") from error


def bind_address(coordinator: str) -> str | None:
    """Return the address on which process 0 listens: `coordinator` where its host is `localhost` or a loopback address,
    else None for all interfaces. Other names are not resolved: a machine may know its own as 127.0.1.1."""
    host = coordinator.rpartition(":")[0].strip("[]")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        is_loopback = False
    return coordinator if is_loopback else None


def _check_address(coordinator: str, bound: str | None, first: bool) -> None:
    """Say in a sentence what the runtime would die of."""
    host, _, port = coordinator.rpartition(":")
    if first:
        try:
            family = socket.AF_INET6 if bound and ":" in host else socket.AF_INET
            socket.create_server((host.strip("[]") if bound else "", int(port)), family=family).close()
        except OSError as error:
            raise UserError(f"process 0 cannot listen on port {port} ({error}); choose another one.") from error
        return
    until = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"process 0 does not answer at {coordinator} after {PATIENCE} s ({error}); start it, or correct "
                    "distributed.coordinator."
                ) from error
            time.sleep(0.2)


@contextmanager
def exit_on_abort(sentence: str, status: int = 1) -> Iterator[None]:
    """Inside, end with a sentence and a status where the runtime aborts this process.

    It does so from a thread of its own, where no Python code can catch it, once another process is gone or silent.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def end(_: int) -> None:
        os.write(2, f"{sentence}\n".encode() if sentence else b"")
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
    """Inside, end with status 1 and a sentence, and without waiting for anyone, where another process is gone.

    Whoever waits for it in a collective is told so at once, or after `heartbeat_seconds`.
    """
    if not jax.distributed.is_initialized():
        yield
        return
    sentence = f"error: another process of this run has ended or does not answer, its own output says why; {advice}"
    with exit_on_abort(sentence):
        try:
            yield
        except (jax.errors.JaxRuntimeError, multihost_utils.ProcessFailureError, ValueError) as error:
            if not LOST.search(str(error)):
                raise
            _flush()
            os.write(2, f"{_first_line(error)}\n{sentence}\n".encode())
            os._exit(1)


def shutdown(status: int) -> int:
    """The status to exit with; one of several processes ends here with it, once all have come to leave.

    If they do not within `heartbeat_seconds`, it ends all the same, and the others as `exit_on_lost_process` has it.

    It ends without what the interpreter would wait for: the threads of a save that nobody finishes, and devices that
    still are at a collective with others that are gone. A result is read from one device as soon as that has it; the
    other devices may not have begun.
    """
    if jax.distributed.is_initialized():
        _flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # all is said; the runtime would add pages
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
    """Wait until all processes have come to this point, as long as they live.

    A collective is less patient: on CPUs the first one among the same devices waits for 30 s.

    Raises:
      ProcessFailureError: one of them does not live any more.
    """
    if jax.process_count() > 1:
        with multihost_utils.live_devices(jax.devices()) as alive:
            pass
        if lost := set(jax.devices()) - set(alive):
            raise multihost_utils.ProcessFailureError(lost)


def count_processes(environment: Mapping[str, str]) -> int:
    """How many processes SLURM, Open MPI or, on TPUs, Kubernetes started with this one; 1 without any of them."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    hosts = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES", ""))
    slices = environment.get("MEGASCALE_NUM_SLICES", "")
    return len(hosts.split(",")) * (int(slices) if slices.isdecimal() else 1)


def is_main_process() -> bool:
    """Whether this process is the one that writes logs."""
    return jax.process_index() == 0


def broadcast(text: str) -> str:
    """The text that process 0 gives, for all of them."""
    return all_gather(text)[0]


def all_gather(text: str) -> list[str]:
    """The texts that all processes give, of at most `LONGEST_TEXT` bytes, for all of them."""
    if jax.process_count() == 1:
        return [text]
    coded = np.zeros(LONGEST_TEXT, np.uint8)
    told = np.frombuffer(text.encode(), np.uint8)
    coded[: len(told)] = told
    barrier()
    return [bytes(each).rstrip(b"\0").decode() for each in multihost_utils.process_allgather(coded)]


class AsyncMax:
    """The largest of a small number that each process gives, without waiting for it.

    A signal reaches one process, but all must stop after the same step.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        whole = NamedSharding(mesh, PartitionSpec())
        self._largest = jax.jit(lambda numbers: numbers.max(), out_shardings=whole)
        self._alone, self._n = jax.process_count() == 1, mesh.size

    def ask(self, number: int) -> jax.Array | int:
        """What `int` will give once all have said theirs."""
        if self._alone:
            return number
        mine = lambda index: np.full(len(range(self._n)[index[0]]), number, np.int32)  # noqa: E731
        return self._largest(jax.make_array_from_callback((self._n,), self._everywhere, mine))
