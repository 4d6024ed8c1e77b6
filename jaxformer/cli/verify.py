"""`python -m jaxformer verify`: check a trained model's invariants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.cli import machine
from jaxformer.cli.arguments import as_command, parse
from jaxformer.cli.load import RunOptions, open_run, with_run
from jaxformer.cli.options import POSITIONAL_TOO
from jaxformer.config import ComputeConfig
from jaxformer.contract import Task
from jaxformer.fields import check_range
from jaxformer.inspect.verify import ROUNDING, Check, largest_of, random_inputs, relative_error, verify
from jaxformer.invocation import command
from jaxformer.terminal import echo

if TYPE_CHECKING:
    from jaxformer.runs import Run

DESCRIPTION = """Check a trained model's invariants: logits do not depend on later tokens; outputs depend neither on
padding nor on the rest of the batch; decoding with a KV cache reproduces the logits of a full pass; evaluation has no
dropout; gradients match finite differences in float64; several devices give the results of one. The inputs are random
tokens and pixels, so no data is needed; each line shows the largest deviation and the tolerance for rounding. The exit
status is 1 if a check fails."""


@dataclass(frozen=True)
class Arguments:
    """Options of verify."""

    run: Annotated[str | None, POSITIONAL_TOO] = None
    """Folder of the run; by default the newest below runs/ that has a checkpoint."""
    checkpoint: str = "last"
    """'last', 'best', or a step."""
    examples: int = 4
    """Number of random examples to check; the last text is shorter."""
    tokens: int = 64
    """Maximum text length in tokens. A model with fixed-length inputs always gets its full length; a model with an
    attention window gets at least 8 more tokens than the window."""
    seed: int = 0
    """Seed of the random inputs."""


@as_command()
def main(arguments: list[str]) -> int:
    """Verify a run; return the exit status: 0 all invariants hold, 1 a check failed, 2 wrong input."""
    options = parse(arguments, Arguments(), command("verify"), DESCRIPTION)
    check_range(options, "examples", "tokens", least=2)
    machine.set_up(machine.cores())
    run = open_run(with_run(RunOptions(run=options.run, checkpoint=options.checkpoint)))
    echo(f"run {run.path}, step {run.step:,}: {type(run.model).__name__}, on {options.examples} random examples")
    echo(f"{'':4}  {'invariant':<18}  {'deviation':>9}  {'limit':>7}")
    failed = []
    for check in _checks(run, options):
        echo(_row(check))
        if not check.holds:
            failed.append(check.name)
    echo(f"failed: {', '.join(failed)}" if failed else "all invariants hold")
    return 1 if failed else 0


def _row(check: Check) -> str:
    if check.deviation is None:
        return f"{'-':>4}  {check.name:<18}  {'':>9}  {'':>7}  {check.detail}"
    verdict = "ok" if check.holds else "FAIL"
    return f"{verdict:>4}  {check.name:<18}  {check.deviation:9.1e}  {check.limit:7.0e}  {check.detail}"


def _checks(run: Run, options: Arguments) -> Iterator[Check]:
    inputs = random_inputs(run.config.model, options.examples, options.seed, options.tokens)
    for check in verify(run.model, run.params, inputs, _targets(run, inputs, options.seed)):
        yield check
    if check.name == "finite":  # it failed and ended the checks
        return
    with jax.default_matmul_precision("highest"):
        check = _several_devices(run, options)
    yield check


def _targets(run: Run, inputs_B: tuple[jax.Array, ...], seed: int) -> jax.Array:
    """Return random valid target classes, or the examples' indices for a contrastive model."""
    outputs = jax.eval_shape(lambda *x: run.model.apply({"params": run.params}, *x), *(x[0] for x in inputs_B))
    n = len(inputs_B[0])
    if run.config.model.contract.task is Task.CONTRASTIVE:
        return jnp.arange(n)
    logits = jax.tree.leaves(outputs)[0]
    return jnp.asarray(np.random.default_rng(seed).integers(0, logits.shape[-1], (n, *logits.shape[:-1])), jnp.int32)


def _several_devices(run: Run, options: Arguments) -> Check:
    """Check that a batch has the same training loss and gradient, including dropout, on one device and on all."""
    from jaxformer.data.dataset import Batch
    from jaxformer.sharding import make_mesh, replicated
    from jaxformer.train.setup import TrainSetup
    from jaxformer.train.step import make_gradient

    n, name = jax.local_device_count(), "several devices"
    if n == 1:
        return Check(name, "there is one device", None, ROUNDING)
    inputs = random_inputs(run.config.model, n, options.seed, options.tokens)
    batch = Batch(inputs, _targets(run, inputs, options.seed))
    config = dataclasses.replace(
        run.config, mesh="", compute=ComputeConfig(precision="float32"),
        train=dataclasses.replace(run.config.train, batch_size=n),
    )  # fmt: skip
    results = []
    for devices in (jax.local_devices()[:1], jax.local_devices()):
        setup = TrainSetup(config, make_mesh("", devices))
        params = jax.device_put(run.params, replicated(setup.mesh))
        results.append(jax.device_get(jax.jit(make_gradient(setup))(params, batch, setup.example_keys(0), None)))
    detail = f"loss and gradient of {n} examples, on {n} devices and on one"
    return Check(name, detail, largest_of(map(relative_error, *map(jax.tree.leaves, results))), ROUNDING)
