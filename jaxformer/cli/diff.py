"""`python -m jaxformer diff`: where two runs part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from jaxformer.cli.arguments import parse, run_command
from jaxformer.cli.options import POSITIONAL
from jaxformer.errors import UserError
from jaxformer.fields import flatten, to_dict
from jaxformer.terminal import echo

PROGRAM = "python -m jaxformer diff"
DESCRIPTION = """Compare two runs: fields of their configs; the first logged step at which they part, in what, and the
first parameter that their gradient tables tell apart; every logged number at that step and at the last that both have;
the arrays of the last checkpoint that both have. Time does not count. The exit status is 0 where nothing differs, and 1
where something does."""
MOST = 12
"""Lines of one kind that are shown."""


@dataclass(frozen=True)
class Arguments:
    """Options of diff."""

    one: Annotated[str, POSITIONAL] = ""
    """A run's folder."""
    other: Annotated[str, POSITIONAL] = ""
    """Another's."""
    tolerance: float = 0.0
    """Numbers that differ by no more than this share of the larger one count as the same."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; the exit status: 0 the same, 1 not, 2 wrong input."""
    return run_command(_main, arguments)


def _main(arguments: list[str]) -> int:
    asked = parse(arguments, Arguments(), PROGRAM, DESCRIPTION)
    if not (asked.one and asked.other):
        raise UserError(f"give two runs: {PROGRAM} runs/one runs/other.")
    if not 0 <= asked.tolerance < 1:
        raise UserError(f"tolerance is {asked.tolerance}; it must be at least 0 and below 1.")
    runs = Path(asked.one), Path(asked.other)
    sections = {
        "configs": list(_configs(*runs)),
        "logs": list(_logs(*runs, asked.tolerance)),
        "checkpoints": list(_checkpoints(*runs, asked.tolerance)),
    }
    for title, lines in sections.items():
        echo(f"{title}: {'' if lines else 'the same'}".rstrip())
        for line in lines[:MOST]:
            echo(f"  {line}")
        if len(lines) > MOST:
            echo(f"  … and {len(lines) - MOST} more")
    return 1 if any(sections.values()) else 0


def _configs(one: Path, other: Path) -> Iterator[str]:
    """Fields that differ."""
    from jaxformer.runs import read_config

    fields, others = (flatten(to_dict(read_config(run))) for run in (one, other))
    for name in {**fields, **others}:
        if fields.get(name) != others.get(name) or (name in fields) != (name in others):
            yield f"{name}: {_told(fields.get(name))} and {_told(others.get(name))}"


def _logs(one: Path, other: Path, tolerance: float) -> Iterator[str]:
    """First where they part, then all that differs there and at the end."""
    from jaxformer.train.log import read_metrics, without_timings

    rows, others = (_by_step(map(without_timings, read_metrics(run))) for run in (one, other))
    both = sorted(rows.keys() & others.keys())
    if not both:
        yield "neither has any" if not rows and not others else "no step is logged by both"
        return
    if missing := sorted(rows.keys() ^ others.keys()):
        where = one if missing[0] in rows else other
        yield f"steps that one of them alone has logged: {len(missing)}, first step {missing[0]:,} of {where}"
    alone = {name: (step, one if name in rows[step] else other) for step in reversed(both)
             for name in rows[step].keys() ^ others[step].keys()}  # fmt: skip
    for name, (step, where) in islice(sorted(alone.items()), 3):
        yield f"only {where} has logged {name}, first at step {step:,}"
    if len(alone) > 3:
        yield f"and {len(alone) - 3} more that one of them alone has logged"
    apart = {step: list(_apart(rows[step], others[step], tolerance)) for step in both}
    first = next((step for step in both if apart[step]), None)
    if first is None:
        return
    yield f"they part at step {first:,}, in {apart[first][0]}: {_values(rows[first], others[first], apart[first][0])}"
    tables = ((step, name) for step in both for name in apart[step] if name.startswith("gradients."))
    for step, name in islice(tables, 1):
        parameter, statistic = name.removeprefix("gradients.").rsplit(".", 1)
        values = _values(rows[step], others[step], name)
        yield f"the first parameter they tell apart, at step {step:,}, is {parameter}, in {statistic}: {values}"
    for step in dict.fromkeys((first, both[-1])):
        for name in apart[step]:
            if not name.startswith("gradients."):
                yield f"step {step:,}, {name}: {_values(rows[step], others[step], name)}"


def _by_step(rows: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """All that was logged at each step; a note has a row of its own."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["step"], {}).update(flatten(row))
    return found


def _checkpoints(one: Path, other: Path, tolerance: float) -> Iterator[str]:
    """Arrays of the last checkpoint of both that differ."""
    from jaxformer.checkpoints import CheckpointReader

    stored = [CheckpointReader(run) for run in (one, other)]
    both = sorted(set(stored[0].steps()) & set(stored[1].steps()))
    if not both:
        yield "no step has a checkpoint of both" if any(stored) else "neither has any"
        return
    for checkpoints in stored:
        checkpoints.step(both[-1])  # which sees whether it is damaged
    arrays, others = (checkpoints.arrays(both[-1]) for checkpoints in stored)
    for name in {**arrays, **others}:
        a, b = arrays.get(name), others.get(name)
        if a is None or b is None:
            yield f"step {both[-1]:,}, {name}: only {one if b is None else other} has it"
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"step {both[-1]:,}, {name}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        elif a.tobytes() != b.tobytes():
            wide, wider = (x.astype(np.float64) for x in (a, b))
            norm = max(np.linalg.norm(wide), np.linalg.norm(wider))
            share = float(np.linalg.norm(wide - wider) / norm) if norm else 0.0
            if not share <= tolerance or tolerance == 0:
                yield f"step {both[-1]:,}, {name}: apart by {share:.2e} of its norm"


def _apart(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> Iterator[str]:
    """Names of what both have and what differs by more than a tolerance, in the order of the first."""
    for name in (name for name in one if name in other):
        a, b = one[name], other[name]
        if a is not b and not (a == b or _near(a, b, tolerance)):
            yield name


def _near(a: Any, b: Any, tolerance: float) -> bool:
    numbers = all(isinstance(x, int | float) and isfinite(x) for x in (a, b))
    return numbers and abs(a - b) <= tolerance * max(abs(a), abs(b))


def _values(one: dict[str, Any], other: dict[str, Any], name: str) -> str:
    return f"{_told(one.get(name))} and {_told(other.get(name))}"


def _told(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    return "nothing" if value is None else str(value)
