"""Configs of a run, its data and its training: frozen dataclasses, changed with `dataclasses.replace`, stored as JSON.

Configs of models are defined in `jaxformer/models/` and configs of datasets in `jaxformer/data/`; this file has their
base classes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from jaxformer.config.fields import (
    FieldDocs,
    Fraction,
    Length,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Range,
    Seed,
    Side,
    Size,
    check_fields,
    expand_sides,
)
from jaxformer.contract import Contract, Input, ParameterAxes, Task, token_inputs
from jaxformer.errors import UserError, abbreviate

if TYPE_CHECKING:
    import flax.linen as nn
    import optax

__all__ = [
    "ComputeConfig", "Config", "DataConfig", "ImageModelConfig", "LoraConfig", "ModelConfig", "OptimizerConfig",
    "Resizing", "TokenModelConfig", "TrainConfig",
]  # fmt: skip
MAX_PROFILED_STEPS = 100
"""Maximum number of steps in a trace, which the profiler holds in memory until it is written."""


@dataclass(frozen=True)
class ModelConfig(FieldDocs):
    """Base of all model configs."""

    def __post_init__(self) -> None:
        check_fields(self)

    def build(self, execution: Any = None) -> nn.Module:
        """Return the Linen module for one example; `execution` is a `jaxformer.nn.execution.Execution`, None for the
        default."""
        raise NotImplementedError

    @property
    def contract(self) -> Contract:
        """Task, inputs and capabilities of the model."""
        raise NotImplementedError

    def with_head(self, other: ModelConfig) -> ModelConfig:
        """Return the config of the model that fine-tuning this one trains in place of `other`: this one unless it
        supports a new head, that of `other`, or is not trained without one; the task is then another."""
        return self

    def is_same_model(self, other: object) -> bool:
        """Return True if another config, perhaps of another class, has the same model, apart from its initial
        parameters."""
        return self == other

    def example(self) -> tuple[np.ndarray, ...]:
        """Return the inputs of an example of maximum size, all zeros."""
        return tuple(np.zeros(x.shape, x.dtype) for x in self.contract.inputs)


@dataclass(frozen=True)
class TokenModelConfig(ModelConfig):
    """Base of the configs of token models; the default contract is that of a causal language model."""

    vocab_size: Length = 2048
    """Vocabulary size in tokens, including end-of-text."""
    context_length: Length = 32
    """Longest training sequence, in tokens."""

    @property
    def n_positions(self) -> int:
        """Maximum length of a prompt in tokens: the context length, unless a model can read more."""
        return self.context_length

    @property
    def n_predicted(self) -> int:
        """Number of tokens predicted per window, the last ones."""
        return self.context_length

    @property
    def contract(self) -> Contract:
        inputs = token_inputs(self.context_length, "tokens_T")
        return Contract(Task.CAUSAL_LM, inputs, vocab_size=self.vocab_size, n_classes=self.vocab_size)


@dataclass(frozen=True)
class Resizing(FieldDocs):
    """Resizing of images, before their centre is cropped to the size that a model reads, or framed in black."""

    size: tuple[Side, ...] = (256,)
    """Height and width in pixels; one value is that of the shorter side, with the proportions of the image."""
    resampling: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"] = "bicubic"
    """Filter of the interpolation, one of Pillow's."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.size) not in (1, 2):
            raise UserError(f"size is {self.size}; give a height and a width, or one number for the shorter side.")

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of an image after resizing."""
        if len(self.size) == 2:
            return self.size
        (short,) = self.size
        return (int(short * height / width), short) if width <= height else (short, int(short * width / height))


@dataclass(frozen=True)
class ImageModelConfig(ModelConfig):
    """Base of the configs of image and video classifiers."""

    image_size: tuple[Side, ...] = (224, 224)
    """Height and width in pixels; one value sets both."""
    channels: Size = 3
    """Colour channels: 1 (grayscale) or 3 (RGB)."""
    n_classes: Annotated[NonNegative, Range(most=2**20)] = 1000
    """Number of classes; 0 for a model without a head, whose output is the features of the image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expand_sides(self, "image_size")

    @property
    def contract(self) -> Contract:
        pixels = Input("pixels", (*self.image_size, self.channels), "uint8")
        return Contract(Task.IMAGE_CLASSIFICATION, (pixels,), n_classes=self.n_classes)


Fixed = Container[str] | None
"""Names of the model's fields that are not inferred from the data; None for all but the vocabulary size."""


@dataclass(frozen=True)
class DataConfig(FieldDocs):
    """Base of all data configs."""

    @property
    def has_segments(self) -> bool:
        """True if examples are packed, as in `jaxformer.data.packing`."""
        return False

    def __post_init__(self) -> None:
        check_fields(self, "data.")

    def load(self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Any = None, fixed: Fixed = None) -> Any:
        """Return a `jaxformer.data.dataset.Dataset`, whose batches have the inputs of its `model`.

        Args:
          tokenizer: tokenizer of a resumed run; None to train one on the training split, if there are tokens.
          fixed: names of the model's fields, such as `image_size`, that are not inferred from the data.

        Raises:
          UserError: the data cannot be read, or the model does not match it.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class OptimizerConfig(FieldDocs):
    """Optimizer (optax) and learning-rate schedule."""

    name: Literal["nesterov_sgd", "adamw", "muon", "lion", "schedule_free"] = "nesterov_sgd"
    """Optimizer. muon updates matrices, and leaves token embeddings, the unembedding and vectors to adamw;
    schedule_free averages the iterates of adamw."""
    learning_rate: PositiveFloat = 0.05
    """Peak learning rate, reached at the end of the warm-up."""
    schedule: Literal["constant", "cosine", "linear", "wsd", "inverse_sqrt"] = "constant"
    """Learning-rate schedule after the warm-up: constant, half a cosine, linear decay, constant and then linear decay
    (wsd: warmup-stable-decay), or proportional to 1/sqrt(step)."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up; the first step has a learning rate of learning_rate/warmup_steps."""
    decay_fraction: Annotated[float, Range(above=0, most=1, hint=", such as 0.2")] | None = None
    """Fraction of all steps, at the end, over which 'wsd' decays; 0.2 by default."""
    final_fraction: NonNegativeFloat = 0.0
    """Final learning rate of 'cosine', 'linear' and 'wsd', as a fraction of the peak."""
    momentum: Fraction = 0.9
    """Momentum of nesterov_sgd, and of muon for matrices (0.95 in its paper)."""
    b1: Fraction = 0.9
    """Momentum of adamw, of muon's other parameters and of lion's update; interpolation factor of schedule_free."""
    b2: Fraction = 0.95
    """Decay rate of the squared gradients in adamw, muon's other parameters and schedule_free, and of lion's momentum
    (0.99 in its paper)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, on matrices and embeddings, never on gains, biases or positions; not for nesterov_sgd."""
    clip_norm: Annotated[float, Range(above=0, hint=", or none to disable it")] | None = None
    """Maximum global norm of the gradient (gradient clipping); none for no clipping."""
    base_width: Positive | None = None
    """Model width at which learning_rate was tuned. At width d_model, the learning rate of matrices that sum over the
    width is multiplied by base_width / d_model (Yang et al. 2022, table 3, Adam), or by its square root if muon updates
    them."""

    def __post_init__(self) -> None:
        check_fields(self, "optimizer.")
        is_sgd, averages, schedule = self.name == "nesterov_sgd", self.name == "schedule_free", self.schedule
        has_width, has_decay = self.base_width is not None, self.decay_fraction is not None
        own_rule = type(self).rule is not OptimizerConfig.rule
        own_schedule = type(self).make_schedule is not OptimizerConfig.make_schedule
        no_end = schedule not in ("cosine", "linear", "wsd")
        from_warmup = schedule == "inverse_sqrt" and not self.warmup_steps
        conflicts = [
            (has_width and (is_sgd or own_rule), "base_width", f"{self.name} does not scale by width; omit it"),
            (self.weight_decay and is_sgd, "weight_decay", "nesterov_sgd has none; set it to 0"),
            (self.final_fraction and no_end, "final_fraction", "only cosine, linear and wsd end there; set it to 0"),
            (has_decay and schedule != "wsd", "decay_fraction", "only wsd has a decay; set it to none"),
            (from_warmup, "warmup_steps", "inverse_sqrt decays from there on; set at least 1"),
            (averages and own_schedule, "name", "it averages instead of following a schedule; choose another"),
            (averages and schedule != "constant", "schedule", "schedule_free averages instead; set it to constant"),
            (averages and not self.b1, "b1", "schedule_free divides by it; set it above 0, such as 0.9"),
        ]
        for is_met, name, reason in conflicts:
            if is_met:
                raise UserError(f"`optimizer.{name}` is {getattr(self, name)}, but {reason}.")

    def rule(self, schedule: optax.Schedule, axes: Mapping[str, ParameterAxes]) -> optax.GradientTransformation | None:
        """Return the optax transformation of a subclass, without gradient clipping; None for the one selected by
        `name`.

        Args:
          schedule: learning rate by optimizer step, counted from 0; its count must be in the optimizer's state, as with
            `optax.scale_by_learning_rate`.
          axes: `ParameterAxes` of each parameter by its dotted name.
        """
        return None

    def make_schedule(self, steps: int) -> optax.Schedule | None:
        """Return the learning-rate schedule of a subclass for `steps` optimizer steps, a function of the step counted
        from 0, which `jax.jit` can trace; None for the one selected by `schedule`.

        With a schedule of its own, a subclass has no use for `schedule`, `warmup_steps`, `decay_fraction` and
        `final_fraction` except as it reads them.
        """
        return None

    def decay_steps(self, steps: int) -> int:
        """Return the number of steps over which 'wsd' decays, out of `steps` in all."""
        return max(1, round((self.decay_fraction or 0.2) * steps))


@dataclass(frozen=True)
class TrainConfig(FieldDocs):
    """Batch size, intervals in optimizer steps, and responses to failures of training."""

    batch_size: Size = 32
    """Examples per batch, over all devices."""
    log_every: Positive = 10
    """Steps between log lines."""
    eval_every: NonNegative = 100
    """Steps between evaluations (validation loss, attention entropy); 0: none, not even at the end."""
    eval_examples: Positive = 256
    """Validation examples per evaluation; the last evaluation uses all."""
    report_every: NonNegative = 500
    """Steps between tables of update ratios and between sample generations, both also at step 100; 0: none, and no
    report.html or initialisation check."""
    gradients_every: NonNegative = 50
    """Steps between rows of the log with the norms of gradient, weights and update of each parameter; earlier rows come
    after 1, 2, 4, ... times log_every steps; 0: none."""
    sharpness_every: NonNegative = 0
    """Steps between measurements of the sharpness, the largest eigenvalue of the Hessian of the loss on some training
    examples, each as long as some 20 steps; 0: none."""
    checkpoint_every: NonNegative = 100
    """Steps between checkpoints; 0: only at the end and when training is interrupted."""
    snapshots: Literal["none", "doubling"] = "none"
    """Steps after which the parameters alone are also saved, for good: none, or steps 0, 1, 2, 4, 8, ... and the last
    (doubling)."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Response to a non-finite loss or gradient: stop and report its origin, or skip the step."""
    max_skips: Positive = 10
    """Maximum number of consecutive steps that 'skip' may skip."""
    divergence: Literal["stop", "warn", "continue"] = "stop"
    """Response to a finite training loss that stays far above its minimum: stop, warn once, or ignore it."""
    skip_batches: NonNegative = 0
    """Batches of data to skip: step k trains on batch k + skip_batches. Rolling back with `skip_batches`
    increases it."""
    label_smoothing: Fraction = 0.0
    """Fraction of each target's probability spread over all classes (Szegedy et al. 2016); the logged loss excludes
    it."""
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Loggers that receive the metrics in addition to metrics.jsonl; each needs the extra of the same name."""
    profile: str | None = None
    """Steps START:STOP to trace with the profiler, such as 10:13 for steps 10, 11 and 12, into the run's folder."""
    show_entropy: bool = False
    """Print the attention entropy of each head, in nats, at every evaluation; metrics.jsonl always has it."""
    sample_prompt: str = "The"
    """Prompt of the samples generated during training."""
    sample_tokens: Annotated[Positive, Range(most=2**16)] = 48
    """Tokens per sample."""

    def __post_init__(self) -> None:
        check_fields(self, "train.")
        if not self.sample_prompt:
            raise UserError("`train.sample_prompt` is empty; give it at least one character.")
        steps = self.profiled_steps
        if self.profile is not None and not (steps and steps[0] > 0 and len(steps) <= MAX_PROFILED_STEPS):
            raise UserError(
                f"`train.profile` is {abbreviate(self.profile)}; it must be START:STOP with 1 <= START < STOP, at most "
                f"{MAX_PROFILED_STEPS} steps, such as 10:13 for steps 10, 11 and 12."
            )

    @property
    def profiled_steps(self) -> range:
        """Steps to trace, parsed from `profile`; empty for none."""
        numbers = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", self.profile or "")
        return range(int(numbers[1]), int(numbers[2])) if numbers else range(0)


@dataclass(frozen=True)
class LoraConfig(FieldDocs):
    """Low-rank adaptation (Hu et al. 2021): if rank is set, only adapters of some matrices are trained."""

    rank: Annotated[NonNegative, Range(most=2**20)] = 0
    """Rank of the adapters; 0 trains all parameters."""
    alpha: PositiveFloat = 16.0
    """Scale of the adapters: a matrix W becomes W + (alpha / rank) A B."""
    matrices: tuple[str, ...] = ("matrix",)
    """Matrices with adapters. Each entry is a name such as W_Q, a pattern such as 'blocks.*.mlp.*', or a role: matrix
    (all between the embedding and the logits) or embedding."""
    whole: tuple[str, ...] = ()
    """Parameters trained in full beside the adapters, each a name or a pattern such as 'head.*'; by default, those of a
    head that the pretrained model does not have."""

    def __post_init__(self) -> None:
        check_fields(self, "lora.")
        if not self.matrices:
            raise UserError("`lora.matrices` is empty; name at least one matrix, such as W_Q.")


@dataclass(frozen=True)
class ComputeConfig(FieldDocs):
    """Settings of speed, memory and rounding, which leave the trained function unchanged."""

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of matmuls (mixed precision); auto is bfloat16 on GPU and TPU, float32 on CPU. Parameters,
    optimizer state, softmax, norm statistics and the loss are always float32."""
    attention: Literal["auto", "xla", "blockwise", "cudnn", "splash"] = "auto"
    """Attention implementation; auto is the device's fused kernel (cudnn on GPUs, splash on TPUs) if it supports the
    model and passes a trial, and otherwise xla or, for long sequences, blockwise."""
    remat: Literal["none", "dots", "block"] = "none"
    """Activation checkpointing (gradient checkpointing). Saved for the backward pass: all activations (none), outputs
    of matmuls with weights (dots), or only the input of each block (block); dots and block also save the output of
    fused or blockwise attention and one value per query and head."""
    scan_blocks: bool = False
    """Scan over the blocks, so that only one is compiled, which speeds up compilation of deep models."""
    grad_accumulation_steps: Size = 1
    """Microbatches per batch (gradient accumulation). Losses over the whole batch (load balancing of experts, CLIP's
    contrastive loss) are computed per microbatch; everything else is unchanged."""
    deterministic: bool = False
    """Make runs on GPUs bit-reproducible, at the cost of speed: a fixed order of sums, and no autotuning. Not needed on
    CPUs."""

    def __post_init__(self) -> None:
        check_fields(self, "compute.")


@dataclass(frozen=True)
class Config(FieldDocs):
    """A training run: everything that its results depend on."""

    name: str
    """Name of the run's folder."""
    model: ModelConfig
    """Model."""
    data: DataConfig
    """Data."""
    steps: Positive
    """Optimizer steps."""
    seed: Seed = 0
    """Seed of the initialisation, the order of the data and dropout."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and learning-rate schedule."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Batch size, intervals, and responses to failures."""
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    """Speed, memory and rounding."""
    mesh: str = ""
    """Device mesh, such as 'data=2,fsdp=4', with axes data, fsdp, expert and tensor. Remaining devices are
    data-parallel, as all are by default. In plan, 'auto' ranks all meshes."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adaptation."""
    init_from: str | None = None
    """Folder of a run or of a published model (config.json, safetensors, tokenizer.json), whose parameters (a run's
    last), model and tokenizer training starts from, at step 0; by default, parameters are randomly initialised."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise UserError(f"`name` is {self.name!r}; it names a folder: letters, digits, '_', '-' and '.' only.")
        if self.lora.rank and self.init_from is None:
            remedy = "name a run with `init_from`, or set it to 0"
            raise UserError(f"`lora.rank` is {self.lora.rank}, but there is nothing to adapt; {remedy}.")
        if (base_width := self.optimizer.base_width) is not None:
            if self.lora.rank:
                remedy = "omit one of them"
                raise UserError(
                    f"`optimizer.base_width` is {base_width}, but adapters have a width of their own; {remedy}."
                )
            if self.model.contract.scaled_width is None:
                reason = f"but this {type(self.model).__name__} has several widths, or logits from its embedding"
                raise UserError(f"`optimizer.base_width` is {base_width}, {reason}; omit it.")
        profiled = self.train.profiled_steps
        if profiled and profiled[-1] > self.steps:
            raise UserError(
                f"`train.profile` is {self.train.profile}, but the last step is {self.steps}; name earlier steps, or "
                "none."
            )
        stable_end = self.steps - self.optimizer.decay_steps(self.steps)
        if self.optimizer.schedule == "wsd" and (warmup := self.optimizer.warmup_steps) > stable_end:
            remedy = "shorten the warm-up or decay_fraction, or train for more steps"
            conflict = f"but 'wsd' decays from step {stable_end} on"
            raise UserError(f"`optimizer.warmup_steps` is {warmup}, {conflict}; {remedy}.")
