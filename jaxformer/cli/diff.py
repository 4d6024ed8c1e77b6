"""`python -m jaxformer diff`: compare two runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jaxformer.cli.command import as_command
from jaxformer.cli.options import POSITIONAL, CommandLine
from jaxformer.config.fields import Fraction
from jaxformer.errors import UserError, command
from jaxformer.terminal import echo

DESCRIPTION = """Compare two runs: the fields of their configs; the first logged step at which they differ, and the
first parameter whose statistics in the gradient tables differ; all logged values at that step and at the last common
step; the arrays of the last common checkpoint. Timings are ignored. The exit status is 0 if nothing differs, and 1
otherwise."""
MAX_LINES = 12
"""Maximum lines shown per section."""


@dataclass(frozen=True)
class Arguments:
    """Options of diff."""

    one: Annotated[str, POSITIONAL] = ""
    """Folder of a run."""
    other: Annotated[str, POSITIONAL] = ""
    """Folder of another run."""
    tolerance: Fraction = 0.0
    """Relative difference up to which two numbers count as equal."""


@as_command()
def main(line: CommandLine) -> int:
    """Compare two runs; return the exit status: 0 equal, 1 different, 2 wrong input."""
    options = line.parse(Arguments(), command("diff"), DESCRIPTION)
    if not (options.one and options.other):
        raise UserError(f"give two runs: {command('diff')} runs/one runs/other.")

    from jaxformer.inspect.comparison import checkpoint_differences, config_differences, log_differences
    from jaxformer.runs.storage import local_folder

    a, b = local_folder(options.one), local_folder(options.other)
    sections = {
        "configs": list(config_differences(a, b)),
        "logs": list(log_differences(a, b, options.tolerance)),
        "checkpoints": list(checkpoint_differences(a, b, options.tolerance)),
    }
    for title, lines in sections.items():
        echo(f"{title}: {'' if lines else 'the same'}".rstrip())
        for difference in lines[:MAX_LINES]:
            echo(f"  {difference}")
        if len(lines) > MAX_LINES:
            echo(f"  … and {len(lines) - MAX_LINES} more")
    return 1 if any(sections.values()) else 0
