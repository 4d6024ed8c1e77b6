"""What a run is made of, as frozen dataclasses: change one with `dataclasses.replace`, store it as JSON.

Each model keeps its own config beside it in `jaxformer/models/`, and each kind of data in `jaxformer/data/`; here
stands only what all of them share.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
import typing
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf, isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np

from jaxformer.errors import UserError, abbreviate

if TYPE_CHECKING:
    import flax.linen as nn

T = TypeVar("T")
MAX_INTEGER = 2**31 - 1
"""Largest int32, in which devices count."""
MAX_SIZE = 2**20
"""Largest width of a model, and number of its heads, classes or experts."""
LIMITS: Mapping[str, int] = {
    **dict.fromkeys(("n_blocks", "n_encoder_blocks", "n_decoder_blocks", "n_temporal_blocks", "n_layers"), 2**10),
    **dict.fromkeys(("image_size", "patch_size", "n_frames", "tubelet_frames", "shift", "max_speed"), 2**14),
    **dict.fromkeys(("vocab_size", "context_length", "window", "n_pairs", "n_held_out"), 2**24),
    **dict.fromkeys(("sample_tokens",), 2**16),
    **dict.fromkeys(("batch_size", "grad_accumulation_steps", "processes"), 2**20),
    "seed": 2**32 - 1,
    "heartbeat_seconds": 86_400,
}
"""Largest integer for each name of a field, in whatever config: far beyond any model there is, and small enough that
what does not fit is refused at once. Others: `MAX_SIZE` in a model's config, `MAX_INTEGER` elsewhere."""


@dataclass(frozen=True)
class ModelConfig:
    """What the trainer needs to know of every model."""

    objective: ClassVar[str] = "cross_entropy"
    """What it is trained on; a name in `jaxformer.models.objective.OBJECTIVES`."""

    def __post_init__(self) -> None:
        check_fields(self)

    def build(self, execution: Any = None) -> nn.Module:
        """The Linen module for one example, computed as `jaxformer.nn.execution.Execution` says."""
        raise UserError(f"{type(self).__name__} describes no model; give one from jaxformer.models.")

    def example(self) -> tuple[np.ndarray, ...]:
        """What the module is called with: an example of the largest size, in which all is zero."""
        raise UserError(f"{type(self).__name__} describes no model; give one from jaxformer.models.")


@dataclass(frozen=True)
class TokenModelConfig(ModelConfig):
    """What all models of tokens share; one that is called with more than a sequence overrides `example`."""

    vocab_size: int = 2048
    """Number of tokens, the end-of-text token included."""
    context_length: int = 32
    """Longest sequence the model is trained on, in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "vocab_size", "context_length")

    @property
    def n_predicted(self) -> int:
        """How many of the tokens in a window it predicts: the last ones."""
        return self.context_length

    def example(self) -> tuple[np.ndarray, ...]:
        return (np.zeros(self.context_length, np.int32),)


@dataclass(frozen=True)
class ImageModelConfig(ModelConfig):
    """What all models share that tell what an image or a video shows."""

    image_size: tuple[int, ...] = (224, 224)
    """Height and width in pixels; one number stands for both."""
    channels: int = 3
    """1 for grey, 3 for colour."""
    n_classes: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "channels", "n_classes")
        expand_sides(self, "image_size")

    def example(self) -> tuple[np.ndarray, ...]:
        return (np.zeros((*self.image_size, self.channels), np.uint8),)


@dataclass(frozen=True)
class DataConfig:
    """What the trainer needs to know of every kind of data; each stands beside its reader in `jaxformer/data/`."""

    def __post_init__(self) -> None:
        check_fields(self)

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Any = None,
        fixed: Container[str] | None = None,
    ) -> Any:  # fmt: skip
        """Return a `jaxformer.data.dataset.Dataset`, in batches of what its `model` is called with.

        Args:
          tokenizer: of a run that goes on; without it, one learns from the training part, where there are tokens.
          fixed: names of the model's fields, such as `image_size`, that must stay as they are where the data would have
            them otherwise; without it, all but the size of a vocabulary.

        Raises:
          UserError: it cannot be read, or is not what the model takes.
        """
        raise UserError(f"{type(self).__name__} describes no data; give one from jaxformer.data.")


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optax optimizer, and its schedule."""

    name: Literal["nesterov_sgd", "adamw", "muon", "lion", "schedule_free"] = "nesterov_sgd"
    """muon is for matrices, with adamw for embeddings of tokens, logits and vectors; schedule_free averages what adamw
    finds."""
    learning_rate: float = 0.05
    """What the warm-up rises to."""
    schedule: Literal["constant", "cosine", "wsd", "inverse_sqrt"] = "constant"
    """After the warm-up: level, half a cosine down, level and then a line down (wsd), or down with 1/sqrt(step)."""
    warmup_steps: int = 0
    """Steps of linear rise; the first is taken at 1/warmup_steps of learning_rate."""
    decay_fraction: float | None = None
    """Share of all steps, at the end, over which 'wsd' falls; without it, 0.2."""
    final_fraction: float = 0.0
    """Where 'cosine' and 'wsd' end, as a share of learning_rate."""
    momentum: float = 0.9
    """For nesterov_sgd and the matrices of muon, whose authors take 0.95."""
    b1: float = 0.9
    """Momentum of adamw, of muon's rest and in lion's steps; schedule_free takes gradients so near to its average."""
    b2: float = 0.95
    """Decay of the squared gradients in adamw, muon's rest and schedule_free; of lion's momentum (its paper: 0.99)."""
    weight_decay: float = 0.0
    """For all but nesterov_sgd; on matrices only, never on gains, biases or positions."""
    clip_norm: float | None = None
    """Gradients longer than this (global norm) are shortened to it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.learning_rate > 0:
            raise UserError(f"optimizer.learning_rate is {self.learning_rate}; it must be above 0.")
        at_least(self, 0, "warmup_steps", "weight_decay", "final_fraction")
        for name in ("momentum", "b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer.{name} is {getattr(self, name)}; it must be at least 0 and below 1.")
        if self.weight_decay and self.name == "nesterov_sgd":
            raise UserError(f"optimizer.weight_decay is {self.weight_decay}, but {self.name} has none; set it to 0.")
        if self.final_fraction and self.schedule not in ("cosine", "wsd"):
            raise UserError(
                f"optimizer.final_fraction is {self.final_fraction}, but only cosine and wsd end there; set it to 0."
            )
        if self.decay_fraction is not None:
            if self.schedule != "wsd":
                raise UserError(
                    f"optimizer.decay_fraction is {self.decay_fraction}, but only wsd has such an end; set it to none."
                )
            if not 0 < self.decay_fraction <= 1:
                raise UserError(
                    f"optimizer.decay_fraction is {self.decay_fraction}; it must be above 0 and at most 1, such as 0.2."
                )
        if self.schedule == "inverse_sqrt" and not self.warmup_steps:
            raise UserError("optimizer.warmup_steps is 0, but 'inverse_sqrt' falls from there on; set at least 1.")
        if self.name == "schedule_free":
            if self.schedule != "constant":
                raise UserError(
                    f"optimizer.schedule is {self.schedule!r}, but schedule_free averages instead; set it to constant."
                )
            if not self.b1:
                raise UserError("optimizer.b1 is 0, but schedule_free divides by it; set it above 0, such as 0.9.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"optimizer.clip_norm is {self.clip_norm}; it must be above 0, or none to switch it off.")

    def decay_steps(self, steps: int) -> int:
        """Over how many of all steps 'wsd' falls."""
        return max(1, round((self.decay_fraction or 0.2) * steps))


@dataclass(frozen=True)
class TrainConfig:
    """How often what happens during training. Counts are in optimizer steps."""

    batch_size: int = 32
    """Examples in a batch, over all devices together."""
    log_every: int = 10
    eval_every: int = 100
    """Steps between evaluations (held-out loss, attention entropy); 0: none, also not at the end."""
    eval_examples: int = 256
    """Held-out examples in a validation on the way; the last one takes all."""
    report_every: int = 500
    """Steps between tables of update ratios and between sample generations, the first of which come at step 100; 0:
    none, nor plots, report.html and the initialisation check."""
    gradients_every: int = 50
    """Steps between rows of the log with the norms of the gradient, weights and update of each parameter; 0: none on
    the way."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0: only at the end, and where training is interrupted."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Response to a loss or gradient that is not finite: stop and look for the cause, or leave that step out."""
    max_skips: int = 10
    """With 'skip', how many steps in a row may be left out."""
    divergence: Literal["stop", "warn", "continue"] = "stop"
    """Response to a training loss that is finite and stays far above its minimum: stop, warn once, or ignore it."""
    skip_batches: int = 0
    """Batches of the data left out: step k learns from batch k + skip_batches. Rolling back with --skip-batches adds
    to it."""
    label_smoothing: float = 0.0
    """Share of each target that is spread over all classes (Szegedy et al. 2016); the loss in the log is without."""
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where the numbers of metrics.jsonl go besides; each needs the extra that is called like it."""
    show_entropy: bool = False
    """Print the attention entropy of each head, in nats, with every evaluation; `metrics.jsonl` has it always."""
    sample_prompt: str = "The"
    sample_tokens: int = 48

    def __post_init__(self) -> None:
        check_fields(self)
        at_least(self, 1, "batch_size", "log_every", "eval_examples", "max_skips", "sample_tokens")
        at_least(self, 0, "eval_every", "report_every", "gradients_every", "checkpoint_every", "skip_batches")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and below 1.")
        if not self.sample_prompt:
            raise UserError("train.sample_prompt is empty; give it at least one character.")
        if any("\ud800" <= character <= "\udfff" for character in self.sample_prompt):
            raise UserError("train.sample_prompt holds bytes that are not UTF-8; give it as UTF-8.")


@dataclass(frozen=True)
class ComputeConfig:
    """How it is computed: speed, memory and rounding; what is learned stays the same."""

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the products of matrices; auto is bfloat16 on GPU and TPU, float32 on CPU. Parameters, optimizer state,
    softmax, the statistics of norms and the loss are float32 always."""
    attention: Literal["auto", "xla", "blockwise", "cudnn", "splash"] = "auto"
    """Auto is the fused kernel of the device, if it works there."""
    remat: Literal["none", "dots", "block"] = "none"
    """What the backward pass finds stored: all; products with weights; only the input of each block."""
    scan_blocks: bool = False
    """Compile one block and loop over it: quicker to compile where there are many."""
    grad_accumulation_steps: int = 1
    """Parts of a batch to take one after the other, adding up their gradients. What looks at a batch as a whole sees
    one part at a time: the balance of experts, and CLIP, which tells each pair from others. Else nothing changes."""

    def __post_init__(self) -> None:
        check_fields(self)
        at_least(self, 1, "grad_accumulation_steps")


@dataclass(frozen=True)
class Config:
    """One training run. Everything that can change its numbers stands here."""

    name: str
    """What the run's folder is called."""
    model: ModelConfig
    data: DataConfig
    steps: int
    """Optimizer steps."""
    seed: int = 0
    """For the weights, the order of the data and dropout."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    mesh: str = ""
    """How the devices share the work, such as 'data=2,fsdp=4'; the axes are data, fsdp, expert and tensor.
    Without it, or for what it leaves, all devices split the batch (data)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise UserError(f"name is {self.name!r}; it names a folder: letters, digits, '_', '-' and '.' only.")
        at_least(self, 1, "steps")
        at_least(self, 0, "seed")
        stable_end = self.steps - self.optimizer.decay_steps(self.steps)
        if self.optimizer.schedule == "wsd" and self.optimizer.warmup_steps > stable_end:
            raise UserError(
                f"optimizer.warmup_steps is {self.optimizer.warmup_steps}, but 'wsd' falls from step {stable_end} on; "
                "shorten the warm-up or decay_fraction, or take more steps."
            )
        if self.train.batch_size % self.compute.grad_accumulation_steps:
            raise UserError(
                f"train.batch_size {self.train.batch_size} does not split into compute.grad_accumulation_steps "
                f"{self.compute.grad_accumulation_steps} equal parts; make it a multiple."
            )


def check_fields(config: object) -> None:
    """Raise `UserError` for the first field that has none of the values of its `Literal`, a number that is not finite,
    or, where it holds integers, one beyond its limit: see `LIMITS`. Scalars of NumPy count as numbers."""
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):  # type: ignore[arg-type]
        value, hint, most = getattr(config, f.name), hints[f.name], field_limit(config, f.name)
        values, hint = (value, typing.get_args(hint)[0]) if typing.get_origin(hint) is tuple else ((value,), hint)
        if typing.get_origin(hint) is Literal:
            for wrong in (v for v in values if v not in typing.get_args(hint)):
                choices = ", ".join(map(str, typing.get_args(hint)))
                raise UserError(f"{f.name} is {wrong!r}; it must be one of {choices}.")
        for number in _numbers(value):
            if isinstance(number, int) and _has_integers(hint) and number > most:
                raise UserError(f"{f.name} is {abbreviate(number)}; it must be at most {most}.")
            if not -sys.float_info.max <= number <= sys.float_info.max:
                raise UserError(f"{f.name} is {abbreviate(number)}; it must be a finite number.")


def field_limit(config: object, name: str) -> int:
    """Return the largest integer that a field may have."""
    return LIMITS.get(name, MAX_SIZE if isinstance(config, ModelConfig) else MAX_INTEGER)


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers in a value, however deep in tuples, as Python's."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _numbers(item)
    elif not isinstance(value, bool) and isinstance(value, Real):
        yield int(value) if isinstance(value, Integral) else float(value)


def _has_integers(hint: Any) -> bool:
    """Return whether a type is `int`, or a tuple or an option of it."""
    return hint is int or any(map(_has_integers, typing.get_args(hint)))


def expand_sides(config: object, *names: str) -> None:
    """Make a height and a width of fields that may hold one number for both, or raise `UserError`."""
    for name in names:
        value = getattr(config, name)
        sides = value if isinstance(value, tuple) else (value,)
        sides = sides * 2 if len(sides) == 1 else sides
        if len(sides) != 2 or min(sides) < 1:
            raise UserError(f"{name} is {value}; it must be a height and a width of at least 1 pixel, or one for both.")
        object.__setattr__(config, name, sides)


def at_least(config: object, limit: float, *names: str) -> None:
    """Raise `UserError` for the first of the named fields that is below the limit."""
    for name in names:
        if not getattr(config, name) >= limit:
            raise UserError(f"{name} is {getattr(config, name)}; it must be at least {limit}.")


def differences(a: object, b: object, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """The fields in which two configs differ, as `(dotted name, value in a, value in b)`."""
    if type(a) is not type(b) or not dataclasses.is_dataclass(a):
        return [] if a == b else [(prefix, a, b)]
    return [
        row
        for f in dataclasses.fields(a)
        for row in differences(getattr(a, f.name), getattr(b, f.name), f"{prefix}.{f.name}".lstrip("."))
    ]


def to_dict(config: object) -> dict[str, Any]:
    """Plain JSON types; what may be of several classes, a run's model and its data, has the name of its class as
    `kind`, `file.Class`."""
    assert dataclasses.is_dataclass(config)
    hints = typing.get_type_hints(type(config))
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        fields[f.name] = to_dict(value) if dataclasses.is_dataclass(value) else value
        if hints[f.name] in (ModelConfig, DataConfig):
            kind = f"{type(value).__module__.rpartition('.')[2]}.{type(value).__name__}"
            fields[f.name] = {"kind": kind, **fields[f.name]}
    return fields


def flatten(value: Any, name: str = "", separator: str = ".") -> dict[str, Any]:
    """A tree of JSON as leaves by their path; items of a list by their "name" if they have one, or their number."""
    if isinstance(value, dict):
        items: dict[Any, Any] = value
    elif isinstance(value, list):
        named = all(isinstance(x, dict) and "name" in x for x in value)
        items = {
            (x["name"] if named else i): {k: v for k, v in x.items() if k != "name"} if named else x
            for i, x in enumerate(value)
        }
    else:
        return {name: value}
    found: dict[str, Any] = {}
    for key, item in items.items():
        found |= flatten(item, f"{name}{separator}{key}" if name else str(key), separator)
    return found


def nonfinite_to_none(value: Any) -> Any:
    """A tree for JSON, which knows no number that is infinite or none: null instead."""
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: nonfinite_to_none(x) for name, x in value.items()}
    return [nonfinite_to_none(x) for x in value] if isinstance(value, list | tuple) else value


def from_dict(cls: type[T], values: Mapping[str, Any], where: str = "config") -> T:
    """The inverse of `to_dict` for a class whose fields are plain types or dataclasses.

    Fields that are left out keep their default. Raises `UserError` for an unknown name or a wrong type.
    """
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}."
            raise UserError(f"{where} has a field {abbreviate(name)} that {cls.__name__} does not know; {hint}")
    try:
        return cls(**{name: _typed(hints[name], value, f"{where}.{name}") for name, value in values.items()})
    except TypeError as error:
        raise UserError(f"{where} is incomplete: {error}.") from error


def _typed(hint: Any, value: Any, where: str) -> Any:
    """The value as the type asks for it (lists become tuples), or `UserError`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return from_dict(hint, value, where)
    elif origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _typed(next(a for a in args if a is not type(None)), value, where)
    elif origin is Literal:
        if value in args:
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_typed(args[0], v, where) for v in value)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if isinstance(value, float) or value.bit_length() < 1024 else inf
    elif type(value) is hint:
        return value
    raise UserError(f"{where} is {abbreviate(value)}, which is not {getattr(hint, '__name__', None) or hint}.")
