"""Differences between runs in their results, configs, logs and checkpoints. Timings are ignored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import Config
from jaxformer.config.fields import flatten, to_dict
from jaxformer.runs.checkpoints import CheckpointReader
from jaxformer.runs.run import read_config
from jaxformer.train.log import read_metrics, without_timings

Row = dict[str, Any]
"""Values logged at a step, by flattened name."""


FORM_OF_TEXT = {"tokenizer", "stride", "packing"}
"""Fields of a text's config that change its tokens or windows, but not the text."""


class Result(NamedTuple):
    """The last evaluation of a run."""

    run: Path
    step: int
    value: float
    """Held-out loss or bits per byte; infinity if it is not finite."""

    @property
    def text(self) -> str:
        """The value; "not finite" for infinity."""
        return f"{self.value:.4f}" if isfinite(self.value) else "not finite"


def verdict(runs: Sequence[Path]) -> list[str]:
    """Return which run has the lowest held-out loss at its last evaluation, by how much and on what data, and then, of
    more than two runs, the loss of each, best first. Losses on different data are listed in the order of the runs. The
    same text in different tokens is compared in bits per byte."""
    configs, logs = [read_config(run) for run in runs], [list(read_metrics(run)) for run in runs]
    same_data, same_tokens = _same_data(runs, configs)
    metric, unit = ("val_bpb", "bits per byte") if same_data and not same_tokens else ("val_loss", "loss")
    results = [result for run, rows in zip(runs, logs, strict=True) if (result := _last(run, rows, metric))]
    if len(results) < len(runs):
        missing = next(run for run in runs if run not in {result.run for result in results})
        return [f"no run is better: {missing} has no evaluation with a held-out {unit}"]
    lines = [f"{x.run}: held-out {unit} {x.text} at step {x.step:,}" for x in results]
    if not same_data:
        different = ", ".join(dict.fromkeys(_data_name(config) for config in configs))
        remedy = "the command eval measures each on one text"
        return [f"no run is better: their data differ ({different}), so their losses do not compare; {remedy}", *lines]
    data = f"the same data, {_data_name(configs[0])}"
    best, *others = sorted(results, key=lambda result: result.value)
    if best.value == others[-1].value:
        return [f"no run is better: held-out {unit} {best.text} of all, on {data}"]
    first = others[0]
    by = (
        f", {first.value - best.value:.4f} ({1 - best.value / first.value:.1%}) less than"
        if isfinite(first.value)
        else "; of"
    )
    line = f"{best.run} is better: held-out {unit} {best.text} at step {best.step:,}{by} {first.run}"
    line += f" ({first.text} at step {first.step:,}), on {data}"
    if best.step != first.step:
        line += _at_common_step([logs[runs.index(result.run)] for result in (best, first)], metric)
    return [line, *(f"{x.run}: {x.text} at step {x.step:,}" for x in (best, *others) if len(runs) > 2)]


def config_differences(*runs: Path) -> Iterator[str]:
    """Yield a description of each field in which the configs of runs differ."""
    configs = [flatten(to_dict(read_config(run))) for run in runs]
    for name in dict.fromkeys(name for config in configs for name in config):
        first = configs[0]
        if any(c.get(name) != first.get(name) or (name in c) != (name in first) for c in configs):
            yield f"{name}: {_values(configs, name)}"


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
    yield f"first difference at step {first:,}, in {name}: {_values([ours[first], theirs[first]], name)}"
    tables = ((step, name) for step in common for name in changed[step] if name.startswith("gradients."))
    for step, name in islice(tables, 1):
        parameter, statistic = name.removeprefix("gradients.").rsplit(".", 1)
        values = _values([ours[step], theirs[step]], name)
        yield f"first difference in a parameter at step {step:,}, in {statistic} of {parameter}: {values}"
    for step in dict.fromkeys((first, common[-1])):
        for name in changed[step]:
            if not name.startswith("gradients."):
                yield f"step {step:,}, {name}: {_values([ours[step], theirs[step]], name)}"


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


def _values(rows: Sequence[Row], name: str) -> str:
    """Return the values of rows as text, with all digits if nine digits do not distinguish them."""
    values = [row.get(name, "nothing") for row in rows]
    short = [f"{value:.9g}" if isinstance(value, float) else str(value) for value in values]
    return " and ".join(short if len({*short}) == len({*map(repr, values)}) else map(repr, values))


def _last(run: Path, rows: Iterable[Row], metric: str) -> Result | None:
    """Return the last evaluation in a log; None if there is none."""
    values = [(row["step"], row[metric]) for row in rows if metric in row]
    if not values:
        return None
    step, value = values[-1]
    return Result(run, step, value if value is not None and isfinite(value) else inf)


def _at_common_step(logs: Sequence[Iterable[Row]], metric: str) -> str:
    """Return the values of two runs at the last step at which both were evaluated; empty if there is none."""
    ours, theirs = ({row["step"]: row[metric] for row in rows if row.get(metric) is not None} for rows in logs)
    if not (common := ours.keys() & theirs.keys()):
        return "; no step has an evaluation of both"
    step = max(common)
    return f"; at step {step:,}, the last with an evaluation of both, {ours[step]:.4f} and {theirs[step]:.4f}"


def _same_data(runs: Sequence[Path], configs: Sequence[Config]) -> tuple[bool, bool]:
    """Return whether all runs were evaluated on the same data, and whether it is in the same tokens. Without a
    checkpoint, which stores a fingerprint of the data, the configs decide."""
    readers = [CheckpointReader(run) for run in runs]
    prints = {reader.fingerprint(reader.steps()[-1]) if reader else None for reader in readers}
    tokens = {config.model.contract.vocab_size for config in configs}
    kinds = {(type(config.data), config.model.contract.task) for config in configs}
    forms = [{k: v for k, v in to_dict(config.data).items() if k not in FORM_OF_TEXT} for config in configs]
    same_config = len(kinds) == 1 and all(form == forms[0] for form in forms)
    if len(tokens) > 1:
        return same_config, False
    return len(kinds) == 1 and (len(prints) == 1 if None not in prints else same_config), True


def _data_name(config: Config) -> str:
    """Return the path of a config's data, or its kind."""
    return str(getattr(config.data, "path", None) or type(config.data).__name__)
