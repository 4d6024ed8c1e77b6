"""Training steps with torch, on the files that `training.jaxformer` writes to a folder; without JAX."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import record
from benchmarks.harness import Figures
from benchmarks.training_torch_model import Decoder, Shape, translate

WARM_UP = 5
PRODUCTS = 10


def make_optimizer(model: Decoder, config: dict) -> torch.optim.Optimizer:
    """Return torch's fused version of the config's optimizer.

    Raises:
      ValueError: the optimizer is neither adamw nor nesterov_sgd.
    """
    o, decayed = config["optimizer"], model.matrices()
    if o["name"] == "nesterov_sgd":
        return torch.optim.SGD(model.parameters(), momentum=o["momentum"], nesterov=True, fused=True)
    if o["name"] != "adamw":
        raise ValueError(f"the torch peer trains with adamw or nesterov_sgd, not {o['name']}")
    others = [p for p in model.parameters() if not any(p is q for q in decayed)]
    groups = [{"params": decayed, "weight_decay": o["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(o["b1"], o["b2"]), fused=True)


def train(folder: Path, is_compiled: bool, **_: Any) -> tuple[Any, Figures]:
    """Set up the same training in idiomatic torch; on a GPU with autocast to jaxformer's compute dtype."""
    torch.set_num_threads(record.cores())
    torch._dynamo.reset()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, batches = json.loads((folder / "config.json").read_text()), np.load(folder / "batches.npy")
    shape, clip_norm, rates = Shape(config["model"]), config["optimizer"]["clip_norm"], config["learning_rates"]
    model = Decoder(shape)
    with np.load(folder / "weights.npz") as weights:
        model.load_state_dict(translate(weights, shape.n_blocks))
    model.to(device)
    parameters, optimizer = list(model.parameters()), make_optimizer(model, config)
    loss_of = torch.compile(model) if is_compiled else model
    dtype = getattr(torch, config["dtype"])
    # Flash attention has no float32 on a GPU.
    without_flash = device == "cuda" and dtype == torch.float32
    kernel = SDPBackend.EFFICIENT_ATTENTION if without_flash else SDPBackend.FLASH_ATTENTION

    def step(number: int) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = rates[min(number, len(rates) - 1)]
        tokens = torch.from_numpy(batches[number % len(batches)]).to(device, non_blocking=True).long()
        with sdpa_kernel(kernel), torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = loss_of(tokens)
        optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
        return loss.detach()

    return step, {
        "values": [float(step(number)) for number in range(WARM_UP)], "parameters": sum(p.numel() for p in parameters),
    }  # fmt: skip


def matmuls(folder: Path, size: int = 1024, **_: Any) -> tuple[Any, Figures]:
    """Multiply square float32 matrices on all cores."""
    torch.set_num_threads(record.cores())
    a, b = torch.randn(size, size), torch.randn(size, size) * size**-0.5

    def multiply(_: int) -> torch.Tensor:
        product = a
        for _ in range(PRODUCTS):
            product = product @ b
        return product[0, 0]

    return multiply, {"flops": 2 * size**3 * PRODUCTS}
