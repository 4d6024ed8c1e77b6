"""`python -m jaxformer influence`: show which training documents made a text likely, and prove it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from jaxformer.cli import machine
from jaxformer.cli.command import as_command, command
from jaxformer.cli.load import CheckpointOptions, open_run, run_folder, with_run
from jaxformer.cli.options import POSITIONAL_TOO, CommandLine
from jaxformer.config.fields import Positive
from jaxformer.errors import UserError
from jaxformer.terminal import echo, echo_error, echo_status

if TYPE_CHECKING:
    from jaxformer.inspect.influence import Replay
    from jaxformer.runs.run import Run

DESCRIPTION = """Show which training documents made a text likely: the derivative of its log-probability by
the weight of each document's loss, through all steps of training, in the time of some ten trainings. --prove then
trains again without the documents listed, and without as many others, everything else equal to the last bit.
--without-step instead shows the loss of a training without one batch, which may have caused a spike."""
SMOOTHER = "train with a lower learning rate, or with adamw, for estimates that hold"
TRIMMED_EVERY = 16
"""Steps after which freed memory is returned."""
AFTER = 10
"""Steps shown after one that is left out."""


@dataclass(frozen=True)
class Arguments:
    """Options of influence."""

    run: Annotated[str | None, POSITIONAL_TOO] = None
    """Folder of the run, or its URL, s3://bucket/run; by default the newest below runs/ that has a checkpoint."""

    text: str | None = None
    """Text whose probability is explained, given the end of a document before it."""
    top: Positive = 5
    """Number of documents listed."""
    prove: bool = False
    """Train again without the documents listed, and without as many random others."""
    without_step: Positive | None = None
    """Step whose batch is left out of another training; needs no --text."""


@as_command()
def main(line: CommandLine) -> int:
    """Print the documents, or the losses; return the exit status."""
    options = line.parse(Arguments(), command("influence"), DESCRIPTION)
    if options.text is None and options.without_step is None:
        raise UserError("--text is missing; give the text whose probability is to be explained.")
    if options.text is not None and options.without_step is not None:
        raise UserError("--without-step needs no --text; give one of them.")
    opening = with_run(CheckpointOptions(options.run))

    from jaxformer.runs.run import read_config

    config = read_config(run_folder(opening))
    machine.set_up(config.train.batch_size, config.mesh)
    run = open_run(opening)

    from jaxformer.inspect.influence import Replay

    replay = Replay(run)
    if options.without_step is None:
        _explain(run, replay, options)
    else:
        _skip(replay, options.without_step)
    return 0


def _explain(run: Run, replay: Replay, options: Arguments) -> None:
    """Print the documents that added most to the text's log-probability, and write the page."""
    import numpy as np

    from jaxformer.inspect.influence import causes
    from jaxformer.inspect.pages.influence import INFLUENCE_PAGE, beginning, write_influence

    tokens = np.array(run.text_model()[1].encode_prompt(options.text or ""))
    if len(tokens) < 2:
        raise UserError(f"--text is {options.text!r}, with no token to predict; give a longer text.")
    echo(f"training {replay.n_steps:,} steps again, and back through them", sys.stderr)
    try:
        found = causes(replay, run, tokens, options.top if options.prove else 0, _show)
    except FloatingPointError as error:
        raise UserError(f"{error}, as training was at the edge of stability; {SMOOTHER}.") from error
    differs = "differs from that of the run, which had other devices or versions, or was resumed with other settings"
    equals = "equals that of the run to the last bit" if found.is_equal else differs
    echo(f"the training, repeated, {equals}")
    echo(f"log-probability of the text: {found.log_probability:.3f} nats in {len(tokens) - 1} tokens; added most:")
    for n in found.ranked[: options.top]:
        words = beginning(run, replay, n)[:60]
        echo(f"{found.added_N[n]:+9.3f} nats  document {n:,} of {len(replay.documents[n]):,} tokens: {words}")
    if not found.is_plausible:
        problem = f"an estimate exceeds the {-found.untrained:.0f} nats that there were to learn of the text"
        echo_error(f"note: {problem}, as at the edge of stability; {SMOOTHER}.")
    for proof in found.proofs:
        which = "those" if proof is found.proofs[0] else f"{len(proof.documents)} others"
        echo(f"trained without {which}: predicted {proof.predicted:+.3f} nats, measured {proof.measured:+.3f}")
    write_influence(run, replay, found)
    echo(f"{run.path / INFLUENCE_PAGE}; open it in a browser")


def _skip(replay: Replay, step: int) -> None:
    """Print the losses around a step with and without its batch."""
    if step > replay.n_steps:
        raise UserError(f"--without-step is {step}; the run has {replay.n_steps} steps.")
    with_it, without = ([loss for *_, loss in replay.steps(without=steps)] for steps in ((), (step,)))
    echo(f"  step     loss  without the batch of step {step:,}")
    for i in range(max(0, step - 3), min(replay.n_steps, step + AFTER)):
        echo(f"{i + 1:6,}  {with_it[i]:7.4f}  {without[i]:7.4f}")


def _show(done: int, total: int) -> None:
    """Report each tenth of the steps on stderr if it is a terminal, and return memory, of which each backward pass
    frees pieces that the next one does not reuse: 10 GB after 300 steps."""
    if done % TRIMMED_EVERY == 0:
        machine.release_freed_memory()
    if done * 10 // total > (done - 1) * 10 // total:
        echo_status(f"{done / total:.0%}")
