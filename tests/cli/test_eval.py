"""`python -m jaxformer eval`: the number, and what it refuses."""

import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import load_run
from jaxformer.cli import eval as command
from jaxformer.config import Config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.runs.run import Run, load_data, read_config, write_config
from jaxformer.train.evaluate import Evaluator
from jaxformer.train.setup import TrainSetup
from tests.arrays import first_params
from tests.helpers import small_run, write_books

UNKNOWN = "Καλημέρα κόσμε 你好 🙂\n\n" * 40
"""Characters that no training text had."""


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    """Without the line about which run is taken."""
    monkeypatch.setattr("jaxformer.cli.load.echo", lambda *_: None)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    write_books(folder / "books")
    (folder / "other.txt").write_text(UNKNOWN)
    (folder / "empty.txt").write_text(" \n")
    small_run(folder / "runs/quick", [file.read_text() for file in (folder / "books").iterdir()], steps=100)
    return folder


def metrics_in(line: str) -> dict[str, float]:
    """Return the metrics in the line that eval prints, which has the words of the training log."""
    numbers = re.fullmatch(
        r"(?:held-out|loss) (\S+)(?: \((\S+) bits/byte\)  perplexity (\S+))?  (\S+)% accuracy  (\S+) targets", line
    )
    names = ("loss", "bpb", "ppl", "accuracy", "targets")
    return {name: float(x.replace(",", "")) for name, x in zip(names, numbers.groups(), strict=True) if x}


@pytest.fixture
def evaluate(here, monkeypatch, capsys):
    """Return the metrics that eval prints, by name."""
    monkeypatch.chdir(here)

    def call(*options: str) -> dict[str, float]:
        assert command.main(options) == 0, capsys.readouterr().err
        last = capsys.readouterr().out.splitlines()[-1]
        return metrics_in(last)

    return call


@pytest.mark.slow
def test_the_default_equals_the_final_validation_of_training_on_any_batch_and_mesh(here, evaluate):
    mesh = make_mesh()
    run = load_run(here / "runs/quick", mesh=mesh)
    data = TextConfig(path="other.txt", val_path="books").load(run.config.model, 4, 0, run.tokenizer)
    validation = Evaluator(TrainSetup(run.config, mesh), data)(run.params)
    results = evaluate("--run", "runs/quick", "--data.path", "books")
    assert results["targets"] == validation.targets == len(data.val.tokens) - 1
    np.testing.assert_allclose(results["loss"], validation.loss, rtol=1e-6, atol=5e-7)  # six decimals are shown
    np.testing.assert_allclose(results["bpb"], validation.bits_per_byte, rtol=1e-6, atol=5e-7)
    np.testing.assert_allclose(results["ppl"], validation.perplexity, rtol=1e-5)  # six digits are shown
    for other in (["--batch-size", "3"], ["--mesh", "data=4,tensor=2"]):
        again = evaluate("--data.path", "books", *other)
        np.testing.assert_allclose([again[k] for k in results], [results[k] for k in results], rtol=1e-5)


@pytest.mark.slow
def test_a_note_says_that_the_split_is_not_the_one_of_training(here, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(here)
    folder = small_run(tmp_path / "run", ["a"])
    config = replace(read_config(folder), data=TextConfig(path="books"))
    write_config(folder, config)
    for step, fingerprint in enumerate(["another", load_data(folder, config).fingerprint], start=1):
        with CheckpointManager(folder) as checkpoints:
            position = {"step": step, "fingerprint": fingerprint}
            checkpoints.save(step, load_run(folder).params, {"none": jnp.zeros(1)}, position, None)
    notes = []
    for step in "1", "2":
        assert command.main(["--run", str(folder), "--checkpoint", step]) == 0
        notes.append("differs from what this run was trained on" in capsys.readouterr().err)
    assert notes == [True, False]


@pytest.mark.slow
def test_the_losses_by_position_average_to_the_loss(here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    assert command.main(["--data.path", "books", "--by-position"]) == 0
    metrics, by_position = capsys.readouterr().out.splitlines()[1:]
    means = dict(part.split("=") for part in by_position.removeprefix("loss by position: ").split())
    assert list(means) == ["1", "2", "3-4", "5-8", "9-16"]
    loss = metrics_in(metrics)["loss"]
    np.testing.assert_allclose(np.dot([1, 1, 2, 4, 8], [float(x) for x in means.values()]) / 16, loss, rtol=2e-3)
    assert float(means["1"]) > float(means["9-16"])

    Path("short.txt").write_text("a b a")
    assert command.main(["--data.path", "short.txt", "--by-position"]) == 0
    metrics, by_position = capsys.readouterr().out.splitlines()[1:]
    n_targets = int(metrics_in(metrics)["targets"])
    positions = [part.split("=")[0] for part in by_position.removeprefix("loss by position: ").split()]
    assert n_targets < 16 and positions == ["1", "2", "3-4", "5-8", "9-16"][: 1 + (n_targets - 1).bit_length()]
    assert "nan" not in by_position


@pytest.mark.slow
def test_a_model_with_one_prediction_per_window_has_a_stride_of_one(here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    tokenizer = Tokenizer.train(["a b"], 257)
    model = MLPConfig(vocab_size=257, context_length=8, d_model=4, d_ff=(4,), mixing="concatenate")
    config = Config("a", model, data=TextConfig(), steps=1)
    params = first_params(model.build(), jnp.zeros(8, jnp.int32))
    run = Run(Path("it"), config, model.build(), params, tokenizer, 0)
    monkeypatch.setattr(command, "open_run", lambda options, mesh: run)
    assert command.main(["--data.path", "books/0.txt"]) == 0
    assert "; windows of 8 tokens, 1 apart\n" in capsys.readouterr().out
    assert command.main(["--data.path", "books/0.txt", "--stride", "4"]) == 2
    assert capsys.readouterr().err == (
        "error: --stride is 4; it must be at most 1, as many tokens as a window of this run predicts.\n"
    )


@pytest.mark.slow
def test_characters_unknown_to_the_tokenizer_count_as_their_bytes(here, evaluate):
    results = evaluate("--data.path", "other.txt")
    run = load_run(here / "runs/quick")
    text = UNKNOWN.strip() + "\n"  # as documents are read
    assert results["targets"] == len(run.tokenizer.encode(text)) + 1  # and the end of text
    bits = results["loss"] / np.log(2) * results["targets"]
    np.testing.assert_allclose(results["bpb"], bits / len(text.encode()), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data.path empty.txt", "the 1 file(s) at empty.txt hold no text"),
        ("--data.path books --stride 17", "--stride is 17; it must be at most 16, as many tokens"),
        ("--data.path books --checkpoint 7", "7"),
        ("--data.path books --mesh data=3", "the mesh needs data 3 = 3 devices, but there are 8"),
    ],
)
def test_invalid_data_or_options_are_one_sentence_errors(here, monkeypatch, capsys, options, message):
    monkeypatch.chdir(here)
    assert command.main(options.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--stride 4", "--data.unwrap and --data.column are for a text; name one with --data.path"),
        ("--data.path x --mesh batch=2", "the mesh is 'batch=2'; it must be one size"),
    ],
)
def test_invalid_options_are_refused_without_a_run(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert command.main(options.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
