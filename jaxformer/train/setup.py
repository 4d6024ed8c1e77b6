"""Training setup: everything derived from a config and a device mesh, each part once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from jaxformer.config import ComputeConfig, Config
from jaxformer.contract import ParameterAxes, Task
from jaxformer.data.dataset import Batch
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.nn.execution import Execution
from jaxformer.nn.lora import adapter_axes, init_adapters, merge
from jaxformer.nn.parameter_norms import parameter_name, row_names
from jaxformer.nn.parameters import cast, parameter_axes, trace_init
from jaxformer.ops import workarounds
from jaxformer.parallel.memory import check_parameters
from jaxformer.parallel.mesh import abstract, batch_sharding, batch_shards, gather, shardings, specs_of
from jaxformer.runs.pretrained import Pretrained
from jaxformer.runs.run import abstract_params, parameter_order
from jaxformer.terminal import short_repr
from jaxformer.train.kernels import ChosenAttention, choose_attention
from jaxformer.train.optimizer import make_optimizer, make_schedule

BLOCK = re.compile(r"blocks_\d+$")
"""Pattern of block names; blocks gather their own parameters when they begin."""

ADAPTER_KEY_ID = 2**32 - 1
"""Value folded into the seed's key to initialise adapters; it is no step number, with which dropout keys are
derived."""


class TrainState(NamedTuple):
    """The arrays that training updates.

    A step whose loss or gradient norm is not finite leaves parameters and optimizer state unchanged. After more than
    `train.max_skips` of them in a row (or one, without 'skip'), no later step changes the state, so that the failing
    state can still be inspected and saved.
    """

    params: Params
    """Trained parameters, float32: the model's parameters or, with `lora`, the adapters; see
    `TrainSetup.model_params`."""
    opt_state: optax.OptState
    failures: jax.Array
    """Number of latest consecutive steps that were not finite, int32."""
    frozen_params: Params | None = None
    """With `lora`, the parameters that adapters are added to, which no step changes."""

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(frozen=True, eq=False)
class TrainSetup:
    """A config on a device mesh, passed to steps, evaluation, callbacks, plans and autopsies.

    Each part is derived once, on first use.

    Raises:
      UserError: the batch does not split evenly over the devices, or the model cannot read packed examples.
    """

    config: Config
    mesh: Mesh
    pretrained: Pretrained | None = None
    """Pretrained model that `config.init_from` names, from which the initial state is loaded."""

    def __post_init__(self) -> None:
        B, n_microbatches = self.config.train.batch_size, self.config.compute.grad_accumulation_steps
        n = batch_shards(self.mesh)
        if B % (n * n_microbatches):
            up = -(-B // (n * n_microbatches)) * n * n_microbatches
            also = f" in {n_microbatches} microbatches" if n_microbatches > 1 else ""
            raise UserError(
                f"`train.batch_size` {B} does not split over {n} devices{also}; use a multiple such as {up}."
            )
        if self.config.data.has_segments and not self.config.model.contract.has_segments:
            kind = type(self.config.model).__name__
            raise UserError(
                f"the data packs its examples, but this {kind} does not attend within segments; set "
                "`data.packing='windows'`, or use a decoder without a prefix."
            )

    @cached_property
    def compute_dtype(self) -> jnp.dtype:
        """Compute dtype of matmuls; see `resolve_precision`."""
        return resolve_precision(self.config.compute, self.mesh)

    @cached_property
    def schedule(self) -> optax.Schedule:
        """Learning rate by optimizer step, counted from 0."""
        return make_schedule(self.config.optimizer, self.config.steps)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Optimizer, including clipping and schedule."""
        width = self.config.model.contract.scaled_width
        return make_optimizer(self.config.optimizer, self.schedule, self.state_axes, width)

    @cached_property
    def model(self) -> nn.Module:
        """Model for one example on one device with plain execution, for initialisation and inspection."""
        return self.config.model.build()

    @cached_property
    def parameter_axes(self) -> Mapping[str, ParameterAxes]:
        """Declared axes of each parameter by its dotted name."""
        return parameter_axes(self.model)

    @cached_property
    def state_axes(self) -> Mapping[str, ParameterAxes]:
        """Axes of each parameter and each adapter by its dotted name."""
        axes = self.parameter_axes
        try:
            return {**axes, **adapter_axes(axes, self.config.lora)}
        except ValueError as error:  # names what the model does not have
            raise UserError(str(error)) from error

    @cached_property
    def parameter_order(self) -> list[str]:
        """Dotted names of the trained parameters in the order of their first use; see `run.parameter_order`."""
        names = parameter_order(self.model)
        if not self.config.lora.rank:
            return names
        trained = {*map(parameter_name, row_names(self.abstract_state.params))}
        return [part for name in names for part in (name, f"{name}.A", f"{name}.B") if part in trained]

    @cached_property
    def abstract_params(self) -> Params:
        """Shapes, dtypes and shardings of the model's parameters."""
        shapes = abstract_params(self.model)
        return abstract(shapes, shardings(shapes, self.parameter_axes, self.mesh))

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        shapes = jax.eval_shape(self._begin, self.abstract_params)
        return abstract(shapes, shardings(shapes, self.state_axes, self.mesh))

    @cached_property
    def state_shardings(self) -> TrainState:
        """`NamedSharding` of each array of the state."""
        return jax.tree.map(lambda x: x.sharding, self.abstract_state)

    def model_params(self, state: TrainState) -> Params:
        """Return the model's parameters in their shardings, for evaluation and sampling."""
        return self._merge(state.frozen_params, state.params) if self.config.lora.rank else state.params

    @cached_property
    def _merge(self) -> Callable[[Params, Params], Params]:
        merge_adapters = partial(merge, config=self.config.lora)
        return jax.jit(merge_adapters, out_shardings=jax.tree.map(lambda x: x.sharding, self.abstract_params))

    def check_devices(self) -> None:
        """Raise `UserError` if the parameters do not fit into memory, the configured attention cannot run, `lora`
        matches no matrix, or blocks that are to be scanned differ in shape."""
        if not self.config.lora.rank:  # frozen parameters have no gradients
            check_parameters(self.abstract_params, self.mesh.size, jax.local_devices()[0])
        self.attention, self.state_axes  # noqa: B018
        first: dict[str, Any] = {}
        for name, params in self.abstract_params.items() if self.config.compute.scan_blocks else ():
            shapes = jax.tree.map(jnp.shape, params)
            if BLOCK.search(name) and first.setdefault(BLOCK.sub("", name), shapes) != shapes:
                raise UserError("the blocks differ in shape and cannot be scanned; set `compute.scan_blocks=False`.")

    def init_state(self) -> TrainState:
        """Return the initial state in its sharding; random initialisation depends only on `config.seed`, not on the
        mesh.

        Raises:
          UserError: the parameters of `config.init_from` are missing or cannot be read.
        """
        if self.config.init_from is None:
            options = workarounds.run_once_options(self.mesh.devices.flat[0].platform)
            init = lambda: self._begin(self._init_params())  # noqa: E731
            return jax.jit(init, out_shardings=self.state_shardings, compiler_options=options)()
        params, loaded = self.load_params(), "frozen_params" if self.config.lora.rank else "params"
        without: dict[str, Any] = {loaded: None}
        # Each array of the state needs its own buffer, because a step donates them all.
        begin = lambda params: self._begin(jax.tree.map(jnp.copy, params))._replace(**without)  # noqa: E731
        state = jax.jit(begin, out_shardings=self.state_shardings._replace(**without))(params)
        return state._replace(**{loaded: params})

    def load_params(self) -> Params:
        """Return the model's parameters from `pretrained`, with new ones where that has none, as for another head.

        Raises:
          UserError: they are missing or cannot be read.
        """
        assert self.pretrained is not None, "init_from needs `pretrained`"
        loaded = flatten_dict(self.pretrained.read(self.abstract_params, self.config.model))
        new = {path: x.sharding for path, x in flatten_dict(self.abstract_params).items() if path not in loaded}
        if new:
            init = lambda: {path: flatten_dict(self._init_params())[path] for path in new}  # noqa: E731
            loaded |= jax.jit(init, out_shardings=new)()
        return unflatten_dict(loaded)

    def _init_params(self) -> Params:
        return self.model.init(jax.random.key(self.config.seed), *self.config.model.example())["params"]

    def _begin(self, params: Params) -> TrainState:
        """Return the initial state for a model's parameters, with adapters if `lora` is set."""
        if not self.config.lora.rank:
            return TrainState(params, self.optimizer.init(params), jnp.int32(0))
        key = jax.random.fold_in(jax.random.key(self.config.seed), ADAPTER_KEY_ID)
        adapters = init_adapters(key, params, self.parameter_axes, self.config.lora)
        return TrainState(adapters, self.optimizer.init(adapters), jnp.int32(0), params)

    @cached_property
    def attention(self) -> ChosenAttention:
        """Attention implementation on these devices; see `choose_attention`."""
        return choose_attention(self.config, self.mesh, self.compute_dtype)

    @cached_property
    def execution(self) -> Execution:
        """Execution of the model that steps apply to the result of `compute_params`, inside `mesh.on_each_shard`."""
        c, specs, mesh = self.config.compute, specs_of(self.abstract_params), self.mesh
        return Execution(
            self.attention.function,
            c.remat,
            c.scan_blocks,
            # A module without its own spec belongs to one that `compute_params` has gathered.
            lambda name, params: gather(params, specs[name], mesh) if name in specs else params,
            mesh.shape["expert"] if any("expert" in axes for axes in jax.tree.leaves(specs)) else 1,
        )

    def compute_params(self, params: Params, frozen: Params | None = None) -> Params:
        """Merge a device's shards of `TrainState.params` and `frozen_params`, cast them to the compute dtype and gather
        those outside blocks; see `execution`."""
        specs, mesh = specs_of(self.abstract_params), self.mesh
        params = params if frozen is None else merge(frozen, params, self.config.lora)
        params = cast(params, self.compute_dtype)
        if mesh.devices.flat[0].platform == "cpu":
            params = jax.tree.map(lambda w: workarounds.separate_gradient_transpose(w) if w.ndim == 2 else w, params)
        return {name: p if BLOCK.search(name) else gather(p, specs[name], mesh) for name, p in params.items()}

    def example_keys(self, step: jax.Array | int) -> jax.Array:
        """Return one dropout key per example of the whole batch, `(B,)`, independent of how the batch is split."""
        key = jax.random.fold_in(jax.random.key(self.config.seed), step)
        B = self.config.train.batch_size
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(B))

    @cached_property
    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and shardings of a batch of examples of maximum length, without targets if these are not
        classes."""
        B, split, model = self.config.train.batch_size, batch_sharding(self.mesh), self.config.model
        inputs: tuple[Any, ...] = model.example()
        if self.config.data.has_segments:
            inputs = (*inputs, None, np.zeros_like(inputs[0]))
        has_classes = model.contract.task is not Task.CONTRASTIVE
        targets = jax.ShapeDtypeStruct(trace_init(self.model).output.shape[:-1], jnp.int32) if has_classes else None
        shaped = lambda x: jax.ShapeDtypeStruct((B, *x.shape), x.dtype, sharding=split)  # noqa: E731
        return jax.tree.map(shaped, Batch(inputs, targets))

    def check_fit(self, batch: Batch) -> None:
        """Raise `UserError` if a batch does not have the inputs or the targets that the model expects."""
        batch = batch._replace(targets=None) if self.abstract_batch.targets is None else batch  # any will do
        expected, actual = (jax.tree.leaves((b.inputs, b.targets)) for b in (self.abstract_batch, batch))
        if [(x.dtype, x.ndim) for x in expected] != [(x.dtype, x.ndim) for x in actual]:
            texts = [", ".join(f"{x.dtype} {x.shape[1:]}" for x in xs) for xs in (expected, actual)]
            problem = f"{type(self.config.model).__name__} expects inputs and targets {texts[0]} per example"
            raise UserError(f"{problem}, but the data has {texts[1]}; change one of them.")


def resolve_precision(config: ComputeConfig, mesh: Mesh) -> jnp.dtype:
    """Return the compute dtype that `compute.precision` selects on these devices.

    Raises:
      UserError: it is bfloat16 with a tensor axis of several CPU devices.
    """
    platform = mesh.devices.flat[0].platform
    if config.precision == "auto":
        return jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    no_sums = platform in workarounds.PLATFORMS_WITHOUT_BFLOAT16_SUMS
    if config.precision == "bfloat16" and no_sums and mesh.shape["tensor"] > 1:
        raise UserError(
            "`compute.precision` is bfloat16, which a CPU cannot sum over a tensor axis; use float32 there."
        )
    return jnp.dtype(config.precision)
