"""The jitted training and evaluation steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxformer.config import Config
from jaxformer.data.dataset import Batch
from jaxformer.errors import UserError
from jaxformer.models.objective import BatchReduction, Params, count_tokens, objective_of
from jaxformer.nn.parameter_norms import global_norm, row_norms
from jaxformer.ops import workarounds
from jaxformer.parallel.memory import REMEDY, check_memory
from jaxformer.parallel.mesh import (
    BATCH,
    REPLICATED,
    batch_sharding,
    batch_shards,
    on_each_shard,
    replicated,
    specs_of,
    sum_over_batch,
)
from jaxformer.terminal import short_repr
from jaxformer.train.optimizer import eval_point, updates_taken
from jaxformer.train.setup import TrainSetup, TrainState


class StepMetrics(NamedTuple):
    """Measurements of one step, identical on all devices; float32, except for `finite`."""

    loss: jax.Array
    """Mean loss before the update, in nats; NaN if the step was skipped."""
    finite: jax.Array
    """False if the step was skipped, bool."""
    learning_rate: jax.Array
    """Learning rate of this step; after a skipped step, the next one has the same learning rate."""
    grad_norm: jax.Array
    """Global norm of the gradient before clipping; infinite if its sum of squares exceeds float32."""
    update_norm: jax.Array
    """Global norm of the update; 0 if the step was skipped."""
    norms_3R: jax.Array
    """Norms of the gradient, the update, and the weights before it, for each parameter and head; see
    `parameter_norms.row_names`."""

    def __repr__(self) -> str:
        return short_repr(self)


def make_gradient(setup: TrainSetup) -> Callable[..., tuple[jax.Array, Params]]:
    """Return a function of `(params, batch, keys_B, frozen=None)` that returns the mean loss, a float32 scalar, and the
    gradient, sharded like `params`; `frozen` are `TrainState.frozen_params`.

    Both cover the whole batch, however it is split into devices and microbatches, each of which differentiates its
    contribution to the mean. (The gradient of a sum, divided at the end, would overflow sooner.)
    """
    specs, n_microbatches = specs_of(setup.abstract_state), setup.config.compute.grad_accumulation_steps
    model, reduction = setup.config.model.build(setup.execution), batch_reduction(setup.mesh, n_microbatches)
    objective, smoothing = objective_of(model), setup.config.train.label_smoothing

    def device_grads(params: Params, batch: Batch, keys_B: jax.Array, frozen: Params) -> tuple[jax.Array, Params]:
        """Accumulate gradients over the microbatches of one device, and sum them over all devices."""
        n_tokens = None if n_microbatches == 1 else sum_over_batch(count_tokens(model, batch))

        def microbatch_loss(params: Params, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Return the contributions of one device's microbatch to the objective and to the mean loss."""
            params = setup.compute_params(params, frozen)
            return objective.loss(model, params, batch, keys_B, smoothing, reduction._replace(n_tokens=n_tokens))

        microbatch_grads = jax.grad(microbatch_loss, has_aux=True)
        if n_microbatches == 1:
            grads, loss = microbatch_grads(params, batch, keys_B)
        else:
            microbatches = jax.tree.map(lambda x: x.reshape(n_microbatches, -1, *x.shape[1:]), (batch, keys_B))
            zeros = jax.tree.map(jnp.zeros_like, (params, jnp.float32(0)))

            def add_microbatch(total: tuple[Params, jax.Array], microbatch: tuple[Batch, jax.Array]) -> tuple:
                return jax.tree.map(jnp.add, total, microbatch_grads(params, *microbatch)), None

            (grads, loss), _ = jax.lax.scan(add_microbatch, zeros, microbatches)
        return sum_over_batch(loss), sum_over_batch(grads, specs.params)

    in_specs = (specs.params, *2 * [PartitionSpec(BATCH)], specs.frozen_params)
    gradient = on_each_shard(device_grads, setup.mesh, in_specs, (REPLICATED, specs.params))
    return lambda params, batch, keys_B, frozen=None: gradient(params, batch, keys_B, frozen)


def batch_reduction(mesh: Mesh, n_microbatches: int = 1) -> BatchReduction:
    """Return the reduction over the microbatches computed at once on all devices, for use inside `on_each_shard`."""
    n, axes = batch_shards(mesh), tuple(axis for axis in BATCH if mesh.shape[axis] > 1)
    return BatchReduction(
        n * n_microbatches,
        mean=lambda tree: jax.tree.map(lambda x: x / n, sum_over_batch(tree)),
        gather=lambda rows: jax.lax.all_gather(rows, axes, axis=0, tiled=True) if axes else rows,
    )


def make_train_step(setup: TrainSetup) -> jax.stages.Wrapped:
    """Return the jitted step, which maps `(state, batch, step)` to `(state, StepMetrics)`; the state argument is
    donated.

    A step whose loss or gradient norm is not finite is skipped; see `TrainState`.
    """
    sharded_grads, optimizer, schedule = make_gradient(setup), setup.optimizer, setup.schedule
    allowed = allowed_failures(setup.config)

    def train_step(state: TrainState, batch: Batch, step: jax.Array) -> tuple[TrainState, StepMetrics]:
        point = eval_point(setup.config.optimizer, state.params, state.opt_state)
        loss, grads = sharded_grads(point, batch, setup.example_keys(step), state.frozen_params)
        weights_R, params = workarounds.in_order(row_norms(state.params), state.params)
        state = state._replace(params=params)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts with floats
            learning_rate = jnp.float32(schedule(updates_taken(state.opt_state)))
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        grads_R, updates_R = row_norms(grads), row_norms(updates)
        grad_norm, update_norm = global_norm(grads_R), global_norm(updates_R)
        # Updates overflow float32 only in a network that has already diverged, and checking each entry costs another
        # pass.
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (state.failures <= allowed)
        params = optax.apply_updates(state.params, updates)
        updated = state._replace(params=params, opt_state=opt_state, failures=jnp.int32(0))
        skipped = state._replace(failures=state.failures + 1)
        # Frozen parameters are the same arrays in both, and need no selection.
        state = jax.tree.map(lambda new, old: new if new is old else jnp.where(finite, new, old), updated, skipped)
        norms_3R = jnp.stack([grads_R, updates_R, weights_R])
        loss, update_norm = jnp.where(finite, loss, jnp.nan), jnp.where(finite, update_norm, 0.0)
        return state, StepMetrics(loss, finite, learning_rate, grad_norm, update_norm, norms_3R)

    return jax.jit(train_step, donate_argnums=0, out_shardings=(setup.state_shardings, replicated(setup.mesh)))


class CompiledStep:
    """Train step compiled ahead of time for each batch shape, so that its memory is known before it runs."""

    def __init__(self, setup: TrainSetup, print_line: Callable[[str], None]) -> None:
        """Create the step without compiling it.

        Args:
          print_line: function that receives a line for each batch shape that the step is compiled again for.
        """
        self._setup, self._step, self._print_line = setup, make_train_step(setup), print_line
        self._compiled: dict[tuple, jax.stages.Compiled] = {}

    def compile(self, batch: Batch) -> str:
        """Compile for `train.batch_size` examples of the shapes and dtypes in `batch`; return a line about memory.

        Raises:
          UserError: the step does not fit into memory.
        """
        B, split = self._setup.config.train.batch_size, batch_sharding(self._setup.mesh)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((B, *x.shape[1:]), x.dtype, sharding=split), batch)
        lowered = self._step.lower(self._setup.abstract_state, shapes, jax.ShapeDtypeStruct((), jnp.int32))
        try:
            compiled = self._compiled[_shapes(shapes)] = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(f"a step needs more memory than a device has; {REMEDY}.") from error
        return check_memory(compiled, self._setup.mesh.local_devices[0])

    def __call__(self, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, StepMetrics]:
        """Apply `make_train_step`."""
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # JAX then calls nothing that is compiled
            return self._step(state, batch, np.int32(step))
        if _shapes(batch) not in self._compiled:
            sizes = " and ".join(dict.fromkeys(str(x.shape) for x in jax.tree.leaves(batch)))
            self._print_line(f"step {step + 1:,} is recompiled for a batch of {sizes}")
            self.compile(batch)
        return self._compiled[_shapes(batch)](state, batch, np.int32(step))


def _shapes(batch: Batch) -> tuple:
    return tuple((x.shape, x.dtype) for x in jax.tree.leaves(batch))


def allowed_failures(config: Config) -> int:
    """Return the maximum number of consecutive non-finite steps."""
    return config.train.max_skips if config.train.non_finite == "skip" else 0


def make_eval_step(setup: TrainSetup) -> Callable[[Params, Batch], dict[str, jax.Array]]:
    """Return the jitted function from `(params, batch)` to the objective's measurements of each example."""
    model, split = setup.config.model.build(setup.execution), PartitionSpec(BATCH)

    def eval_step(params: Params, batch: Batch) -> dict[str, jax.Array]:
        return objective_of(model).measure(model, setup.compute_params(params), batch)

    sharded = on_each_shard(eval_step, setup.mesh, (specs_of(setup.abstract_params), split), split)
    return jax.jit(sharded, out_shardings=replicated(setup.mesh))
