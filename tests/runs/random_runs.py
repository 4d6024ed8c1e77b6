"""Runs with random parameters, made without compiling a program."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxformer.config import Config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.runs.run import Run, create_run
from tests.arrays import random_params
from tests.helpers import SMALL

N_TOKENS = 280


def random_run(folder: Path, texts: list[str], model: Any = SMALL) -> Run:
    """Return a run of a text model with random parameters, and no checkpoint; its tokenizer has `N_TOKENS` tokens."""
    config, tokenizer = Config(folder.name, model, data=TextConfig(), steps=1), Tokenizer.train(texts, N_TOKENS)
    path, built = create_run(folder, config, tokenizer, allow_suffix=False), model.build()
    return Run(path, config, built, random_params(built, *model.example()), tokenizer, 0)


def saved_run(folder: Path, texts: list[str]) -> Path:
    """Return the folder of such a run with a checkpoint."""
    run = random_run(folder, texts)
    with CheckpointManager(run.path) as checkpoints:
        checkpoints.save(0, run.params, {"none": jnp.zeros(1)}, {"step": 0}, None)
    return run.path
