"""Autopsy of a non-finite step: a replay that finds the first value that is infinite or NaN."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxformer.data.dataset import Batch
from jaxformer.inspect.of_run import of_run
from jaxformer.models import objective
from jaxformer.models.objective import Params, objective_of
from jaxformer.nn.parameter_norms import dotted
from jaxformer.ops.linear_cross_entropy import rows_per_chunk
from jaxformer.terminal import align

MODEL, LOSS = "the model (logits)", "the loss"
EXAMPLES_PER_CHUNK = 8
"""Examples replayed together, fewer if their logits are large; memory grows with this number, not with the batch."""
CONTEXT_ROWS = 4
"""Rows printed before and after the origin."""


@dataclass(frozen=True)
class Magnitude:
    """Magnitudes of an array's finite values over the whole batch."""

    largest: float
    """Largest magnitude."""
    rms: float
    """Root mean square."""
    non_finite: int
    """Number of non-finite values."""


@dataclass(frozen=True)
class Row:
    """A module's output or a parameter, and the gradient of the batch's mean loss with respect to it."""

    name: str
    value: Magnitude
    gradient: Magnitude


@dataclass(frozen=True)
class Autopsy:
    """The first non-finite value of a step, shown as a table of the values around it."""

    origin: str
    """'the output of blocks.1.mlp', 'the gradient that blocks.1.mlp passes back to blocks.1.mlp_norm', 'the gradient of
    blocks.1.mlp.W_1', 'the loss', or 'the parameter blocks.1.mlp.W_1'."""
    direction: Literal["forward", "backward"]
    index: int
    """Index in `modules` of the module that the origin belongs to."""
    modules: tuple[Row, ...]
    """Outputs in order of computation: a module follows its submodules, and the loss is last."""
    parameters: tuple[Row, ...]

    def __repr__(self) -> str:
        first, last = max(0, self.index - CONTEXT_ROWS), self.index + CONTEXT_ROWS + 1
        own = [p for p in self.parameters if _module_index(p.name, self.modules) == self.index]
        lines = [f"{self.origin}, {self.direction}"]
        lines += ["", *_table("output of", self.modules[first:last], self.modules[self.index].name)]
        if own:
            lines += ["", *_table("parameter", own)]
        return "\n".join(lines)


@of_run
def first_non_finite(
    model: nn.Module,
    params: Params,
    batch: Batch,
    keys_B: jax.Array | None = None,
    compute_dtype: DTypeLike | None = None,
) -> Autopsy | None:
    """Return the first non-finite value in the forward or backward pass of a loss; None if all are finite.

    The order is that of computation: parameters, outputs of modules, loss; then, backward from the loss, the gradients
    with respect to each module's output and its parameters. The arguments are those of `replay`.
    """
    modules, parameters = replay(model, params, batch, keys_B, compute_dtype)
    autopsy = partial(Autopsy, modules=modules, parameters=parameters)
    for parameter in parameters:
        if parameter.value.non_finite:
            return autopsy(f"the parameter {parameter.name}", "forward", _module_index(parameter.name, modules))
    for index, module in enumerate(modules):
        if module.value.non_finite:
            return autopsy(LOSS if module.name == LOSS else f"the output of {module.name}", "forward", index)
    # A fault in a module's backward pass shows in the gradient of the preceding output or of one of its own parameters.
    shares_norm = getattr(getattr(model, "config", None), "norm_placement", None) == "parallel"

    def passed_back(name: str, before: str) -> str:
        if shares_norm and before.endswith("attention_norm"):  # read by the MLP as well
            name += f" or {before.removesuffix('attention_norm')}mlp"
        return f"the gradient that {name} passes back to {before}"

    broken = [
        (index, passed_back(modules[index].name, before.name))
        for index, before in enumerate(modules[:-1], start=1)
        if before.gradient.non_finite
    ]
    faulty = [p.name for p in parameters if p.gradient.non_finite]
    broken += [(_module_index(name, modules), f"the gradient of {name}") for name in faulty]
    if not broken:
        return None
    index, origin = max(broken, key=lambda pair: pair[0])
    return autopsy(origin, "backward", index)


def replay(
    model: nn.Module,
    params: Params,
    batch: Batch,
    keys_B: jax.Array | None = None,
    compute_dtype: DTypeLike | None = None,
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Measure all outputs, parameters and gradients of the mean loss of a batch.

    The loss is the objective's `example_loss`, without label smoothing, router losses, or the other pairs of a batch.

    Args:
      model: unrolled model, as blocks in a scan would share one row. It should use the step's attention implementation.
      params: parameters before the step.
      batch: batch of the step.
      keys_B: dropout keys, one per example; None for no dropout.
      compute_dtype: dtype that the parameters are cast to; None for no cast.

    Returns:
      One row per module, in the order in which they finish, and one row per parameter.
    """
    if compute_dtype is not None:
        params = jax.tree.map(lambda p: p.astype(compute_dtype), params)
    batch = jax.tree.map(jnp.asarray, batch)
    record: dict[str, jax.Array] = {}
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (batch, keys_B))
    jax.eval_shape(lambda params, example: _tapped_loss(model, params, record, *example), params, example)
    names = tuple(record)
    modules, parameters = jax.device_get(_measure_all(model, names, params, batch, keys_B))
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return tuple(map(_row, names, modules)), tuple(_row(dotted(path), measured) for path, measured in leaves)


def save_autopsy(
    folder: Path, step: int, batch: Batch, key_data: np.ndarray | None, report: Autopsy | None, execution: str
) -> Path:
    """Write everything needed to repeat a failed step atomically to `autopsy/step-N/` in a run's folder; return that
    path.

    Args:
      folder: the run's folder.
      step: N, counted from 1; checkpoint N - 1 holds the parameters before it.
      batch: batch of the step.
      key_data: `jax.random.key_data` of the dropout keys, one per example.
      report: result of `first_non_finite`; None if the replay was finite.
      execution: implementation used in the replay, such as 'attention: xla'.
    """
    parent = folder / "autopsy"
    parent.mkdir(exist_ok=True)
    path = parent / f"step-{step}"
    result = "all values were finite when recomputed" if report is None else str(report)
    text = (
        f"Step {step} had a non-finite loss or gradient. First non-finite value: {result}\n\n"
        f"Recomputed with the step's {execution}. "
        f"Largest magnitudes and root mean squares ignore non-finite values. The parameters before the step are "
        f"checkpoint {step - 1}, in checkpoints/{step - 1}. batch.npz holds the batch"
        + (".\n" if key_data is None else "; key.npy the data of the dropout keys, one per example.\n")
    )
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    arrays = {jax.tree_util.keystr(key, simple=True, separator="."): leaf for key, leaf in leaves}
    values = {"step": step, "execution": execution, "autopsy": None if report is None else asdict(report)}
    with tempfile.TemporaryDirectory(prefix=".new-", dir=parent) as scratch:
        new = Path(scratch) / path.name
        new.mkdir()
        np.savez(new / "batch.npz", **arrays)
        if key_data is not None:
            np.save(new / "key.npy", key_data, allow_pickle=False)
        (new / "report.txt").write_text(text, encoding="utf-8")
        (new / "report.json").write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        if path.exists():
            shutil.rmtree(path)
        new.rename(path)
    return path


@partial(jax.jit, static_argnames=("model", "names"))
def _measure_all(
    model: nn.Module, names: tuple[str, ...], params: Params, batch: Batch, keys_B: jax.Array | None
) -> tuple[jax.Array, Params]:
    """Return `_measure` of outputs and their gradients, `(modules, 2, 4)`, and of each parameter and its gradient,
    `(2, 4)`."""
    call = lambda params, *inputs: model.apply({"params": params}, *inputs)  # noqa: E731
    outputs = jax.eval_shape(call, params, *jax.tree.map(lambda x: x[0], batch.inputs))
    n_outputs = sum(leaf.size for leaf in jax.tree.leaves(outputs))  # mostly logits
    chunk = rows_per_chunk(EXAMPLES_PER_CHUNK, n_outputs, objective.MAX_LOGITS_BYTES // 4)
    # Weighted example losses sum to the batch loss; unweighted ones are averaged.
    reduce = jnp.mean if batch.weights is None else jnp.sum

    def mean_loss(params: Params, records_B: dict[str, jax.Array]) -> jax.Array:
        # Recompute activations in the backward pass, so that none is saved between chunks.
        example_loss = jax.checkpoint(lambda example: _tapped_loss(model, params, *example))
        return reduce(jax.lax.map(example_loss, (records_B, batch, keys_B), batch_size=chunk))

    records_B = dict.fromkeys(names, jnp.zeros((len(jax.tree.leaves(batch)[0]), *empty_record().shape)))
    grads, measured_B = jax.grad(mean_loss, argnums=(0, 1))(params, records_B)
    modules = _over_batch(jnp.stack([measured_B[name] for name in names], axis=1))
    return modules, jax.tree.map(lambda p, g: jnp.stack([_measure(p), _measure(g)]), params, grads)


def _tapped_loss(model: nn.Module, params: Params, record: dict, example: Batch, key: jax.Array | None) -> jax.Array:
    """Return the loss of one example, with a tap at the output of every module; missing records are added."""
    calls: list[str] = []

    def intercept(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        out = call(*args, **kwargs)
        if context.method_name != "__call__":
            return out
        path = dotted(context.module.path) or MODEL
        calls.append(path)
        n_calls = calls.count(path)
        return tap(out, record.setdefault(path if n_calls == 1 else f"{path} (call {n_calls})", empty_record()))

    with nn.intercept_methods(intercept):
        loss = objective_of(model).example_loss(model, params, example, key)
    return tap(loss, record.setdefault(LOSS, empty_record()))


def empty_record() -> jax.Array:
    """Return an empty record of `tap`, `(2, 4)` in JAX's widest float: `_measure` of the values, and of their
    gradients."""
    return jnp.zeros((2, 4))


@jax.custom_vjp
def tap(values: Any, record: jax.Array) -> Any:
    """Return the values, any pytree, unchanged. The "gradient" of the record is `_measure` of the values and of their
    gradients, so that measurements leave a loop, a `vmap` or a checkpointed block the way gradients do."""
    return values


tap.defvjp(
    lambda values, record: (values, _measure(values)),
    lambda measured, grads: (grads, jnp.stack([measured, _measure(grads)])),
)


def _measure(tree: Any) -> jax.Array:
    """Return the largest magnitude, root mean square, and counts of finite and non-finite values, `(4,)` in JAX's
    widest float, in which a value is finite if it is in its own dtype."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    x = jnp.concatenate([jnp.zeros(0), *(jnp.ravel(leaf).astype(float) for leaf in floats)])
    finite = jnp.isfinite(x)
    magnitude = jnp.where(finite, jnp.abs(x), 0.0)
    largest, n_finite = jnp.max(magnitude, initial=0.0), jnp.sum(finite)
    rms = _root_mean_square(magnitude, 1.0, n_finite, largest)
    return jnp.stack([largest, rms, *(n.astype(x.dtype) for n in (n_finite, x.size - n_finite))])


def _over_batch(measured_B: jax.Array) -> jax.Array:
    """Combine `_measure` of each example, `(B, …, 4)`, into that of all, `(…, 4)`."""
    largest_B, rms_B, n_finite_B, n_not_B = jnp.moveaxis(measured_B, -1, 0)
    largest, n_finite = jnp.max(largest_B, axis=0), jnp.sum(n_finite_B, axis=0)
    rms = _root_mean_square(rms_B, n_finite_B, n_finite, largest)
    return jnp.stack([largest, rms, n_finite, jnp.sum(n_not_B, axis=0)], axis=-1)


def _root_mean_square(x: jax.Array, weights: ArrayLike, total: jax.Array, largest: jax.Array) -> jax.Array:
    """Return √(Σ w·x² / total) over the first axis, 0 for a total of 0, even if the squares would overflow."""
    tiny = jnp.finfo(x.dtype).tiny
    unit = jnp.clip(largest, tiny, 1 / tiny)  # keeps the reciprocal a normal number
    return unit * jnp.sqrt(jnp.sum(weights * (x / unit[None]) ** 2, axis=0) / jnp.maximum(total, 1).astype(x.dtype))


def _row(name: str, measured: np.ndarray) -> Row:
    return Row(name, *(Magnitude(float(largest), float(rms), int(n)) for largest, rms, _, n in measured))


def _module_index(parameter: str, modules: tuple[Row, ...]) -> int:
    """Return the index of the innermost module with a row that contains a parameter."""
    names = [module.name for module in modules]
    path = parameter.rpartition(".")[0]
    while path and path not in names:
        path = path.rpartition(".")[0]
    return names.index(path or MODEL)


def _table(title: str, rows: Iterable[Row], marked: str = "") -> list[str]:
    columns = ["largest", "rms", "not finite"]
    table = [["", title, *columns, *(f"gradient: {column}" for column in columns)]]
    for row in rows:
        cells = [(f"{m.largest:.2e}", f"{m.rms:.2e}", f"{m.non_finite:,}") for m in (row.value, row.gradient)]
        table.append([">" if row.name == marked else "", row.name, *cells[0], *cells[1]])
    return align(table, "<<>>>>>>")
