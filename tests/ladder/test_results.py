"""Outcomes of the ladder, read from the logs of its runs."""

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import ladder
from configs.ladder import RECIPE, REPORTED
from jaxformer.cli.arguments import load_config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import next_token_batch
from jaxformer.ladder.page import describe_change, write_results
from jaxformer.ladder.results import as_text, has_ended, rung_result
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.run import create_run
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_train_step
from tests.browser import embedded
from tests.helpers import ROOT


def write_run(folder: Path, name: str, rows: list[dict], broken: int | None = None) -> None:
    """Write a rung's folder as training leaves it, without its checkpoints."""
    config = load_config(f"{ROOT}/configs/ladder.py:{name}")
    run = create_run(folder / name, config, Tokenizer.train([], 257), allow_suffix=False)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if broken is not None:
        (run / f"autopsy/step-{broken}").mkdir(parents=True)


@pytest.mark.slow
def test_a_rung_before_attention_learns_with_the_optimizer_of_the_ladder():
    """Twenty steps at a small size of texts in which each token is one more than the one before."""
    config = ladder.mix_qkv
    model = replace(config.model, vocab_size=64, context_length=8, d_model=16, d_ff=(32, 32))
    config = replace(config, model=model, train=replace(config.train, batch_size=32))
    setup = TrainSetup(config, make_mesh("data=1", jax.devices()[:1]))
    windows_BT = (np.random.default_rng(0).integers(64, size=(32, 1)) + np.arange(9)) % 64
    state, step, losses = setup.init_state(), make_train_step(setup), []
    for k in range(20):
        state, metrics = step(state, next_token_batch(windows_BT.astype(np.int32)), np.int32(k))
        losses.append(float(metrics.loss))
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


def test_every_rung_says_what_it_changes():
    rungs = {name: getattr(ladder, name) for name in (*REPORTED, *RECIPE)}
    changes = {b: describe_change(rungs[a], rungs[b]) for a, b in itertools.pairwise(rungs)}
    assert all(changes.values())
    assert changes["attention_unscaled"] == "RungDecoder instead of MLP" and changes["two_blocks"] == "n_blocks 1 → 2"
    assert changes["cosine"] == "optimizer.schedule constant → cosine, optimizer.warmup_steps 0 → 50"


@pytest.mark.slow
def test_results_are_those_of_the_logs(tmp_path):
    final = {
        "step": 10_644,
        "val_loss": 4.0,
        "val_ppl": math.exp(4),
        "val_bpb": 1.5,
        "entropy": [[1.2345, 0.5], [0.25]],
    }
    write_run(tmp_path, "residual", [{"step": 0, "val_loss": 8.0}, final | {"step_ms": 2.0}])
    write_run(
        tmp_path,
        "four_blocks",
        [
            {"step": 0, "val_loss": 7.0},
            {"step": 4, "note": "other data"},
            {"step": 5, "val_loss": None, "entropy": [[None, 1.0]], "step_ms": 10.0},
        ],
        broken=6,
    )
    results = [rung_result(tmp_path / name, REPORTED[name]) for name in ("residual", "four_blocks")]
    residual, four = results
    assert (residual.parameters, residual.steps, residual.loss, residual.ended_early) == (6_500_608, 10_644, 4.0, "")
    assert residual.entropy == "1.23 0.5; 0.25" and residual.sources.startswith("68.284")
    assert residual.targets == 10_644 * 4096 * 32
    uniform = sum(math.log(t) for t in range(1, 33)) / 32  # each row of a causal map over all positions before it
    assert residual.normalized_entropy == "48% 20%; 10%" and round(1.2345 / uniform, 2) == 0.48
    assert residual.entropy_positions == "3.4 1.6; 1.3"
    assert residual.minutes == pytest.approx(10_644 * 2 / 60_000)
    assert (
        four.ended_early == "not finite at step 6"
        and math.isnan(four.loss)
        and four.steps == 5
        and four.entropy == "- 1 (at step 5)"
    )
    assert four.minutes == pytest.approx(50 / 60_000)
    assert has_ended(tmp_path / "four_blocks") and not has_ended(tmp_path / "residual")  # nothing is saved

    told = [{"prompt": "Call me", "temperature": 0.0, "text": " <b>"}]
    (tmp_path / "residual/continuations.json").write_text(json.dumps(told))
    write_results(results, tmp_path)
    rows = list(csv.DictReader((tmp_path / "ladder.csv").read_text().splitlines()))
    assert [row["rung"] for row in rows] == ["residual", "four_blocks"]
    assert float(rows[0]["perplexity"]) == pytest.approx(math.exp(4)) and rows[1]["loss"] == ""
    page = (tmp_path / "ladder.html").read_text()
    assert f'data-value="{math.exp(4)!r}">54.60<' in page and ">not finite at step 6</td>" in page
    [chart] = embedded(page, "Held-out loss")
    assert chart["lines"][0]["y"] == [8.0, 4.0]
    one, other = embedded(page, "Rung by rung")
    assert one["y"]["limits"] == other["y"]["limits"] and not one["marks"]
    assert other["marks"] == [[6, "not finite at step 6"]]  # the event, where it was
    assert "n_blocks 1 → 4, n_heads 1 → 4" in page
    [entropy] = embedded(page, "Attention entropy")
    assert entropy["rows"] == ["residual, layer 0", "residual, layer 1", "four_blocks, layer 0"]
    assert entropy["values"] == [[1.2345, 0.5], [0.25, None], [None, 1.0]]
    assert entropy["notes"][0][0].endswith("1.23 nats, as if 3.4 positions")
    assert "<b>residual</b>  <mark>Call me</mark> &lt;b&gt;</pre>" in page
    text = as_text(results).splitlines()
    assert max(map(len, text)) <= 100 and [line.split()[0] for line in text[:3]] == ["rung", "residual", "four_blocks"]
    assert text[-2] == f"residual     1.23 0.5; 0.25 | {REPORTED['residual']}"
    assert text[-1] == "four_blocks  - 1 (at step 5) | NaN before step 100"
    assert " 2.00e+45 " in as_text([replace(results[0], perplexity=2e45)])


@pytest.mark.slow
def test_a_diverged_rung_ended_at_the_step_where_divergence_began(tmp_path):
    event = {"step": 130, "diverged": {"step": 130, "began": 118, "loss": 9.0, "minimum": 5.0, "minimum_step": 117}}
    rows = [{"step": 0, "val_loss": 7.0}, {"step": 100, "val_loss": 5.5, "step_ms": 1.0}, event]
    write_run(tmp_path, "four_blocks", rows)
    four = rung_result(tmp_path / "four_blocks", "")
    assert four.ended_early == "diverged at step 118" and math.isnan(four.loss) and four.steps == 130
    assert has_ended(tmp_path / "four_blocks")
    write_results([four], tmp_path)
    assert "four_blocks (diverged at step 118)" in (tmp_path / "ladder.html").read_text()


@pytest.mark.slow
def test_validation_losses_are_compared_without_those_of_a_rung_that_reads_what_it_predicts(tmp_path):
    for name, loss in (("mix_qkv", 3.7), ("mix_unmasked", 0.2)):
        write_run(tmp_path, name, [{"step": 0, "val_loss": 6.0}, {"step": 10_644, "val_loss": loss, "step_ms": 1.0}])
    both = [rung_result(tmp_path / name, "") for name in ("mix_qkv", "mix_unmasked")]
    for results, shown in ((both, ["mix_qkv"]), (both[1:], ["mix_unmasked"])):
        write_results(results, tmp_path)
        page = (tmp_path / "ladder.html").read_text()
        [chart] = embedded(page, "Held-out loss")
        assert [line["name"] for line in chart["lines"]] == shown
        assert ("Without mix_unmasked: the loss of a rung that reads its own targets is near 0." in page) == (
            results is both
        )


def test_an_unfinished_run_has_not_ended(tmp_path):
    write_run(tmp_path, "residual", [{"step": 0, "val_loss": 8.0}, {"step": 50, "loss": 7.0, "step_ms": 1.0}])
    assert not has_ended(tmp_path / "residual")
    write_run(tmp_path, "two_blocks", [])
    assert not has_ended(tmp_path / "two_blocks")
    assert math.isnan(rung_result(tmp_path / "two_blocks", "").loss)
