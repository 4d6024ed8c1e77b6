"""Ranking of the meshes that a number of devices allows, by counts of memory and communication that need no compiler.

The counts follow from the table of `parallel.mesh`: which axis of the mesh splits which axis of which parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh

from jaxformer.config import Config
from jaxformer.contract import ParameterAxes, Role
from jaxformer.errors import UserError
from jaxformer.parallel.mesh import AXES, BATCH, make_mesh, spec
from jaxformer.plan.hlo import Collective, bytes_sent, devices_per_host
from jaxformer.plan.roofline import Chip, Estimate, model_flops
from jaxformer.train.setup import BLOCK, TrainSetup

MAX_LISTED = 8
"""Maximum number of meshes that `describe_meshes` lists."""


@dataclass(frozen=True)
class MeshCost:
    """Cost of a step on a mesh, counted or compiled."""

    mesh: str
    memory: float
    """Bytes that a device needs; see `memory_of`."""
    fits: bool
    bytes_sent: float
    """Bytes that a device sends."""
    estimate: Estimate
    """Estimated time; counted, it has no memory traffic, which hardly depends on the mesh."""
    exposed: float | None = None
    """Seconds of communication that a compiled schedule does not hide; None if unknown."""

    @property
    def seconds(self) -> float:
        """Seconds of compute and communication one after the other; of a schedule, of its exposed communication."""
        return self.estimate.compute + (self.estimate.network if self.exposed is None else self.exposed)

    @property
    def order(self) -> tuple[bool, float, float]:
        """Sort key: meshes that fit, by `seconds`; the others, by memory."""
        return not self.fits, self.seconds if self.fits else self.memory, self.memory


def rank_meshes(setup: TrainSetup, n: int, chip: Chip, capacity: float, host_size: int | None = None) -> list[MeshCost]:
    """Return the meshes of n devices that split the batch, the heads and the experts evenly, best first; see
    `MeshCost.order`.

    Args:
      setup: a set-up on one device, such as `on_one_device`; its compute dtype is that of the step.
      capacity: bytes that a step may need per device.
      host_size: devices per host, whose links are faster than the network between hosts; None if hosts do not matter.

    Raises:
      UserError: no mesh of n devices splits the batch evenly, or adapters are trained.
    """
    config, meshes = setup.config, list(_meshes(setup, n))
    if config.lora.rank:
        raise UserError("`mesh` is 'auto', which does not count the adapters of `lora`; set `mesh`.")
    if not meshes:
        B, steps = config.train.batch_size, config.compute.grad_accumulation_steps
        also = f" in {steps} microbatches" if steps > 1 else ""
        problem = f"no mesh of {n} devices splits `train.batch_size` {B}{also}"
        raise UserError(f"{problem}; use a multiple of {n * steps}.")
    model = model_flops(setup)
    again = sum(model.by_scope.values()) / 3 if config.compute.remat == "block" else 0.0  # attention is saved
    of_model, flops = (config.train.batch_size * x / n for x in (model.total, model.total + again))
    costs = []
    for sizes in meshes:
        sent, memory = required_collectives(setup, sizes, host_size), memory_of(setup, sizes)
        name = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"
        estimate = Estimate.of(flops, 0, sent, of_model, chip)
        costs.append(MeshCost(name, memory, memory <= capacity, sum(c.n_bytes for c in sent), estimate))
    return sorted(costs, key=lambda c: c.order)


def describe_meshes(costs: Sequence[MeshCost]) -> list[str]:
    """Return a table of the best meshes as lines of text."""
    lines = [f"  {'mesh':<24} {'GB needed':>10} {'GB sent':>8} {'compute s':>10} {'network s':>10} {'in turn s':>9}"]
    for c in costs[:MAX_LISTED]:
        e, note = c.estimate, "" if c.fits else "  does not fit"
        times = f"{e.compute:>10.3g} {e.network:>10.3g} {c.seconds:>9.3g}"
        note = note if c.exposed is None else f"  {c.exposed:.3g} s of the network exposed{note}"
        lines.append(f"  {c.mesh:<24} {c.memory / 1e9:>10.1f} {c.bytes_sent / 1e9:>8.3g} {times}{note}")
    rest = costs[MAX_LISTED:]
    return lines + ([f"  and {len(rest)} others, of which {sum(c.fits for c in rest)} fit"] if rest else [])


def on_one_device(config: Config) -> TrainSetup:
    """Return a config's set-up on one local device, in the compute dtype of an accelerator."""
    compute = config.compute
    compute = replace(compute, precision="bfloat16" if compute.precision == "auto" else compute.precision)
    return TrainSetup(replace(config, mesh="", compute=compute), make_mesh("", jax.local_devices()[:1]))


def _meshes(setup: TrainSetup, n: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of the axes of the meshes of `rank_meshes`."""
    model, steps = setup.config.model, setup.config.compute.grad_accumulation_steps
    heads = 1 if (shape := model.contract.attention) is None else shape.n_heads
    n_experts = getattr(getattr(model, "experts", None), "n_experts", 1)
    divisors = [size for size in range(1, n + 1) if n % size == 0]
    for tensor in (t for t in divisors if heads % t == 0):
        for expert in (e for e in divisors if n_experts % e == 0 and n // tensor % e == 0):
            if setup.config.train.batch_size % (n // tensor * steps) == 0:
                rest = n // tensor // expert
                for fsdp in (f for f in divisors if rest % f == 0):
                    yield dict(zip(AXES, (rest // fsdp, fsdp, expert, tensor), strict=True))


def required_collectives(
    setup: TrainSetup, sizes: Mapping[str, int], host_size: int | None = None
) -> tuple[Collective, ...]:
    """Return the communication that a mesh with axes of these sizes requires per step.

    With n devices on `fsdp`, a sharded parameter of S bytes in the compute dtype takes an all-gather of (n - 1)/n · S,
    another in the backward pass of a recomputed block, and a reduce-scatter of its gradient of the same size. A
    parameter, or a shard of it, that is replicated on d devices takes an all-reduce of its gradient, 2 (d - 1)/d of its
    size. With gradient accumulation, all but the all-reduce count once per microbatch (Rajbhandari et al. 2020). What
    `tensor` splits is scattered whole, as compiled programs do, and the count of its all-gathers is a lower bound:
    compiled programs send 1.7 to 3.6 times as much, in gathers of activations too.

    On `tensor`, a matrix whose input axis is split, such as W_O, takes an all-reduce of its outputs in the forward
    pass and one in the backward pass, of the inputs of the matrices before it; with recomputed blocks, that of
    attention takes another. A vocabulary that is split takes one for the embedding and one for the logits (Shoeybi et
    al. 2019, section 3). On `expert`, each layer of experts takes two all-to-alls forward and two backward, of the
    tokens' slots (Lepikhin et al. 2020); with recomputed blocks, two more.
    """
    config, width = setup.config, setup.compute_dtype.itemsize
    steps, remat = config.compute.grad_accumulation_steps, config.compute.remat
    examples = config.train.batch_size / prod(sizes[axis] for axis in BATCH)  # of a device, in all microbatches
    tokens = examples * (shape.n_positions if (shape := config.model.contract.attention) else 1)
    parameters = split_parameters(setup, sizes)
    is_tied = not any("vocab" in axes.outputs for _, axes, _, _ in parameters)
    times: Counter[tuple[str, int]] = Counter()
    n_bytes: dict[tuple[str, int], float] = defaultdict(float)

    def send(kind: str, on: Sequence[str], S: float, n_times: int = 1) -> None:
        if (n := prod(sizes[axis] for axis in on)) > 1:
            key = kind, devices_per_host(_group(sizes, on), host_size)
            times[key] += n_times
            n_bytes[key] += n_times * bytes_sent(kind, n, S)

    for name, axes, leaf, split in parameters:
        gathered = leaf.size / (sizes["expert"] if "expert" in split else 1)
        is_recomputed = remat != "none" and BLOCK.search(name.partition(".")[0]) is not None
        if "fsdp" in split:
            send("all-gather", ["fsdp"], gathered * width, steps * (1 + is_recomputed))
            send("reduce-scatter", ["fsdp"], gathered * width, steps)
        gradient = 4 * leaf.size / prod(sizes[axis] for axis in split if axis)  # summed in float32
        send("all-reduce", [axis for axis in BATCH if axis not in split], gradient)
        rows = tokens * rows_per_token(setup, axes)
        if "vocab" in axes.names and "tensor" in split:
            send("all-reduce", ["tensor"], rows * model_width(parameters) * width, 2 if is_tied else 1)
        elif axes.role is Role.MATRIX and "embed" not in axes.inputs:
            outputs = rows * prod(leaf.shape[-len(axes.outputs) :]) * width
            if "tensor" in split:
                send("all-reduce", ["tensor"], outputs, 3 if remat == "block" and "heads" in axes.inputs else 2)
            if "expert" in split:
                send("all-to-all", ["expert"], outputs, 6 if is_recomputed else 4)
    return tuple(Collective(kind, times[kind, k], n_bytes[kind, k], k) for kind, k in sorted(times))


def minimal_bytes_sent(setup: TrainSetup) -> float | None:
    """Return the minimum bytes that a device must send per step, given the sharding; see `required_collectives`. None
    for adapters, and on a mesh axis `tensor` or `expert` that splits parameters, where it depends on the compiler."""
    if setup.config.lora.rank:
        return None
    sizes = dict(setup.mesh.shape)
    if any({"tensor", "expert"} & set(split) for *_, split in split_parameters(setup, sizes)):
        return None
    return sum(c.n_bytes for c in required_collectives(setup, sizes))


def split_parameters(
    setup: TrainSetup, sizes: Mapping[str, int]
) -> list[tuple[str, ParameterAxes, jax.ShapeDtypeStruct, tuple[str | None, ...]]]:
    """Return each parameter's dotted name, named axes, shape, and the mesh axis that splits each of its axes."""
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    named = flatten_dict(setup.abstract_params, sep=".").items()
    axes = setup.parameter_axes
    return [(name, axes[name], leaf, tuple(spec(axes[name], leaf.shape, mesh))) for name, leaf in named]


def rows_per_token(setup: TrainSetup, axes: ParameterAxes) -> float:
    """Return the rows, per token, that a parameter with these axes is multiplied with: of experts, their slots."""
    if "experts" not in axes.stack or (experts := getattr(setup.config.model, "experts", None)) is None:
        return 1
    return float(experts.per_token * experts.capacity_factor if experts.capacity_factor else experts.n_experts)


def model_width(parameters: Sequence[tuple[str, ParameterAxes, jax.ShapeDtypeStruct, Any]]) -> int:
    """Return the model's width, the size of axes named `embed`."""
    widths = (dict(zip(axes.names, leaf.shape, strict=True)).get("embed", 0) for _, axes, leaf, _ in parameters)
    return max(widths, default=0)


def _group(sizes: Mapping[str, int], on: Sequence[str]) -> list[int]:
    """Return the devices, in the order of the mesh, that communicate with the first on these axes."""
    devices = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
    return [int(i) for i in devices[tuple(slice(None) if axis in on else 0 for axis in sizes)].flat]


def memory_of(setup: TrainSetup, sizes: Mapping[str, int]) -> float:
    """Return an estimate of the bytes that a step needs per device.

    Parameters, their gradients and the optimizer's state are sharded as the parameters; casts to the compute dtype, of
    those outside blocks also the gathered whole and its gradient, come on top, and for each token of a microbatch the
    outputs of all matmuls and four more of the model's width per block. Of recomputed blocks, one counts, and of all
    the inputs and the outputs of attention. The logits, which are computed in chunks, do not count.
    """
    config, width = setup.config, setup.compute_dtype.itemsize
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(setup.abstract_state))
    n_parameters = sum(leaf.size for leaf in jax.tree.leaves(setup.abstract_params))
    per_parameter = state / n_parameters + 4 + width  # with the gradient, in float32, and the cast
    parameters = split_parameters(setup, sizes)
    D, total, of_block = model_width(parameters), 0.0, defaultdict[str, float](float)
    for name, axes, leaf, split in parameters:
        total += per_parameter * leaf.size / prod(sizes[axis] for axis in split if axis)
        top, n_outputs = name.partition(".")[0], len(axes.outputs)
        if not BLOCK.search(top):
            total += 2 * width * leaf.size / prod(sizes[axis] for axis in split if axis and axis != "fsdp")
        elif axes.inputs:
            is_split = "tensor" in split[-n_outputs:]
            outputs = prod(leaf.shape[-n_outputs:]) // (sizes["tensor"] if is_split else 1)
            of_block[top] += rows_per_token(setup, axes) * outputs
    steps = config.compute.grad_accumulation_steps
    examples = config.train.batch_size / prod(sizes[axis] for axis in BATCH) / steps
    shape, blocks = config.model.contract.attention, [size + 4 * D for size in of_block.values()]
    attended = shape.n_heads * shape.value_dim / sizes["tensor"] if shape else 0
    is_recomputed = config.compute.remat == "block"
    saved = len(blocks) * (D + attended) + max(blocks, default=0) if is_recomputed else sum(blocks)
    return total + examples * (shape.n_positions if shape else 1) * saved * width
