"""A process that trains with torch when asked what `train_jaxformer.py` left in a folder: see `processes`.

    python benchmarks/train_torch.py FOLDER [--eager] [--float32]

It needs torch and NumPy, and neither JAX nor jaxformer. On a GPU it computes in the dtype jaxformer chose, by
autocast, or with `--float32` as torch does where it is told nothing.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import record
import torch
from processes import serve
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_decoder import Decoder, Shape, translate


def make_optimizer(model: Decoder, config: dict) -> torch.optim.Optimizer:
    """torch's fused version of what the config names.

    Raises:
      ValueError: it is neither adamw nor nesterov_sgd.
    """
    o, decayed = config["optimizer"], model.matrices()
    if o["name"] == "nesterov_sgd":
        return torch.optim.SGD(model.parameters(), momentum=o["momentum"], nesterov=True, fused=True)
    if o["name"] != "adamw":
        raise ValueError(f"the torch peer trains with adamw or nesterov_sgd, not {o['name']}")
    others = [p for p in model.parameters() if not any(p is q for q in decayed)]
    groups = [{"params": decayed, "weight_decay": o["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(o["b1"], o["b2"]), fused=True)


def main() -> None:
    """Train the same model in torch as one writes it there, and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--float32", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(record.cores())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, batches = json.loads((asked.folder / "config.json").read_text()), np.load(asked.folder / "batches.npy")
    shape, clip_norm = Shape(config["model"]), config["optimizer"]["clip_norm"]
    model = Decoder(shape)
    with np.load(asked.folder / "weights.npz") as weights:
        model.load_state_dict(translate(weights, shape.n_blocks))
    model.to(device)
    parameters, optimizer = list(model.parameters()), make_optimizer(model, config)
    loss_of = model if asked.eager else torch.compile(model)
    dtype = torch.float32 if asked.float32 else getattr(torch, config["dtype"])
    # Flash attention has no float32 on a GPU.
    without_flash = device == "cuda" and dtype == torch.float32
    kernel = SDPBackend.EFFICIENT_ATTENTION if without_flash else SDPBackend.FLASH_ATTENTION

    def step(taken: int) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = config["learning_rates"][taken]
        tokens = torch.from_numpy(batches[taken % len(batches)]).to(device, non_blocking=True).long()
        with sdpa_kernel(kernel), torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = loss_of(tokens)
        optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
        return loss.detach()

    serve(
        step,
        parameters=sum(p.numel() for p in parameters),
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        versions=record.versions("torch"),
    )


if __name__ == "__main__":
    main()
