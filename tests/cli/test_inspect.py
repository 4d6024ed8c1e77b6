"""`python -m jaxformer inspect`, on a run that was trained, and in a browser."""

import base64
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import load_run
from jaxformer.cli import inspect
from jaxformer.config import Config, ModelConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.inspect.pages import live as live_page
from jaxformer.inspect.pages import model
from jaxformer.inspect.pages.labels import TOKEN_SYMBOLS
from jaxformer.inspect.pages.page import rounded
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.runs.run import create_run, load_data, read_config
from jaxformer.train.log import read_metrics
from jaxformer.train.run_evaluation import load_validation_text
from tests.arrays import plain_decoder, random_params
from tests.browser import browsing, complaints, embedded, wait_for
from tests.runs.random_runs import saved_run
from tests.shared import trained

WORDS = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop")
EVIL = "The <script>x()"


def text_path(run: Path) -> str:
    """Return where the texts of a run are."""
    data = read_config(run).data
    assert isinstance(data, TextConfig)
    return data.path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("inspect") / "run"
    return Path(shutil.copytree(trained(tmp_path_factory) / "runs/quick", copy))


def test_page_of_a_prompt(run: Path, capsys: pytest.CaptureFixture):
    page = run.parent / "page.html"
    assert inspect.main([str(run), "--prompt", EVIL, "--out", str(page), "--examples", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{page}: ") and page.stat().st_size < 1e6
    parts = printed.err.splitlines()
    assert parts[:2] == ["the model on your own text ...", "attention maps ..."] and parts[-1] == "the training log ..."
    text, rows = page.read_text(encoding="utf-8"), read_metrics(run)

    def lines(title: str) -> list[tuple[str, list, list]]:
        lines = [(chart["positions"], line) for chart in embedded(text, title) for line in chart["lines"]]
        return [(line["member"], positions[line["x"]], line["y"]) for positions, line in lines]

    (_, steps, batch), (_, evaluated, held), *counted = lines("Loss")
    assert [(x, y) for _, x, y in counted] == [([0, 20], rounded([x, x])) for x in rows[0]["count_losses"].values()]
    assert held == rounded([row["val_loss"] for row in rows if "val_loss" in row])
    assert evaluated == [row["step"] for row in rows if "val_loss" in row] == [0, 10, 20]
    assert batch == rounded([row["loss"] for row in rows if "loss" in row])
    assert steps == [row["step"] for row in rows if "loss" in row]
    heads = [[row["entropy"][0][head] for row in rows if "entropy" in row] for head in range(2)]
    assert [y for *_, y in lines("Attention entropy")] == rounded(heads)
    updates = {name: y for name, _, y in lines("Update ratios")}
    tables = [(row["gradients"], row["lr"]) for row in rows if "gradients" in row]
    assert {p["name"] for p in tables[0][0]} == set(updates)
    expected = [p["update"] for table, _ in tables for p in table if p["name"] == "embedding.W_E"]
    assert tables[-1][1] < 0.01 * tables[0][1] and updates["embedding.W_E"] == [*rounded(expected[:-1]), None]
    [shown] = embedded(text, "Attention maps")
    assert EVIL not in text and "".join(shown["texts"]["text"]) == EVIL.replace(" ", "␣")
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert titles[:7] == [
        "Your own text", "Attention maps", "Logit lens", "Direct logit attribution", "Head ablation",
        "Head statistics", "Per-example gradients",
    ]  # fmt: skip
    assert "Samples" in titles and "Initialisation check" in titles


@pytest.mark.slow
def test_page_of_a_large_model_without_a_prompt_shows_a_held_out_text_and_measures_on_fewer_targets(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    for module, limit, value in (
        (live_page, "FLOAT16_PARAMETERS", 0), (live_page, "MAX_EMBEDDED_BYTES", 0), (model, "ABLATION_BUDGET", 0),
        (model, "MIN_TARGETS", 16),
    ):  # fmt: skip
        monkeypatch.setattr(module, limit, value)
    (tmp_path / "text.txt").write_text("The king finds the sea. " * 40)
    assert inspect.main([str(run), "--data.path", str(tmp_path / "text.txt")]) == 0
    printed = capsys.readouterr()
    page, weights = printed.out.splitlines()
    assert page.startswith(f"{run}/inspect.html: ") and weights.startswith(f"{run}/inspect.html.weights.0 to 0: ")
    source = f"held-out data of {tmp_path}/text.txt: 2 examples of up to 8 tokens"
    assert f"statistics and ablation of heads, on {source} ...\n" in printed.err
    assert "ablation of heads, layer 0 ...\n" in printed.err
    text = (run / "inspect.html").read_text()
    assert f"Heads and gradients are measured on {source}." in text
    [shown] = embedded(text, "Attention maps")
    assert len(shown["texts"]["text"]) == 8  # a full window of what is measured
    [live] = embedded(text, "Your own text")
    stored = (run / "inspect.html.weights.0").read_bytes()
    assert live["files"] == ["inspect.html.weights.0"] and "weights" not in live
    assert live["sha256"] == hashlib.sha256(stored).hexdigest() and live["size"] == len(stored)
    whole, first = "".join(shown["texts"]["text"]).replace("∅", ""), live["text"].translate(TOKEN_SYMBOLS)
    assert first and whole.startswith(first) and whole[len(first)] in "␣⏎"  # ends with a word


@pytest.mark.slow
def test_run_that_was_not_trained_says_on_what_it_is_measured_and_lenses_are_fitted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    imported = shutil.copytree(run, tmp_path / "imported", ignore=shutil.ignore_patterns("metrics.jsonl", "*.html"))
    options = [str(imported), "--lenses", "--max-live-parameters", "0", "--examples", "1"]
    assert inspect.main(options) == 0
    data, said = text_path(run), capsys.readouterr().err
    assert f"note: {imported} has no training: it is measured on {data}; name a text with --data.path" in said
    page = (imported / "inspect.html").read_text()
    assert "<h2>Your own text</h2>" not in page
    assert re.search(r"^lenses, on \d+ held-out texts of 16 tokens \.\.\.$", said, re.MULTILINE)
    same, divergence = embedded(page, "Lenses")
    assert [line["name"] for line in same["lines"]] == ["logit", "Jacobian", "regression"]
    for of_same, of_divergence in zip(same["lines"], divergence["lines"], strict=True):
        assert of_same["y"][-1] > 0.9  # the last stream is the model's own
        assert 0 <= of_divergence["y"][-1] < of_divergence["y"][0]
    logit, _, regression = (line["y"] for line in divergence["lines"])
    assert regression[0] < logit[0]
    opened = load_run(imported)
    text, _, _ = load_validation_text(opened, None)  # the same, without the training text
    own, held_out = (next(data.val_batches(4, 4)) for data in (load_data(imported, opened.config), text))
    jax.tree.map(np.testing.assert_array_equal, held_out, own)


@pytest.mark.slow
def test_page_without_data_needs_a_prompt_and_works_in_a_browser(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved, ignore=shutil.ignore_patterns("*.html"))
    config = json.loads((moved / "config.json").read_text())
    config["data"]["path"] = "nowhere"
    (moved / "config.json").write_text(json.dumps(config))
    assert inspect.main([str(moved)]) == 2
    assert "the run's data is not available; give a text with --prompt." in capsys.readouterr().err
    assert not (moved / "inspect.html").exists()
    assert inspect.main([str(moved), "--prompt", EVIL]) == 0
    text = (moved / "inspect.html").read_text()
    assert (
        "Heads and gradients are measured on the prompt only." in text
        and "The data of the run cannot be read: " in text
    )
    with browsing(moved / "inspect.html") as browser:
        wait_for(browser, "return document.querySelector('.live .status')")
        for section in (".live", ".attention"):
            tokens = browser.find_elements("css selector", f"{section} .tokens button")
            assert "".join(token.get_property("textContent") for token in tokens) == EVIL.replace(" ", "␣")
        assert complaints(browser) == []


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_run(tmp_path_factory.mktemp("inspect") / "small", [WORDS])


def untrained(folder: Path, model: ModelConfig, scale: float = 1.0) -> Path:
    """Create a run of an untrained small model, whose data does not exist."""
    tokenizer = Tokenizer.train([WORDS], 280)
    path = create_run(folder / "other", Config("other", model, data=TextConfig("nowhere"), steps=1), tokenizer, False)
    with CheckpointManager(path) as checkpoints:
        params = jax.tree.map(lambda x: scale * x, random_params(model.build(), *model.example()))
        checkpoints.save(0, params, {"none": jnp.zeros(1)}, {"step": 0}, None)
    return path


SMALL: dict = {"vocab_size": 280, "context_length": 16, "d_model": 8, "n_heads": 2, "d_ff": (8,)}


@pytest.mark.slow
def test_prefix_has_no_predictions(tmp_path: Path):
    path = untrained(tmp_path, plain_decoder(**SMALL, n_blocks=1, prefix=True))
    assert inspect.main([str(path), "--prompt", "ai bj ck dl"]) == 0
    text = (path / "inspect.html").read_text()
    assert (
        "The model does not run in this page: the page&#x27;s script supports neither mixtures of experts nor "
        "attention to a prefix." in text
    )
    [shown] = embedded(text, "Attention maps")
    predictions = shown["predictions"]["text"]
    prefix = len(predictions) // 2
    assert [prediction is None for prediction in predictions] == [i < prefix - 1 for i in range(len(predictions))]
    [lens] = embedded(text, "Logit lens")
    assert len(lens["values"][0]) == len(predictions) - prefix + 1  # and the prediction at the prefix's last token
    weights = shown["layers"][0]
    assert (weights["rows"], weights["columns"], weights["heads"]) == ("text", "text", 2)


@pytest.mark.slow
def test_model_that_is_not_finite_has_a_page_without_a_warning(tmp_path: Path):
    path = untrained(tmp_path, plain_decoder(**SMALL, n_blocks=1), math.nan)
    assert inspect.main([str(path), "--prompt", "ai bj"]) == 0  # tests turn warnings into errors
    text = (path / "inspect.html").read_text()
    assert "does not run in this page: a parameter is not finite" in text and "has weights that are not finite" in text
    [shown] = embedded(text, "Attention maps")
    assert set(base64.b64decode(shown["layers"][0]["frames"][0])) == {0}
    assert {p for _, p, _ in shown["predictions"]["text"][0][1]} == {None}


@pytest.mark.slow
def test_model_of_full_windows_shows_no_text(tmp_path: Path, capsys: pytest.CaptureFixture):
    model = MLPConfig(vocab_size=280, context_length=4, d_model=4, d_ff=(8,), mixing="concatenate")
    path = untrained(tmp_path, model)
    assert inspect.main([str(path), "--prompt", "abcd"]) == 2
    assert "supports full windows only, which a page does not show; omit --prompt." in capsys.readouterr().err
    assert inspect.main([str(path)]) == 0 and "<h1>other: inspection</h1>" in (path / "inspect.html").read_text()


@pytest.mark.slow
def test_out_that_is_not_a_file_is_refused(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    os.mkfifo(tmp_path / "fifo")
    assert inspect.main([str(small), "--prompt", "ab", "--out", str(tmp_path / "fifo")]) == 2
    assert "it must be a file in a folder that exists." in capsys.readouterr().err
    assert (tmp_path / "fifo").is_fifo()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x" * 40], "--prompt has 40 tokens; it may have at most the context's 16."),
        (["--prompt", ""], "--prompt is empty"),
        (["--max-live-parameters", "200000000"], "it must be at least 0 and at most 150000000."),
        (["--contrast", "ab"], "--contrast is compared with a prompt; give it with --prompt."),
        (["--prompt", "ab", "--contrast", "abc"], "--prompt and --contrast have 2 and 3 tokens; give two texts whose"),
        (["--prompt", "ab", "--contrast", "ab"], "--contrast has the same tokens as --prompt; give another text."),
    ],
)
def test_wrong_input_is_a_user_error(
    options: list[str], message: str, small: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model, "validation_batch", lambda *_: (None, "", "it is not here."))
    assert inspect.main([str(small), *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not (small / "inspect.html").exists()


@pytest.mark.slow
def test_prompt_with_too_many_attention_weights_is_refused(small: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model, "validation_batch", lambda *_: (None, "", "it is not here."))
    monkeypatch.setattr(model, "MAX_ATTENTION_WEIGHTS", 50)
    assert inspect.main([str(small), "--prompt", "0123456789"]) == 2
    assert "--prompt has 10 tokens, and so the model 200 attention weights" in (error := capsys.readouterr().err)
    assert error.endswith("a page holds at most 50: shorten it to about 5 tokens.\n")
