"""Memory traffic of a compiled step by category, and the minimum of each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from math import prod

import jax

from jaxformer.contract import Role
from jaxformer.parallel.mesh import BATCH
from jaxformer.plan.hlo import Program
from jaxformer.plan.meshes import model_width, split_parameters
from jaxformer.train.setup import BLOCK, TrainSetup

MATMULS, ATTENTION, LOSS, OPTIMIZER = "matmuls", "attention", "loss", "optimizer"
NORMS, ACTIVATION, BIASES, EMBEDDING, OTHER = "norms, residuals", "activation", "biases", "embedding", "other"

OP_NAMES = {
    LOSS: r"\bloss\b",
    ATTENTION: r"\.attend\b|fmha|splash",
    OPTIMIZER: r"^(?!.*(jvp|transpose)\()",
    EMBEDDING: r"\bembed",
    NORMS: r"norm\b|add_any$|blocks_\d+/add$",
    ACTIVATION: r"_hidden_layer\b",
    BIASES: r"/(add|reduce_sum)$",
}
"""Patterns of the names of operations, in order: modules and transformations in which they were traced. What is outside
the differentiated function belongs to the optimizer, with the norms of gradients. Matmuls are a category of their own,
but for those of the loss."""


def traffic_by_category(program: Program, has_biases: bool = True) -> dict[str, float]:
    """Return the bytes that the operations of each category read and write, largest first; a fused one belongs where
    its result does. In a model without biases, what would be theirs by name is other."""
    total: dict[str, float] = defaultdict(float)
    names = {c: pattern for c, pattern in OP_NAMES.items() if has_biases or c != BIASES}
    for i, n_bytes in program.traffic():
        name = re.search(r'op_name="([^"]*)"', i.attributes)
        text = name[1] if name else ""
        category = next((c for c, pattern in names.items() if re.search(pattern, text)), OTHER) if text else OTHER
        total[MATMULS if category != LOSS and program.is_matmul(i) else category] += n_bytes
    return {category: n for category, n in sorted(total.items(), key=lambda item: -item[1]) if n}


def minimal_traffic(setup: TrainSetup, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return, by category, the bytes that a device moves if each operation reads its inputs once and writes its results
    once, for a decoder on a mesh with axes of these sizes.

    Matmuls with weights have three passes, each over rows, matrix and outputs, or four in recomputed blocks. Those that
    nothing but the next block reads have three there too: W_2 without a norm behind it, and W_O of parallel sublayers.
    Attention keeps scores on the chip, and the loss its logits. A norm and the residual stream around it are one
    operation forward and one backward, and so is an activation; biases are part of others.
    """
    config, width = setup.config, setup.compute_dtype.itemsize
    shape, experts = config.model.contract.attention, getattr(config.model, "experts", None)
    examples = config.train.batch_size / prod(sizes[axis] for axis in BATCH)
    tokens = examples * (shape.n_positions if shape else 1)
    steps, state = config.compute.grad_accumulation_steps, jax.tree.leaves(setup.abstract_state)
    n_parameters = sum(leaf.size for leaf in jax.tree.leaves(setup.abstract_params))
    per_parameter = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in state) / n_parameters + 4
    parameters = split_parameters(setup, sizes)
    total: dict[str, float] = defaultdict(float)
    is_tied = not any("vocab" in axes.outputs for _, axes, _, _ in parameters)
    placement = getattr(config.model, "norm_placement", "pre")
    last = {"pre": {"hidden"}}.get(placement, {"hidden", "heads"} if placement.startswith("parallel") else set())
    for name, axes, leaf, split in parameters:
        total[OPTIMIZER] += per_parameter * leaf.size / prod(sizes[axis] for axis in split if axis)
        again = config.compute.remat == "block" and BLOCK.search(name.partition(".")[0]) is not None
        by = [sizes[axis] if axis and axis != "fsdp" else 1 for axis in split or leaf.ndim * (None,)]
        local = [size // n for size, n in zip(leaf.shape, by, strict=True)]  # gathered over `fsdp`
        start, end = len(axes.stack), len(axes.stack) + len(axes.inputs)
        n_in, n_out = prod(local[start:end]), prod(local[end:])
        rows = tokens * (experts.per_token if experts and "experts" in axes.stack else 1)
        if "vocab" in axes.outputs or ("vocab" in axes.inputs and is_tied):
            total[LOSS] += 2 * width * (tokens * model_width(parameters) + steps * prod(local))
        elif axes.role is Role.MATRIX:
            # The gradient of an expert's weight is a product with the expert's output.
            is_last = bool(last.intersection(axes.inputs)) and "experts" not in axes.stack
            passes = 3 + (again and not is_last)
            total[MATMULS] += passes * width * (rows * (n_in + n_out) + steps * prod(local))
            if "heads" in axes.inputs and shape:
                heads = shape.n_heads * (shape.head_dim + shape.value_dim)
                heads += shape.n_kv_heads * (shape.head_dim + shape.value_dim)
                total[ATTENTION] += 3 * width * tokens * heads / (sizes["tensor"] if "tensor" in split else 1)
            if "hidden" in axes.outputs:
                total[ACTIVATION] += 3 * width * rows * n_out
            if "hidden" in axes.inputs:
                total[ACTIVATION] += (2 + again) * width * rows * n_in
        elif name.endswith("gamma") and axes.outputs == ("embed",):
            total[NORMS] += (6 + 2 * again) * width * tokens * n_out
    return dict(total)
