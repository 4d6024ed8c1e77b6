"""`python -m jaxformer plan`: what a training step needs on devices that one need not have."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import TYPE_CHECKING, Annotated

from jaxformer.cli import machine
from jaxformer.cli.arguments import load_config, parse, peek, run_command
from jaxformer.cli.options import MERGED
from jaxformer.cli.train import DEFAULT_CONFIG
from jaxformer.config import Config
from jaxformer.errors import UserError
from jaxformer.sharding import parse_mesh
from jaxformer.terminal import echo

if TYPE_CHECKING:
    import jax

PROGRAM = "python -m jaxformer plan"
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
SLICES = {"v4": CUBES, "v5e": FLAT, "v5p": (*CUBES, "16x16x24"), "v6e": FLAT}
"""The usual ones of each generation; the compiler knows more."""
FOR_THE_COMPILER = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # asks no metadata server what this machine is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it only compiles, and may do so beside another
}


@dataclass(frozen=True)
class Arguments:
    """Options of plan: these, and every field of the config."""

    fields: Annotated[Config, MERGED]
    config: str = DEFAULT_CONFIG
    """FILE.py or FILE.py:NAME, the config to start from."""
    topology: str | None = None
    """TPUs to compile for, such as v5e:16x16 or v5p:8x8x8; without it, the devices of this machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan; the exit status: 0 it fits, 1 it does not, 2 wrong input."""
    return run_command(_main, arguments)


def _main(arguments: list[str]) -> int:
    asked = _parse(arguments)
    if asked.topology is None:
        machine.set_up(asked.fields.train.batch_size // asked.fields.compute.grad_accumulation_steps, asked.fields.mesh)
        import jax

        return _plan(asked.fields, jax.devices())
    check_topology(asked.topology, asked.fields.mesh)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("--topology needs the TPU compiler, which is not installed; pip install 'jaxformer[plan]'.")
    # In a process of its own: this one may have found other devices already, and the compiler talks a lot.
    command = [sys.executable, "-m", "jaxformer.cli.plan", *arguments]
    done = subprocess.run(command, env={**os.environ, **FOR_THE_COMPILER}, stderr=subprocess.PIPE, text=True)
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode not in (0, 1, 2, 130) or any(line.startswith("Traceback") for line in said):
        telling = [line for line in said if "Error: " in line] or said or ["nothing"]
        wrong = (
            "; take the version that goes with jax: pip install 'jaxformer[plan]'" if "INTERNAL" in telling[-1] else ""
        )
        raise UserError(f"the TPU compiler failed (status {done.returncode}): {telling[-1].rstrip('.')}{wrong}.")
    for line in said:
        if line.startswith("error: "):
            echo(line, sys.stderr)
    return done.returncode


def _parse(arguments: list[str]) -> Arguments:
    known, _ = peek(arguments, {"--config": {"nargs": "?"}})
    spec = known.config or DEFAULT_CONFIG
    return parse(arguments, Arguments(load_config(spec), spec), PROGRAM, "Plan a training step.")


def check_topology(topology: str, mesh: str) -> None:
    """Refuse what is no topology, and a mesh that is not made of its chips.

    Raises:
      UserError: either of these.
    """
    generation, _, shape = topology.partition(":")
    known = [f"{name}:{slice_}" for name, slices in SLICES.items() for slice_ in slices]
    if generation not in SLICES or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        near = get_close_matches(topology, known, 3, 0) if generation not in SLICES else _near(generation, shape)
        raise UserError(f"there is no topology {topology!r}; near it are {', '.join(near)}.")
    n, axes = prod(map(int, shape.split("x"))), parse_mesh(mesh)
    fixed = prod(size for axis, size in axes.items() if axis != "data")
    if n != fixed * axes.get("data", max(1, n // fixed)):
        raise UserError(
            f"the mesh {mesh} is of {prod(axes.values())} devices, but {topology} has {n} chips; change --mesh."
        )


def _near(generation: str, shape: str) -> list[str]:
    """The slices of one generation whose number of chips is next to a shape's."""
    wanted = prod(max(1, int(size)) for size in re.findall(r"\d+", shape)[:3])
    slices = sorted(SLICES[generation], key=lambda s: abs(prod(map(int, s.split("x"))) - wanted))
    return [f"{generation}:{slice_}" for slice_ in slices[:3]]


def _in_process(arguments: list[str]) -> int:
    """What the process of the compiler does."""
    from jax.experimental import topologies

    asked = _parse(arguments)
    topology = str(asked.topology)
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # as it was refused: jax wraps what libtpu says in several types
        near = _near(*topology.split(":"))
        raise UserError(f"the TPU compiler knows no topology {topology!r}; near it are {', '.join(near)}.") from error
    return _plan(asked.fields, devices)


def _plan(config: Config, devices: Sequence[jax.Device]) -> int:
    from jaxformer.plan.plan import describe, make_plan
    from jaxformer.sharding import make_mesh
    from jaxformer.train.setup import TrainSetup

    setup = TrainSetup(config, make_mesh(config.mesh, devices))
    plan = make_plan(setup)
    echo("\n".join(describe(plan, setup)))
    return 0 if plan.fits else 1


if __name__ == "__main__":
    sys.exit(run_command(_in_process))
