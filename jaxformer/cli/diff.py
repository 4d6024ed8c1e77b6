"""`python -m jaxformer diff`: compare runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxformer.cli.command import as_command, command
from jaxformer.cli.options import POSITIONAL, CommandLine
from jaxformer.config.fields import Fraction
from jaxformer.errors import UserError
from jaxformer.terminal import echo

DESCRIPTION = """Compare runs: which has the lowest held-out loss, by how much and on what data; the fields in which
their configs differ; and a page with their curves, one over the other. Of two runs also the first logged step at which
they differ, and the first parameter whose statistics in the gradient tables differ; all logged values at that step and
at the last common step; the arrays of the last common checkpoint. Timings are ignored. The exit status is 0 if nothing
differs, and 1 otherwise."""
MAX_LINES = 12
"""Maximum lines shown per section."""


@dataclass(frozen=True)
class Arguments:
    """Options of diff."""

    runs: Annotated[tuple[str, ...], POSITIONAL] = ()
    """Folders of two or more runs."""
    page: str | None = ""
    """HTML file for the curves, which opens from disk; by default diff.html beside the first run, and none for no
    file."""
    tolerance: Fraction = 0.0
    """Relative difference up to which two numbers count as equal."""


@as_command()
def main(line: CommandLine) -> int:
    """Compare two runs; return the exit status: 0 equal, 1 different, 2 wrong input."""
    options = line.parse(Arguments(), command("diff"), DESCRIPTION)
    if len(options.runs) < 2:
        raise UserError(f"give two runs or more: {command('diff')} runs/one runs/other.")

    from jaxformer.inspect.comparison import checkpoint_differences, config_differences, log_differences, verdict
    from jaxformer.inspect.pages.training import write_comparison
    from jaxformer.runs.storage import local_folder
    from jaxformer.train.log import read_metrics

    runs = [local_folder(run) for run in options.runs]
    sections = {"configs": list(config_differences(*runs))}
    if len(runs) == 2:
        a, b = runs
        sections["logs"] = list(log_differences(a, b, options.tolerance))
        sections["checkpoints"] = list(checkpoint_differences(a, b, options.tolerance))
    for text in verdict(runs):
        echo(text)
    for title, lines in sections.items():
        echo(f"{title}: {'' if lines else 'the same'}".rstrip())
        for difference in lines[:MAX_LINES]:
            echo(f"  {difference}")
        if len(lines) > MAX_LINES:
            echo(f"  … and {len(lines) - MAX_LINES} more")
    if options.page is not None:
        page = Path(options.page or runs[0].parent / "diff.html")
        if write_comparison(page, dict(zip(options.runs, map(read_metrics, runs), strict=False))):
            echo(f"curves: {page}; open it in a browser")
    return 1 if any(sections.values()) else 0
