"""`python -m jaxformer verify`: hold a trained model against what every model promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.cli import machine
from jaxformer.cli.arguments import parse, run_command
from jaxformer.cli.load import RunOptions, open_run, with_run
from jaxformer.cli.options import POSITIONAL
from jaxformer.config import ComputeConfig
from jaxformer.contract import Task
from jaxformer.fields import at_least
from jaxformer.inspect.verify import ROUNDING, Check, apart, random_inputs, verify, worst_of
from jaxformer.terminal import echo

if TYPE_CHECKING:
    from jaxformer.runs import Run

DESCRIPTION = """Hold a trained model against what every model promises: that it sees no later token, that padding and
what else is in the batch change nothing, that decoding with a cache gives what is computed at once, that nothing is
dropped in evaluation, that gradients are those of finite differences in float64, and that several devices give what
one gives. It is tried on random tokens and pixels, so no data is needed; each line has the largest deviation found, and
what rounding allows. The exit status is 1 where a promise is not kept."""


@dataclass(frozen=True)
class Arguments:
    """Options of verify."""

    run: Annotated[str | None, POSITIONAL] = None
    """The run's folder; without it, the newest below runs/ that has a checkpoint."""
    checkpoint: str = "last"
    """'last', 'best', or a step."""
    examples: int = 4
    """How many to try it on; the last text is shorter."""
    tokens: int = 64
    """Of each text, at most; a model that reads only full windows gets these, and one that attends to a window of the
    last tokens, 8 more than that, so that its end shows."""
    seed: int = 0
    """Of what is drawn."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify; the exit status: 0 all holds, 1 not, 2 wrong input."""
    return run_command(_main, arguments)


def _main(arguments: list[str]) -> int:
    asked = parse(arguments, Arguments(), "python -m jaxformer verify", DESCRIPTION)
    at_least(asked, 2, "examples")
    at_least(asked, 2, "tokens")
    at_least(asked, 0, "seed")
    machine.set_up(machine.cores())
    run = open_run(with_run(RunOptions(run=asked.run, checkpoint=asked.checkpoint)), None)
    echo(f"run {run.path}, step {run.step:,}: {type(run.model).__name__}, on {asked.examples} random examples")
    echo(f"{'':4}  {'promise':<18}  {'deviation':>9}  {'limit':>7}")
    broken = []
    for check in _checks(run, asked):
        echo(_row(check))
        if not check.holds:
            broken.append(check.promise)
    echo(f"not kept: {', '.join(broken)}" if broken else "all that applies is kept")
    return 1 if broken else 0


def _row(check: Check) -> str:
    if check.measured is None:
        return f"{'-':>4}  {check.promise:<18}  {'':>9}  {'':>7}  {check.said}"
    verdict = "ok" if check.holds else "FAIL"
    return f"{verdict:>4}  {check.promise:<18}  {check.measured:9.1e}  {check.limit:7.0e}  {check.said}"


def _checks(run: Run, asked: Arguments) -> Iterator[Check]:
    inputs = random_inputs(run.config.model, asked.examples, asked.seed, asked.tokens)
    for found in verify(run.model, run.params, inputs, _targets(run, inputs, asked.seed)):
        yield found
    if found.promise == "finite":  # that it is not, and the last thing to say
        return
    with jax.default_matmul_precision("highest"):  # as `verify` has it
        found = _sharding(run, asked)
    yield found


def _targets(run: Run, inputs_B: tuple[jax.Array, ...], seed: int) -> jax.Array:
    """Classes that the model could be trained to give, or the numbers of the examples."""
    given = jax.eval_shape(lambda *inputs: run.model.apply({"params": run.params}, *inputs), *(x[0] for x in inputs_B))
    n = len(inputs_B[0])
    if run.config.model.contract.task is Task.CONTRASTIVE:
        return jnp.arange(n)
    logits = jax.tree.leaves(given)[0]
    return jnp.asarray(np.random.default_rng(seed).integers(0, logits.shape[-1], (n, *logits.shape[:-1])), jnp.int32)


def _sharding(run: Run, asked: Arguments) -> Check:
    """The loss and the gradient that training would have, dropout included, of a batch on one device and on all."""
    from jaxformer.data.dataset import Batch
    from jaxformer.sharding import make_mesh, replicated
    from jaxformer.train.setup import TrainSetup
    from jaxformer.train.step import make_gradient

    n, name = jax.local_device_count(), "several devices"
    if n == 1:
        return Check(name, "there is one device", None, ROUNDING)
    inputs = random_inputs(run.config.model, n, asked.seed, asked.tokens)
    batch = Batch(inputs, _targets(run, inputs, asked.seed))
    config = dataclasses.replace(
        run.config, mesh="", compute=ComputeConfig(precision="float32"),
        train=dataclasses.replace(run.config.train, batch_size=n),
    )  # fmt: skip
    found = []
    for devices in (jax.local_devices()[:1], jax.local_devices()):
        setup = TrainSetup(config, make_mesh("", devices))
        params = jax.device_put(run.params, replicated(setup.mesh))
        found.append(jax.device_get(jax.jit(make_gradient(setup))(params, batch, setup.example_keys(0))))
    said = f"loss and gradient of {n} examples, on {n} devices and on one"
    return Check(name, said, worst_of(map(apart, *map(jax.tree.leaves, found))), ROUNDING)
