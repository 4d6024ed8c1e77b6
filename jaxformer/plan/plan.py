"""What a training step would need on given devices: it is compiled for them, and not run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.config import Config
from jaxformer.memory import memory_capacity, memory_needed
from jaxformer.plan.hlo import Collective, parse
from jaxformer.plan.roofline import (
    CHIPS,
    Estimate,
    bytes_on_paper,
    estimate,
    model_operations,
    product_operations,
    used,
)
from jaxformer.runs import count_parameters
from jaxformer.sharding import batch_shards
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_train_step

FREE = 0.1
"""Share of the memory that a plan leaves to the runtime, to fragments and to what else is on the device."""

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Plan:
    """A step's needs. Bytes and operations are those of one device and one step.

    Attributes:
      device: what the devices are called.
      attention: what computes it.
      parameters: of the whole model.
      shape: of the targets of a batch: examples, or these and the tokens of each.
      needs, has: bytes of memory; `has` is None where it is not known.
      model_operations: what the model needs, see `roofline.model_operations`.
      on_paper: bytes that must be sent, see `roofline.bytes_on_paper`.
      operations: all that are computed, in products of matrices.
      traffic: bytes to and from memory.
      collectives: what is sent, by kind.
      unknown_loops: loops that had to be counted once.
      estimate: of the time; None where the chip's rates are not known.
    """

    device: str
    attention: str
    parameters: int
    shape: tuple[int, ...]
    needs: float
    has: float | None
    model_operations: float
    on_paper: float | None
    operations: float = 0.0
    traffic: float = 0.0
    collectives: tuple[Collective, ...] = ()
    unknown_loops: int = 0
    estimate: Estimate | None = None

    @property
    def unit(self) -> str:
        """What a batch is counted in."""
        return "tokens" if len(self.shape) > 1 else "examples"

    @property
    def sent(self) -> float:
        """Bytes in all collectives."""
        return sum(c.n_bytes for c in self.collectives)

    @property
    def fits(self) -> bool:
        """With `FREE` to spare."""
        return self.has is None or self.needs <= (1 - FREE) * self.has


def make_plan(setup: TrainSetup) -> Plan:
    """Compile the step for the devices of a mesh, which may be elsewhere, and read what it does.

    Raises:
      UserError: the batch does not split evenly, or attention cannot be what is asked for.
    """
    config, mesh, state, batch = setup.config, setup.mesh, setup.abstract_state, setup.abstract_batch
    device, n = mesh.devices.flat[0], mesh.size
    traced = make_train_step(setup).trace(state, batch, jax.ShapeDtypeStruct((), jnp.int32))
    chip = CHIPS.get(device.device_kind)
    has = memory_capacity(device) if device in jax.local_devices() else chip and chip.memory
    model, visible = model_operations(config)
    known: dict[str, Any] = {
        "device": device.device_kind,
        "attention": setup.attention_line,
        "parameters": count_parameters(state.params),
        "shape": (config.train.batch_size,) if batch.targets is None else batch.targets.shape,
        "has": has,
        "model_operations": model / n,
        "on_paper": bytes_on_paper(setup),
    }
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if (needs := asked_for(str(error))) is None:
            raise
        return Plan(**known, needs=needs)
    program = parse(compiled.as_text())
    collectives = tuple(program.collectives(n))
    # Kernels of a GPU's library are no part of the program that was traced.
    operations = max(model, product_operations(used(traced.jaxpr), visible)) / n
    traffic = program.memory_traffic()
    sent = sum(c.n_bytes for c in collectives)
    return Plan(
        **known, needs=memory_needed(compiled), operations=operations, traffic=traffic, collectives=collectives,
        unknown_loops=program.unknown_loops,
        estimate=estimate(operations, traffic, sent, model / n, chip) if chip else None,
    )  # fmt: skip


def asked_for(error: str) -> float | None:
    """The bytes that a program needs, from the compiler's complaint that there are too few of them."""
    used = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm|HLO temporaries \(([\d.]+)([KMGT])\) exceeds", error)
    if used is None:
        return None
    amount, unit = filter(None, used.groups())
    return float(amount) * UNITS[unit]


def describe(plan: Plan, setup: TrainSetup) -> list[str]:
    """The plan in lines for people."""
    config, mesh = setup.config, setup.mesh
    axes = ", ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1) or "one device"
    size = " x ".join(f"{n:,}" for n in plan.shape) + (f" = {prod(plan.shape):,}" if len(plan.shape) > 1 else "")
    lines = [
        f"{config.name} on {mesh.size} x {plan.device}, mesh {axes}",
        f"{plan.attention}, precision: {setup.compute_dtype}",
        f"{plan.parameters:,} parameters; a step of {size} {plan.unit}",
        "a device and step:",
    ]
    room = "of unknown memory" if plan.has is None else f"of {plan.has / 1e9:.1f} GB"
    lines.append(f"  memory needed      {plan.needs / 1e9:.2f} GB {room}")
    lines.append(f"  model operations   {plan.model_operations / 1e12:,.3g} T")
    if plan.operations:
        lines.append(f"  computed           {plan.operations / 1e12:,.3g} T (with what is computed again)")
        lines.append(f"  memory traffic     {plan.traffic / 1e9:,.3g} GB (estimate)")
        for c in plan.collectives:
            lines.append(f"  {c.kind:<18} {c.n_bytes / 1e9:,.3g} GB sent in {c.times:,}")
        if plan.on_paper:
            more = f"{plan.on_paper / 1e9:,.3g} GB, {plan.sent / plan.on_paper:.2f} times as much"
            lines.append(f"  sent in all        {plan.sent / 1e9:,.3g} GB; on paper {more}")
        if plan.unknown_loops:
            lines.append(f"  {plan.unknown_loops} loop(s) of unknown length are counted as if they ran once")
    if e := plan.estimate:
        lines += [
            f"estimate, from published rates ({e.chip.source}):",
            f"  compute {e.compute:.3g} s, memory {e.memory:.3g} s, network {e.network:.3g} s a step",
            f"  step time {e.seconds:.3g} s, bound by {e.bound}; "
            f"{prod(plan.shape) / e.seconds:,.0f} {plan.unit} a second",
            f"  utilisation {e.utilisation:.2f} if these overlap, {e.utilisation_in_turn:.2f} if they come in turn",
        ]
    elif plan.operations:
        lines.append(f"no estimate of the time: the rates of {plan.device} are not known")
    if plan.has is None:
        return lines
    if plan.fits:
        return [*lines, f"fits: {1 - plan.needs / plan.has:.0%} of the memory stays free"]
    return [
        *lines,
        f"does not fit: it needs {plan.needs / 1e9:.2f} of {plan.has / 1e9:.1f} GB, and {FREE:.0%} should stay free; "
        f"{advice(config, mesh)}",
    ]


def advice(config: Config, mesh: Mesh) -> str:
    """What to change where memory is short, least loss first."""
    c, ways = config.compute, []
    rows = config.train.batch_size // batch_shards(mesh) // c.grad_accumulation_steps
    if c.remat != "block":
        ways.append("--compute.remat block")
    if not c.scan_blocks and getattr(config.model, "n_blocks", 1) > 2:
        ways.append("--compute.scan-blocks")
    if rows > 1:
        ways.append(
            f"--compute.grad-accumulation-steps {2 * c.grad_accumulation_steps}"
            if rows % 2 == 0
            else "a smaller --train.batch-size"
        )
    if mesh.shape["data"] > 1:
        ways.append(f"--mesh fsdp={mesh.shape['data'] * mesh.shape['fsdp']}")
    ways.append("more devices")
    return "try " + " or ".join(", ".join(ways).rsplit(", ", 1))
