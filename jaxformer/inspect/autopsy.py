"""Where the first number that is not finite came from: a step computed again, and what to keep of it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.dataset import Batch
from jaxformer.models.objective import Params, n_chunks, objective_of
from jaxformer.parameters import dotted

MODEL, LOSS = "the model (logits)", "the loss"
AT_ONCE = 8
"""Examples that are computed together, fewer if their logits are many; what a replay holds in memory grows with these
and not with the batch."""
AROUND = 4
"""Rows before and after the culprit that are printed."""


@dataclass(frozen=True)
class Size:
    """Of an array over the whole batch; what is not finite is counted, and left out of the rest."""

    largest: float
    """Largest magnitude."""
    rms: float
    """Root mean square."""
    non_finite: int
    """How many values are not finite."""


@dataclass(frozen=True)
class Row:
    """A module's output or a parameter, and the gradient of the batch's mean loss with respect to it."""

    name: str
    value: Size
    gradient: Size


@dataclass(frozen=True)
class Autopsy:
    """What broke first; `str` of it is a table of what happened around there."""

    origin: str
    """'the output of blocks.1.mlp', 'the gradient that blocks.1.mlp passes back to blocks.1.mlp_norm', 'the gradient of
    blocks.1.mlp.W_1', 'the loss', or 'the parameter blocks.1.mlp.W_1'."""
    direction: Literal["forward", "backward"]
    at: int
    """The row of the module in which it broke."""
    modules: tuple[Row, ...]
    """Outputs in the order in which they were finished, so that a module follows its parts; the loss comes last."""
    parameters: tuple[Row, ...]

    def __str__(self) -> str:
        first, last = max(0, self.at - AROUND), self.at + AROUND + 1
        broken = self.modules[self.at].name
        own = [p for p in self.parameters if _owner(p.name, self.modules) == self.at]
        lines = [f"{self.origin}, {self.direction}"]
        lines += ["", *_table("output of", self.modules[first:last], broken)]
        if own:
            lines += ["", *_table("parameter", own)]
        return "\n".join(lines)


def first_non_finite(
    model: nn.Module,
    params: Params,
    batch: Batch,
    keys_B: jax.Array | None = None,
    compute_dtype: Any = None,
) -> Autopsy | None:
    """Name the first thing that is not finite when a loss is computed and differentiated, or None if all is finite.

    It is looked for in the order of the computation: the parameters, every module's output, the loss; then back
    from the loss through the gradients with respect to the same outputs and, module by module, its parameters.
    The arguments are those of `replay`.
    """
    modules, parameters = replay(model, params, batch, keys_B, compute_dtype)
    found = partial(Autopsy, modules=modules, parameters=parameters)
    for parameter in parameters:
        if parameter.value.non_finite:
            return found(f"the parameter {parameter.name}", "forward", _owner(parameter.name, modules))
    for at, module in enumerate(modules):
        if module.value.non_finite:
            return found(LOSS if module.name == LOSS else f"the output of {module.name}", "forward", at)
    # Backward, what broke in a module shows in the output before it, or in a parameter of its own.
    broken = [
        (at, f"the gradient that {modules[at].name} passes back to {before.name}")
        for at, before in enumerate(modules[:-1], start=1)
        if before.gradient.non_finite
    ]
    broken += [(_owner(p.name, modules), f"the gradient of {p.name}") for p in parameters if p.gradient.non_finite]
    if not broken:
        return None
    at, origin = max(broken, key=lambda pair: pair[0])
    return found(origin, "backward", at)


def replay(
    model: nn.Module,
    params: Params,
    batch: Batch,
    keys_B: jax.Array | None = None,
    compute_dtype: Any = None,
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Compute the mean loss of a batch and its gradient, and measure everything on the way.

    The loss is that of each example by itself, see `example_loss` of an objective: what a step adds to it, for smooth
    labels, routers, or the other pairs of a batch, is not looked at.

    Args:
      model: unrolled; blocks that a scan runs would be added up into one row. Its attention should be the step's.
      params: the parameters as the step was given them.
      batch: what the step was given.
      keys_B: a dropout key an example; dropout is off without them.
      compute_dtype: what the parameters are cast to first; None for no cast.

    Returns:
      A row a module, in the order in which they finish, and a row a parameter.
    """
    if compute_dtype is not None:
        params = jax.tree.map(lambda p: p.astype(compute_dtype), params)
    batch = jax.tree.map(jnp.asarray, batch)
    # Once without numbers, for the names of the modules in their order.
    found: dict[str, Any] = {}
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (batch, keys_B))
    jax.eval_shape(lambda params, example: _tapped_loss(model, params, found, *example), params, example)
    modules, parameters = jax.device_get(_measure_all(model, tuple(found), params, batch, keys_B))
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return (
        tuple(_row(name, measured) for name, measured in zip(found, modules, strict=True)),
        tuple(_row(dotted(path), measured) for path, measured in leaves),
    )


def save_autopsy(
    folder: Path, step: int, batch: Batch, key_data: np.ndarray | None, report: Autopsy | None, how: str
) -> Path:
    """Keep what it takes to repeat a step that broke, in `autopsy/step-N/` below a run's folder; that place.

    It appears whole, by a rename, in the place of what an earlier try at the same step left.

    Args:
      step: N, counted from 1: the parameters it started from are checkpoint N - 1.
      batch: what it was given.
      key_data: `jax.random.key_data` of its dropout keys, one an example.
      report: what `first_non_finite` found; None if all was finite when computed again.
      how: with what it was computed again, such as 'attention: xla'.
    """
    parent = folder / "autopsy"
    parent.mkdir(exist_ok=True)
    place = parent / f"step-{step}"
    told = "all was finite when computed again" if report is None else str(report)
    text = (
        f"Step {step} gave a loss or a gradient that is not finite. First: {told}\n\n"
        f"Computed again with the step's {how}. "
        f"Largest magnitudes and root mean squares leave out what is not finite. The parameters from before the step "
        f"are checkpoint {step - 1}, in checkpoints/{step - 1}. batch.npz holds what it was given"
        + (".\n" if key_data is None else "; key.npy the data of the dropout keys, one an example.\n")
    )
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
    try:
        scratch.chmod(0o755)
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
        np.savez(scratch / "batch.npz", **named)
        if key_data is not None:
            np.save(scratch / "key.npy", key_data, allow_pickle=False)
        (scratch / "report.txt").write_text(text, encoding="utf-8")
        values = {"step": step, "how": how, "autopsy": None if report is None else asdict(report)}
        (scratch / "report.json").write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)
        scratch.rename(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place


@partial(jax.jit, static_argnames=("model", "names"))
def _measure_all(
    model: nn.Module, names: tuple[str, ...], params: Params, batch: Batch, keys_B: jax.Array | None
) -> tuple[jax.Array, Params]:
    """`_measure` of outputs and their gradients, `(modules, 2, 4)`, and of each parameter and its, `(2, 4)`."""

    call = lambda params, *inputs: model.apply({"params": params}, *inputs)  # noqa: E731
    made = jax.eval_shape(call, params, *jax.tree.map(lambda x: x[0], batch.inputs))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(made))  # logits, mostly
    at_once = max(1, AT_ONCE // n_chunks(AT_ONCE, numbers))
    # Weighted targets add up; without weights each example has its own mean.
    together = jnp.mean if batch.weights is None else jnp.sum

    def mean_loss(params: Params, records_B: dict[str, jax.Array]) -> jax.Array:
        # Recomputed going back, so that nothing of an example is kept but what it is computed from.
        one = jax.checkpoint(lambda example: _tapped_loss(model, params, *example))
        return together(jax.lax.map(one, (records_B, batch, keys_B), batch_size=at_once))

    records_B = dict.fromkeys(names, jnp.zeros((len(jax.tree.leaves(batch)[0]), *EMPTY.shape)))
    grads, measured_B = jax.grad(mean_loss, argnums=(0, 1))(params, records_B)
    modules = _over_batch(jnp.stack([measured_B[name] for name in names], axis=1))
    return modules, jax.tree.map(lambda p, g: jnp.stack([_measure(p), _measure(g)]), params, grads)


def _tapped_loss(
    model: nn.Module, params: Params, record: dict[str, Any], example: Batch, key: jax.Array | None
) -> jax.Array:
    """The loss of one example, with a tap at the output of every module; names that have no record get one."""
    calls: list[str] = []

    def listen(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        out = call(*args, **kwargs)
        if context.method_name != "__call__":
            return out
        path = dotted(context.module.path) or MODEL
        calls.append(path)
        again = calls.count(path)
        return tap(out, record.setdefault(path if again == 1 else f"{path} (call {again})", EMPTY))

    with nn.intercept_methods(listen):
        loss = objective_of(model).example_loss(model, params, example, key)
    return tap(loss, record.setdefault(LOSS, EMPTY))


EMPTY = np.zeros((2, 4), np.float32)
"""A record of `tap` before anything is in it: `_measure` of the values, and of their gradients."""


@jax.custom_vjp
def tap(values: Any, record: jax.Array) -> Any:
    """The values (any tree), unchanged. The "gradient" with respect to the record is what `_measure` says of them and
    of their gradients: so that measurements leave a loop, a `vmap` or a recomputed block as gradients do."""
    return values


def _tap_forward(values: Any, record: jax.Array) -> tuple[Any, jax.Array]:
    return values, _measure(values)


def _tap_backward(measured: jax.Array, grads: Any) -> tuple[Any, jax.Array]:
    return grads, jnp.stack([measured, _measure(grads)])


tap.defvjp(_tap_forward, _tap_backward)


def _measure(tree: Any) -> jax.Array:
    """Largest magnitude, root mean square, how many are finite and how many are not, `(4,)` float32."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    x = jnp.concatenate([jnp.zeros(0), *(jnp.ravel(leaf).astype(jnp.float32) for leaf in floats)])
    finite = jnp.isfinite(x)
    size = jnp.where(finite, jnp.abs(x), 0.0)
    largest, n_finite = jnp.max(size, initial=0.0), jnp.sum(finite)
    rms = _root_mean_square(size, 1.0, n_finite, largest)
    return jnp.stack([largest, rms, n_finite, x.size - n_finite]).astype(jnp.float32)


def _over_batch(measured_B: jax.Array) -> jax.Array:
    """`_measure` of all examples, `(…, 4)`, from that of each, `(B, …, 4)`."""
    largest_B, rms_B, n_finite_B, n_not_B = jnp.moveaxis(measured_B, -1, 0)
    largest, n_finite = jnp.max(largest_B, axis=0), jnp.sum(n_finite_B, axis=0)
    rms = _root_mean_square(rms_B, n_finite_B, n_finite, largest)
    return jnp.stack([largest, rms, n_finite, jnp.sum(n_not_B, axis=0)], axis=-1)


def _root_mean_square(x: jax.Array, weights: Any, total: jax.Array, largest: jax.Array) -> jax.Array:
    """√(Σ w·x² / total) along the first axis, 0 for a total of 0, of numbers whose squares float32 may not hold."""
    unit = jnp.clip(largest, 1e-30, 1e37)  # beyond these, one over it is no normal number
    return unit * jnp.sqrt(jnp.sum(weights * (x / unit) ** 2, axis=0) / jnp.maximum(total, 1))


def _row(name: str, measured: np.ndarray) -> Row:
    sizes = (Size(float(largest), float(rms), int(n)) for largest, rms, _, n in measured)
    return Row(name, *sizes)


def _owner(parameter: str, modules: tuple[Row, ...]) -> int:
    """The row of the module that a parameter belongs to, or of the nearest around it that has a row."""
    names = [module.name for module in modules]
    path = parameter.rpartition(".")[0]
    while path and path not in names:
        path = path.rpartition(".")[0]
    return names.index(path or MODEL)


def _table(title: str, rows: Any, marked: str = "") -> list[str]:
    width = max(len(title), *(len(row.name) for row in rows))
    columns = f"{'largest':>9}  {'rms':>9}  {'not finite':>10}"
    lines = [f"  {'':<{width}}  {'value':^32}  {'gradient':^32}", f"  {title:<{width}}  {columns}  {columns}"]
    for row in rows:
        sizes = "  ".join(f"{s.largest:9.2e}  {s.rms:9.2e}  {s.non_finite:10,}" for s in (row.value, row.gradient))
        lines.append(f"{'>' if row.name == marked else ' '} {row.name:<{width}}  {sizes}")
    return lines
