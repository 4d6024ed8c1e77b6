"""Write what their Python prints into the chapters of docs/story, and stored figures into these, docs/ladder.md,
docs/alternatives.md and the README.

    python -m docs.scripts.story [PAGE.md ...]

A block of Python is followed by a block of text with its output; a page is read from top to bottom. Figures are those
of `studies/results/ladder.json`. Between `<!-- STUDY/ROW FIELD -->` and `<!-- -->` stands one of the first seed, of
the study `ladder` without a name. Between `<!-- TABLE NAMES -->` and `<!-- end -->` stands a table, of all rows
without names: those of `TABLES`, `<!-- seeds STUDY -->` of the perplexity of each row with each seed, `<!--
continuations -->` of a held-out prompt by each rung, `<!-- forecasts FIELD -->` of the forecasts of a field of
`ladder.forecasts.Forecast` and their scores, `<!-- positions STUDIES -->` of the loss by position, `<!-- case NAME
-->` of a case of `benchmarks/cases.py`, `<!-- heads RUN -->` of what a run's heads attend to, `<!-- modalities -->` of
`modalities.json`, `<!-- sharpness -->` of the study `sharpness`, and `<!-- gaps NAMES -->` of the difference between
each rung named and the next.

The README, whose Python is not run, has figures of `margins.json` (`<!-- margins/CONFIG seeds -->`, `bits`, `seconds`)
and the blocks `<!-- first_run log -->` and `<!-- first_run sample -->` of `first_run.json`.
"""

import io
import json
import re
import sys
import textwrap
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np

from jaxformer.inspect import nesterov_limit

ROOT = Path(__file__).resolve().parents[2]
STORY = ROOT / "docs/story"
PAGES = [*sorted(STORY.glob("*.md")), *(ROOT / f"docs/{name}.md" for name in ("ladder", "alternatives", "heads"))]
README = ROOT / "README.md"
BLOCK = re.compile(r"^(```python\n(.*?)^```\n)(?:\n```text\n.*?^```\n)?", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"<!-- (?:(\w+)/)?(\w+) (\w+) -->.*?<!-- -->")
COLUMNS = {
    "rung": "rung",
    "parameters": "parameters",
    "loss": "nats per token",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
}
ALL_COLUMNS = COLUMNS | {"entropy": "entropy by heads; blocks", "minutes": "minutes", "sources": "the sources"}
CHANGE_COLUMNS = {name: COLUMNS[name] for name in ("parameters", "loss", "perplexity")}
TABLES = {
    "rungs": ("ladder", COLUMNS),
    "outcomes": ("ladder", ALL_COLUMNS),
    "mixing": ("ladder", {"rung": "rung", "change": "an MLP on"} | CHANGE_COLUMNS),
    "counts": ("counts", {"change": "counted in the training text"} | {n: COLUMNS[n] for n in ("loss", "perplexity")}),
    "recurrent": ("recurrent", {"rung": "model"} | CHANGE_COLUMNS | {"minutes": "minutes"}),
    "concatenated": ("concatenated", {"change": "`mlp_concat` with", "targets": "targets"} | CHANGE_COLUMNS),
    "overfitting": (
        "overfitting",
        {
            "change": "`head_scale`",
            "train_loss": "training loss",
            "loss": "held-out loss",
            "best_loss": "at its lowest",
            "best_epoch": "at epoch",
        },
    ),
    "alternatives": ("alternatives", {"change": "`head_scale` with"} | CHANGE_COLUMNS),
}
"""Study and columns by the name of a table."""
FORMATS = {
    "loss": ".3f",
    "train_loss": ".3f",
    "best_loss": ".3f",
    "best_epoch": ".2f",
    "perplexity": ".4g",
    "bits_per_byte": ".3f",
    "minutes": ".1f",
}
OTHERS = (
    "forecasts", "seeds", "positions", "continuations", "case", "heads", "first_run", "modalities", "sharpness", "gaps",
)  # fmt: skip
TABLE = re.compile(
    rf"^<!-- ({'|'.join((*TABLES, *OTHERS))})( [\w ]+)? -->\n.*?^<!-- end -->\n",
    re.MULTILINE | re.DOTALL,
)


def stored_figures(name: str, folder: str = "studies") -> dict[str, Any]:
    """Return the figures of a file of `studies/results`, or of the results in another folder."""
    stored: dict[str, Any] = json.loads((ROOT / folder / f"results/{name}.json").read_text(encoding="utf-8"))
    return stored["figures"]


def printed(chapter: str) -> str:
    """Return what the Python of a chapter prints, as the page shows it; a test of the chapters runs it."""
    page = (STORY / f"{chapter}.md").read_text(encoding="utf-8")
    return "".join(re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL))


def studies() -> dict[str, Any]:
    """Return the stored studies by name; of each row, a study has the outcome by seed."""
    return stored_figures("ladder")


def outcomes(study: str) -> dict[str, dict[str, Any]]:
    """Return the fields of each row of a study, by its name, with the first seed."""
    return {name: seeds[min(seeds, key=int)] for name, seeds in studies()[study]["rows"].items()}


def cell(figures: dict[str, Any], field: str) -> str:
    """Return a figure of a rung as text; in place of the loss of one that ended early, the cause."""
    value = figures[field]
    if value is None:
        return str(figures["ended_early"]) if field == "loss" else "-"
    return format(value, FORMATS.get(field, ",")) if isinstance(value, int | float) else value or "-"


def figure(study: str, row: str, field: str) -> str:
    """Return one figure of a study; `total minutes` are those of all its rows."""
    if study == "margins":
        return margin(row, field)
    if row == "total":
        return format(sum(figures[field] or 0 for figures in outcomes(study).values()), ".0f")
    return cell(outcomes(study)[row], field)


def margin(config: str, field: str) -> str:
    """Return the number of `seeds` of a config of quick.py on two devices, mean and standard deviation of their `bits`
    per byte, or the `seconds` of all steps, by the median step of the median seed."""
    which = {"config": f"quick.py:{config}", "devices": 2, "factor": 1}
    pieces = [piece for piece in stored_figures("margins")["pieces"] if which.items() <= piece.items()]
    if field == "seconds":
        return f"{median(piece['step_ms'] * piece['steps'] for piece in pieces) / 1000:.0f}"
    bits = [piece["val_bpb"] for piece in pieces]
    return str(len(bits)) if field == "seeds" else f"{mean(bits):.3f} ± {stdev(bits):.3f}"


def first_run(part: str) -> str:
    """Return the log of the README's run as a block of text, or the first lines of the text sampled from it."""
    figures = stored_figures("first_run")
    if part == "log":
        return "\n".join(["```text", *figures["log"], "```\n"])
    return (
        textwrap.indent(textwrap.fill(" ".join(figures[part].split()), 86, max_lines=4, placeholder=" …"), "> ") + "\n"
    )


def table(kind: str, names: list[str]) -> str:
    """Return a table in Markdown, or another block that stands between marks."""
    if kind == "first_run":
        return first_run(names[0])
    if kind == "seeds":
        rows = by_seed(*names)
    elif kind == "positions":
        rows = by_position(names)
    elif kind == "continuations":
        rows = continuations()
    elif kind == "case":
        rows = case(names[0])
    elif kind == "heads":
        rows = heads(names[0])
    elif kind == "modalities":
        rows = modalities()
    elif kind == "sharpness":
        rows = sharpness()
    elif kind == "gaps":
        rows = gaps(names)
    elif kind == "forecasts":
        rows = forecasts(*names)
    else:
        study, columns = TABLES[kind]
        figures = outcomes(study)
        rows = [list(columns.values())]
        shown = names or [name for name in figures if kind != "mixing" or figures[name]["change"]]
        rows += [[cell(figures[name] | {"rung": f"`{name}`"}, field) for field in columns] for name in shown]
    known = [[x for x in column[1:] if x != "-"] for column in zip(*rows, strict=True)]
    numbers = [sum(bool(re.match(r"[\d,.]+$", x)) for x in column) > len(column) / 2 for column in known]
    rows.insert(1, ["---:" if is_number else "---" for is_number in numbers])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def case(name: str) -> list[list[str]]:
    """Return the median time of each side of a case at each point, and the figures that are derived from it."""
    figures = stored_figures(name, "benchmarks")
    points, sides = figures["points"], list(figures["roles"])
    derived = list(next(iter(points.values()))["derived"])
    table = [[figures["unit"], *sides, *derived]]
    for label, point in points.items():
        values = [*(point["ms"][side]["median"] for side in sides), *(point["derived"][key] for key in derived)]
        table.append([label, *(f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in values)])
    return table


def heads(run: str) -> list[list[str]]:
    """Return what is measured of each head of a run: nats, weights, positions, a share of variance, and nats."""
    table = [
        ["head", "entropy", "on itself", "one back", "on the first", "distance", "explained by it", "loss without"]
    ]
    for head in stored_figures("heads")["runs"][run]["heads"]:
        block = head["layer"].split(".")[1]
        values = [head["entropy"], head["weight_at_distance"][0], head["previous"], head["first"], head["distance"]]
        shown = [*(f"{x:.2f}" for x in values), f"{100 * head['by_distance']:.0f} %", f"+{head['nats_without']:.3f}"]
        table.append([f"{block}.{head['head']}", *shown])
    return table


def modalities() -> list[list[str]]:
    """Return the bits per token of counts and of the model on each kind of sequence."""
    table = [["bits per token", "tokens", "frequencies", "n-grams", "repeat", "linear", "the model"]]
    for name, figures in stored_figures("modalities")["modalities"].items():
        bits, options = figures["bits"], figures["options"]
        counts = [
            f"{bits['unigram']:.3f}",
            f"{bits['ngram']:.3f} (n = {options['order']})",
            f"{bits['repeat']:.3f} (of {options['lag']} before)",
            f"{bits['linear']:.3f} (of {options['values']} values)" if "linear" in bits else "-",
        ]
        model = f"{mean(figures['model']):.3f} ± {stdev(figures['model']):.3f}"
        table.append([name, f"{figures['training_tokens']:,} of {figures['vocab_size'] - 1}", *counts, model])
    return table


def relative_sharpness() -> dict[str, dict[int, float]]:
    """Return the sharpness of each row of its study at each step, divided by the limit of Nesterov SGD."""
    found = {}
    for name, figures in outcomes("sharpness").items():
        rate = float(figures["options"].partition("learning-rate ")[2].split()[0])
        found[name] = {int(step): x / nesterov_limit(rate, 0.9) for step, x in figures["sharpness"].items()}
    return found


def sharpness() -> list[list[str]]:
    """Return what each rung's sharpness was during training, and with which loss the training ended."""
    table = [["rung", "sharpness / limit at first", "at most", "at step", "at last", "nats per token"]]
    for name, ratios in relative_sharpness().items():
        first, *_, last = [*ratios.values()] * 2
        step, most = max(ratios.items(), key=lambda item: item[1])
        rung, _, rate = name.partition("_0")
        label = f"`{rung}`, rate 0{rate}" if rate else f"`{name}`"
        loss = cell(outcomes("sharpness")[name], "loss")
        table.append([label, f"{first:.3g}", f"{most:.3g}", f"{step:,}", f"{last:.3g}", loss])
    return table


def forecasts(field: str) -> list[list[str]]:
    """Return the forecast of a field for each rung, of the first seed, the outcome with each seed, and the number that
    came as forecast."""
    figures = stored_figures("forecast")
    seeds = sorted({seed for rung in figures.values() for seed in rung}, key=int)
    table = [["rung", "forecast", *(f"seed {seed}" for seed in seeds), "as forecast"]]
    for name, by_seed in figures.items():
        scores = [by_seed[seed]["score"].get(field) for seed in seeds if seed in by_seed]
        if not any(scores):
            continue
        shown = [next(iter(by_seed.values()))["forecast"][field], *(None if x is None else x[0] for x in scores)]
        between = " to " if field != "entropy" else " "
        cells = [
            between.join("-" if x is None else f"{x:.4g}" for x in (value if isinstance(value, list) else [value]))
            for value in shown
        ]
        table.append([f"`{name}`", *cells, f"{sum(x is not None and x[1] for x in scores)} of {len(scores)}"])
    return table


def by_seed(study: str) -> list[list[str]]:
    """Return the perplexity of each row of a study with each seed, and their mean."""
    rows = studies()[study]["rows"]
    seeds = sorted({seed for outcome in rows.values() for seed in outcome}, key=int)
    table = [["perplexity with seed", *seeds, "mean"]]
    for name, outcome in rows.items():
        found = [outcome.get(seed) for seed in seeds]
        known = [x["perplexity"] for x in found if x and x["perplexity"]]
        shown = ["-" if x is None else cell(x, "perplexity" if x["perplexity"] else "ended_early") for x in found]
        label = f"`{name}`" if study == "ladder" else next(iter(outcome.values()))["change"]
        table.append([label, *shown, format(mean(known), ".4g") if known else "-"])
    return table


def seeds(row: str, study: str = "ladder") -> list[dict[str, Any]]:
    """Return the fields of a row of a study with each seed."""
    return list(studies()[study]["rows"][row].values())


def perplexities(row: str, study: str = "ladder") -> list[float]:
    """Return the perplexity of a row of a study with each seed."""
    return [outcome["perplexity"] for outcome in seeds(row, study)]


def interval(before: str, after: str, study: str = "ladder") -> tuple[float, float]:
    """Return the 95 % interval of the difference between the mean perplexities of two rows of a study (Welch's t-test
    over the seeds). If it holds 0, the seeds do not tell the rows apart."""
    from scipy.stats import ttest_ind  # for which all that imports this module would otherwise wait

    pair = (perplexities(row, study) for row in (before, after))
    low, high = ttest_ind(*pair, equal_var=False).confidence_interval(0.95)
    return float(low), float(high)


def gaps(names: list[str]) -> list[list[str]]:
    """Return by how much the mean perplexity falls from each rung to the next, and the 95 % interval."""
    table = [["from", "to", "perplexity falls by", "95 % interval"]]
    for before, after in pairwise(names):
        low, high = interval(before, after)
        fall = mean(perplexities(before)) - mean(perplexities(after))
        table.append([f"`{before}`", f"`{after}`", f"{fall:.2f}", f"{low:.2f} to {high:.2f}"])
    return table


def by_position(names: list[str]) -> list[list[str]]:
    """Return the held-out loss at positions that double, counted from 1, of the rows of studies that store it."""
    rows = {name: row for study in names for name, row in outcomes(study).items()}
    losses = {name: row["loss_by_position"] for name, row in rows.items() if "loss_by_position" in row}
    shown = [2**i for i in range(len(next(iter(losses.values()))).bit_length())]
    table = [["nats at position", *map(str, shown)]]
    return table + [[f"`{name}`", *(f"{x[n - 1]:.3f}" for n in shown)] for name, x in losses.items()]


def continuations() -> list[list[str]]:
    """Return what each rung makes of one held-out prompt, at temperature 0.5 and greedy."""
    stored = studies()["ladder"]["continuations"]
    prompt = next(iter(stored.values()))[0][0]
    as_cell = lambda text: f"`{' '.join(text.split()).replace('`', '').replace('|', '¦')}`"  # noqa: E731
    table = [["rung", f"{as_cell(prompt)} at temperature 0.5", "greedy"]]
    for name, rows in stored.items():
        texts = [text for own_prompt, _, text in rows if own_prompt == prompt]
        table.append([f"`{name}`", *(as_cell(text) for text in texts or ("-", "-"))])
    return table


def fill_figures(page: str) -> str:
    """Return a page with the stored figures."""
    page = FIGURE.sub(lambda m: m[0].partition("-->")[0] + f"-->{figure(m[1] or 'ladder', m[2], m[3])}<!-- -->", page)
    return TABLE.sub(
        lambda m: f"<!-- {m[1]}{m[2] or ''} -->\n\n{table(m[1], (m[2] or '').split())}\n<!-- end -->\n", page
    )


def fill(page: str) -> str:
    """Return a chapter with the output of its Python and the stored figures."""
    namespace: dict[str, Any] = {}

    def with_output(match: re.Match[str]) -> str:
        with redirect_stdout(io.StringIO()) as output:
            exec(match[2], namespace)  # noqa: S102 (the project's own pages)
        shown = "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())
        return match[1] + (f"\n```text\n{shown}```\n" if shown else "")

    with np.printoptions():  # which a page may set for itself
        return BLOCK.sub(with_output, fill_figures(page))


if __name__ == "__main__":
    for path in [Path(name).resolve() for name in sys.argv[1:]] or [*PAGES, README]:
        filled = (fill_figures if path == README else fill)(path.read_text(encoding="utf-8"))
        path.write_text(filled, encoding="utf-8")
