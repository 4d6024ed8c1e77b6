"""Loading of published models' parameters, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Sharding

from jaxformer.errors import UserError
from jaxformer.interop.families import Family, Weight
from jaxformer.interop.folder import FLOATS, ModelFolder
from jaxformer.interop.layout import Layout, axis_sizes
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params


@dataclass(frozen=True)
class Source:
    """Tensors from which one parameter is read."""

    weight: Weight
    layout: Layout
    names: tuple[str, ...]
    """Name of one tensor, or of one per expert."""


def rows(family: Family, config: DecoderConfig) -> dict[str, tuple[Weight, tuple[str, ...]]]:
    """Return each parameter's table row and tensor names, by its path in our model."""
    table: dict[str, tuple[Weight, tuple[str, ...]]] = {}
    for weight in family.weights:
        for i in range(config.n_blocks) if "{i}" in weight.ours else (0,):
            name = weight.theirs.replace("{i}", str(i))
            n_experts = (getattr(config, "n_experts", None) or 0) if "{e}" in name else 1
            names = tuple(name.replace("{e}", str(e)) for e in range(n_experts))
            table[weight.ours.replace("{i}", str(i))] = weight, names
    return table


def find_sources(folder: ModelFolder, family: Family, config: DecoderConfig, abstract: Params) -> dict[str, Source]:
    """Return the tensors of each parameter in `abstract`, by path, after verifying all shapes and dtypes. Raises
    `UserError` if a tensor is missing, has another shape or no floating-point dtype, or if the folder has a tensor that
    the model does not."""
    sizes, table = axis_sizes(config), rows(family, config)
    bare = not any(name.startswith(family.prefix) for name in folder.files)
    sources: dict[str, Source] = {}
    for path in flatten_dict(abstract, sep="."):
        weight, names = table[path]
        layout = Layout.parse(weight.layout, sizes)
        names = tuple(name.removeprefix(family.prefix) if bare else name for name in names)
        for name in names:
            _check_tensor(folder, name, layout.their_shape)
        sources[path] = Source(weight, layout, names)
    _check_rest(folder, family, config, {name for source in sources.values() for name in source.names})
    return sources


def _check_tensor(folder: ModelFolder, name: str, shape: tuple[int, ...]) -> None:
    if name not in folder.files:
        raise UserError(f"{folder.path} has no tensor {name}, which its config.json implies; download it again.")
    if (actual := folder.shape(name)) != shape:
        remedy = "restore the files that belong together"
        raise UserError(f"{name} in {folder.path} has shape {actual}, but config.json implies {shape}; {remedy}.")
    if (dtype := folder.dtype(name)) not in FLOATS:
        remedy = "use the bfloat16 or float32 checkpoint that it was made from"
        raise UserError(f"{name} in {folder.path} is {dtype}, and quantised weights are not supported; {remedy}.")


def _check_rest(folder: ModelFolder, family: Family, config: DecoderConfig, used: set[str]) -> None:
    """Raise `UserError` for a tensor without a parameter in the model, other than a copy of a tied head."""
    theirs = {weight.ours: weight.theirs for weight in family.weights}
    for name in sorted(folder.files.keys() - used):
        if name == theirs.get("W_out") and config.unembedding == "tied":
            embedding = theirs["embedding.W_E"].removeprefix(family.prefix)
            table = next(name for name in used if name.endswith(embedding))
            if folder.dtype(name) not in FLOATS or not np.array_equal(folder.read(name), folder.read(table)):
                problem = f"config.json of {folder.path} ties {name} to the embedding, but the two differ"
                raise UserError(f"{problem}; set tie_word_embeddings to false.")
        elif not any(re.search(pattern, name) for pattern in family.ignored):
            problem = f"{folder.path} has a tensor {name}, which {family.architecture} of this config does not have"
            raise UserError(f"{problem}; use the checkpoint of the model only.")


def load_params(folder: ModelFolder, sources: Mapping[str, Source], abstract: Params) -> Params:
    """Return the parameters in the dtypes and shardings of `abstract`, read one tensor at a time, the largest first,
    while little other memory is in use. Leaves without a sharding go to the first device."""
    structs: dict[str, Any] = flatten_dict(abstract, sep=".")
    params: dict[str, jax.Array] = {}
    for path in sorted(structs, key=lambda path: prod(structs[path].shape), reverse=True):
        source, struct = sources[path], structs[path]
        convert = converter(source.layout, source.weight, jnp.dtype(struct.dtype), struct.sharding)
        # Wait, as several parameters' tensors would otherwise be in memory at once.
        params[path] = jax.block_until_ready(convert([folder.read(name) for name in source.names]))
    return unflatten_dict({path: params[path] for path in structs}, sep=".")


@lru_cache(maxsize=256)
def converter(layout: Layout, weight: Weight, dtype: jnp.dtype, sharding: Sharding | None) -> Callable[..., jax.Array]:
    """Return a jitted function from a parameter's tensors to the parameter, which transposes on all cores."""

    def convert(tensors: list[jax.Array]) -> jax.Array:
        arrays = [layout.to_ours(tensor, weight.part) for tensor in tensors]
        array = jnp.stack(arrays) if "{e}" in weight.theirs else arrays[0]
        return (array.astype(jnp.float32) + weight.offset if weight.offset else array).astype(dtype)

    return jax.jit(convert, out_shardings=sharding)


def stored_dtype(folder: ModelFolder, source: Source) -> jnp.dtype:
    """Return a dtype that holds a stored parameter exactly: float32 if it has an offset or mixed dtypes."""
    dtypes = {folder.dtype(name) for name in source.names}
    by_name = {"F64": jnp.float32, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
    return jnp.dtype(jnp.float32 if source.weight.offset or len(dtypes) > 1 else by_name[dtypes.pop()])
