"""`python -m jaxformer merge`: merge a run's adapters into its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jaxformer.cli import machine
from jaxformer.cli.arguments import folder_named, run_named
from jaxformer.cli.command import as_command, command
from jaxformer.cli.options import POSITIONAL_TOO, CommandLine
from jaxformer.errors import UserError
from jaxformer.files import no_empty_parents
from jaxformer.terminal import echo

DESCRIPTION = """Write a new run with the parameters of another run and its LoRA adapters merged into them. It needs no
base run and has no optimizer state: train it further with --init-from. Other commands merge adapters when they load a
run."""


@dataclass(frozen=True)
class Arguments:
    """Options of merge."""

    run: Annotated[str, POSITIONAL_TOO] = ""
    """Folder of a run that was trained with --lora.rank."""
    out: str = ""
    """Folder of the run to write."""
    checkpoint: str = "last"
    """'last', 'best', or a step."""


@as_command()
def main(line: CommandLine) -> int:
    """Merge adapters; return the exit status."""
    options = line.parse(Arguments(), command("merge"), DESCRIPTION)
    if not (options.run and options.out):
        raise UserError(f"give a run and a folder to write: {command('merge')} runs/tuned --out runs/merged.")
    out = folder_named("--out", options.out)
    machine.set_up()

    from jaxformer.runs.run import check_can_create, create_run, load_run, read_config  # orbax takes a second to import

    check_can_create(out)
    folder = run_named("--run", options.run)
    if not read_config(folder).lora.rank:
        raise UserError(f"{folder} was trained without --lora.rank; it has no adapters to merge.")
    run = load_run(folder, options.checkpoint)
    with no_empty_parents(out):
        create_run(out, run.config, run.tokenizer, False, run.classes, run.params, run.step, run.sampling)
    echo(f"{out}: step {run.step:,} of {folder}, adapters merged")
    return 0
