"""`python -m jaxformer COMMAND`: everything that the command line offers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from jaxformer.cli.arguments import run_command
from jaxformer.cli.options import paragraphs
from jaxformer.errors import UserError
from jaxformer.terminal import echo, echo_status

COMMANDS = {
    "train": ("jaxformer.cli.train", "train a model; the same as train.py"),
    "sample": ("jaxformer.cli.sample", "sample from a model; the same as sample.py"),
    "eval": ("jaxformer.cli.eval", "measure how well a model predicts a text"),
    "inspect": ("jaxformer.cli.inspect", "write a page that shows a trained model from within"),
    "plan": ("jaxformer.cli.plan", "compile a training step for devices one need not have, and say what it takes"),
    "ladder": ("jaxformer.cli.ladder", "train the ladder, rung after rung, and set the outcomes side by side"),
    "verify": ("jaxformer.cli.verify", "hold a trained model against what every model promises"),
    "diff": ("jaxformer.cli.diff", "tell where two runs part"),
    "verify-resume": ("jaxformer.cli.verify_resume", "kill a run, resume it, and compare it with one left in peace"),
}
"""By name: the module whose `main` it is, and what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Call a command with the arguments after its name; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        module, _ = COMMANDS[given[0]]
        echo_status("loading JAX ...")
        return importlib.import_module(module).main(given[1:])
    return run_command(_help, given)


def _help(arguments: list[str]) -> int:
    if arguments and arguments[0] not in ("-h", "--help"):
        near = get_close_matches(arguments[0], COMMANDS, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}."
        raise UserError(f"unknown command {arguments[0]}; {hint}")
    echo("usage: python -m jaxformer COMMAND [OPTIONS]\n")
    for name, (_, what) in COMMANDS.items():
        echo(f"  {name:<15} {paragraphs(what, 18).lstrip()}")
    echo("\nCOMMAND --help lists the options of one.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
