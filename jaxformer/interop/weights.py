"""Loading of published models' parameters, one tensor at a time.

Layouts of tensors are written as `(H K) D -> D H K`: their axes, with axes in parentheses stored as one, and our axes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.data.progress import Progress
from jaxformer.errors import UserError
from jaxformer.interop.families.tables import Family, ImportedConfig, Weight
from jaxformer.interop.folder import FLOATS, PublishedModel
from jaxformer.models.blocks import head_width
from jaxformer.models.clip import CLIPConfig, ImageTowerConfig
from jaxformer.models.objective import Params
from jaxformer.models.vit import ViTConfig
from jaxformer.nn.mlp import GATED
from jaxformer.ops.patches import resize_grid
from jaxformer.ops.positions import sinusoidal
from jaxformer.parallel.mesh import global_device_put

FIELDS = (
    *(("{i}", "n_blocks"), ("W_out", "unembedding"), ("V", "vocab_size")),
    *(("{i}", "n_encoder_blocks"), ("{i}", "n_decoder_blocks"), ("N", "position_buckets")),
    *(("{e}", "experts.n_experts"), ("E", "experts.n_experts"), ("U", "experts.shared_width")),
    *(("P", "max_context"), ("P", "context_length"), ("S", "n_segments"), ("H", "n_heads"), ("G", "n_kv_heads")),
    *(("R", "n_heads"), ("R", "n_kv_heads")),
    *(("K", "head_dim"), ("Z", "head_dim"), ("F", "d_ff"), ("D", "d_model"), ("O", "d_model"), ("C", "n_classes")),
    *(("M", "embedding_dim"), ("M", "d_model")),
    *(("P", "image_size"), ("P", "patch_size"), ("Y", "patch_size"), ("I", "channels")),
    *(("J", "d_joint"), ("vision", "vision.d_model"), ("text", "text.d_model")),
    *((f"b_{letter}", "attention_bias") for letter in "QKVO"),
    *(("f", "experts.dense_width"), ("c", "latents.width"), ("q", "latents.query_width"), ("r", "latents.rope_width")),
    *(("n", "head_dim"), ("v", "latents.value_width")),
)
"""Marks of a table row, axes or parts of names, and the fields of ours that they depend on."""


def n_experts(config: Any) -> int:
    """Return the number of experts per block; 0 for MLPs."""
    experts = getattr(config, "experts", None)
    return 0 if experts is None else experts.n_experts


def part_of(family: Family, config: ImportedConfig, ours: str) -> Any:
    """Return the config of the tower that a parameter belongs to, or of the model."""
    tower = ours.partition("_")[0]
    return getattr(config, tower) if tower in family.towers else config


def axis_sizes(config: Any) -> dict[str, int]:
    """Return axis sizes by letter, for the config of a model or of a tower."""
    if isinstance(config, CLIPConfig):
        return {"J": config.d_joint, "vision": config.vision.d_model, "text": config.text.d_model}
    sizes = {
        "D": config.d_model,
        "H": config.n_heads,
        "G": getattr(config, "kv_heads", config.n_heads),
        "R": config.n_heads // getattr(config, "kv_heads", config.n_heads),
        "K": head_width(config),
        "Z": head_width(config) // 2,
        "A": 2,
        "F": config.d_ff[0],
        "E": n_experts(config),
        "U": getattr(getattr(config, "experts", None), "shared_width", None) or config.d_ff[0],
        "S": getattr(config, "n_segments", 0),
        "O": getattr(config, "n_features", config.d_model),
        "M": getattr(config, "width_of_embedding", config.d_model),
        "C": getattr(config, "n_classes", 0),
        "N": getattr(config, "position_buckets", 0),
        "f": getattr(getattr(config, "experts", None), "dense_width", None) or config.d_ff[0],
    }
    if (latents := getattr(config, "latents", None)) is not None:
        widths = latents.width, latents.query_width or 0, latents.rope_width, config.width_of_values
        sizes |= dict(zip("cqrv", widths, strict=True)) | {"n": head_width(config) - latents.rope_width}
    if isinstance(config, ViTConfig | ImageTowerConfig):
        return (
            sizes | dict(zip("YXI", (*config.patch_size, config.channels), strict=True)) | {"P": _n_positions(config)}
        )
    return sizes | {"V": config.vocab_size, "P": config.n_positions}


def _n_positions(config: ViTConfig | ImageTowerConfig) -> int:
    """Return the number of positions of an image encoder."""
    if isinstance(config, ImageTowerConfig):
        return 1 + config.n_patches
    return config.n_positions(prod(config.grid))


@dataclass(frozen=True)
class Layout:
    """Axes of a tensor: per axis of theirs and of our parameter, the axes that it combines; and the size of each axis
    by letter. A number is its own size, and a sum that of its parts."""

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str, sizes: Mapping[str, int]) -> Layout:
        """Parse a layout such as `(H K) D -> D H K`."""
        theirs, ours = (
            tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", side))
            for side in text.split(" -> ")
        )
        return cls(theirs, ours, tuple(sizes.items()))

    def shape(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the sizes of axes."""
        sizes = dict(self.sizes)
        return tuple(sum(int(x) if x.isdigit() else sizes[x] for x in axis.split("+")) for axis in axes)

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of their tensor."""
        return tuple(prod(self.shape(group)) for group in self.theirs)

    @property
    def parts(self) -> tuple[int, tuple[str, ...]] | None:
        """Index, among all axes of theirs, of the one along which several of our parameters are stored, and the axis of
        each; None for a single parameter."""
        for i, axis in enumerate(axis for group in self.theirs for axis in group):
            if axis.isdigit() or "+" in axis:
                return i, ("1",) * int(axis) if axis.isdigit() else tuple(axis.split("+"))
        return None

    def axes(self, part: int | None) -> tuple[list[str], list[str]]:
        """Return all axes of a part of theirs, and those of them in our order, without axes of length 1."""
        theirs = [axis for group in self.theirs for axis in group]
        if self.parts is not None:
            assert part is not None
            theirs[self.parts[0]] = self.parts[1][part]
        return theirs, [axis for group in self.ours for axis in group if axis in theirs and axis != "1"]

    def to_ours(self, tensor: jax.Array, part: int | None = None) -> jax.Array:
        """Return their tensor in our layout; if it holds several parameters, the one with index `part`."""
        theirs, ours = self.axes(part)
        if self.parts is not None:
            (i, parts), whole = self.parts, self.shape([axis for group in self.theirs for axis in group])
            start = sum(self.shape(parts[:part]))
            tensor = jax.lax.slice_in_dim(tensor.reshape(whole), start, start + self.shape(theirs)[i], axis=i)
        kept = [axis for axis in theirs if axis != "1"]
        tensor = tensor.reshape(self.shape(kept)).transpose([kept.index(axis) for axis in ours])
        return tensor.reshape([prod(self.shape(group)) for group in self.ours])

    def to_theirs(self, parameter: np.ndarray, part: int | None = None) -> np.ndarray:
        """Return our parameter in their layout, with all of its axes; see `fuse`."""
        theirs, ours = self.axes(part)
        kept = [axis for axis in theirs if axis != "1"]
        ordered = parameter.reshape(self.shape(ours)).transpose([ours.index(axis) for axis in kept])
        return ordered.reshape(self.shape(theirs))


def fuse(layouts: Sequence[Layout], parameters: Sequence[np.ndarray]) -> np.ndarray:
    """Return their tensor, given all of our parameters that it holds, in the order of their parts."""
    first = layouts[0]
    if first.parts is None:
        return first.to_theirs(parameters[0]).reshape(first.their_shape)
    parts = [layout.to_theirs(x, i) for i, (layout, x) in enumerate(zip(layouts, parameters, strict=True))]
    return np.concatenate(parts, axis=first.parts[0]).reshape(first.their_shape)


@dataclass(frozen=True)
class Source:
    """Tensors from which one parameter is read."""

    weight: Weight
    layout: Layout
    names: tuple[str, ...]
    """Name of one tensor, or of one per expert; then those of `weight.extras`."""
    grids: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Rows and columns of patches of their positions and of ours, between which they are interpolated, if these
    differ."""


def rows(family: Family, config: ImportedConfig) -> dict[str, tuple[Weight, tuple[str, ...]]]:
    """Return each parameter's table row and tensor names, without those of `extras`, by its path in our model."""
    table: dict[str, tuple[Weight, tuple[str, ...]]] = {}
    for weight in family.weights:
        part = part_of(family, config, weight.ours)
        if weight.when is not None and getattr(part, weight.when[0]) != weight.when[1]:
            continue
        stack, is_repeated, _ = weight.ours.partition("_{i}")  # such as blocks, of which there are n_blocks
        count = "n_blocks" if family.towers else f"n_{stack}"
        gated = "_1" if getattr(part, "activation", None) in GATED else ""
        for i in range(getattr(part, count)) if is_repeated else (0,):
            name = weight.theirs.replace("{i}", str(i)).replace("{gated}", gated)
            n_tensors = n_experts(config) if "{e}" in name else 1
            names = tuple(name.replace("{e}", str(e)) for e in range(n_tensors))
            table[weight.ours.replace("{i}", str(i))] = weight, names
    return table


def extra_name(extra: str, path: str) -> str:
    """Return the name of one of a row's `extras` for the parameter at a path."""
    return re.sub(r"\{i\}", lambda _: re.findall(r"\d+", path)[0], extra)


def find_sources(
    published: PublishedModel, family: Family, config: ImportedConfig, abstract: Params
) -> dict[str, Source]:
    """Return the tensors of each parameter in `abstract`, by path, after verifying all shapes and dtypes. Raises
    `UserError` if a tensor is missing, has another shape or no floating-point dtype, or if there is a tensor that
    the model does not have."""
    table, grid_of = rows(family, config), family.position_grid
    bare = not any(name.startswith(family.prefix) for name in published.names)
    sources: dict[str, Source] = {}
    for path in flatten_dict(abstract, sep="."):
        weight, names = table[path]
        sizes, grids = axis_sizes(part_of(family, config, path)), None
        if weight.tokens and grid_of is not None and isinstance(config, ViTConfig):
            rows_of_theirs, columns = grid_of(published.config)
            if (rows_of_theirs, columns) != config.grid:
                grids = (rows_of_theirs, columns), config.grid
                sizes["P"] = config.n_tokens + rows_of_theirs * columns
        layout = Layout.parse(weight.layout, sizes)
        names += tuple(extra_name(extra, path) for extra in weight.extras)
        names = tuple(name.removeprefix(family.prefix) if bare else name for name in names)
        for end, older in family.older_names:
            found = [(name, name.removesuffix(end) + older) for name in names]
            names = tuple(old if name.endswith(end) and old in published.names else name for name, old in found)
        shape, vector = layout.their_shape, (sizes.get("D", 0),)
        if weight.first_row:
            shape = (shape[0] + weight.first_row, *shape[1:])
        n = len(names) - len(weight.extras)
        shapes = [shape] * n + [vector] * (weight.scale is not None) + [(1, 1, *vector)] * len(weight.tokens)
        for name, expected in zip(names, shapes, strict=True):
            _check_tensor(published, name, expected, _fields(family, weight))
        sources[path] = Source(weight, layout, names, grids)
    _check_rest(published, family, config, {name for source in sources.values() for name in source.names})
    return sources


def _fields(family: Family, weight: Weight) -> str:
    """Return the names of the published config's fields that the presence and shape of a tensor follow from."""
    tower = weight.ours.partition("_")[0]
    prefix = f"{tower}." if tower in family.towers else ""
    theirs = {field.ours.removeprefix(prefix): field.theirs for field in family.fields if field.ours.startswith(prefix)}
    marks = {
        *re.findall(r"\w+", weight.layout),
        *re.findall(r"\{.\}|W_out$|b_[QKVO]$", weight.ours),
        *re.findall(r"\{e\}", weight.theirs),
    }
    return ", ".join(dict.fromkeys(theirs[ours] for mark, ours in FIELDS if mark in marks and ours in theirs))


def _check_tensor(published: PublishedModel, name: str, shape: tuple[int, ...], fields: str) -> None:
    if name not in published.names:
        problem = f"{published.path} has no tensor {name}, which {fields} of its config imply"
        raise UserError(f"{problem}; download it again.")
    if (actual := published.shape(name)) != shape:
        problem = f"{name} in {published.path} has shape {actual}, but its config implies {shape} by {fields}"
        raise UserError(f"{problem}; restore the files that belong together.")
    if (dtype := published.dtype(name)) not in FLOATS:
        problem = f"{name} in {published.path} is {dtype}, and quantised weights are not supported"
        raise UserError(f"{problem}; use the checkpoint that it was made from.")


def _check_rest(published: PublishedModel, family: Family, config: ImportedConfig, used: set[str]) -> None:
    """Raise `UserError` for a tensor without a parameter in the model, other than a copy of a tied head."""
    theirs = {weight.ours: weight.theirs for weight in family.weights}
    is_tied = getattr(config, "unembedding", None) == "tied" and "W_out" in theirs
    sinusoids = {name for full in family.sinusoids for name in (full, full.removeprefix(family.prefix))}
    copies = {**family.copies, **({theirs["W_out"]: theirs["embedding.W_E"]} if is_tied else {})}
    for name in sorted(set(published.names) - used):
        if name in copies:
            bare = copies[name].removeprefix(family.prefix)
            first = next(name for name in used if name.endswith(bare))
            if published.dtype(name) not in FLOATS or not np.array_equal(published.read(name), published.read(first)):
                problem = f"config.json of {published.path} ties {name} to {first}, but the two differ"
                raise UserError(f"{problem}; set tie_word_embeddings to false.")
        elif name in sinusoids:
            expected = sinusoidal(jnp.arange(published.shape(name)[0]), axis_sizes(config)["D"], interleaved=False)
            if not np.allclose(published.read(name).astype(np.float32), expected, atol=1e-2):
                problem = f"{name} in {published.path} is not the sinusoidal encoding, which is the only one supported"
                raise UserError(f"{problem} for {family.model_type}; use a checkpoint whose positions are not trained.")
        elif not any(re.search(pattern, name) for pattern in (*family.ignored, *filter(None, [family.unread]))):
            pattern = re.sub(r"\.\d+\.", ".{i}.", name, count=1)
            rows_of_name = (weight for weight in family.weights if weight.theirs == pattern)
            fields = next((_fields(family, weight) for weight in rows_of_name), "architectures")
            problem = f"{published.path} has a tensor {name}, which {family.architecture} does not have by {fields}"
            raise UserError(f"{problem} of its config; use the checkpoint of the model only.")


def load_params(published: PublishedModel, sources: Mapping[str, Source], abstract: Params) -> Params:
    """Return the parameters in the dtypes and shardings of `abstract`, read one tensor at a time, the largest first,
    while little other memory is in use, with progress on stderr. Leaves without a sharding go to the first device."""
    structs: dict[str, jax.ShapeDtypeStruct] = flatten_dict(abstract, sep=".")
    size = lambda path: sum(prod(published.shape(x)) * FLOATS[published.dtype(x)] for x in sources[path].names)  # noqa: E731
    sizes = {path: size(path) for path in structs}
    progress = Progress(f"reading {published.path}", sum(sizes.values()))
    params: dict[str, jax.Array] = {}
    for path in sorted(structs, key=lambda path: prod(structs[path].shape), reverse=True):
        params[path] = _load_parameter(published, sources[path], structs[path])
        progress.add(sizes[path])
    return unflatten_dict({path: params[path] for path in structs}, sep=".")


def _load_parameter(published: PublishedModel, source: Source, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Return one parameter, converted on the first device, from which other devices get their shards only."""
    convert = converter(source.layout, source.weight, jnp.dtype(struct.dtype), source.grids)
    array = convert([published.read(name) for name in source.names])
    array = array if struct.sharding is None else global_device_put(array, struct.sharding)
    return jax.block_until_ready(array)  # otherwise, tensors of several parameters would be in memory at once


@lru_cache(maxsize=256)
def converter(layout: Layout, weight: Weight, dtype: jnp.dtype, grids: Any = None) -> Callable[..., jax.Array]:
    """Return a jitted function from a parameter's tensors to the parameter, which transposes on all cores."""

    def convert(tensors: list[jax.Array]) -> jax.Array:
        n = len(tensors) - len(weight.extras)
        parts, extras = tensors[:n], [tensor.astype(jnp.float32).reshape(-1) for tensor in tensors[n:]]
        parts = [tensor[weight.first_row :] for tensor in parts] if weight.first_row else parts
        arrays = [layout.to_ours(tensor, weight.part) for tensor in parts]
        array = jnp.stack(arrays) if "{e}" in weight.theirs else arrays[0]
        if not (weight.offset or extras):
            return array.astype(dtype)
        array = array.astype(jnp.float32) + weight.offset
        if weight.scale is not None:
            array *= extras.pop(0)
        for i, token_D in enumerate(extras):
            array = array.at[i].add(token_D)
        if grids is not None:
            array = jnp.concatenate([array[: len(extras)], resize_grid(array[len(extras) :], *grids)])
        return array.astype(dtype)

    return jax.jit(convert)


def stored_dtype(published: PublishedModel, source: Source) -> jnp.dtype:
    """Return a dtype that holds a stored parameter exactly: float32 if it is computed or has mixed dtypes."""
    dtypes = {published.dtype(name) for name in source.names}
    by_name = {"F64": jnp.float32, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
    is_computed = source.weight.offset or source.weight.extras or len(dtypes) > 1
    return jnp.dtype(jnp.float32 if is_computed else by_name[dtypes.pop()])
