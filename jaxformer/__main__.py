"""The command line: `jaxformer COMMAND`, or `python -m jaxformer COMMAND`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from jaxformer.cli.command import as_command, command, exit_program
from jaxformer.cli.options import CommandLine, paragraphs
from jaxformer.errors import UserError
from jaxformer.terminal import echo, echo_status

COMMANDS = {
    "train": ("jaxformer.cli.train", "train a model; the same as train.py"),
    "sample": ("jaxformer.cli.sample", "sample from a model; the same as sample.py"),
    "import": ("jaxformer.cli.import_model", "import a published model as a run"),
    "eval": ("jaxformer.cli.eval", "evaluate a model on held-out data or a text"),
    "tokens": ("jaxformer.cli.tokens", "print the tokens of a text"),
    "inspect": ("jaxformer.cli.inspect", "write a page of attention maps and activations of a trained model"),
    "influence": ("jaxformer.cli.influence", "show which documents made a text likely, and prove it"),
    "film": ("jaxformer.cli.film", "show how the heads of a model came to be, from its snapshots"),
    "plan": ("jaxformer.cli.plan", "compile a training step for any devices, and report memory, time and MFU"),
    "ladder": ("jaxformer.cli.ladder", "train the ladder, rung by rung, and compare the results"),
    "export": ("jaxformer.cli.export", "export a trained model to transformers, llama.cpp or plain jax"),
    "merge": ("jaxformer.cli.merge", "merge the LoRA adapters of a run into its parameters"),
    "verify": ("jaxformer.cli.verify", "check the invariants of a trained model"),
    "diff": ("jaxformer.cli.diff", "say which run is better, and where two diverge"),
    "verify-resume": ("jaxformer.cli.verify_resume", "kill a run, resume it, and compare it with an uninterrupted one"),
}
"""Module and description of each command; the module's `main` runs it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names with the remaining arguments; return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in COMMANDS:
        module, _ = COMMANDS[arguments[0]]
        echo_status("loading JAX ...")
        return importlib.import_module(module).main(arguments[1:])
    return _help(arguments)


@as_command()
def _help(line: CommandLine) -> int:
    arguments = line.words()
    if arguments and arguments[0] not in ("-h", "--help"):
        near = get_close_matches(arguments[0], COMMANDS, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}."
        raise UserError(f"unknown command {arguments[0]}; {hint}")
    echo(f"usage: {command('COMMAND')} [OPTIONS]\n")
    for name, (_, description) in COMMANDS.items():
        echo(f"  {name:<15} {paragraphs(description, 18).lstrip()}")
    echo("\nCOMMAND --help lists the options of one.")
    return 0


def run() -> NoReturn:
    """Run the command that the program's first argument names, and exit with its status."""
    exit_program(main())


if __name__ == "__main__":
    run()
