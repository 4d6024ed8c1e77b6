"""Roofline estimate of the step time, from a step's cost and a chip's published peak rates.

A step computes F FLOPs, moves M bytes through memory and sends C bytes to other devices, each per device. On a chip
with f FLOPs per second, memory bandwidth of m bytes per second and links that send c bytes per second along one ring,
it takes at least `max(F / f, M / m, C / c)` if all three overlap, and `F/f + M/m + C/c` if none do. Model FLOPs
utilisation (MFU) is the model's own FLOPs (see `ModelFlops`) divided by `f` times that time; recomputation takes time
but does not count as utilisation (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxformer.nn.execution import Execution
from jaxformer.ops.kernels import BLOCK
from jaxformer.ops.masks import Causal, Mask
from jaxformer.plan.hlo import Collective
from jaxformer.runs.run import abstract_params
from jaxformer.train.setup import TrainSetup


@dataclass(frozen=True)
class Chip:
    """Published figures of one accelerator."""

    flops: float
    """bfloat16 FLOPs per second, without sparsity."""
    memory: float
    """Memory capacity in bytes."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    link: float
    """Bytes per second sent along one ring of devices: in a two-dimensional torus, half the rate of all links."""
    source: str
    """Publication of these figures."""
    nic: float = 0.0
    """Bytes per second that a device sends to other hosts; 0 if the links also connect hosts."""

    def send_seconds(self, collectives: Iterable[Collective]) -> float:
        """Return the communication time in seconds, with collectives run sequentially.

        A ring over several hosts passes through all its devices on each host, and leaves through their network cards.
        """

        def rate(c: Collective) -> float:
            return min(self.link, c.per_host * self.nic) if c.per_host and self.nic else self.link

        return sum(c.n_bytes / rate(c) for c in collectives)


TPUS = "cloud.google.com/tpu/docs/"
BOOK = "Austin et al. 2025, How to Scale Your Model"

CHIPS = {
    "TPU v4": Chip(
        flops=275e12, memory=32 * 2**30, bandwidth=1200e9,  # TPUS/v4: bf16, and HBM2 of 32 GiB at 1200 GBps
        link=2 * 45e9,  # BOOK, part 2: one-way 4.5e10 per link; six make the 1.1 PB/s of 4096 chips in TPUS/v4
        source=f"{TPUS}v4; links: {BOOK}",
    ),
    "TPU v5 lite": Chip(
        flops=197e12, memory=16e9, bandwidth=819e9,  # TPUS/v5e: bf16, and HBM2 of 16 GB at 819 GBps
        link=400e9 / 2 / 2,  # TPUS/v5e: 400 GBps per chip, both directions, in a torus of 2 dimensions
        source=f"{TPUS}v5e",
    ),
    "TPU v5": Chip(
        flops=459e12, memory=95 * 2**30, bandwidth=2765e9,  # TPUS/v5p: BF16, and HBM of 95 GiB at 2765 GBps
        link=1200e9 / 2 / 3,  # TPUS/v5p: 1200 GBps per chip, both directions, in a torus of 3 dimensions
        source=f"{TPUS}v5p",
    ),
    "TPU v6 lite": Chip(
        flops=918e12, memory=32e9, bandwidth=1600e9,  # TPUS/v6e: bf16, and HBM of 32 GB at 1600 GBps
        link=3200e9 / 8 / 2,  # TPUS/v6e: 3200 Gbps per chip, in a torus of 2 dimensions
        source=f"{TPUS}v6e",
    ),
    "TPU7x": Chip(  # a device is one of a chip's two halves, which share its links: a ring over both leaves by them
        flops=2307e12 / 2, memory=192 * 2**30 / 2, bandwidth=7380e9 / 2,  # TPUS/tpu7x: BF16, and HBM of 192 GiB
        link=1200e9 / 2 / 3,  # TPUS/tpu7x: 1200 GBps per chip, both directions, in a torus of 3 dimensions
        source=f"{TPUS}tpu7x",
    ),
    # NVIDIA's BF16 figures with sparsity are twice these, and its NVLink figures count both directions. FLOPs and
    # NVLink are also in BOOK, part 12, rounded to two digits: 3.1e14, 9.9e14, 2.3e15; 300, 450, 900 GB/s. Memory is the
    # figure that CUDA reports, as in `plan/gpus`. A DGX has one InfiniBand card per GPU, of 200 Gb/s for A100s and 400
    # Gb/s for the others.
    "NVIDIA A100-SXM4-80GB": Chip(
        flops=312e12, memory=85_100_068_864, bandwidth=2039e9, link=600e9 / 2, nic=200e9 / 8,
        source="NVIDIA data sheets of A100 SXM and DGX A100",
    ),
    "NVIDIA H100 80GB HBM3": Chip(
        flops=989e12, memory=84_942_979_072, bandwidth=3350e9, link=900e9 / 2, nic=400e9 / 8,
        source="NVIDIA data sheets of H100 SXM and DGX H100",
    ),
    "NVIDIA H200": Chip(
        flops=989e12, memory=139 * 2**30, bandwidth=4800e9, link=900e9 / 2, nic=400e9 / 8,
        source="NVIDIA data sheets of H200 SXM and DGX H200",
    ),
    # One eighth of a DGX: 72 PFLOPS in FP8 with sparsity, a quarter of that in BF16 without; 64 TB/s; 14.4 TB/s.
    "NVIDIA B200": Chip(
        flops=72e15 / 4 / 8, memory=191_514_411_008, bandwidth=8000e9, link=1800e9 / 2, nic=400e9 / 8,
        source="NVIDIA DGX B200 data sheet",
    ),
}  # fmt: skip
"""Chips by JAX's name of the device."""


@dataclass(frozen=True)
class Estimate:
    """Estimated step time and utilisation of the chip."""

    compute: float
    """Compute time in seconds."""
    memory: float
    """Memory traffic time in seconds."""
    network: float
    """Communication time in seconds."""
    model_flops: float
    """Model FLOPs per device."""
    chip: Chip

    @classmethod
    def of(
        cls, flops: float, memory_traffic: float, collectives: Iterable[Collective], model_flops: float, chip: Chip
    ) -> Estimate:
        """Estimate the step time from the cost per device."""
        network = chip.send_seconds(collectives)
        return cls(flops / chip.flops, memory_traffic / chip.bandwidth, network, model_flops, chip)

    @property
    def seconds(self) -> float:
        """Step time in seconds if compute, memory and network overlap."""
        return max(self.compute, self.memory, self.network)

    @property
    def bound(self) -> str:
        """The slowest of compute, memory and network."""
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation if the three overlap."""
        return self.model_flops / self.chip.flops / self.seconds

    @property
    def mfu_without_overlap(self) -> float:
        """Model FLOPs utilisation if the three do not overlap."""
        return self.model_flops / self.chip.flops / (self.compute + self.memory + self.network)


KERNEL_MATMULS = {
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd_wrapper": 5,
}
"""Number of matmuls over all pairs of queries and keys in cuDNN's primitives, which hide them."""


def matmul_flops(jaxpr: Any, visible: float = 1.0) -> float:
    """Return the FLOPs of all matmuls in a jaxpr; see `flops_by_scope`."""
    return sum(flops_by_scope(jaxpr, visible).values())


def flops_by_scope(jaxpr: Any, visible: float = 1.0) -> dict[str, float]:
    """Return the FLOPs of all matmuls in a jaxpr by name stack, over all devices, with loops multiplied out.

    Args:
      jaxpr: open or closed jaxpr.
      visible: fraction of its blocks that an attention kernel computes.
    """
    total: dict[str, float] = defaultdict(float)
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, p, scope = eqn.primitive.name, eqn.params, str(eqn.source_info.name_stack)
        if name == "dot_general":
            (contracted, _), _ = p["dimension_numbers"]
            K = prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total[scope] += 2 * K * prod(eqn.outvars[0].aval.shape)
            continue
        if n_matmuls := KERNEL_MATMULS.get(name):
            (*B, T, H, K), (*_, S, _, _) = (x.aval.shape for x in eqn.invars[:2])
            total[scope] += n_matmuls * 2 * prod(B) * H * T * S * K * visible
            continue
        inner, times = [flops_by_scope(j, visible) for j in _jaxprs(p)], 1.0
        if name == "cond":
            inner = [max(inner, key=lambda branch: sum(branch.values()))]
        elif name == "scan":
            times = p["length"]
        elif name == "shard_map":
            axes = next(value for key, value in p.items() if key.endswith("manual_axes"))  # jax 0.10: newly_manual_axes
            times = prod(p["mesh"].shape[axis] for axis in axes)
        elif name == "pallas_call":
            times = visible * prod(p["grid_mapping"].grid)
        for counts in inner:
            for inner_scope, flops in counts.items():
                total[f"{scope}/{inner_scope}"] += times * flops
    return total


def without_dead_code(jaxpr: Any) -> Any:
    """Remove unused equations from a closed jaxpr, such as the recomputation of a kernel whose result was saved."""
    return dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))[0]


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield item


def visible_pairs(mask: Mask, T: int, S: int, block: int = 1) -> int:
    """Return the number of (query, key) pairs, of T·S, in blocks that a mask does not hide entirely."""
    if not isinstance(mask, Causal):
        return T * S
    first = np.arange(0, T, block)
    nearest = np.minimum(first + block, S) - 1
    furthest = np.maximum(0, first - (mask.window or T) + 1)
    return int((nearest // block - furthest // block + 1).sum()) * block * block


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs that a model needs for one example: three times those of the forward pass, as the backward pass has two
    matmuls for each. Experts count for the tokens routed to them."""

    by_scope: dict[str, float]
    """FLOPs of matmuls with weights, by name stack."""
    attention: float
    """FLOPs of attention over visible pairs."""
    n_scores: int
    """Attention scores in one forward pass, including masked ones."""
    visible: float
    """Fraction of blocks that an attention kernel computes."""

    @property
    def total(self) -> float:
        """FLOPs of weight matmuls and attention."""
        return sum(self.by_scope.values()) + self.attention


def model_flops(setup: TrainSetup) -> ModelFlops:
    """Return the FLOPs that a model needs for one example of maximum size, forward and backward."""
    calls: list[tuple[Any, Any, Mask]] = []

    def record(q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, mask: Mask, scale: float) -> jax.Array:
        calls.append((q_HTK, v_GSK, mask))
        return jnp.zeros((*q_HTK.shape[:2], v_GSK.shape[-1]), v_GSK.dtype)

    config, rngs = setup.config, {}
    params = abstract_params(setup.model)
    if (experts := getattr(config.model, "experts", None)) is not None:
        routed: Any = replace(config.model, experts=replace(experts, capacity_factor=1.0))  # type: ignore[call-arg]
        rngs = {"dropout": jax.random.key(0)}  # a dropout key selects the capacity of training
        setup = replace(setup, config=replace(config, model=routed))
    model = setup.config.model.build(Execution(attention=record))
    jaxpr = jax.make_jaxpr(lambda params, *example: model.apply({"params": params}, *example, rngs=rngs))(
        params, *config.model.example()
    )
    attention, n_scores, visible = 0.0, 0, 1.0
    for q_HTK, v_GSK, mask in calls:
        (H, T, K), (_, S, value_dim) = q_HTK.shape, v_GSK.shape
        attention += 3 * 2 * H * (K + value_dim) * visible_pairs(mask, T, S)
        n_scores += H * T * S
        visible = min(1.0, visible_pairs(mask, T, S, BLOCK) / (T * S)) if BLOCK < T else 1.0
    weights = {scope: 3 * flops for scope, flops in flops_by_scope(jaxpr).items()}
    return ModelFlops(weights, attention, n_scores, visible)
