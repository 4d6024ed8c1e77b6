"""Cost plan of a training step, compiled for given devices, which need not be present."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.ops.kernels import MAX_DOCUMENTS
from jaxformer.parallel.memory import gpu_pool_share, memory_capacity, memory_needed
from jaxformer.plan.costs import Part, cache_bytes, cached_tokens, count_parts, describe_parts, examples_per_microbatch
from jaxformer.plan.hlo import Collective, parse
from jaxformer.plan.meshes import minimal_bytes_sent
from jaxformer.plan.roofline import CHIPS, Chip, Estimate, matmul_flops, model_flops, without_dead_code
from jaxformer.plan.schedule import exposed_seconds
from jaxformer.plan.traffic import minimal_traffic, traffic_by_category
from jaxformer.runs.run import count_parameters
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_train_step

FREE_SHARE = 0.1
"""Fraction of memory left free for the runtime, fragmentation and other programs."""

MIN_SHARE = 0.005
"""Minimum fraction of the memory traffic of a category that `describe` lists."""

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Plan:
    """Cost of a training step. Bytes and FLOPs are per device and step."""

    device: str
    """JAX's name of the devices."""
    attention: str
    """Log line about the attention implementation."""
    n_parameters: int
    """Parameters of the whole model."""
    shape: tuple[int, ...]
    """Shape of a batch's targets: examples, or examples and tokens."""
    memory: float
    """Bytes of memory that the step needs."""
    capacity: float | None
    """Bytes of memory available to the runtime on the device; None if unknown."""
    model_flops: float
    """FLOPs of the model itself, see `roofline.ModelFlops`."""
    minimal_bytes_sent: float | None
    """Minimum bytes sent that the sharding requires, see `meshes.minimal_bytes_sent`."""
    parts: tuple[Part, ...]
    """Parameters and FLOPs of each part of the model."""
    cache: float | None
    """Bytes of the KV cache for one sequence, see `costs.cache_bytes`; None without a cache."""
    scores: float
    """Bytes that the attention scores of one microbatch would take; fused attention does not store them."""
    flops: float = 0.0
    """FLOPs of all matmuls, including recomputation."""
    traffic: Mapping[str, float] = field(default_factory=dict)
    """Bytes read from and written to memory, by category; see `traffic.traffic_by_category`."""
    minimal_traffic: Mapping[str, float] = field(default_factory=dict)
    """Minimum of some categories, see `traffic.minimal_traffic`; empty if unknown."""
    collectives: tuple[Collective, ...] = ()
    exposed: float | None = None
    """Seconds of communication that the schedule does not hide, see `schedule.exposed_seconds`; None if unknown."""
    unknown_loops: int = 0
    """Loops with unknown trip count, which are counted once."""
    estimate: Estimate | None = None
    """Estimated time; None if the chip is not in `CHIPS`."""

    @property
    def unit(self) -> str:
        """Unit of throughput."""
        return "tokens" if len(self.shape) > 1 else "examples"

    @property
    def memory_traffic(self) -> float:
        """Bytes read from and written to memory."""
        return sum(self.traffic.values())

    @property
    def bytes_sent(self) -> float:
        """Bytes sent in all collectives."""
        return sum(c.n_bytes for c in self.collectives)

    @property
    def fits(self) -> bool:
        """True if `FREE_SHARE` of the memory stays free, or the capacity is unknown."""
        return self.capacity is None or self.memory <= (1 - FREE_SHARE) * self.capacity


def make_plan(setup: TrainSetup) -> Plan:
    """Compile the training step of a set-up, whose devices need not be present, and analyse the program.

    Raises:
      UserError: the config's attention cannot run on these devices.
    """
    batch, device, n = setup.abstract_batch, setup.mesh.devices.flat[0], setup.mesh.size
    traced = make_train_step(setup).trace(setup.abstract_state, batch, jax.ShapeDtypeStruct((), jnp.int32))
    chip = CHIPS.get(device.device_kind)
    model, host = model_flops(setup), [d for d in setup.mesh.devices.flat if d.process_index == device.process_index]
    of_model = model.total * setup.config.train.batch_size
    is_absent = device not in jax.local_devices()
    known: dict[str, Any] = {
        "device": device.device_kind,
        "attention": setup.attention.line,
        "n_parameters": count_parameters(setup.abstract_params),
        "shape": (setup.config.train.batch_size,) if batch.targets is None else batch.targets.shape,
        "capacity": absent_capacity(chip, device.platform == "gpu") if is_absent else memory_capacity(device),
        "model_flops": of_model / n,
        "minimal_bytes_sent": minimal_bytes_sent(setup),
        "parts": count_parts(setup, model),
        "cache": cache_bytes(setup),
        "scores": model.n_scores * setup.compute_dtype.itemsize * examples_per_microbatch(setup),
    }
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if (memory := memory_in_error(str(error))) is None:
            raise
        return Plan(**known, memory=memory)
    program = parse(compiled.as_text())
    # TPU links also connect hosts.
    is_gpu = device.platform == "gpu"
    host_size = len(host) if is_gpu else None
    collectives = tuple(program.collectives(n, host_size))
    has_biases = any(name.rpartition(".")[2].startswith("b_") for name in setup.parameter_axes)
    traffic, is_decoder = traffic_by_category(program, has_biases), setup.config.model.contract.has_residual_stream
    # Loops within Pallas kernels for GPUs are not counted, so take at least the model FLOPs.
    flops = max(of_model, matmul_flops(without_dead_code(traced.jaxpr), model.visible)) / n
    return Plan(
        **known,
        memory=memory_needed(compiled),
        flops=flops,
        traffic=traffic,
        minimal_traffic=minimal_traffic(setup, setup.mesh.shape) if is_decoder and not setup.config.lora.rank else {},
        collectives=collectives,
        # The TPU compiler fuses collectives with what hides them.
        exposed=exposed_seconds(program, n, chip, host_size) if chip and is_gpu and collectives else None,
        unknown_loops=program.unknown_loops,
        estimate=Estimate.of(flops, sum(traffic.values()), collectives, of_model / n, chip) if chip else None,
    )


def absent_capacity(chip: Chip | None, is_gpu: bool) -> float | None:
    """Return the bytes of memory that JAX would allocate on a device that is not present; None for an unknown chip."""
    share = gpu_pool_share() if is_gpu else 1.0
    return None if chip is None else share * chip.memory


def memory_in_error(error: str) -> float | None:
    """Return the bytes that a program needs, from the compiler's out-of-memory error; None for other errors."""
    match = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm|HLO temporaries \(([\d.]+)([KMGT])\) exceeds", error)
    if match is None:
        return None
    amount, unit = filter(None, match.groups())
    return float(amount) * UNITS[unit]


def describe(plan: Plan, setup: TrainSetup) -> list[str]:
    """Return the plan as lines of text."""
    config, mesh = setup.config, setup.mesh
    axes = ", ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1) or "one device"
    size = " x ".join(f"{n:,}" for n in plan.shape) + (f" = {prod(plan.shape):,}" if len(plan.shape) > 1 else "")
    device = mesh.devices.flat[0]
    is_absent_gpu = device.platform == "gpu" and device not in jax.local_devices()
    pool = f", {gpu_pool_share():.0%} of the GPU's" if is_absent_gpu else ""
    capacity = "of unknown memory" if plan.capacity is None else f"of {plan.capacity / 1e9:.1f} GB{pool}"
    few = f"counted for at most {MAX_DOCUMENTS} documents per row; a batch with more in a row is attended to blockwise"
    lines = [
        f"{config.name} on {mesh.size} x {plan.device}, mesh {axes}",
        f"{plan.attention}, precision: {setup.compute_dtype}",
        *([few] if config.data.has_segments and plan.attention == "attention: cudnn" else []),
        f"{plan.n_parameters:,} parameters; a step of {size} {plan.unit}",
        "per device and step:",
        f"  memory needed      {plan.memory / 1e9:.2f} GB {capacity}",
        f"  model FLOPs        {plan.model_flops / 1e12:,.3g} T",
    ]
    if plan.flops:
        lines.append(f"  computed FLOPs     {plan.flops / 1e12:,.3g} T (with recomputation)")
        least = f", minimum {sum(plan.minimal_traffic.values()) / 1e9:,.3g}" if plan.minimal_traffic else ""
        lines.append(f"  memory traffic     {plan.memory_traffic / 1e9:,.3g} GB (estimate){least}")
        for category, n_bytes in plan.traffic.items():
            if n_bytes > MIN_SHARE * plan.memory_traffic:
                needed = plan.minimal_traffic.get(category, 0)
                least = f", minimum {needed / 1e9:,.3g}" if needed else ""
                lines.append(f"    {category:<16} {n_bytes / 1e9:,.3g} GB{least}")
        for c in plan.collectives:
            hosts = f", between hosts, by {c.per_host} GPU(s) of each" if c.per_host else ""
            lines.append(f"  {c.kind:<18} {c.n_bytes / 1e9:,.3g} GB sent in {c.times:,}{hosts}")
        if minimum := plan.minimal_bytes_sent:
            more = f"{minimum / 1e9:,.3g} GB, {plan.bytes_sent / minimum:.2f} times as much"
            lines.append(f"  sent in all        {plan.bytes_sent / 1e9:,.3g} GB; minimum {more}")
        if plan.unknown_loops:
            lines.append(f"  {plan.unknown_loops} loop(s) of unknown length are counted as if they ran once")
    lines += describe_parts(plan.parts)
    if plan.cache:
        contract = setup.config.model.contract
        n_tokens, window = cached_tokens(contract), contract.attention_window
        text = f"{n_tokens:,} {'or more ' if contract.extrapolates and n_tokens == window else ''}tokens"
        lines.append(f"KV cache: {plan.cache / 1e9:,.3g} GB per text of {text}, in {setup.compute_dtype}")
    if plan.scores:
        lines.append(f"attention scores: {plan.scores / 1e9:,.3g} GB per device, if they were stored for all layers")
    if e := plan.estimate:
        lines += [
            f"estimate from published peak rates ({e.chip.source}):",
            f"  compute {e.compute:.3g} s, memory {e.memory:.3g} s, network {e.network:.3g} s per step",
            *([] if plan.exposed is None else [f"  the schedule leaves {plan.exposed:.3g} s of the network exposed"]),
            f"  step time {e.seconds:.3g} s, bound by {e.bound}; "
            f"{prod(plan.shape) / e.seconds:,.0f} {plan.unit} per second",
            f"  MFU {e.mfu:.2f} if these overlap, {e.mfu_without_overlap:.2f} if not",
        ]
    elif plan.flops:
        lines.append(f"no time estimate: the peak rates of {plan.device} are not known")
    if is_absent_gpu:
        lines.append("not included without a GPU: cuDNN's attention workspace and autotuned matmuls")
    if plan.capacity is not None:
        lines.append(
            f"fits: {1 - plan.memory / plan.capacity:.0%} of the memory stays free"
            if plan.fits
            else f"does not fit: it needs {plan.memory / 1e9:.2f} of {plan.capacity / 1e9:.1f} GB, and "
            f"{FREE_SHARE:.0%} should stay free; try {memory_hints(plan, setup)}"
        )
    return lines


def memory_hints(plan: Plan, setup: TrainSetup) -> str:
    """Return changes of the config that save memory, cheapest first."""
    c, shape, options, examples = setup.config.compute, setup.mesh.shape, [], examples_per_microbatch(setup)
    if c.remat != "block":
        options.append("`compute.remat='block'`")
    if not c.scan_blocks and getattr(setup.config.model, "n_blocks", 1) > 2:
        options.append("`compute.scan_blocks=True`")
    if examples > 1 and examples % 2 == 0:
        options.append(f"`compute.grad_accumulation_steps={_accumulation_that_fits(plan, setup)}`")
    elif examples > 1:
        options.append("a smaller `train.batch_size`")
    if shape["data"] > 1:
        options.append(f"`mesh='fsdp={shape['data'] * shape['fsdp']}'`")
    return " or ".join(", ".join([*options, "more devices"]).rsplit(", ", 1))


def _accumulation_that_fits(plan: Plan, setup: TrainSetup) -> int:
    """Return the gradient accumulation steps times the smallest power of 2 that is estimated to fit; times 2 if none
    is.

    Parameters, their gradients and the optimizer state keep their size; all else shrinks with the microbatch.
    """
    state = setup.abstract_state
    fixed = sum(
        prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves((state, state.params))
    )
    times, examples = 2, examples_per_microbatch(setup)
    limit = (1 - FREE_SHARE) * (plan.capacity or 0)
    while fixed + (plan.memory - fixed) / times > limit and examples % (2 * times) == 0:
        times *= 2
    fits = fixed + (plan.memory - fixed) / times <= limit
    return (times if fits else 2) * setup.config.compute.grad_accumulation_steps
