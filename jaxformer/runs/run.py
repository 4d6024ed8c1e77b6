"""A run's folder, with everything that sampling and inspection need: config, tokenizer, class names and checkpoints."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike

from jaxformer.config import Config, DataConfig, LoraConfig, ModelConfig, OptimizerConfig, TokenModelConfig
from jaxformer.config.fields import from_dict, to_dict
from jaxformer.config.files import kind_of
from jaxformer.contract import contract_of
from jaxformer.data.dataset import Dataset
from jaxformer.data.tokenizer import TOKENIZER_CONFIG, Tokenizer
from jaxformer.errors import UserError, parse_json, resume_fields, run_name
from jaxformer.files import sha256, write_atomically
from jaxformer.models.inputs import as_array, check_example, check_next_tokens
from jaxformer.models.objective import Params, is_causal_lm, next_token_nll
from jaxformer.nn.lora import adapter_axes, init_adapters, merge
from jaxformer.nn.parameter_norms import dotted
from jaxformer.nn.parameters import keeps_dtype, parameter_axes, trace_init
from jaxformer.parallel.mesh import abstract, shardings
from jaxformer.runs.checkpoints import CheckpointManager, CheckpointReader
from jaxformer.runs.convert import convert, convert_train
from jaxformer.runs.integrity import CHECKSUMS
from jaxformer.runs.registry import BASE, CONFIG, find_class
from jaxformer.runs.storage import local_folder

TOKENIZER, CLASSES, SAMPLING = "tokenizer.json", "classes.json", "sampling.json"
METRICS, SAMPLES = "metrics.jsonl", "samples.txt"
PLOTS = "plots"
PARAMETER_DTYPES = ("float32", "bfloat16", "float16")
SCRATCH = ".new-"
"""Prefix of the name of a run's folder until it is complete."""


@dataclass(frozen=True)
class Run:
    """A trained model: its config, parameters and tokenizer."""

    path: Path
    """Folder of the run."""
    config: Config
    """Config of the run, without `lora`: adapters are merged into the parameters."""
    model: nn.Module
    params: Params
    tokenizer: Tokenizer | None
    """Tokenizer; None if the data has no text."""
    step: int
    """Number of optimizer steps after which the parameters were saved."""
    classes: tuple[str, ...] = ()
    """Names of the target classes; empty if targets are tokens or have no names."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling settings that the model was published with, named as in `decode.Sampling`; empty if there are none."""

    def __repr__(self) -> str:
        n, kind = count_parameters(self.params), type(self.model).__name__
        return f"<Run {self.config.name}: {kind} with {n:,} parameters, at step {self.step:,}, in {self.path}>"

    def text_model(self) -> tuple[TokenModelConfig, Tokenizer]:
        """Return the config and the tokenizer of a text model.

        Raises:
          UserError: the model is not a text model.
        """
        if self.tokenizer is None or not isinstance(self.config.model, TokenModelConfig):
            kind = type(self.model).__name__
            raise UserError(f"{self.path} holds a {kind}, which does not generate text; name a run that does.")
        return self.config.model, self.tokenizer

    def tokens(self, text: str | Sequence[int] | ArrayLike) -> jax.Array:
        """Return the tokens of a text, `(T,)` int32, after the token that the tokenizer puts before a text, if any; or
        the given tokens as an array.

        Raises:
          TypeError: the model reads no texts, or formats them, as masked language models and translators do.
          ValueError: a token is beyond the range of int32.
          UserError: the tokenizer cannot encode the text.
        """
        if not isinstance(text, str):
            if isinstance(text, Sequence) and [part for part in text if isinstance(part, str)]:
                raise TypeError(f"expected one text or its tokens, got {len(text)} texts; give one at a time")
            return as_array(text)
        if self.tokenizer is None or not is_causal_lm(self.model):
            problem = f"a {type(self.model).__name__} does not read plain text"
            raise TypeError(f"{problem}; give the model's inputs as arrays, or use sample.py")
        return jnp.array(self.tokenizer.encode_prompt(text), jnp.int32)

    def logits(self, *inputs: str | ArrayLike | None) -> jax.Array:
        """Return the model's output for one example: for a text or tokens `(T,)`, the logits `(T, V)`, of which row t
        predicts token t + 1.

        Args:
          inputs: a text or its tokens; for other models, their inputs.

        Raises:
          TypeError: as `tokens` raises.
          ValueError: the inputs are a batch, or hold token ids outside the vocabulary.
        """
        arrays = [None if x is None else self.tokens(x) for x in inputs]
        check_example(self.model, *arrays)
        logits: Any = self.model.apply({"params": self.params}, *arrays)
        return logits

    def loss(self, params: Params, tokens_T: str | ArrayLike) -> jax.Array:
        """Return the mean next-token cross-entropy of one sequence in nats per token, a float32 scalar, for `jax.grad`.

        Args:
          tokens_T: a text, or at least 2 token ids; for learned positions, at most one more than the context length.

        Raises:
          TypeError: the model is not a causal language model.
          ValueError: the token ids are invalid.
        """
        if not is_causal_lm(self.model):
            raise TypeError(f"{type(self.model).__name__} predicts no next token; see models.objective")
        tokens_T = self.tokens(tokens_T)
        check_next_tokens(contract_of(self.model), tokens_T)
        return jnp.mean(next_token_nll(self.model, params, tokens_T))


def load_run(
    path: str | Path, checkpoint: str | int = "last", mesh: Mesh | None = None,
    convert: Callable[[Params, nn.Module], Params] | None = None, meanwhile: Callable[[Run], None] | None = None,
    *, dtype: DTypeLike | None = None,
) -> Run:  # fmt: skip
    """Load a run from its folder.

    Args:
      checkpoint: 'last', 'best' (lowest validation loss), or a step; for the first two, corrupt checkpoints are
        skipped with a warning.
      mesh: devices for the parameters; None for the first device.
      convert: function of some of the parameters and the model, applied to them as they are read.
      meanwhile: function called in a thread while the checkpoint is verified and read, to compile programs, with a run
        at step 0 that has the shapes of the parameters only. Not called with a mesh.
      dtype: dtype of the parameters in memory: "float32", "bfloat16" or "float16"; "stored" for those of the
        checkpoint, such as a published model's; None for the model's own, float32. Adapters are merged in the latter,
        which is also what "stored" then means.

    Raises:
      ValueError: the dtype is another one.
      UserError: there is no such run or checkpoint, it is corrupt, a file cannot be read, or the tokenizer or class
        names have changed.
    """
    as_stored = isinstance(dtype, str) and dtype == "stored"
    if dtype is not None and not as_stored and dtype not in [*map(jnp.dtype, PARAMETER_DTYPES)]:
        raise ValueError(f"parameters cannot be held in {dtype}; choose {', '.join(PARAMETER_DTYPES)} or stored")
    folder = local_folder(path) if isinstance(path, str) else path
    config = read_config(folder)
    own, model = replace(config, lora=LoraConfig()), config.model.build()
    checkpoints = CheckpointReader(folder)
    converted = None if convert is None else lambda params: convert(params, model)
    with ThreadPoolExecutor() as pool:  # hashing and reading files leave Python free for the model and the tokenizer
        verified = pool.submit(checkpoints.step, checkpoint)
        reading = pool.submit(read_tokenizer, folder, config.model.contract.vocab_size is not None)
        shapes = abstract_params(model)
        if as_stored and not config.lora.rank:
            shapes = checkpoints.in_stored_dtypes(verified.result(), shapes)
        elif dtype is not None and not as_stored:

            def held(name: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
                return x if keeps_dtype(name) or not jnp.issubdtype(x, jnp.floating) else x.update(dtype=dtype)

            shapes = jax.tree_util.tree_map_with_path(held, shapes)

        def prepare(meanwhile: Callable[[Run], None]) -> None:
            read = jax.eval_shape(converted or (lambda params: params), shapes)
            first = SingleDeviceSharding(jax.devices()[0])
            params = abstract(read, jax.tree.map(lambda _: first, read))
            settings = read_sampling(folder)
            meanwhile(Run(folder, own, model, params, reading.result(), 0, sampling=settings))

        prepared = pool.submit(prepare, meanwhile) if meanwhile is not None and mesh is None else None
        if mesh is not None:
            shapes = abstract(shapes, shardings(shapes, parameter_axes(model), mesh))
        step, classes = verified.result(), _read_classes(folder)
        params = restore_params(folder, config, checkpoints, step, shapes, converted)
        if prepared is not None:
            prepared.result()
    return Run(folder, own, model, params, reading.result(), step, classes, read_sampling(folder))


def restore_params(
    folder: Path, config: Config, checkpoints: CheckpointReader, step: int, shapes: Params,
    convert: Callable[[Params], Params] | None = None,
) -> Params:  # fmt: skip
    """Return the model's parameters from a checkpoint, with adapters merged into the base parameters in their dtype.

    Args:
      config: config of the run.
      shapes: shapes, dtypes and shardings of the parameters; leaves without a sharding are placed on the first device.
      convert: function applied to the parameters, some entries of the tree at a time, or to merged ones as a whole.

    Raises:
      UserError: the base or the checkpoint is missing, corrupt, or does not fit the config.
    """
    if not config.lora.rank:
        return checkpoints.restore_params(step, shapes, convert)
    model = config.model.build()
    base, axes = CheckpointReader(folder / BASE), parameter_axes(model)
    if not base:
        raise UserError(f"{folder / BASE} has no complete checkpoint, but {folder} holds adapters only; restore it.")
    held, shapes = shapes, jax.tree.map(lambda x, own: x.update(dtype=own.dtype), shapes, abstract_params(model))
    frozen = base.restore_params(base.step(), shapes)
    adapters = jax.eval_shape(lambda params: init_adapters(jax.random.key(0), params, axes, config.lora), shapes)
    mesh = next((leaf.sharding.mesh for leaf in jax.tree.leaves(shapes) if leaf.sharding is not None), None)
    if mesh is not None:
        adapters = abstract(adapters, shardings(adapters, {**axes, **adapter_axes(axes, config.lora)}, mesh))
    merged = merge(frozen, checkpoints.restore_params(step, adapters), config.lora)
    merged = jax.tree.map(lambda x, struct: x.astype(struct.dtype), merged, held)
    return merged if convert is None else convert(merged)


def read_tokenizer(folder: Path, required: bool = False) -> Tokenizer | None:
    """Return the tokenizer of a run; None if it has none.

    Raises:
      UserError: the tokenizer has changed, cannot be read, or is required and missing.
    """
    if not required and not (folder / TOKENIZER).exists():
        return None
    path = _verified(folder, TOKENIZER)
    if TOKENIZER_CONFIG in _checksums(folder) or (folder / TOKENIZER_CONFIG).exists():
        _verified(folder, TOKENIZER_CONFIG)
    return Tokenizer.load(path)


def _verified(folder: Path, name: str, remedy: str = "") -> Path:
    """Return the path of a file in a run's folder, verified by its checksum.

    Raises:
      UserError: the file is missing or has changed, or `CHECKSUMS` is missing or cannot be read.
    """
    file = folder / name
    if not file.is_file() or sha256(file) != _checksums(folder).get(name):
        problem = f"{file} is missing, is not the one that this run was trained with, or has no checksum in {CHECKSUMS}"
        raise UserError(f"{problem}; restore both{remedy}, or train again.")
    return file


def _checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of a run's files by name; empty if they cannot be read."""
    try:
        checksums = parse_json((folder / CHECKSUMS).read_bytes())
    except (OSError, ValueError):
        return {}
    return checksums if isinstance(checksums, dict) else {}


def _read_classes(folder: Path) -> tuple[str, ...]:
    """Return the class names; empty if there is no such file."""
    if not (folder / CLASSES).exists():
        return ()
    return tuple(parse_json(_verified(folder, CLASSES, ", or remove it to use class numbers").read_bytes()))


def read_sampling(folder: Path) -> dict[str, float]:
    """Return the sampling settings of a run, by name; empty if it has none.

    Raises:
      UserError: the file cannot be read.
    """
    file = folder / SAMPLING
    if not file.exists():
        return {}
    try:
        settings = parse_json(file.read_bytes())
        if not isinstance(settings, dict) or any(type(value) not in (int, float) for value in settings.values()):
            raise ValueError("it is not an object of numbers")
    except (OSError, ValueError) as error:
        problem = f"{file} cannot be read as sampling settings ({error})"
        raise UserError(f'{problem}; mend it, such as {{"temperature": 0.6, "top_p": 0.95}}, or remove it.') from error
    return settings


def load_data(
    folder: Path | None, config: Config, fixed: Container[str] | None = None, tokenizer: Tokenizer | None = None
) -> Dataset:
    """Return the data of a config, tokenized with the run's own tokenizer.

    Args:
      folder: folder of the run; None for a new run, whose model is then the data's `model`.
      fixed: for a new run, as in `DataConfig.load`.
      tokenizer: for a new run, tokenizer of the pretrained model, if any.

    Raises:
      UserError: the tokenizer is missing or cannot be read; or see `DataConfig.load`.
    """
    if folder is None:
        return config.data.load(config.model, config.train.batch_size, config.seed, tokenizer, fixed)
    tokenizer = read_tokenizer(folder, config.model.contract.vocab_size is not None)
    return config.data.load(config.model, config.train.batch_size, config.seed, tokenizer)


def abstract_params(model: nn.Module) -> Params:
    """Return the shapes and dtypes of the parameters, a tree of `ShapeDtypeStruct`."""
    return trace_init(model).params


def parameter_order(model: nn.Module) -> list[str]:
    """Return the dotted names of the parameters in the order of their first use, followed by those of the model itself,
    such as the unembedding."""
    by_module = unflatten_dict(trace_init(model).axes, sep=".")
    return sorted(map(dotted, flatten_dict(by_module)), key=lambda name: "." not in name)


def count_parameters(params: Params) -> int:
    """Return the total number of elements in a tree of arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def create_run(
    folder: Path, config: Config, tokenizer: Tokenizer | None, allow_suffix: bool, classes: Sequence[str] = (),
    params: Params | None = None, step: int = 0, sampling: Mapping[str, float] | None = None,
) -> Path:  # fmt: skip
    """Create a run's folder with its config, tokenizer, class names, sampling settings and checksums; return its path.

    A rename publishes the complete folder. An existing folder, even one that another process creates meanwhile, is left
    unchanged: with `allow_suffix`, the next free number is appended to the name.

    Args:
      params: parameters for a checkpoint without optimizer state; None for no checkpoint.
      step: step of that checkpoint.
      sampling: sampling settings that the model was published with; none for no such file.

    Raises:
      UserError: the folder exists.
      TypeError: the config changes in a JSON round trip (a model from another package).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=folder.parent))
    try:
        scratch.chmod(0o755)
        write_config(scratch, config)
        if tokenizer is not None:
            tokenizer.save(scratch / TOKENIZER)
        if classes:
            write_atomically(scratch / CLASSES, json.dumps(list(classes), indent=2) + "\n")
        if sampling:  # without a checksum, as the user may change them
            write_atomically(scratch / SAMPLING, json.dumps(dict(sampling), indent=2) + "\n")
        files = (TOKENIZER, TOKENIZER_CONFIG, CLASSES)
        checksums = {name: sha256(scratch / name) for name in files if (scratch / name).exists()}
        write_atomically(scratch / CHECKSUMS, json.dumps(checksums, indent=2) + "\n")
        if params is not None:
            largest = max((leaf.nbytes for leaf in jax.tree.leaves(params)), default=0)
            with CheckpointManager(scratch, max_gb=1 + largest // 10**9) as checkpoints:
                checkpoints.save(step, params, None, {"step": step}, None)
        if read_config(scratch) != config:
            raise TypeError(f"the config of {folder} changes in a JSON round trip; use plain field types")
        path, number = folder, 1
        while True:
            if not path.exists():
                try:
                    scratch.rename(path)
                    return path
                except OSError:
                    if not path.exists():
                        raise
            if not allow_suffix:
                raise _exists_error(folder)
            number += 1
            path = folder.with_name(f"{folder.name}-{number}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _exists_error(folder: Path) -> UserError:
    return UserError(
        f"{folder} exists; choose another folder, or continue a training there with {resume_fields(folder)}"
    )


def check_can_create(folder: Path, allow_suffix: bool = False) -> None:
    """Raise `UserError` if `create_run` could not create a run's folder."""
    if folder.exists() and not allow_suffix:
        raise _exists_error(folder)
    parent = next((path for path in folder.absolute().parents if path.exists()), Path("/"))
    try:
        tempfile.TemporaryDirectory(prefix=SCRATCH, dir=parent).cleanup()
    except OSError as error:
        raise UserError(
            f"{folder} cannot be created: {parent} is not writable ({error.strerror}); choose another `run`, or make "
            "it writable."
        ) from error


def write_config(folder: Path, config: Config) -> None:
    """Write a config as JSON."""
    write_atomically(folder / CONFIG, json.dumps(to_dict(config), indent=2) + "\n")


def read_config(folder: Path) -> Config:
    """Return the config of a run. No code in its folder is executed; classes from elsewhere are imported as in
    `find_class`.

    Raises:
      UserError: the folder is not a run, or its config does not match this version.
    """
    file = folder / CONFIG
    if not file.is_file():
        reason = "is not a run: it has no config.json" if folder.exists() else "does not exist"
        near = ", ".join(sorted(str(p.parent) for p in folder.parent.glob(f"[!.]*/{CONFIG}"))[:5])
        remedy = f"runs there: {near}" if near else "train one with the command train"
        raise UserError(f"{run_name(folder)} {reason}; {remedy}.")
    try:
        values = dict(parse_json(file.read_bytes()))
        for field, base in (("model", ModelConfig), ("data", DataConfig), ("optimizer", OptimizerConfig)):
            part = dict(values[field])
            kind, part = convert(field, str(part.pop("kind", kind_of(base))), part)
            values[field] = from_dict(find_class(kind, base, folder), part, f"{file}: {field}")
        values["train"] = convert_train(dict(values.get("train", {})))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{file} cannot be read as a run's config ({type(error).__name__}: {error}); restore the one that was "
            "written with the run, or train again."
        ) from error
    return from_dict(Config, values, str(file))


def latest_run(parent: Path, with_checkpoint: bool = False) -> Path:
    """Return the most recently written run in a folder.

    Args:
      with_checkpoint: prefer runs with a checkpoint.

    Raises:
      UserError: there is no run.
    """
    runs = list(parent.glob(f"[!.]*/{CONFIG}"))  # names with a dot are incomplete
    if with_checkpoint:
        runs = [file for file in runs if CheckpointReader(file.parent)] or runs
    if not runs:
        raise UserError(f"there is no run below {parent}; name a run's folder, or train one with the command train.")
    newest = max(
        runs, key=lambda file: (file.parent / METRICS if (file.parent / METRICS).exists() else file).stat().st_mtime
    )
    return newest.parent
