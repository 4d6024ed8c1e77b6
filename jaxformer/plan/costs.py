"""Parameters and FLOPs of each part of a model, and the size of its KV cache."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
from flax.traverse_util import flatten_dict

from jaxformer.contract import Contract, ParameterAxes, Role, Task
from jaxformer.decode import programs
from jaxformer.decode.batches import doubled, length_bucket
from jaxformer.decode.completion import CompletionOptions
from jaxformer.decode.engine import ring_sizes
from jaxformer.parallel.mesh import batch_shards
from jaxformer.plan.roofline import ModelFlops
from jaxformer.train.setup import TrainSetup

EMBEDDING, ATTENTION, MLP, EXPERTS, LOGITS, OTHER = "embedding", "attention", "MLP", "experts", "logits", "other"

PART_OF_AXIS = {
    **dict.fromkeys(("experts", "choices"), EXPERTS),
    "gates": "recurrent cells",
    **dict.fromkeys(("heads", "head_dim", "keys", "alignment", "latent"), ATTENTION),
    **dict.fromkeys(("hidden", "maxout"), MLP),
}
"""Part of a model that a parameter belongs to, by the first of these axes that it has."""


@dataclass(frozen=True)
class Part:
    """One part of a model."""

    name: str
    n_parameters: int
    n_active: int
    """Parameters that one token uses; for experts, those of the router and of the selected experts."""
    flops: float
    """FLOPs per example, forward and backward."""


def part_of(axes: ParameterAxes) -> str:
    """Return the part of a model that a parameter belongs to, by its declared axes."""
    if {"vocab", "classes", "joint"} & set(axes.outputs):
        return LOGITS
    if axes.role in (Role.EMBEDDING, Role.POSITION) or "pixels" in axes.names:
        return EMBEDDING
    return next((part for axis, part in PART_OF_AXIS.items() if axis in axes.names), OTHER)


def count_parts(setup: TrainSetup, model: ModelFlops) -> tuple[Part, ...]:
    """Return the non-empty parts of a set-up's model, in order of first use.

    Args:
      model: FLOPs of the model.
    """
    config, axes = setup.config.model, setup.parameter_axes
    experts = getattr(config, "experts", None)
    routed_share = 1 if experts is None else experts.per_token / experts.n_experts
    sizes = {name: prod(leaf.shape) for name, leaf in flatten_dict(setup.abstract_params, sep=".").items()}
    total, active, modules = Counter[str](), Counter[str](), dict[str, str]()
    flops: dict[str, float] = defaultdict(float)
    for name in sorted(sizes, key=sizes.__getitem__):  # a module's largest parameter comes last
        part = modules[name.rpartition(".")[0]] = part_of(axes[name])
        total[part] += sizes[name]
        active[part] += round(sizes[name] * (routed_share if "experts" in axes[name].stack else 1))
    for scope, n in model.by_scope.items():
        flops[_part_of_scope(scope, modules)] += n
    flops[ATTENTION] += model.attention
    names = (EMBEDDING, ATTENTION, MLP, EXPERTS, "recurrent cells", OTHER, LOGITS)
    return tuple(Part(p, total[p], active[p], flops[p]) for p in names if total[p] or flops[p])


def _part_of_scope(scope: str, modules: Mapping[str, str]) -> str:
    """Return the part that a matmul belongs to, by the modules in its name stack.

    Args:
      modules: part of each module's largest parameter, by the module's dotted name.
    """
    path, part = "", modules.get("", OTHER)
    for word in scope.split("/"):
        if word.endswith(".unembed"):
            return LOGITS
        inner = f"{path}.{word}".lstrip(".")
        if any(f"{name}.".startswith(f"{inner}.") for name in modules):
            path, part = inner, modules.get(inner, part)
    return part


def describe_parts(parts: Sequence[Part]) -> list[str]:
    """Return a table of parts as lines of text."""
    all_flops = sum(part.flops for part in parts) or 1  # a lookup-table model has no matmuls
    lines = ["parameters, and fractions of the model FLOPs:"]
    for p in parts:
        active = f", {p.n_active:,} active per token" if p.n_active < p.n_parameters else ""
        lines.append(f"  {p.name:<18} {p.n_parameters:>15,}{p.flops / all_flops:>8.1%}{active}")
    return lines


def cached_tokens(contract: Contract) -> int:
    """Return the number of tokens in the KV cache after a sequence of the context length, which decoding with a shorter
    attention window does not exceed: their slots are a ring."""
    (n_tokens,) = contract.inputs[0].shape
    window = contract.attention_window if contract.extrapolates else None  # otherwise, slots are no ring
    return int(min(n_tokens, window or n_tokens))


def cache_bytes(setup: TrainSetup) -> float | None:
    """Return the KV cache size in bytes of a causal language model for one sequence of the context length, or of a
    longer one if `cached_tokens` are fewer, in the compute dtype; None for other models."""
    contract = setup.config.model.contract
    if contract.task is not Task.CAUSAL_LM or not contract.has_cache:
        return None
    n_tokens, chunk = cached_tokens(contract), CompletionOptions.prefill_chunk
    chunk = min(chunk, length_bucket(n_tokens))
    rings = ring_sizes(contract.layer_windows, chunk, doubled(chunk, n_tokens))
    init_cache = partial(programs.init_cache, setup.model, n_tokens, setup.compute_dtype, rings)
    return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(init_cache))))


def examples_per_microbatch(setup: TrainSetup) -> int:
    """Return the number of examples per device and microbatch."""
    return setup.config.train.batch_size // batch_shards(setup.mesh) // setup.config.compute.grad_accumulation_steps
