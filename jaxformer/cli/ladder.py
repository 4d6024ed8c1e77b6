"""`python -m jaxformer ladder`: train rung after rung on one text, and set the outcomes side by side."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer.cli.arguments import folder_named, load_config, load_module, options_given, parse, peek, run_command
from jaxformer.cli.options import paragraphs
from jaxformer.cli.train import RUNS, Arguments
from jaxformer.config import Config
from jaxformer.errors import UserError
from jaxformer.fields import flatten, to_dict
from jaxformer.terminal import echo

if TYPE_CHECKING:
    from jaxformer.inspect.page import Figure, Table

RUNGS = "configs/ladder.py"
ABOUT = "Each rung is the one before with one idea changed, trained on the same text."
LOSS = "loss on held-out text, nats a token"
DESCRIPTION = f"""usage: python -m jaxformer ladder [--rungs NAME …] [--folder FOLDER] [OPTIONS OF train.py]

Train rung after rung of {RUNGS}, each in a run of its own below the folder, with the same options: --steps,
--data.path, --train.batch-size and all others of train.py. A rung that is done is not trained again, and one that was
interrupted goes on where it was, so that the same command again goes on with the ladder. A rung that diverges or
becomes not finite has had its turn. At the end there is one table, beside what the sources report: in the terminal, and
in the folder as ladder.csv, ladder.png and ladder.html, a page that needs no network.

--rungs NAME …    which, in the order of the ladder; all of them without it

--folder FOLDER   where (runs/ladder)"""


@dataclass(frozen=True)
class Rung:
    """What became of one."""

    rung: str
    parameters: int
    steps: int
    loss: float
    """Nats a token on held-out text, as are perplexity and bits per byte; NaN where there is none that is finite."""
    perplexity: float
    bits_per_byte: float
    minutes: float
    """That its steps took, without validation."""
    ended_early: str
    """How and where, such as 'diverged at step 118' or 'not finite at step 6'; empty if it went on to its last step."""
    entropy: str
    """Of attention at the last validation, in nats: heads, and between semicolons blocks."""
    sources: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the ladder; the exit status: 0 done, 2 wrong input, 128 + the signal where interrupted."""
    return run_command(_main, arguments, ignore_closed=True)


def _main(arguments: list[str]) -> int:
    asked, options = peek(arguments, {
        "--rungs": {"nargs": "+", "default": None}, "--folder": {"default": str(RUNS / "ladder")},
        "--help": {"action": "store_true"}, "-h": {"action": "store_true", "dest": "help"},
    })  # fmt: skip
    if asked.help:
        echo(paragraphs(DESCRIPTION))
        return 0
    if own_business := sorted(
        {"--config", "--run", "--resume", "--name", "--allow-changed-data"} & options_given(arguments)
    ):
        raise UserError(f"the ladder says {own_business[0]} for each rung itself; leave it out.")
    module = load_module(RUNGS)
    reported: dict[str, str] = module.REPORTED
    for name in asked.rungs or ():
        if name not in reported:
            raise UserError(f"there is no rung {name}; there are {', '.join(reported)}.")
    folder = folder_named("--folder", asked.folder)
    rungs = [name for name in reported if name in (asked.rungs or reported)]
    wanted = {name: _config(name, options) for name in rungs}  # a wrong option is answered before hours of training
    for name in rungs:
        if name in module.MEANT_TO_DIVERGE:
            echo(f"{name} is meant to diverge; training stops where it does")
        status = _climb(wanted[name], folder / name, options)
        if status not in (0, 1):
            return status if status > 0 else 128 - status
        if not (folder / name).exists() or not ended(folder / name):
            raise UserError(f"rung {name} ended with status {status} before its last step; the same command goes on.")
    table = [outcome(folder / name, reported[name]) for name in rungs]
    echo(as_text(table))
    write(table, folder)
    echo(f"the same in {folder}: ladder.csv, ladder.png, ladder.html")
    return 0


def _config(name: str, options: Sequence[str]) -> Config:
    """A rung's config with the options; raises `UserError` for what `train.py` would refuse."""
    config = load_config(f"{RUNGS}:{name}")
    return parse(options, Arguments(config), "python -m jaxformer ladder", DESCRIPTION).fields


def _climb(config: Config, run: Path, options: Sequence[str]) -> int:
    """Train one rung to its end, if it has not come to it; the exit status of training.

    Raises:
      UserError: it has been trained with other options.
    """
    name = run.name
    if run.exists() and ended(run):
        _must_be(config, run)
        echo(f"{name}: done before, in {run}")
        return 0
    echo(f"{name}: {'going on in' if run.exists() else 'training in'} {run}")
    where = ["--resume", "--run", str(run)] if run.exists() else ["--config", f"{RUNGS}:{name}", "--run", str(run)]
    with subprocess.Popen([sys.executable, "-m", "jaxformer", "train", *where, *options]) as process:
        # Whoever ends the ladder means the rung, too, which saves; Ctrl-C it gets by itself.
        before = signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
        try:
            while True:
                with contextlib.suppress(KeyboardInterrupt):
                    return process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def _must_be(config: Config, run: Path) -> None:
    """Raise `UserError` where a run has another config."""
    from jaxformer.runs import read_config

    wanted, found = (flatten(to_dict(c)) for c in (config, read_config(run)))
    for field in {**wanted, **found}:
        if wanted.get(field) != found.get(field):
            raise UserError(
                f"{run} was trained with {field} {found.get(field)}, and {wanted.get(field)} is asked for now; choose "
                "another --folder, or remove it."
            )


def ended(run: Path) -> bool:
    """Whether a run has come to its last step and saved it, or has ended early."""
    from jaxformer.checkpoints import CheckpointReader
    from jaxformer.runs import read_config

    return bool(_ended_early(run)) or CheckpointReader(run).steps()[-1:] == [read_config(run).steps]


def outcome(run: Path, reported: str) -> Rung:
    """What a run's folder tells, beside what the sources do.

    Raises:
      UserError: it is no run.
    """
    from jaxformer.runs import abstract_params, count_parameters, read_config
    from jaxformer.train.log import read_metrics

    config, rows = read_config(run), read_metrics(run)
    measured = [row for row in rows if "val_loss" in row]
    last: dict[str, Any] = measured[-1] if measured else {}
    broken = _ended_early(run)
    if broken:  # what was measured before it is not what the rung came to
        last = {name: value for name, value in last.items() if name == "entropy"}
    told = lambda x: "-" if x is None else f"{x:.3g}"  # noqa: E731 (JSON has null for what is not finite)
    entropy = "; ".join(" ".join(map(told, block)) for block in last.get("entropy", []))
    timed = [(0, 0.0)] + [(row["step"], row["step_ms"]) for row in rows if "step_ms" in row]
    took = sum(ms * (step - before) for (before, _), (step, ms) in pairwise(timed))
    number = lambda name: math.nan if last.get(name) is None else float(last[name])  # noqa: E731
    return Rung(
        rung=run.name,
        parameters=count_parameters(abstract_params(config.model.build(), config.model)),
        steps=rows[-1]["step"] if rows else 0,
        loss=number("val_loss"),
        perplexity=number("val_ppl"),
        bits_per_byte=number("val_bpb"),
        minutes=took / 60_000,
        ended_early=broken,
        entropy=entropy,
        sources=reported,
    )


def _ended_early(run: Path) -> str:
    """How a run diverged or became not finite, and at which step; empty for one that did not."""
    from jaxformer.runs import read_config
    from jaxformer.train.log import read_metrics

    rows = read_metrics(run)
    if rows and "diverged" in rows[-1]:
        return f"diverged at step {rows[-1]['diverged']['began']}"
    steps = [int(number) for place in run.glob("autopsy/step-*") if (number := place.name[5:]).isdigit()]
    last = max((row["step"] for row in rows), default=0)
    if steps and last < read_config(run).steps:  # it may have been helped over it
        return f"not finite at step {max(steps)}"
    return ""


def as_text(table: Sequence[Rung]) -> str:
    """The table for the terminal: its columns of one word each, and below them, a line a rung, what takes more."""
    rows = [cells[:SHORT] for cells in (HEAD, *map(_cells, table))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = lambda i, cell: f"{cell:>{widths[i]}}" if i in NUMBERS else f"{cell:<{widths[i]}}"  # noqa: E731
    lines = ["  ".join(aligned(i, cell) for i, cell in enumerate(row)) for row in rows]
    lines += ["", f"{HEAD[SHORT]} by heads; blocks | what {HEAD[SHORT + 1]} report"]
    lines += [f"{rung.rung:<{widths[0]}}  {rung.entropy or '-'} | {rung.sources}" for rung in table]
    return "\n".join(line.rstrip() for line in lines)


HEAD = (
    "rung", "parameters", "steps", "loss", "perplexity", "bits/byte", "minutes", "ended early", "entropy",
    "the sources",
)  # fmt: skip
NUMBERS = {1, 2, 3, 4, 5, 6}
"""Columns that stand to the right."""
SHORT = 8
"""Columns that a terminal has room for side by side."""


def _cells(rung: Rung) -> tuple[str, ...]:
    number = lambda x, digits: "" if math.isnan(x) else f"{x:.{digits}f}"  # noqa: E731
    return (
        rung.rung, f"{rung.parameters:,}", f"{rung.steps:,}", number(rung.loss, 4), number(rung.perplexity, 2),
        number(rung.bits_per_byte, 4), f"{rung.minutes:.1f}", rung.ended_early,
        rung.entropy, rung.sources,
    )  # fmt: skip


def write(table: Sequence[Rung], folder: Path) -> None:
    """The table as ladder.csv, ladder.png and ladder.html below the folder."""
    from jaxformer.inspect.page import write_page
    from jaxformer.runs import write_atomically

    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([field.name for field in fields(Rung)])
    rows.writerows(["" if isinstance(x, float) and math.isnan(x) else x for x in astuple(rung)] for rung in table)
    write_atomically(folder / "ladder.csv", text.getvalue())
    runs = [folder / rung.rung for rung in table]
    write_atomically(folder / "ladder.png", draw(runs))
    write_page(folder / "ladder.html", "The ladder", [ABOUT], [_table(table), _figure(runs)])


def draw(runs: Sequence[Path]) -> bytes:
    """Losses on held-out text over the steps, a curve a rung, as a PNG."""
    from matplotlib import figure  # slow to import, and only needed here

    picture = figure.Figure(figsize=(9, 5), layout="constrained")
    axes = picture.subplots()
    for run in runs:
        axes.plot(*_curve(run), "o-", markersize=3, label=_label(run))
    axes.set(xlabel="step", ylabel=LOSS, yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with io.BytesIO() as file:
        picture.savefig(file, dpi=120)
        return file.getvalue()


def _figure(runs: Sequence[Path]) -> Figure:
    """The same for the page."""
    from jaxformer.inspect.page import Figure

    traces = []
    for number, run in enumerate(runs):
        steps, losses = _curve(run)
        traces.append({
            "type": "scatter", "mode": "lines+markers", "x": steps, "y": losses, "name": _label(run),
            "line": {"colour": number}, "marker": {"size": 5},
        })  # fmt: skip
    layout = {"height": 460, "xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": LOSS}, "type": "log"}}
    return Figure("On the way", traces, layout)


def _curve(run: Path) -> tuple[list[int], list[float]]:
    from jaxformer.train.log import read_metrics

    rows = [row for row in read_metrics(run) if row.get("val_loss") is not None]
    return [row["step"] for row in rows], [row["val_loss"] for row in rows]


def _label(run: Path) -> str:
    broken = _ended_early(run)
    return f"{run.name} ({broken})" if broken else run.name


def _table(table: Sequence[Rung]) -> Table:
    from jaxformer.inspect.page import Table

    rows = [astuple(rung) for rung in table]
    return Table("Outcomes", HEAD, rows, "Losses are of held-out text; entropies of heads, and of blocks apart by ;.")
