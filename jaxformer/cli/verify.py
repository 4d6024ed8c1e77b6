"""`python -m jaxformer verify`: check a trained model's invariants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.cli import machine
from jaxformer.cli.command import as_command, command
from jaxformer.cli.load import CheckpointOptions, open_run, with_run
from jaxformer.cli.options import CommandLine
from jaxformer.config import ComputeConfig
from jaxformer.config.fields import Range, Seed
from jaxformer.contract import Task
from jaxformer.data.dataset import Batch
from jaxformer.inspect.property_checks import ROUNDING, Check, largest_of, random_inputs, relative_error, verify
from jaxformer.models.objective import Params
from jaxformer.nn.execution import Execution
from jaxformer.ops import workarounds
from jaxformer.terminal import echo

if TYPE_CHECKING:
    from jaxformer.runs.run import Run
    from jaxformer.train.setup import TrainSetup

SMALLEST_GRADIENT = 1e-5
"""Gradient of a parameter, relative to the largest of all parameters, below which its error is relative to this."""

DESCRIPTION = """Check a trained model's invariants: logits do not depend on later tokens; outputs depend neither on
padding nor on the rest of the batch; decoding with a KV cache reproduces the logits of a full pass; evaluation has no
dropout, and in training no dropout key is used twice; gradients match finite differences in float64; several devices
give the results of one. The inputs are random tokens and pixels, so no data is needed; each line shows the largest
deviation and the tolerance for rounding. The exit status is 1 if a check fails."""


@dataclass(frozen=True)
class Arguments(CheckpointOptions):
    """Options of verify."""

    examples: Annotated[int, Range(least=2)] = 4
    """Number of random examples to check; the last text is shorter."""
    tokens: Annotated[int, Range(least=2)] = 64
    """Maximum text length in tokens. A model with fixed-length inputs always gets its full length; a model with an
    attention window gets at least 8 more tokens than the window."""
    seed: Seed = 0
    """Seed of the random inputs."""


@as_command()
def main(line: CommandLine) -> int:
    """Verify a run; return the exit status: 0 all invariants hold, 1 a check failed, 2 wrong input."""
    options = line.parse(Arguments(), command("verify"), DESCRIPTION)
    machine.set_up(machine.cores())
    machine.return_freed_memory()
    run = open_run(with_run(options))
    echo(f"run {run.path}, step {run.step:,}: {type(run.model).__name__}, on {options.examples} random examples")
    echo(f"{'':4}  {'invariant':<18}  {'deviation':>9}  {'limit':>7}")
    failed = []
    for check in _checks(run, options):
        echo(_row(check))
        if not check.holds:
            failed.append(check.name)
        machine.release_freed_memory()
    echo(f"failed: {', '.join(failed)}" if failed else "all invariants hold")
    return 1 if failed else 0


def _row(check: Check) -> str:
    if check.deviation is None:
        return f"{'-':>4}  {check.name:<18}  {'':>9}  {'':>7}  {check.detail}"
    verdict = "ok" if check.holds else "FAIL"
    return f"{verdict:>4}  {check.name:<18}  {check.deviation:9.1e}  {check.limit:7.0e}  {check.detail}"


def _checks(run: Run, options: Arguments) -> Iterator[Check]:
    inputs = random_inputs(run.config.model, options.examples, options.seed, options.tokens)
    for check in verify(run, Batch(inputs, _targets(run, inputs, options.seed))):
        yield check
    if check.name == "finite":  # it failed and ended the checks
        return
    yield _example_keys(run, options)
    yield _several_devices(run, options)


def _targets(run: Run, inputs_B: tuple[jax.Array, ...], seed: int) -> jax.Array:
    """Return random valid target classes, or the examples' indices for a contrastive model."""
    outputs = jax.eval_shape(lambda *x: run.model.apply({"params": run.params}, *x), *(x[0] for x in inputs_B))
    n = len(inputs_B[0])
    if run.config.model.contract.task is Task.CONTRASTIVE:
        return jnp.arange(n)
    logits = jax.tree.leaves(outputs)[0]
    return jnp.asarray(np.random.default_rng(seed).integers(0, logits.shape[-1], (n, *logits.shape[:-1])), jnp.int32)


def _setup(run: Run, n: int, devices: Sequence[jax.Device]) -> TrainSetup:
    """Return the run's training setup for `n` examples on some devices, with float32 parameters and, with
    `jax.enable_x64`, computation in float64.

    A block's parameters are converted when it begins, and again in the backward pass: copies of all of them on all
    devices would take gigabytes.
    """
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.train.setup import BLOCK, TrainSetup

    exact = partial(jax.tree.map, lambda w: w.astype(jax.dtypes.canonicalize_dtype(jnp.float64)))

    class ExactSetup(TrainSetup):
        @cached_property
        def execution(self) -> Execution:
            execution = super().execution
            gather = lambda name, params: exact(execution.gather(name, params))  # noqa: E731
            return dataclasses.replace(execution, gather=gather)

        def compute_params(self, params: Params, frozen: Params | None = None) -> Params:
            params = super().compute_params(params, frozen)
            return {name: p if BLOCK.search(name) else exact(p) for name, p in params.items()}

    train = dataclasses.replace(run.config.train, batch_size=n)
    compute = ComputeConfig(precision="float32", remat="block")
    config = dataclasses.replace(run.config, mesh="", compute=compute, train=train)
    return ExactSetup(config, make_mesh("", devices))


def _example_keys(run: Run, options: Arguments) -> Check:
    """Check that each example of each step has its own dropout key."""
    setup = _setup(run, options.examples, jax.local_devices()[:1])
    keys = [tuple(key) for step in range(2) for key in jax.random.key_data(setup.example_keys(step)).tolist()]
    detail = f"equal dropout keys among {options.examples} examples of 2 steps"
    return Check("example keys", detail, float(len(keys) - len({*keys})), 0.0)


def _several_devices(run: Run, options: Arguments) -> Check:
    """Check that a batch has the same training loss and gradient, including dropout, on one device and on all."""
    from jaxformer.parallel.mesh import replicated
    from jaxformer.train.step import make_gradient

    n, name = jax.local_device_count(), "several devices"
    if n == 1:
        return Check(name, "there is one device", None, ROUNDING)
    inputs = random_inputs(run.config.model, n, options.seed, options.tokens)
    batch = Batch(inputs, _targets(run, inputs, options.seed))
    results = []
    # In float64, sums in another order differ by far less than the gradients of parameters that hardly matter.
    with jax.enable_x64(True):
        for devices in (jax.local_devices(), jax.local_devices()[:1]):
            setup = _setup(run, n, devices)
            shared = replicated(setup.mesh)
            memory = workarounds.low_memory_options(devices[0].platform)
            # Gradients take the memory of the copies.
            gradient = jax.jit(make_gradient(setup), donate_argnums=0, compiler_options=memory)
            copies = jax.tree.map(lambda p, shared=shared: jnp.copy(jax.device_put(p, shared)), run.params)
            results.append(jax.device_get(gradient(copies, batch, setup.example_keys(0))))
            del copies
    (loss, grads), (expected_loss, expected) = results
    least = SMALLEST_GRADIENT * largest_of(np.abs(g).max(initial=0) for g in jax.tree.leaves(expected))
    errors = jax.tree.leaves(jax.tree.map(partial(relative_error, least=least), grads, expected))
    detail = f"loss and gradient of {n} examples, on {n} devices and on one, in float64"
    return Check(name, detail, largest_of((relative_error(loss, expected_loss), *errors)), ROUNDING)
