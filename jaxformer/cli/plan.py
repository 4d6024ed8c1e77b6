"""`python -m jaxformer plan`: estimate the cost of a training step on devices that need not be present."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from jaxformer.cli import machine
from jaxformer.cli.arguments import DEFAULT_CONFIG
from jaxformer.cli.command import as_command, command
from jaxformer.cli.options import MERGED, CommandLine, with_flags
from jaxformer.cli.train import named_config
from jaxformer.config import Config
from jaxformer.errors import UserError
from jaxformer.parallel.determinism import set_deterministic
from jaxformer.terminal import echo

if TYPE_CHECKING:
    import jax

AUTO = "auto"
"""Value of --mesh for a ranking of all meshes."""
N_COMPILED = 3
"""Number of meshes of a ranking that are compiled."""

COMPILER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no query to a metadata server
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compilation uses no device, and may run beside another process
}

FAILURE = re.compile(r"Traceback|F\d{4} ")
"""Pattern of the start of a Python traceback, and of a fatal error in the compiler's log."""
ERROR = re.compile(r"Error: |^F\d{4} ")
"""Pattern of a line that states the error."""


@dataclass(frozen=True)
class Arguments:
    """Options of plan: these, and every field of the config."""

    run_config: Annotated[Config, MERGED]
    config: str = DEFAULT_CONFIG
    """Config to start from: quick, quick:modern, or FILE.py:NAME for your own file."""
    topology: str | None = None
    """Devices to compile for: TPUs, such as v5e:16x16 or v5p:8x8x8, or NVIDIA GPUs, such as h100:8 or, for four hosts
    of eight, h200:4x8; by default the local devices. With --mesh auto, their meshes are ranked, and three compiled."""


@as_command()
def main(line: CommandLine) -> int:
    """Plan; return the exit status: 0 the step fits, 1 it does not, 2 wrong input."""
    options = _parse(line)
    config = options.run_config
    if config.compute.deterministic:
        set_deterministic()
    is_auto = config.mesh == AUTO
    if options.topology is None:
        mesh = "" if is_auto else config.mesh
        machine.set_up(config.train.batch_size // config.compute.grad_accumulation_steps, mesh)
        import jax

        return _plan_meshes(config) if is_auto else _plan(config, jax.devices())

    from jaxformer.plan.topology import check_topology, compiler_of, count_devices, rescale_mesh

    n = count_devices(options.topology)
    words = line.words()
    if "--mesh" not in line.given and not is_auto and (mesh := rescale_mesh(config.mesh, n)) != config.mesh:
        echo(f"the config's mesh {config.mesh} does not have {n} devices; planning for --mesh {mesh}")
        words, config = [*words, "--mesh", mesh], replace(config, mesh=mesh)
    if not is_auto:
        check_topology(options.topology, config.mesh)
    compiler = compiler_of(options.topology)
    install = f"pip install 'jaxformer[{compiler.extra}]'"
    if not compiler.is_installed and not is_auto:
        raise UserError(f"--topology needs the {compiler.kind} compiler, which is not installed; {install}.")
    # In a separate process: this one may have initialised other devices, and the compiler's log must be hidden.
    process = [sys.executable, "-m", "jaxformer.cli.plan", *words]
    result = subprocess.run(process, env={**os.environ, **COMPILER_ENVIRONMENT}, stderr=subprocess.PIPE, text=True)
    log = [text.strip() for text in result.stderr.splitlines() if text.strip()]
    if result.returncode not in (0, 1, 2, 130) or any(FAILURE.match(text) for text in log):
        error = ([text for text in log if ERROR.search(text)] or log or ["nothing"])[-1].rstrip(".")
        remedy = f"; install the version that matches jax: {install}" if "INTERNAL" in error else ""
        raise UserError(f"the {compiler.kind} compiler failed (status {result.returncode}): {error}{remedy}.")
    for text in log:
        if text.startswith("error: "):
            echo(text, sys.stderr)
    return result.returncode


def _parse(line: CommandLine) -> Arguments:
    return line.parse(Arguments(*named_config(line)), command("plan"), "Plan a training step.")


@as_command()
def _plan_topology(line: CommandLine) -> int:
    """Plan for a topology, in the compiler's process."""
    from jaxformer.plan.topology import topology_devices

    options = _parse(line)
    if options.run_config.mesh == AUTO:
        return _plan_meshes(options.run_config, options.topology)
    return _plan(options.run_config, topology_devices(str(options.topology)))


def _plan_meshes(config: Config, topology: str | None = None) -> int:
    """Rank the meshes of a topology, or of the local devices, and plan the best where the compiler is installed."""
    import jax

    from jaxformer.parallel.memory import memory_capacity
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.plan import make_plan
    from jaxformer.plan.meshes import MeshCost, describe_meshes, on_one_device, rank_meshes
    from jaxformer.plan.plan import FREE_SHARE, absent_capacity
    from jaxformer.plan.roofline import CHIPS
    from jaxformer.plan.topology import GPU, compiler_of, count_devices, device_kind, host_size, topology_devices
    from jaxformer.train.setup import TrainSetup

    first = jax.devices()[0]
    kind = device_kind(topology) if topology else first.device_kind
    if (chip := CHIPS.get(kind)) is None:
        problem = f"--mesh auto needs the peak rates of the devices, and those of {kind} are not known"
        raise UserError(f"{problem}; name others by --topology, such as h100:8.")
    if topology:
        n, per_host = count_devices(topology), host_size(topology)
        capacity = absent_capacity(chip, compiler_of(topology) is GPU)
    else:
        n, per_host = jax.device_count(), jax.local_device_count() if first.platform == "gpu" else None
        capacity = memory_capacity(first)
    assert capacity is not None, kind
    ranked = rank_meshes(on_one_device(config), n, chip, (1 - FREE_SHARE) * capacity, per_host)
    counted = "compute and communication (with tensor and fsdp, a lower bound)"
    echo(f"{config.name} on {n} x {kind}: meshes by counted {counted}, best first")
    echo("\n".join(describe_meshes(ranked)))
    if topology and not (compiler := compiler_of(topology)).is_installed:
        echo(f"not compiled: pip install 'jaxformer[{compiler.extra}]' provides the {compiler.kind} compiler")
        return 0 if ranked[0].fits else 1
    compiled, devices = [], topology_devices(topology) if topology else jax.devices()
    for cost in ranked[:N_COMPILED]:
        plan = make_plan(TrainSetup(replace(config, mesh=cost.mesh), make_mesh(cost.mesh, devices)))
        estimate = plan.estimate or cost.estimate
        compiled.append(MeshCost(cost.mesh, plan.memory, plan.fits, plan.bytes_sent, estimate, plan.exposed))
    compiled.sort(key=lambda cost: cost.order)
    echo("compiled:")
    echo("\n".join(describe_meshes(compiled)))
    echo(f"--mesh {compiled[0].mesh} plans the first in full")
    return 0 if compiled[0].fits else 1


def _plan(config: Config, devices: Sequence[jax.Device]) -> int:
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.plan import describe, make_plan
    from jaxformer.train.setup import TrainSetup

    setup = TrainSetup(config, make_mesh(config.mesh, devices))
    plan = make_plan(setup)
    echo(with_flags("\n".join(describe(plan, setup))))
    return 0 if plan.fits else 1


if __name__ == "__main__":
    sys.exit(_plan_topology())
