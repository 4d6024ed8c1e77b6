"""Results of the ladder: one rung per run, next to the sources' figures, and continuations of the same held-out prompts
by each rung."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxformer.config import Config, TokenModelConfig
from jaxformer.config.fields import nonfinite_to_none, to_dict
from jaxformer.files import write_atomically
from jaxformer.inspect.samples import continuations, validation_prompts
from jaxformer.ladder.forecasts import Forecast, forecast, score
from jaxformer.runs.checkpoints import CheckpointReader
from jaxformer.runs.run import abstract_params, count_parameters, load_run, read_config
from jaxformer.terminal import align
from jaxformer.train.log import read_metrics

HEAD = ("rung", "parameters", "steps", "targets", "loss", "perplexity", "bpb", "minutes", "ended early")
SIDES = "<>>>>>>><"
"""Columns of the terminal's table, and their alignment; see `terminal.align`."""
CONTINUATIONS = "continuations.json"
"""File in a rung's folder."""
FORECASTS = "forecast.json"
"""File in the ladder's folder: the forecast of each rung, and its score once the rung has ended."""
NEW_TOKENS = 32


@dataclass(frozen=True)
class RungResult:
    """Results of one rung."""

    rung: str
    parameters: int
    steps: int
    targets: int
    """Number of tokens predicted during training: the last `n_predicted` of each window."""
    loss: float
    """Held-out loss in nats per token; like perplexity and bits per byte, NaN without a finite value."""
    perplexity: float
    bits_per_byte: float
    minutes: float
    """Training time, excluding evaluations."""
    ended_early: str
    """Cause and step, such as 'diverged at step 118' or 'not finite at step 6'; empty if the last step was reached."""
    entropy: str
    """Attention entropy in nats at the last evaluation, heads separated by spaces and blocks by semicolons; followed by
    its step if training ended early."""
    normalized_entropy: str
    """Attention entropy as a fraction of its maximum log(T!) / T, the mean over positions t of uniform causal rows."""
    entropy_positions: str
    """Attention entropy H as a number of positions, e^H: the length of a uniform row with this entropy."""
    sources: str


def has_ended(run: Path) -> bool:
    """Return True if a run has saved its last step or has ended early."""
    return bool(ended_early(run)) or CheckpointReader(run).steps()[-1:] == [read_config(run).steps]


def ended_early(run: Path) -> str:
    """Return cause and step if a run diverged or became non-finite; empty otherwise."""
    rows = read_metrics(run)
    if rows and "diverged" in rows[-1]:
        return f"diverged at step {rows[-1]['diverged']['began']}"
    steps = [int(number) for path in run.glob("autopsy/step-*") if (number := path.name[5:]).isdigit()]
    last = max((row["step"] for row in rows), default=0)
    if steps and last < read_config(run).steps:  # otherwise the run was resumed past that step
        return f"not finite at step {max(steps)}"
    return ""


def rung_result(run: Path, sources: str) -> RungResult:
    """Return the results in a run's folder, with the sources' figures for this rung. Raises `UserError` if the folder
    is not a run."""
    config, rows = read_config(run), read_metrics(run)
    cause = ended_early(run)
    evaluated = [row for row in rows if "val_loss" in row]
    last: dict[str, Any] = evaluated[-1] if evaluated else {}

    def metric(name: str) -> float:
        # If a run ended early, its evaluations are not results; JSON has null for non-finite values.
        return math.nan if cause or last.get(name) is None else float(last[name])

    assert isinstance(config.model, TokenModelConfig)  # all rungs are token models
    blocks, length, predicted = last.get("entropy", []), config.model.context_length, config.model.n_predicted
    at = f" (at step {last['step']})" if cause and blocks else ""
    uniform = math.lgamma(length + 1) / length or 1.0  # with one position, entropies are 0
    timed = [(0, 0.0)] + [(row["step"], row["step_ms"]) for row in rows if "step_ms" in row]
    minutes = sum(ms * (step - before) for (before, _), (step, ms) in pairwise(timed)) / 60_000
    n_steps = rows[-1]["step"] if rows else 0
    return RungResult(
        rung=run.name,
        parameters=count_parameters(abstract_params(config.model.build())),
        steps=n_steps,
        targets=n_steps * config.train.batch_size * predicted,
        loss=metric("val_loss"),
        perplexity=metric("val_ppl"),
        bits_per_byte=metric("val_bpb"),
        minutes=minutes,
        ended_early=cause,
        entropy=_by_head(blocks, "{:.3g}") + at,
        normalized_entropy=_by_head(blocks, "{:.0%}", lambda x: x / uniform),
        entropy_positions=_by_head(blocks, "{:.1f}", math.exp),
        sources=sources,
    )


def forecast_rungs(configs: Mapping[str, Config], folder: Path) -> dict[str, Forecast]:
    """Return the forecast of each rung. They are written to `FORECASTS` in the folder of the runs; one that is already
    there is kept if the rung has begun to train, or has the same fields."""
    stored, counts = read_forecasts(folder), {}
    for name, config in configs.items():
        fields = json.loads(json.dumps(to_dict(config)))
        if name in stored and (stored[name]["config"] == fields or (folder / name).exists()):
            continue
        data, key = config.data, (config.data, config.model.vocab_size)  # type: ignore[attr-defined]
        if key not in counts:
            loaded: Any = data.load(config.model, config.train.batch_size, config.seed)
            counts[key] = loaded.counts(), loaded.model.vocab_size
        n_counts, vocab_size = counts[key]
        fitting: Any = replace(config.model, vocab_size=vocab_size)  # type: ignore[call-arg]
        predicted = nonfinite_to_none(asdict(forecast(replace(config, model=fitting), n_counts)))
        stored[name] = {"config": fields, "forecast": predicted}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FORECASTS, json.dumps(stored, indent=1) + "\n")
    return {name: Forecast(**stored[name]["forecast"]) for name in configs}


def read_forecasts(folder: Path) -> dict[str, Any]:
    """Return the contents of `FORECASTS` in a folder; empty without the file."""
    file = folder / FORECASTS
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def score_rung(run: Path) -> None:
    """Add the score of a run that has ended to the forecast in the folder above it; see `forecasts.score`."""
    cause, forecasts = ended_early(run), read_forecasts(run.parent)
    stored = forecasts[run.name]
    stored["score"] = score(
        Forecast(**stored["forecast"]), read_metrics(run), int(cause.split()[-1]) if cause else None
    )
    write_atomically(run.parent / FORECASTS, json.dumps(nonfinite_to_none(forecasts), indent=1) + "\n")


FORECAST_HEAD = ("rung", "quantity", "forecast", "outcome", "as forecast")


def forecast_rows(folder: Path, rungs: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a row for each scored quantity of some rungs, as in `FORECAST_HEAD`."""
    stored, rows = read_forecasts(folder), list[tuple[str, ...]]()
    for rung in rungs:
        entry = stored.get(rung, {})
        for name, (outcome, hit) in entry.get("score", {}).items():
            cells = _cell(entry["forecast"][name], " " if name == "entropy" else " to "), _cell(outcome, " ")
            if name == "plateau":
                cells = cells[0], f"passed by step {outcome}" if outcome is not None else "not passed"
            rows.append((rung, name.replace("_", " "), *cells, "yes" if hit else "no"))
    return rows


def _cell(value: float | Sequence[float] | None, between: str) -> str:
    values = value if isinstance(value, list) else [value]
    return between.join("none" if x is None else f"{x:.4g}" for x in values)


def _by_head(blocks: Sequence[Sequence[float | None]], form: str, of: Callable[[float], float] = float) -> str:
    return "; ".join(" ".join("-" if x is None else form.format(of(x)) for x in heads) for heads in blocks)


def continue_validation(runs: Sequence[Path]) -> list[tuple[str, str, float, str]]:
    """Return rung, prompt, temperature and continuation for the same held-out prompts and each run, at temperature 0.5
    and greedy; none for a run that ended early. They are stored in the run's folder, and read from there the next
    time."""
    rows, prompts = [], list[str]()
    for run in runs:
        file = run / CONTINUATIONS
        if not file.exists() and not ended_early(run) and CheckpointReader(run).steps():
            opened = load_run(run)
            prompts = prompts or validation_prompts(opened)
            (model, tokenizer), params = opened.text_model(), opened.params
            encoded = list(map(tokenizer.encode_prompt, prompts))
            texts = continuations(model, opened.model, params, tokenizer, encoded, range(len(encoded)), NEW_TOKENS)
            stored = [
                {"prompt": prompts[i], "temperature": temperature, "text": tokenizer.decode(new)}
                for temperature, i, _, new in texts
            ]
            write_atomically(file, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
        if file.exists():
            rows += [(run.name, *row.values()) for row in json.loads(file.read_text(encoding="utf-8"))]
    return rows


def as_text(results: Sequence[RungResult]) -> str:
    """Return the results as text for the terminal: a table of short columns, and one line per rung for the others."""

    def number(x: float, digits: int) -> str:
        return "" if math.isnan(x) else f"{x:.{digits}f}" if x < 1e6 else f"{x:.{digits}e}"

    cells = [
        (
            r.rung,
            f"{r.parameters:,}",
            f"{r.steps:,}",
            f"{r.targets:.2g}",
            number(r.loss, 4),
            number(r.perplexity, 2),
            number(r.bits_per_byte, 4),
            f"{r.minutes:.1f}",
            r.ended_early,
        )
        for r in results
    ]
    width = max(map(len, ("rung", *(r.rung for r in results))))
    lines = [*align([HEAD, *cells], SIDES), "", "entropy by heads; blocks | the sources' report"]
    lines += [f"{r.rung:<{width}}  {r.entropy or '-'} | {r.sources}" for r in results]
    return "\n".join(line.rstrip() for line in lines)
