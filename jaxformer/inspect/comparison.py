"""Differences between two runs in their configs, logs and checkpoints. Timings are ignored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config.fields import flatten, to_dict
from jaxformer.runs.checkpoints import CheckpointReader
from jaxformer.runs.run import read_config
from jaxformer.train.log import read_metrics, without_timings

Row = dict[str, Any]
"""Values logged at a step, by flattened name."""


def config_differences(a: Path, b: Path) -> Iterator[str]:
    """Yield a description of each field in which the configs of two runs differ."""
    ours, theirs = (flatten(to_dict(read_config(run))) for run in (a, b))
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name) or (name in ours) != (name in theirs):
            yield f"{name}: {_values(ours, theirs, name)}"


def log_differences(a: Path, b: Path, tolerance: float = 0.0) -> Iterator[str]:
    """Yield descriptions of the first step at which two logs differ by more than the relative `tolerance`, and of all
    differences at that step and at the last common step."""
    ours, theirs = (_by_step(map(without_timings, read_metrics(run))) for run in (a, b))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        yield "neither run has logged a step" if not ours and not theirs else "no step is logged by both"
        return
    if missing := sorted(ours.keys() ^ theirs.keys()):
        owner = a if missing[0] in ours else b
        yield f"steps logged by one run only: {len(missing)}, first step {missing[0]:,} of {owner}"
    unshared = {
        name: (step, a if name in ours[step] else b)
        for step in reversed(common)
        for name in ours[step].keys() ^ theirs[step].keys()
    }
    for name, (step, owner) in islice(sorted(unshared.items()), 3):
        yield f"only {owner} has logged {name}, first at step {step:,}"
    if len(unshared) > 3:
        yield f"and {len(unshared) - 3} more that only one run has logged"
    changed = {step: list(_changed(ours[step], theirs[step], tolerance)) for step in common}
    first = next((step for step in common if changed[step]), None)
    if first is None:
        return
    name = changed[first][0]
    yield f"first difference at step {first:,}, in {name}: {_values(ours[first], theirs[first], name)}"
    tables = ((step, name) for step in common for name in changed[step] if name.startswith("gradients."))
    for step, name in islice(tables, 1):
        parameter, statistic = name.removeprefix("gradients.").rsplit(".", 1)
        values = _values(ours[step], theirs[step], name)
        yield f"first difference in a parameter at step {step:,}, in {statistic} of {parameter}: {values}"
    for step in dict.fromkeys((first, common[-1])):
        for name in changed[step]:
            if not name.startswith("gradients."):
                yield f"step {step:,}, {name}: {_values(ours[step], theirs[step], name)}"


def checkpoint_differences(a: Path, b: Path, tolerance: float = 0.0) -> Iterator[str]:
    """Yield descriptions of the arrays that differ in the last common checkpoint of two runs, where the norm of the
    difference exceeds `tolerance` times the norm of the array; with 0, arrays must be bit-identical. Raises `UserError`
    if the checkpoint is corrupt."""
    readers = CheckpointReader(a), CheckpointReader(b)
    common = sorted(set(readers[0].steps()) & set(readers[1].steps()))
    if not common:
        yield "no step has a checkpoint of both" if any(readers) else "neither run has a checkpoint"
        return
    step = common[-1]
    for reader in readers:
        reader.step(step)  # verifies the checksums
    ours, theirs = (reader.arrays(step) for reader in readers)
    for name in {**ours, **theirs}:
        x, y = ours.get(name), theirs.get(name)
        if x is None or y is None:
            yield f"step {step:,}, {name}: only {a if y is None else b} has it"
        elif (x.shape, x.dtype) != (y.shape, y.dtype):
            yield f"step {step:,}, {name}: {x.dtype} {x.shape} and {y.dtype} {y.shape}"
        elif x.tobytes() != y.tobytes():
            wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
            norm = max(np.linalg.norm(wide_x), np.linalg.norm(wide_y))
            relative = float(np.linalg.norm(wide_x - wide_y) / norm) if norm else 0.0
            if not relative <= tolerance or tolerance == 0:
                yield f"step {step:,}, {name}: relative difference {relative:.2e}"


def exact_differences(a: Path, b: Path) -> list[str]:
    """Return descriptions of all differences between two runs that should be bit-identical: those of logs and
    checkpoints, duplicate rows in one log, and different last checkpoints. Raises `UserError` if a run has no intact
    checkpoint."""
    last = [CheckpointReader(run).step() for run in (a, b)]
    rows = [Counter(row["step"] for row in read_metrics(run)) for run in (a, b)]
    repeated = [step for step in sorted(rows[0] & rows[1]) if rows[0][step] != rows[1][step]]
    return [
        *([f"the last checkpoints are of steps {last[0]:,} and {last[1]:,}"] if last[0] != last[1] else []),
        *(f"step {step:,} has {rows[0][step]} and {rows[1][step]} rows of metrics" for step in repeated),
        *log_differences(a, b),
        *checkpoint_differences(a, b),
    ]


def _by_step(rows: Iterable[Row]) -> dict[int, Row]:
    """Return all values logged at each step, flattened; notes have separate rows in the log."""
    steps: dict[int, Row] = {}
    for row in rows:
        steps.setdefault(row["step"], {}).update(flatten(row))
    return steps


def _changed(ours: Row, theirs: Row, tolerance: float) -> Iterator[str]:
    """Yield the common names whose values differ by more than a relative tolerance, in the order of `ours`."""
    for name in (name for name in ours if name in theirs):
        x, y = ours[name], theirs[name]
        numbers = all(isinstance(value, int | float) and isfinite(value) for value in (x, y))
        if x is not y and x != y and not (numbers and abs(x - y) <= tolerance * max(abs(x), abs(y))):
            yield name


def _values(ours: Row, theirs: Row, name: str) -> str:
    """Return both values as text, with all digits if nine digits do not distinguish them."""
    x, y = ours.get(name, "nothing"), theirs.get(name, "nothing")
    short = [f"{value:.9g}" if isinstance(value, float) else str(value) for value in (x, y)]
    return " and ".join(short if short[0] != short[1] else map(repr, (x, y)))
