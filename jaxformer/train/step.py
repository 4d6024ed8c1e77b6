"""The jitted steps: one that learns, one that only measures."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxformer.config import ComputeConfig, Config, ModelConfig
from jaxformer.contract import Task
from jaxformer.data.dataset import Batch
from jaxformer.distributed import all_gather
from jaxformer.errors import UserError
from jaxformer.memory import REMEDY, check_memory
from jaxformer.models.objective import BatchReduction, Params, objective_of
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.execution import Execution
from jaxformer.ops.attention import attention
from jaxformer.parameters import global_norm, row_norms
from jaxformer.runs import abstract_params
from jaxformer.sharding import (
    BATCH,
    abstract,
    batch_shards,
    batch_split,
    gather,
    on_each_shard,
    replicated,
    shardings,
    sum_over_batch,
)
from jaxformer.train.kernels import make_attention
from jaxformer.train.optimizer import gradient_point, make_optimizer

BLOCK = re.compile(r"blocks_\d+$")
"""Names of blocks, which gather their own parameters when they begin."""


class TrainState(NamedTuple):
    """What training changes.

    A step whose loss or gradient norm is not finite leaves parameters and optimizer state as they were. Once there
    are more such steps in a row than `train.max_skips` (or one, without 'skip'), no later step changes anything:
    what broke can then still be looked at and saved.
    """

    params: Params
    """What one would evaluate and sample from, float32."""
    opt_state: Any
    failures: jax.Array
    """Steps in a row until now that were not finite, int32."""


class StepMetrics(NamedTuple):
    """Measurements of one step, the same on all devices: float32, but for `finite`."""

    loss: jax.Array
    """Mean loss before the update; NaN where the step was left out."""
    finite: jax.Array
    """False where the step was left out, a bool."""
    grad_norm: jax.Array
    """Global norm of the gradient before clipping; infinite where its sum of squares exceeds float32."""
    update_norm: jax.Array
    """Global norm of the update; 0 where the step was left out."""
    norms_3R: jax.Array
    """Norms of gradient, update, and weights before it, of each parameter, heads apart; see `parameters.row_names`."""


def compute_dtype(config: ComputeConfig, mesh: Mesh) -> jnp.dtype:
    """What `compute.precision` means on these devices."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if config.precision == "auto":
        return jnp.dtype(jnp.float32 if on_cpu else jnp.bfloat16)
    if config.precision == "bfloat16" and on_cpu and mesh.shape["tensor"] > 1:
        # XLA's CPU compiler dies of such a sum (all-reduce promotion, seen with jax 0.10).
        raise UserError("compute.precision is bfloat16, which a CPU cannot sum over a tensor axis; use float32 there.")
    return jnp.dtype(config.precision)


@lru_cache(maxsize=4)
def choose_attention(config: Config, mesh: Mesh) -> tuple[Callable[..., jax.Array], str]:
    """What computes attention on these devices, tried on what the model will ask of it, and a line that says so.

    Raises:
      UserError: see `make_attention`.
    """
    seen: list[tuple] = []

    def listen(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        if isinstance(context.module, MultiHeadAttention) and context.method_name == "attend":
            seen.append((*args[:2], args[3]))
        return call(*args, **kwargs)

    def trace(params: Params, *example: jax.Array) -> Any:
        with nn.intercept_methods(listen):
            return config.model.build().apply({"params": params}, *example)

    dtype = compute_dtype(config.compute, mesh)
    shapes = abstract_params(config.model.build(), config.model)
    jax.eval_shape(trace, jax.tree.map(lambda x: x.update(dtype=dtype), shapes), *config.model.example())
    if not seen:
        return attention, "attention: no multi-head layers"
    # A mask that is an array takes every fused kernel out of the choice; each call is looked at again, when it comes.
    q_HTK, k_GSK, mask = next((call for call in seen if not isinstance(call[2], jax.Array)), seen[0])
    here = set(mesh.devices.flat) & set(jax.local_devices())
    chosen, line = make_attention(
        config.compute.attention, mesh.devices.flat[0].platform, _shaped(q_HTK), _shaped(k_GSK), mask,
        mesh.shape["tensor"], try_first=bool(here),
    )  # fmt: skip
    lines = list(dict.fromkeys(all_gather(line[:1000]))) if here else [line]
    if len(lines) > 1:  # different programs would wait for each other for ever
        raise UserError(f"processes differ ({'; '.join(lines)}); set compute.attention to xla or blockwise.")
    return chosen, line


def _shaped(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def build_model(config: Config, mesh: Mesh) -> nn.Module:
    """The model as the steps compute it, where `on_each_shard` has split the batch."""
    c, specs = config.compute, param_specs(config, mesh)
    execution = Execution(
        choose_attention(config, mesh)[0],
        c.remat,
        c.scan_blocks,
        # What is not found is a part of something that was gathered whole, as `to_compute` does.
        lambda name, params: gather(params, specs[name], mesh) if name in specs else params,
        mesh.shape["expert"] if any("expert" in axes for axes in jax.tree.leaves(specs)) else 1,
    )
    return config.model.build(execution)


def to_compute(params: Params, config: Config, mesh: Mesh) -> Params:
    """A device's shards as `build_model` wants them: in the dtype it computes in, what is outside blocks gathered."""
    dtype, specs = compute_dtype(config.compute, mesh), param_specs(config, mesh)
    params = jax.tree.map(lambda w: w.astype(dtype), params)
    if mesh.devices.flat[0].platform == "cpu":
        params = jax.tree.map(lambda w: product_apart(w) if w.ndim == 2 else w, params)
    return {name: p if BLOCK.search(name) else gather(p, specs[name], mesh) for name, p in params.items()}


@jax.custom_vjp
def product_apart(matrix: jax.Array) -> jax.Array:
    """The same matrix, whose gradient is made in two steps: a product, and its transposition.

    XLA's CPU compiler would make one product of them, with both factors transposed, and that takes its slow path:
    a step of `quick` took 128 ms with it and 111 ms without.
    """
    return matrix


product_apart.defvjp(lambda w: (w, None), lambda _, g: (jax.lax.optimization_barrier(g.T).T,))


def param_specs(config: Config, mesh: Mesh) -> Params:
    """The `PartitionSpec` of each parameter."""
    return jax.tree.map(lambda x: x.sharding.spec, abstract_state(config, mesh).params)


@lru_cache(maxsize=4)
def abstract_state(config: Config, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, without making it."""
    shapes = jax.eval_shape(partial(_init, config))
    return abstract(shapes, shardings(shapes, mesh))


def init_state(config: Config, mesh: Mesh) -> TrainState:
    """Fresh parameters from `config.seed`, made where they are to lie; the same numbers on every mesh."""
    places = jax.tree.map(lambda x: x.sharding, abstract_state(config, mesh))
    return jax.jit(partial(_init, config), out_shardings=places)()


def _init(config: Config) -> TrainState:
    params = config.model.build().init(jax.random.key(config.seed), *config.model.example())["params"]
    return TrainState(params, make_optimizer(config.optimizer, config.steps).init(params), jnp.int32(0))


def example_keys(seed: int, step: jax.Array | int, batch_size: int) -> jax.Array:
    """A dropout key for each example of the whole batch, `(B,)`: splitting the batch changes nothing."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch_size))


def check_split(config: Config, mesh: Mesh) -> None:
    """Raise `UserError` where the batch does not split evenly over the devices, in the parts asked for."""
    B, parts, n = config.train.batch_size, config.compute.grad_accumulation_steps, batch_shards(mesh)
    if B % (n * parts):
        up = -(-B // (n * parts)) * n * parts
        also = f" in {parts} parts" if parts > 1 else ""
        raise UserError(f"train.batch_size {B} does not split over {n} devices{also}; use a multiple such as {up}.")


def abstract_batch(config: Config, mesh: Mesh) -> Batch:
    """Shapes and dtypes of a batch of the longest examples, without data."""
    B, split = config.train.batch_size, batch_split(mesh)
    example = Batch(config.model.example(), abstract_targets(config.model))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((B, *x.shape), x.dtype, sharding=split), example)


def abstract_targets(config: ModelConfig) -> jax.ShapeDtypeStruct | None:
    """Shape and dtype of the classes that a model predicts in an example of the largest size; None if it has none."""
    if config.contract.task is Task.CONTRASTIVE:
        return None
    model = config.build()
    call: Callable[..., Any] = lambda params, *example: model.apply({"params": params}, *example)  # noqa: E731
    logits = jax.eval_shape(call, abstract_params(model, config), *config.example())
    return jax.ShapeDtypeStruct(logits.shape[:-1], jnp.int32)


def check_fit(model: ModelConfig, batch: Batch) -> None:
    """Raise `UserError` where a batch does not hold what a model is called with, or what it predicts."""
    takes, gets = model.example(), batch.inputs
    if [(x.dtype, x.ndim + 1) for x in takes] != [(x.dtype, x.ndim) for x in gets]:
        told = [", ".join(f"{x.dtype} {x.shape[skip:]}" for x in xs) for skip, xs in ((0, takes), (1, gets))]
        raise UserError(
            f"{type(model).__name__} takes {told[0]} for an example, but the data gives {told[1]}; change one of them."
        )
    predicts = abstract_targets(model)
    if predicts is not None and predicts.ndim + 1 != batch.targets.ndim:
        raise UserError(
            f"{type(model).__name__} predicts classes of shape {predicts.shape} for an example, but the data gives "
            f"{batch.targets.shape[1:]} to predict; change one of them."
        )


def make_gradient(config: Config, mesh: Mesh) -> Callable[[TrainState, Batch, Any], tuple[jax.Array, Params]]:
    """`(state, batch, step)` to the mean loss, a float32 scalar, and the gradient of what is minimised, as the
    parameters lie.

    Both are of the whole batch, whatever the devices and parts it is split into: what each adds to the mean is
    differentiated. (The gradient of a sum, divided at the end, would overflow sooner.)

    Raises:
      UserError: the batch does not split evenly.
    """
    check_split(config, mesh)
    B, parts = config.train.batch_size, config.compute.grad_accumulation_steps
    model, specs, across = build_model(config, mesh), param_specs(config, mesh), batch_reduction(mesh, parts)
    objective, smoothing = objective_of(model), config.train.label_smoothing

    def share(params: Params, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, Params]:
        """What that which one device takes at once adds to the mean loss, and the gradient of what is minimised."""

        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            return objective.loss(model, to_compute(params, config, mesh), batch, keys_B, smoothing, across)

        grads, told = jax.grad(loss, has_aux=True)(params)
        return told, grads

    def on_one(params: Params, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, Params]:
        """From a device's shards of the parameters and its part of the batch; the same loss on all devices."""
        if parts == 1:
            loss, grads = share(params, batch, keys_B)
        else:
            split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), (batch, keys_B))
            zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
            add = lambda so_far, part: (jax.tree.map(jnp.add, so_far, share(params, *part)), None)  # noqa: E731
            (loss, grads), _ = jax.lax.scan(add, zeros, split)
        return sum_over_batch(loss), sum_over_batch(grads, specs)

    everywhere = on_each_shard(on_one, mesh, (specs, *2 * [PartitionSpec(BATCH)]), (PartitionSpec(), specs))

    def gradient(state: TrainState, batch: Batch, step: Any) -> tuple[jax.Array, Params]:
        point = gradient_point(config.optimizer, state.params, state.opt_state)
        return everywhere(point, batch, example_keys(config.seed, step, B))

    return gradient


def batch_reduction(mesh: Mesh, parts: int = 1) -> BatchReduction:
    """How a part of a batch sees the others, one on each device and `parts` after one another; inside
    `on_each_shard`."""
    n, axes = batch_shards(mesh), tuple(axis for axis in BATCH if mesh.shape[axis] > 1)
    return BatchReduction(
        n * parts,
        mean=lambda tree: jax.tree.map(lambda x: x / n, sum_over_batch(tree)),
        gather=lambda rows: jax.lax.all_gather(rows, axes, axis=0, tiled=True) if axes else rows,
    )


def make_train_step(config: Config, mesh: Mesh) -> Any:
    """The jitted `(state, batch, step)` to `(state, StepMetrics)`; the state given is donated.

    A step whose loss or gradient norm is not finite is left out; see `TrainState`.

    Raises:
      UserError: the batch does not split evenly over the devices.
    """
    gradient, optimizer = make_gradient(config, mesh), make_optimizer(config.optimizer, config.steps)
    allowed = allowed_failures(config)

    def train_step(state: TrainState, batch: Batch, step: jax.Array) -> tuple[TrainState, StepMetrics]:
        loss, grads = gradient(state, batch, step)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        grads_R, updates_R, weights_R = (row_norms(tree) for tree in (grads, updates, state.params))
        grad_norm, update_norm = global_norm(grads_R), global_norm(updates_R)
        # One that exceeds float32 can only come of a network that is lost; asking each number costs another pass.
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (state.failures <= allowed)
        learned = TrainState(optax.apply_updates(state.params, updates), opt_state, jnp.int32(0))
        kept = state._replace(failures=state.failures + 1)
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), learned, kept)
        norms_3R = jnp.stack([grads_R, updates_R, weights_R])
        loss, update_norm = jnp.where(finite, loss, jnp.nan), jnp.where(finite, update_norm, 0.0)
        return state, StepMetrics(loss, finite, grad_norm, update_norm, norms_3R)

    places = jax.tree.map(lambda x: x.sharding, abstract_state(config, mesh))
    return jax.jit(train_step, donate_argnums=0, out_shardings=(places, replicated(mesh)))


class CompiledStep:
    """The train step, compiled for one batch when this is made, so that what it needs is known before it runs, and for
    each batch of another shape when it comes."""

    def __init__(self, config: Config, mesh: Mesh, batch: Batch, say: Callable[[str], None]) -> None:
        """`batch` may be of shapes and dtypes; its first axis is `train.batch_size`. `say` is told what memory a step
        takes, and for which other batches it is compiled again.

        Raises:
          UserError: the batch does not split evenly, or the step does not fit into memory.
        """
        self._step, self._state = make_train_step(config, mesh), abstract_state(config, mesh)
        self._split, self._say, self._device = batch_split(mesh), say, mesh.local_devices[0]
        self._compiled: dict[Any, Any] = {}
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((config.train.batch_size, *x.shape[1:]), x.dtype), batch)
        say("compiling the training step ...")
        say(check_memory(self._compile(shapes), self._device))

    def __call__(self, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, StepMetrics]:
        """As `make_train_step`."""
        compiled = self._compiled.get(_shapes(batch))
        if compiled is None:
            sizes = " and ".join(dict.fromkeys(str(x.shape) for x in jax.tree.leaves(batch)))
            self._say(f"step {step + 1:,} is compiled again, for a batch of {sizes}")
            compiled = self._compile(batch)
            check_memory(compiled, self._device)
        return compiled(state, batch, np.int32(step))

    def _compile(self, batch: Batch) -> Any:
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._split), batch)
        lowered = self._step.lower(self._state, placed, jax.ShapeDtypeStruct((), jnp.int32))
        try:
            compiled = self._compiled[_shapes(batch)] = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(f"a step needs more memory than a device has; {REMEDY}.") from error
        return compiled


def _shapes(batch: Batch) -> tuple:
    return tuple((x.shape, x.dtype) for x in jax.tree.leaves(batch))


def allowed_failures(config: Config) -> int:
    """How many steps in a row may be not finite."""
    return config.train.max_skips if config.train.non_finite == "skip" else 0


def make_eval_step(config: Config, mesh: Mesh) -> Callable[[Params, Batch], dict[str, jax.Array]]:
    """`(params, batch)` to what the objective measures of each example."""
    model, specs = build_model(config, mesh), param_specs(config, mesh)

    def eval_step(params: Params, batch: Batch) -> dict[str, jax.Array]:
        return objective_of(model).measure(model, to_compute(params, config, mesh), batch)

    split = PartitionSpec(BATCH)
    everywhere = on_each_shard(eval_step, mesh, (specs, split), split)
    return jax.jit(everywhere, out_shardings=replicated(mesh))
