"""Pretrained parameters that training starts from instead of a random initialisation: those of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.config import Config, LoraConfig, ModelConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.nn.parameter_norms import dotted
from jaxformer.runs.checkpoints import CheckpointReader, first_difference
from jaxformer.runs.run import abstract_params, read_config, read_sampling, read_tokenizer, restore_params

POSITIONS = "embedding.W_pos"
"""Name of the table of positions."""


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
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling settings that the model was published with; see `Run`."""

    def has_new_head(self, model: ModelConfig) -> bool:
        """Return True for a model of another task, whose head this one does not have."""
        return self.model.contract.task is not model.contract.task

    def check_fit(self, model: ModelConfig) -> None:
        """Raise `UserError` for the first parameter that differs in shape or is missing in one of the models, other
        than those of a new head, and positions beyond the model's."""
        is_new = self.has_new_head(model)
        stored, expected = (_shapes(config, without_head=is_new) for config in (self.model, model))
        if POSITIONS in stored and POSITIONS in expected:
            stored[POSITIONS] = min(stored[POSITIONS], expected[POSITIONS])
        if difference := first_difference(stored, expected):
            name, old, new = difference
            problem = f"{self.path} does not fit the model: {name} is {old} there and {new} in the model"
            raise UserError(f"{problem}; omit the model options that change its parameters, or `init_from`.")

    def read(self, abstract: Params, model: ModelConfig) -> Params:
        """Return the parameters of a model that fits, in the dtypes and shardings of `abstract`, without those of a new
        head."""
        wanted: dict[str, jax.ShapeDtypeStruct] = flatten_dict(abstract, sep=".")
        stored: dict[str, jax.ShapeDtypeStruct] = flatten_dict(abstract_params(self.model.build()), sep=".")
        fits = {name: name in wanted and wanted[name].shape == stored[name].shape for name in stored}
        if all(fits.values()) and len(fits) == len(wanted):
            return self.load(abstract)
        structs = {name: wanted[name] if fits[name] else struct for name, struct in stored.items()}
        loaded = flatten_dict(self.load(unflatten_dict(structs, sep=".")), sep=".")
        is_new = self.has_new_head(model)
        params = {name: loaded[name] for name in wanted if not (is_new and _in_head(name, model))}
        if POSITIONS in params:
            table, struct = params[POSITIONS], wanted[POSITIONS]
            params[POSITIONS] = jax.device_put(table[: struct.shape[0]], struct.sharding).astype(struct.dtype)
        return unflatten_dict(params, sep=".")


def pretrained_run(folder: Path) -> Pretrained:
    """Return the last intact checkpoint of a run. Raises `UserError` if there is no such run or checkpoint, or the
    tokenizer's checksum does not match the run's."""
    config, checkpoints = read_config(folder), CheckpointReader(folder)
    step = checkpoints.step()
    load = lambda shapes: restore_params(folder, config, checkpoints, step, shapes)  # noqa: E731
    own = replace(config, lora=LoraConfig())  # adapters are merged
    return Pretrained(folder, config.model, read_tokenizer(folder), load, own, read_sampling(folder))


def _in_head(name: str, config: ModelConfig) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in config.contract.head)


def _shapes(config: ModelConfig, without_head: bool) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config.build()))
    shapes = {dotted(path): tuple(leaf.shape) for path, leaf in leaves}
    return {name: shape for name, shape in shapes.items() if not (without_head and _in_head(name, config))}
