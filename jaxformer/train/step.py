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

from jaxformer.config import ComputeConfig, Config
from jaxformer.distributed import from_all
from jaxformer.errors import UserError
from jaxformer.models.objective import Params, auxiliary_loss, batch_nll, batch_nll_and_routing
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.execution import Execution
from jaxformer.ops.attention import attention
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
from jaxformer.train.memory import REMEDY, check_memory
from jaxformer.train.optimizer import gradient_point, make_optimizer

BLOCK = re.compile(r"blocks_\d+$")
"""Names of blocks, which gather their own parameters when they begin."""


class TrainState(NamedTuple):
    """What training changes.

    A step whose loss or gradient is not finite leaves parameters and optimizer state as they were. Once there
    are more such steps in a row than `train.max_skips` (or one, without 'skip'), no later step changes anything:
    what broke can then still be looked at and saved.
    """

    params: Params
    """What one would evaluate and sample from, float32."""
    opt_state: Any
    failures: jax.Array
    """Steps in a row until now that were not finite, int32."""


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

    def trace(params: Params, tokens_T: jax.Array) -> Any:
        with nn.intercept_methods(listen):
            return config.model.build().apply({"params": params}, tokens_T)

    dtype = compute_dtype(config.compute, mesh)
    shapes = abstract_params(config.model.build(), config.model)
    tokens_T = jax.ShapeDtypeStruct((config.model.context_length,), jnp.int32)
    jax.eval_shape(trace, jax.tree.map(lambda x: x.update(dtype=dtype), shapes), tokens_T)
    if not seen:
        return attention, "attention: none"
    q_HTK, k_GSK, mask = seen[0]
    here = set(mesh.devices.flat) & set(jax.local_devices())
    chosen, line = make_attention(
        config.compute.attention, mesh.devices.flat[0].platform, _shaped(q_HTK), _shaped(k_GSK), mask,
        mesh.shape["tensor"], try_first=bool(here),
    )  # fmt: skip
    lines = list(dict.fromkeys(from_all(line[:1000]))) if here else [line]
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
        lambda name, params: gather(params, specs[name], mesh),
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
    tokens_T = jnp.zeros((config.model.context_length,), jnp.int32)
    params = config.model.build().init(jax.random.key(config.seed), tokens_T)["params"]
    return TrainState(params, make_optimizer(config.optimizer, config.steps).init(params), jnp.int32(0))


def mean_loss(
    model: nn.Module,
    params: Params,
    batch_BT: jax.Array,
    keys_B: jax.Array | None = None,
    average: Callable[[Any], Any] = lambda routing: routing,
) -> tuple[jax.Array, jax.Array]:
    """What is minimised, and of it the mean nats over all predicted tokens of a batch; float32 scalars.

    They differ by what the routers of experts add. Dropout is on where keys are given.

    Args:
      average: given what the routers did in this batch, gives the mean over all that devices take at once.
    """
    nll_BT, routing_B = batch_nll_and_routing(model, params, batch_BT, keys_B)
    routing = average(jax.tree.map(lambda x: jnp.mean(x, axis=0), routing_B))
    mean = jnp.mean(nll_BT)
    return mean + auxiliary_loss(model, routing), mean


def example_keys(seed: int, step: jax.Array | int, batch_size: int) -> jax.Array:
    """A dropout key for each example of the whole batch, `(B,)`: splitting the batch changes nothing."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch_size))


def check_split(config: Config, mesh: Mesh) -> None:
    """Raise `UserError` where the batch does not split evenly over the devices, in the parts asked for."""
    B, parts, n = config.train.batch_size, config.compute.accumulate, batch_shards(mesh)
    if B % (n * parts):
        up = -(-B // (n * parts)) * n * parts
        also = f" in {parts} parts" if parts > 1 else ""
        raise UserError(f"train.batch_size {B} does not split over {n} devices{also}; use a multiple such as {up}.")


def make_gradient(config: Config, mesh: Mesh) -> Callable[[TrainState, jax.Array, Any], tuple[jax.Array, Params]]:
    """`(state, batch (B, T + 1), step)` to the mean loss, a float32 scalar, and its gradient, as the parameters lie.

    Both are of the whole batch, whatever the devices and parts it is split into: each takes as many tokens, and
    what it adds to the mean is differentiated. (The gradient of a sum, divided at the end, would overflow sooner.)

    Raises:
      UserError: the batch does not split evenly.
    """
    check_split(config, mesh)
    B, parts = config.train.batch_size, config.compute.accumulate
    model, specs = build_model(config, mesh), param_specs(config, mesh)

    def share(params: Params, batch_BT: jax.Array, keys_B: jax.Array) -> tuple[jax.Array, Params]:
        """What that which one device takes at once adds to the mean loss, and the gradient of what is minimised."""
        n = batch_shards(mesh)
        average = lambda routing: jax.tree.map(lambda x: x / n, sum_over_batch(routing))  # noqa: E731

        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            both = mean_loss(model, to_compute(params, config, mesh), batch_BT, keys_B, average)
            return jax.tree.map(lambda x: x / (parts * n), both)

        grads, nll = jax.grad(loss, has_aux=True)(params)
        return nll, grads

    def on_one(params: Params, batch_BT: jax.Array, keys_B: jax.Array) -> tuple[jax.Array, Params]:
        """From a device's shards of the parameters and its part of the batch; the same loss on all devices."""
        if parts == 1:
            loss, grads = share(params, batch_BT, keys_B)
        else:
            split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), (batch_BT, keys_B))
            zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
            add = lambda so_far, part: (jax.tree.map(jnp.add, so_far, share(params, *part)), None)  # noqa: E731
            (loss, grads), _ = jax.lax.scan(add, zeros, split)
        return sum_over_batch(loss), sum_over_batch(grads, specs)

    everywhere = on_each_shard(on_one, mesh, (specs, *2 * [PartitionSpec(BATCH)]), (PartitionSpec(), specs))

    def gradient(state: TrainState, batch_BT: jax.Array, step: Any) -> tuple[jax.Array, Params]:
        point = gradient_point(config.optimizer, state.params, state.opt_state)
        return everywhere(point, batch_BT, example_keys(config.seed, step, B))

    return gradient


def make_train_step(config: Config, mesh: Mesh) -> Any:
    """The jitted `(state, batch (B, T + 1), step)` to `(state, loss)`; the state given is donated.

    The loss, a float32 scalar, is NaN where the step was left out; see `TrainState`.

    Raises:
      UserError: the batch does not split evenly over the devices.
    """
    gradient, optimizer = make_gradient(config, mesh), make_optimizer(config.optimizer, config.steps)
    allowed = allowed_failures(config)

    def train_step(state: TrainState, batch_BT: jax.Array, step: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = gradient(state, batch_BT, step)
        finite = jnp.isfinite(loss) & all_finite(grads) & (state.failures <= allowed)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        learned = TrainState(optax.apply_updates(state.params, updates), opt_state, jnp.int32(0))
        kept = state._replace(failures=state.failures + 1)
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), learned, kept)
        return state, jnp.where(finite, loss, jnp.nan)

    places = jax.tree.map(lambda x: x.sharding, abstract_state(config, mesh))
    return jax.jit(train_step, donate_argnums=0, out_shardings=(places, replicated(mesh)))


class CompiledStep:
    """The train step, compiled when this is made, so that what it needs is known before it runs."""

    def __init__(self, config: Config, mesh: Mesh, say: Callable[[str], None]) -> None:
        """`say` is told what memory a step takes, and why, if ever, it had to be compiled again.

        Raises:
          UserError: the batch does not split evenly, or the step does not fit into memory.
        """
        self._step, self._state = make_train_step(config, mesh), abstract_state(config, mesh)
        self._split, self._say = batch_split(mesh), say
        self._shape: tuple[int, ...] = (config.train.batch_size, config.model.context_length + 1)
        self._compiled = self._compile()
        say(check_memory(self._compiled, mesh.local_devices[0]))

    def __call__(self, state: TrainState, batch_BT: jax.Array, step: int) -> tuple[TrainState, jax.Array]:
        """As `make_train_step`."""
        if batch_BT.shape != self._shape:
            self._say(f"step {step + 1:,} is compiled again: its batch is {batch_BT.shape}, and was {self._shape}")
            self._shape = batch_BT.shape
            self._compiled = self._compile()
        return self._compiled(state, batch_BT, np.int32(step))

    def _compile(self) -> Any:
        batch = jax.ShapeDtypeStruct(self._shape, jnp.int32, sharding=self._split)
        lowered = self._step.lower(self._state, batch, jax.ShapeDtypeStruct((), jnp.int32))
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(f"a step needs more memory than a device has; {REMEDY}.") from error


def allowed_failures(config: Config) -> int:
    """How many steps in a row may be not finite."""
    return config.train.max_skips if config.train.non_finite == "skip" else 0


def all_finite(tree: Any) -> jax.Array:
    """Whether every number of a tree is finite. (Not whether its norm is: squares overflow first.)"""
    return jnp.all(jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))


def make_eval_step(config: Config, mesh: Mesh) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """`(params, batch (B, T + 1), weights (B, n_predicted))` to the weighted sum of nats of each window, `(B,)`."""
    model, specs = build_model(config, mesh), param_specs(config, mesh)

    def eval_step(params: Params, batch_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
        nll_BT = batch_nll(model, to_compute(params, config, mesh), batch_BT)
        return jnp.sum(nll_BT * weights_BT, axis=1)

    split = PartitionSpec(BATCH)
    everywhere = on_each_shard(eval_step, mesh, (specs, split, split), split)
    return jax.jit(everywhere, out_shardings=replicated(mesh))
