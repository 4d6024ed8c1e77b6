"""How long a step must take, from what it does and what a chip is said to do in a second. Estimates, all of it.

A step computes F operations, moves M bytes through memory and sends C bytes to other devices, each per device. On a
chip that does f operations a second, with a memory of m bytes a second and links that send c bytes a second along one
ring, it takes at least `max(F / f, M / m, C / c)`: that is what is reached if all three overlap, and `F/f + M/m + C/c`
if none do. Utilisation is what the model itself needs (see `model_operations`) over `f` times that time; what is
computed again for the backward pass takes time and does not count as use (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxformer.config import Config
from jaxformer.nn.execution import Execution
from jaxformer.ops.kernels import BLOCK
from jaxformer.ops.masks import Causal, Mask
from jaxformer.runs import abstract_params
from jaxformer.train.setup import BLOCK as BLOCK_NAME
from jaxformer.train.setup import TrainSetup


@dataclass(frozen=True)
class Chip:
    """Published figures of one accelerator.

    Attributes:
      operations: bfloat16 operations a second, without sparsity.
      memory: bytes.
      bandwidth: bytes a second to and from that memory.
      link: bytes a second that it can send along one ring of devices: of a torus of two dimensions, half of what all
        links send, as a ring lies along one.
      source: where these are published.
    """

    operations: float
    memory: float
    bandwidth: float
    link: float
    source: str


TPUS = "cloud.google.com/tpu/docs/"
BOOK = "Austin et al. 2025, How to Scale Your Model"

CHIPS = {
    "TPU v4": Chip(
        operations=275e12, memory=32 * 2**30, bandwidth=1200e9,  # TPUS/v4: bf16, and HBM2 of 32 GiB at 1200 GBps
        link=2 * 45e9,  # BOOK, part 2: one-way 4.5e10 a link; six of them are the 1.1 PB/s of 4096 chips in TPUS/v4
        source=f"{TPUS}v4; links: {BOOK}",
    ),
    "TPU v5 lite": Chip(
        operations=197e12, memory=16e9, bandwidth=819e9,  # TPUS/v5e: bf16, and HBM2 of 16 GB at 819 GBps
        link=400e9 / 2 / 2,  # TPUS/v5e: 400 GBps a chip, both directions, in a torus of 2 dimensions
        source=f"{TPUS}v5e",
    ),
    "TPU v5": Chip(
        operations=459e12, memory=95 * 2**30, bandwidth=2765e9,  # TPUS/v5p: BF16, and HBM of 95 GiB at 2765 GBps
        link=1200e9 / 2 / 3,  # TPUS/v5p: 1200 GBps a chip, both directions, in a torus of 3 dimensions
        source=f"{TPUS}v5p",
    ),
    "TPU v6 lite": Chip(
        operations=918e12, memory=32e9, bandwidth=1600e9,  # TPUS/v6e: bf16, and HBM of 32 GB at 1600 GBps
        link=3200e9 / 8 / 2,  # TPUS/v6e: 3200 Gbps a chip, in a torus of 2 dimensions
        source=f"{TPUS}v6e",
    ),
    # NVIDIA's BF16 figures with sparsity are twice these, and its NVLink figures count both directions. Operations,
    # memory and NVLink are also in BOOK, part 12, rounded to two digits: 3.1e14, 9.9e14; 80, 141 GB; 300, 450 GB/s.
    "NVIDIA A100-SXM4-80GB": Chip(
        operations=312e12, memory=80e9, bandwidth=2039e9, link=600e9 / 2, source="NVIDIA A100 data sheet, SXM"
    ),
    "NVIDIA H100 80GB HBM3": Chip(
        operations=989e12, memory=80e9, bandwidth=3350e9, link=900e9 / 2, source="NVIDIA H100 data sheet, SXM"
    ),
    "NVIDIA H200": Chip(
        operations=989e12, memory=141e9, bandwidth=4800e9, link=900e9 / 2, source="NVIDIA H200 data sheet, SXM"
    ),
}  # fmt: skip
"""By what JAX calls the device."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, by what takes them, and the share of the chip's operations that the model uses."""

    compute: float
    memory: float
    network: float
    model_operations: float
    chip: Chip

    @property
    def seconds(self) -> float:
        """Of a step in which the three overlap."""
        return max(self.compute, self.memory, self.network)

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))

    @property
    def utilisation(self) -> float:
        """If the three overlap."""
        return self.model_operations / self.chip.operations / self.seconds

    @property
    def utilisation_in_turn(self) -> float:
        """If they come one after the other."""
        return self.model_operations / self.chip.operations / (self.compute + self.memory + self.network)


def estimate(operations: float, traffic: float, sent: float, model_operations: float, chip: Chip) -> Estimate:
    """From what one device does in a step: operations, bytes to and from memory, bytes sent."""
    return Estimate(
        operations / chip.operations, traffic / chip.bandwidth, sent / chip.link, model_operations, chip
    )  # fmt: skip


def product_operations(jaxpr: Any, visible: float = 1.0) -> float:
    """Additions and multiplications in all matrix products of a jaxpr, over all devices, loops multiplied out.

    Args:
      jaxpr: with or without its constants.
      visible: the share of its blocks that an attention kernel computes.
    """
    total = 0.0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, p = eqn.primitive.name, eqn.params
        if name == "dot_general":
            (contracted, _), _ = p["dimension_numbers"]
            K = prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * K * prod(eqn.outvars[0].aval.shape)
            continue
        inner = [product_operations(j, visible) for j in _jaxprs(p)]
        if name == "cond":
            total += max(inner)
        elif name == "scan":
            total += p["length"] * sum(inner)
        elif name == "shard_map":
            axes = next(value for key, value in p.items() if key.endswith("manual_axes"))  # jax 0.10: newly_manual_axes
            total += prod(p["mesh"].shape[axis] for axis in axes) * sum(inner)
        elif name == "pallas_call":
            total += visible * prod(p["grid_mapping"].grid) * sum(inner)
        else:
            total += sum(inner)
    return total


def used(jaxpr: Any) -> Any:
    """A closed jaxpr without what nothing depends on, such as the second run of a kernel whose result was stored."""
    return dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))[0]


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield item


def visible_pairs(mask: Mask, T: int, S: int, block: int = 1) -> int:
    """How many of T·S pairs of query and key are in blocks of which a mask shows anything."""
    if not isinstance(mask, Causal):
        return T * S
    first = np.arange(0, T, block)
    nearest = np.minimum(first + block, S) - 1
    furthest = np.maximum(0, first - (mask.window or T) + 1)
    return int((nearest // block - furthest // block + 1).sum()) * block * block


def model_operations(config: Config) -> tuple[float, float]:
    """What a model needs for a step: products with weights, and attention over the pairs that the mask shows.

    Three times the forward pass, as the backward pass multiplies twice for each product. The second number is the
    share of blocks that an attention kernel computes.
    """
    seen: list[tuple[Any, Any, Mask]] = []

    def attend(q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, mask: Mask, scale: float) -> jax.Array:
        seen.append((q_HTK, k_GSK, mask))
        return q_HTK

    described, rngs = config.model, {}
    if getattr(described, "n_experts", None) is not None:
        # As in training, experts have so much room; what is needed is as much as there are tokens for them.
        described, rngs = replace(described, capacity_factor=1.0), {"dropout": jax.random.key(0)}  # type: ignore[call-arg]
    model = described.build(Execution(attention=attend))
    params = abstract_params(config.model.build(), config.model)
    jaxpr = jax.make_jaxpr(lambda params, *example: model.apply({"params": params}, *example, rngs=rngs))(
        params, *config.model.example()
    )
    forward, visible = product_operations(jaxpr), 1.0
    for q_HTK, k_GSK, mask in seen:
        (H, T, K), S = q_HTK.shape, k_GSK.shape[1]
        forward += 4 * H * K * visible_pairs(mask, T, S)
        visible = min(1.0, visible_pairs(mask, T, S, BLOCK) / (T * S)) if BLOCK < T else 1.0
    return 3 * forward * config.train.batch_size, visible


def bytes_on_paper(setup: TrainSetup) -> float | None:
    """What a device must send in a step, as the sharding has it; None where an axis `tensor` or `expert` sends
    activations too.

    Of n devices on `fsdp`, a parameter of S bytes (in the type that is computed in) that lies in shards is gathered at
    (n - 1)/n · S, with recomputed blocks once more in the backward pass, and its gradient scattered at as much again.
    What lies on d devices whole, a parameter or a shard of it, has its gradient summed at 2 (d - 1)/d of its size. All
    of it again for each part of a batch that is taken in parts, except that sum.
    """
    leaves = jax.tree_util.tree_leaves_with_path(setup.abstract_state.params)
    config, mesh = setup.config, setup.mesh
    split = {axis for _, leaf in leaves for axes in leaf.sharding.spec for axis in np.atleast_1d(axes or ())}
    if any(mesh.shape[axis] > 1 for axis in ("tensor", "expert") if axis in split):
        return None
    width = setup.compute_dtype.itemsize
    n, parts = mesh.shape["fsdp"], config.compute.grad_accumulation_steps
    total = 0.0
    for path, leaf in leaves:
        sharded = "fsdp" in leaf.sharding.spec
        again = config.compute.remat != "none" and BLOCK_NAME.search(path[0].key) is not None
        if sharded:
            total += parts * (3 if again else 2) * (n - 1) / n * leaf.size * width
        d = mesh.size // (n if sharded else 1)
        total += 2 * (d - 1) / d * leaf.size // (n if sharded else 1) * 4  # summed in float32, as they are kept
    return total
