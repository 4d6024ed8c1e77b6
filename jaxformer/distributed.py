"""Several processes that train one model: `jax.distributed` and what they must agree on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.errors import UserError

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
        given = [self.coordinator, self.processes, self.process]
        if any(x is not None for x in given) and any(x is None for x in given):
            raise UserError("distributed.coordinator, distributed.processes and distributed.process go together.")
        if self.heartbeat_seconds < 1:
            raise UserError(f"distributed.heartbeat_seconds is {self.heartbeat_seconds}; it must be at least 1.")
        if self.processes is not None and self.process is not None and not 0 <= self.process < self.processes:
            raise UserError(
                f"distributed.process is {self.process}; of {self.processes} processes it must be at least 0 and "
                f"below {self.processes}."
            )


def connect(options: DistributedOptions, environment: Mapping[str, str] = os.environ) -> None:
    """Join the other processes, if there are any; to be called before the first array is made.

    Raises:
      UserError: they cannot be reached.
    """
    if options.coordinator is None and processes_around(environment) == 1:
        return
    try:
        jax.distributed.initialize(
            options.coordinator, options.processes, options.process,
            heartbeat_timeout_seconds=options.heartbeat_seconds,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"the processes do not find each other at {options.coordinator}: {reason}") from error


def processes_around(environment: Mapping[str, str]) -> int:
    """How many processes SLURM, Open MPI or a TPU pod started together with this one; 1 without any of them."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return len(environment.get("TPU_WORKER_HOSTNAMES", "").split(","))


def is_first() -> bool:
    """Whether this process is the one that writes logs."""
    return jax.process_index() == 0


def from_first(text: str) -> str:
    """The text that process 0 gives, for all of them."""
    if jax.process_count() == 1:
        return text
    coded = np.zeros(LONGEST_TEXT, np.uint8)
    told = np.frombuffer(text.encode(), np.uint8)
    coded[: len(told)] = told
    return bytes(multihost_utils.broadcast_one_to_all(coded)).rstrip(b"\0").decode()


class Agreement:
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
