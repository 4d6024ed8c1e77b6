"""Pretrained parameters that training starts from instead of a random initialisation: those of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jaxformer.config import Config, LoraConfig, ModelConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.nn.parameter_norms import dotted
from jaxformer.runs.checkpoints import CheckpointReader, first_difference
from jaxformer.runs.run import abstract_params, read_config, read_tokenizer, restore_params


@dataclass(frozen=True)
class Pretrained:
    """A trained model whose parameters are loaded on demand."""

    path: Path
    """Folder of the model."""
    model: ModelConfig
    tokenizer: Tokenizer | None
    """Tokenizer; None for a model without text."""
    load: Callable[[Params], Params]
    """Function from the parameters' shapes, dtypes and shardings to the parameters."""
    config: Config | None = None
    """Config of the run; None for a model published elsewhere."""

    def check_fit(self, model: ModelConfig) -> None:
        """Raise `UserError` for the first parameter that differs in shape or is missing in one of the models."""
        stored, expected = (_shapes(config) for config in (self.model, model))
        if difference := first_difference(stored, expected):
            name, old, new = difference
            problem = f"{self.path} does not fit the model: {name} is {old} there and {new} in the model"
            raise UserError(f"{problem}; omit the model options that change its parameters, or --init-from.")


def pretrained_run(folder: Path) -> Pretrained:
    """Return the last intact checkpoint of a run. Raises `UserError` if there is no such run or checkpoint, or the
    tokenizer's checksum does not match the run's."""
    config, checkpoints = read_config(folder), CheckpointReader(folder)
    step = checkpoints.step()
    load = lambda shapes: restore_params(folder, config, checkpoints, step, shapes)  # noqa: E731
    own = replace(config, lora=LoraConfig())  # adapters are merged
    return Pretrained(folder, config.model, read_tokenizer(folder), load, own)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config.build()))
    return {dotted(path): tuple(leaf.shape) for path, leaf in leaves}
