"""Time and memory for starting to train from a published model of 1.24 billion parameters in bfloat16.

The weights are random, in the shapes of Llama 3.2 1B and in two shards; they may be in the page cache, as they were
just written. The step trains adapters, so that it fits wherever the parameters do; importing the model as a run is
timed separately.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.harness import Figures
from jaxformer.config import LoraConfig
from jaxformer.data.dataset import Batch
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.interop.configs import read_config
from jaxformer.interop.families.decoders import LLAMA
from jaxformer.interop.run import import_run, pretrained_model
from jaxformer.interop.weights import Layout, axis_sizes, rows
from jaxformer.parallel.mesh import make_mesh
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import CompiledStep

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500_000.0,
}  # fmt: skip
N_TOKENS = 64


def write_model(folder: Path) -> None:
    """Write a random model in two shards, with the last blocks in the second."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer.train(["The cat sees the dog."], 280).save(folder / "tokenizer.json")
    model = read_config(CONFIG)
    rng, shards = np.random.default_rng(0), [dict[str, np.ndarray](), dict[str, np.ndarray]()]
    drawn: dict[tuple[int, ...], np.ndarray] = {}  # one tensor per shape, as sampling takes longer than writing
    for path, (weight, (name, *_)) in rows(LLAMA, model).items():
        shape = Layout.parse(weight.layout, axis_sizes(model)).their_shape
        if "bias" not in name and path != "W_out":  # this model has neither
            if shape not in drawn:
                drawn[shape] = (0.02 * rng.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)
            shards[bool(re.match(r"blocks_([89]|1\d)\b", path))][name] = drawn[shape]
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file, tensors in zip(files, shards, strict=True):
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in zip(files, shards, strict=True) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


class Memory:
    """Peak anonymous memory of this process since the start, in bytes, sampled 100 times per second."""

    def __init__(self) -> None:
        self.start, self.peak = self.now(), 0
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        """Return the anonymous memory in bytes."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self.now() - self.start)
            time.sleep(0.01)


def begin(parent: Path) -> tuple[None, Figures]:
    """Write a model below a folder, load it, run a training step, and return times and memory."""
    figures: Figures = {"load_average": os.getloadavg()[0]}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        figures[name] = round(time.perf_counter() - clock, 2)
        clock = time.perf_counter()

    write_model(parent / "model")
    lap("write_random_model_seconds")
    memory = Memory()
    pretrained = pretrained_model(parent / "model")
    assert pretrained.config is not None
    config = replace(
        pretrained.config, init_from=str(parent / "model"), lora=LoraConfig(rank=4),
        model=read_config(CONFIG, N_TOKENS),
        train=replace(pretrained.config.train, batch_size=1),
    )  # fmt: skip
    lap("verify_seconds")
    loaded = {}

    def load(abstract: Any) -> Any:
        nonlocal clock
        clock = time.perf_counter()
        params = jax.block_until_ready(pretrained.load(abstract))
        lap("load_seconds")
        n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        loaded["anonymous_memory_over_parameters"] = round(memory.peak / n_bytes, 3)
        return params

    setup = TrainSetup(config, make_mesh("", jax.devices()[:1]), replace(pretrained, load=load))
    state = jax.block_until_ready(setup.init_state())
    lap("optimizer_state_seconds")
    tokens_BT = np.arange(N_TOKENS, dtype=np.int32)[None]
    batch = Batch((tokens_BT,), tokens_BT, np.ones(1, np.float32))
    state, metrics = CompiledStep(setup, print)(state, batch, 0)
    figures |= loaded | {"loss": float(metrics.loss)}
    lap("first_step_seconds")
    figures["anonymous_memory_of_the_step_bytes"] = memory.peak
    del state
    import_run(parent / "model", parent / "run")
    lap("import_as_run_seconds")
    return None, figures
