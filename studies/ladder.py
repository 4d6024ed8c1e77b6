"""The ladder and other comparisons at a reduced size and equal budget: the figures of docs/ladder.md.

    python -m studies.ladder --data.path books/train --data.val-path books/val [--studies NAME …] [--rows NAME …]
        [--seeds N …] [--folder FOLDER] [--results FOLDER]

A study is a table of runs that share all options but those of a row. Each run is trained with each seed, seed after
seed, in its own folder; a finished run is not trained again, and an interrupted one is resumed, so the same command
continues. After each run the outcomes are stored in `ladder.json`, from which `docs.scripts.story` makes the tables.
The exit status is 0 when all runs have finished, 1 if training failed, 2 for wrong input.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import jax
import numpy as np

from benchmarks import record
from jaxformer.config.fields import nonfinite_to_none
from jaxformer.config.files import load_module
from jaxformer.ladder.results import continue_validation, has_ended, rung_result
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.run import load_data, load_run
from jaxformer.train.log import read_metrics
from jaxformer.train.run_evaluation import loss_by_position

FILE = "ladder"
HELD_OUT_BATCH = 512
SHAPE = "--model.vocab-size 512 --model.d-model 64"
MLP = "--model.d-ff 256 256"
SGD = "--optimizer.learning-rate 0.1"
ADAMW = "--optimizer.name adamw --optimizer.learning-rate 0.003"
GENTLE = "--optimizer.name adamw --optimizer.learning-rate 0.0005"
"""AdamW's learning rate, lowered as the MLP is widened: with 0.003, the loss of a wide one ends at 4.02."""
BUDGET = "--train.batch-size {} --steps {} --train.eval-every 500 --compute.grad-accumulation-steps 1"
AS_MANY_TARGETS = BUDGET.format(1024, 3000)
"""Budget of a model that predicts one token per window, as many as the other rungs predict from 32 windows."""


@dataclass(frozen=True)
class Row:
    """One run of a study."""

    config: str
    """Rung of configs/ladder.py, or FILE.py:NAME."""
    options: str = ""
    """Options of this row only."""
    change: str = ""
    """Description of the change in the table; by default, the rung's own."""
    book: str = ""
    """The one book to train on; by default all."""

    @property
    def config_option(self) -> str:
        """Value of `--config`."""
        return self.config if ":" in self.config else f"ladder:{self.config}"


@dataclass(frozen=True)
class Study:
    """Runs that one table compares."""

    options: str
    """Options of train.py that all rows share."""
    rows: Mapping[str, Row]
    """Rows, by name in the table."""
    continues: bool = False
    """True to store continuations of held-out prompts by the runs with seed 0."""
    by_position: tuple[str, ...] = ()
    """Rows for which the held-out loss at each position of a window is stored."""
    curves: bool = False
    """True to store the losses on training and held-out text during each run."""
    sharpness: bool = False
    """True to store the sharpness during each run."""


def studies() -> dict[str, Study]:
    """Return all studies by name. Rungs and their order are from configs/ladder.py."""
    size = f"{SHAPE} {MLP}"
    options = {"multihead_full": "--model.head-dim 64"}  # as wide as the model, unlike the config's at this size
    return {
        "ladder": Study(
            f"{size} {SGD} {BUDGET.format(32, 3000)}",
            {
                name: Row(name, options.get(name, ""), BEFORE_ATTENTION.get(name, ""))
                for name in load_module("ladder").REPORTED
            },
            continues=True,
            by_position=("residual", "two_blocks", "rmsnorm", "head_scale"),
        ),
        "sharpness": Study(
            f"{size} {BUDGET.format(32, 3000)} --train.sharpness-every 250",
            {name: Row(name, f"{SGD} {options.get(name, '')}".strip()) for name in load_module("ladder").REPORTED}
            | {f"four_blocks_{rate}": Row("four_blocks", f"--optimizer.learning-rate {rate}") for rate in SLOWER},
            sharpness=True,
        ),
        "recurrent": Study(
            f"{SHAPE} {SGD} {BUDGET.format(32, 3000)}",
            {name: Row(name) for name in RECURRENT},
            by_position=RECURRENT,
        ),
        "concatenated": Study(
            SHAPE,
            {
                f"adamw_{B}": Row("mlp_concat", f"{MLP} {ADAMW} {BUDGET.format(B, n)}", f"AdamW, {n:,} batches of {B}")
                for B, n in ((32, 3000), (256, 1200))
            }
            | {
                name: Row("mlp_concat", f"--model.d-ff {F} {F} {options} {AS_MANY_TARGETS}", change)
                for name, F, options, change in (
                    ("sgd_1024", 256, SGD, "SGD, 3,000 batches of 1,024"),
                    ("adamw_1024", 256, ADAMW, "AdamW, 3,000 batches of 1,024"),
                    ("wide_1024", 1440, GENTLE, "AdamW at 0.0005, 3,000 batches of 1,024, an MLP of 1,440"),
                )
            }
            | {"residual": Row("residual", f"{MLP} {ADAMW} {BUDGET.format(32, 3000)}", "the rung `residual`, AdamW")},
        ),
        "learning": Study(
            f"{size} {SGD} {OFTEN_EVALUATED.format(32)}", {name: Row(name) for name in LEARNING}, curves=True
        ),
        "overfitting": Study(f"{SHAPE} {MLP} {OFTEN_EVALUATED.format(64)}", OVERFITTING, curves=True),
        "alternatives": Study(f"{size} {SGD} {BUDGET.format(32, 1000)}", ALTERNATIVES),
        "isolated": Study(f"{size} {BUDGET.format(32, 1000)}", ISOLATED),
    }


LEARNING = ("mlp_concat", "mlp_rowwise", "attention_unscaled", "attention_scaled", "residual")
"""Rungs of which the losses during training are stored."""
RECURRENT = ("recurrent_tanh", "recurrent_gru", "recurrent_lstm")
SLOWER = (0.03, 0.01, 0.003)
"""Lower learning rates of the rung that diverges."""
BEFORE_ATTENTION = {
    "mix_static": "A X", "mix_dynamic": "(X B) X", "mix_gram": "X Xᵀ X", "mix_qkv": "Q Kᵀ V",
    "mix_unmasked": "Q Kᵀ V without a mask",
}  # fmt: skip
"""Input of the MLP in the rungs that derive attention."""
ALTERNATIVES = {
    "base": Row("head_scale", "", "as it is: RMSNorm before each part, learned positions"),
    "wide_heads": Row("head_scale", "--model.head-dim 64", "heads as wide as the model, concatenated"),
    "summed_heads": Row(
        "head_scale", "--model.head-dim 64 --model.no-output-projection", "heads as wide as the model, summed"
    ),
    "wide_values": Row("head_scale", "--model.value-dim 32", "values twice as wide as queries and keys"),
    "wide_values_same_size": Row(
        "head_scale",
        "--model.head-dim 8 --model.value-dim 24",
        "values three times as wide as queries and keys, as many parameters",
    ),
    "colder": Row("head_scale", "--model.score-scale 0.5", "half the temperature: scores 2 / √d"),
    "warmer": Row("head_scale", "--model.score-scale 0.125", "twice the temperature: scores 1 / 2√d"),
    "no_positions": Row("head_scale", "--model.positions none", "no positions"),
    "sinusoidal": Row("head_scale", "--model.positions sinusoidal", "sinusoidal positions"),
    "rope": Row("head_scale", "--model.positions none --model.rope.base 10000", "RoPE"),
    "layernorm": Row("head_scale", "--model.norm layernorm", "LayerNorm before each part"),
    "post_rmsnorm": Row("head_scale", "--model.norm-placement post", "RMSNorm after each part"),
    "post_layernorm": Row(
        "head_scale", "--model.norm layernorm --model.norm-placement post", "LayerNorm after each part, as in 2017"
    ),
    "documents": Row(
        "head_scale", "--data.packing documents --data.stride none", "documents (books) that do not see each other"
    ),
}
"""Variants that the sources mention besides the ladder, each a single change to `head_scale`."""

CHANGED = Path(__file__).with_name("isolated.py")
ISOLATED = {
    "residual": Row("residual", SGD, "the rung `residual`"),
    "no_softmax": Row(f"{CHANGED}:no_softmax", SGD, "`residual` without the softmax: scores divided by √t"),
    "attention_scaled": Row("attention_scaled", SGD, "the rung `attention_scaled`: no residual connection"),
    "plus_around_attention": Row(
        f"{CHANGED}:plus_around_attention", SGD, "`attention_scaled` with a residual connection around attention"
    ),
    "unembedding": Row("attention_scaled", f"{SGD} --model.no-mlp-logits", "`attention_scaled` with W_U after the MLP"),
    "plus_and_unembedding": Row(
        f"{CHANGED}:plus_and_unembedding", SGD, "the same with a residual connection around attention"
    ),
    "four_blocks": Row("four_blocks", SGD, "the rung `four_blocks`"),
    "half_rate": Row("four_blocks", "--optimizer.learning-rate 0.05", "`four_blocks` at half the learning rate"),
    "small_output": Row(f"{CHANGED}:small_output", SGD, "`four_blocks` whose attention adds a quarter of its output"),
    "norm_before_attention": Row(
        f"{CHANGED}:norm_before_attention", SGD, "`four_blocks` with RMSNorm before attention"
    ),
    "norm_before_mlp": Row(f"{CHANGED}:norm_before_mlp", SGD, "`four_blocks` with RMSNorm before the MLP"),
    "rmsnorm": Row("rmsnorm", SGD, "the rung `rmsnorm`: before both"),
}
"""Claims of the sources about one part, each with that part alone changed."""

OFTEN_EVALUATED = "--train.batch-size {} --steps 3000 --train.eval-every 100 --compute.grad-accumulation-steps 1"
NOVELLA, COSINE = "19C-Jekyll.txt", "--optimizer.schedule cosine --optimizer.warmup-steps 50"
OVERFITTING = {
    "books": Row("head_scale", SGD, "fifty books"),
    "base": Row("head_scale", SGD, "as it is", NOVELLA),
    "dropout": Row("head_scale", f"{SGD} --model.dropout 0.2", "dropout 0.2", NOVELLA),
    "adamw": Row("head_scale", f"{ADAMW} {COSINE}", "AdamW", NOVELLA),
    "adamw_dropout": Row("head_scale", f"{ADAMW} {COSINE} --model.dropout 0.2", "AdamW, dropout 0.2", NOVELLA),
}
"""The last rung, trained on one short book for about three epochs at stride 1, and remedies."""


def train(row: Row, options: Sequence[str], run: Path, seed: int) -> int:
    """Train or resume a run to its end, or until its loss diverges or is not finite, and return 0; do nothing if it has
    ended. If training failed, return the exit status of train.py."""
    if run.exists() and has_ended(run):
        return 0
    start = ["--resume"] if run.exists() else ["--config", row.config_option, "--seed", str(seed)]
    command = [sys.executable, "-m", "jaxformer", "train", *start, "--run", str(run), *options]
    print("+", shlex.join(command), flush=True)
    status = subprocess.run(command).returncode
    return 0 if run.exists() and has_ended(run) else status or 1


def learning(run: Path) -> dict[str, Any]:
    """Return the held-out loss at each evaluation of a run, with the mean loss of training since the one before, the
    lowest held-out loss, and the update ratios in the middle of the run."""
    points, since = [], list[float]()
    for line in read_metrics(run):
        since += [line["loss"]] if "loss" in line else []
        if "val_loss" in line and since:
            figures = {"epoch": line["epoch"], "train": mean(since), "held_out": line["val_loss"]}
            points.append({"step": line["step"]} | {name: round(x, 4) for name, x in figures.items()})
            since = []
    best = min(points, key=lambda point: point["held_out"])
    lowest = {"train_loss": points[-1]["train"], "best_loss": best["held_out"], "best_epoch": best["epoch"]}
    return {"curve": points, "update_ratios": update_ratios(run)} | lowest


def update_ratios(run: Path) -> dict[str, Any]:
    """Return the parameters with the smallest and the largest update, relative to its weights, in the middle of a
    run."""
    tables = [line for line in read_metrics(run) if "gradients" in line]
    table = min(tables, key=lambda line: abs(line["step"] - tables[-1]["step"] / 2))
    ratios = sorted((row["update"], row["name"]) for row in table["gradients"])
    return {"step": table["step"], "smallest": ratios[0], "largest": ratios[-1]}


def outcome(row: Row, run: Path, sources: str) -> dict[str, Any]:
    """Return the outcome of a run that has ended, as JSON types."""
    return nonfinite_to_none(asdict(rung_result(run, sources))) | {"options": row.options, "change": row.change}


def count_tokens(run: Path) -> dict[str, dict[str, Any]]:
    """Return the held-out loss of count models from a run's training text, as outcomes of a study; see
    `jaxformer.data.counts`."""
    data: Any = load_data(run, load_run(run).config)  # text windows, as for all rungs
    changes, losses = {"tokens": "tokens", "pairs": "tokens after each token"}, data.count_losses()
    return {
        name: {"0": {"loss": loss, "perplexity": float(np.exp(loss)), "ended_early": "", "change": changes[name]}}
        for name, loss in losses.items()
    }


def position_losses(run: Path) -> list[float]:
    """Return the held-out loss in nats per token at each position of a window."""
    opened, mesh = load_run(run), make_mesh("", jax.devices()[:1])
    data = load_data(run, opened.config)
    nats_T, weights_T = loss_by_position(opened, opened.params, data, mesh, HELD_OUT_BATCH)
    return [round(float(nats), 4) for nats in nats_T / weights_T]


def main() -> int:
    """Train, and store the outcomes after each run; return the exit status."""
    parser = argparse.ArgumentParser(description="The ladder at a reduced size.", allow_abbrev=False)
    all_studies = studies()
    parser.add_argument("--studies", nargs="+", choices=list(all_studies), default=list(all_studies))
    parser.add_argument("--rows", nargs="+", help="rows to train (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/reduced"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=record.STUDY_RESULTS, help=f"folder of {FILE}.json")
    parser.add_argument("--data.path", dest="books", type=Path, required=True, help="folder of the books to train on")
    own, data = parser.parse_known_args()
    known = [label for name in own.studies for label in all_studies[name].rows]
    if unknown := set(own.rows or ()) - {*known}:
        parser.error(f"there is no row {min(unknown)}; there are {', '.join(known)}")
    sources = load_module("ladder").REPORTED
    file = own.results / f"{FILE}.json"
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["figures"] if file.exists() else {}
    counted = False
    for seed, name in product(own.seeds, own.studies):
        study, stored = all_studies[name], figures.setdefault(name, {"rows": {}})
        stored |= {"options": study.options, "cpu": record.cpu()}
        for label in [label for label in study.rows if own.rows is None or label in own.rows]:
            row = study.rows[label]
            run = own.folder / name / f"seed-{seed}" / label
            options = [*shlex.split(f"{study.options} {row.options}"), *data, "--data.path", str(own.books / row.book)]
            if row.book:  # the tokens of all books, so that losses can be compared
                options += ["--data.tokenizer", str(run.with_name("books") / "tokenizer.json")]
            if status := train(row, options, run, seed):
                print(f"error: {run} ended before its last step; the same command resumes it.", file=sys.stderr)
                return status
            stored["rows"].setdefault(label, {})[str(seed)] = outcome(row, run, sources.get(row.config, "-"))
            stored["rows"] = {label: stored["rows"][label] for label in study.rows if label in stored["rows"]}
            if study.curves:
                stored["rows"][label][str(seed)] |= learning(run)
            if study.sharpness:
                stored["rows"][label][str(seed)]["sharpness"] = {
                    line["step"]: round(line["sharpness"], 2)
                    for line in read_metrics(run)
                    if line.get("sharpness") is not None  # None where it was not found
                }
            if label in study.by_position:
                stored["rows"][label][str(seed)]["loss_by_position"] = position_losses(run)
            if study.continues and seed == 0:
                stored.setdefault("continuations", {})[label] = [x[1:] for x in continue_validation([run])]
            if not counted and not row.book:  # once per call, as all runs share the books
                figures["counts"], counted = {"rows": count_tokens(run)}, True
            record.write(FILE, figures, record.versions("jax", "jaxlib", "flax"), own.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
