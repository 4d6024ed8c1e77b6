"""`python -m jaxformer eval`: the number, and what it refuses."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import load_run
from jaxformer.cli import eval as command
from jaxformer.config import Config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.models.mlp import MLPConfig
from jaxformer.runs import Run
from jaxformer.sharding import make_mesh
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
    (folder / "bare").mkdir()
    (folder / "other.txt").write_text(UNKNOWN)
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin1.txt").write_bytes("caf\xe9".encode("latin-1"))
    small_run(folder / "runs/quick", [file.read_text() for file in (folder / "books").iterdir()], steps=100)
    return folder


@pytest.fixture
def evaluate(here, monkeypatch, capsys):
    """What eval says, as numbers by name."""
    monkeypatch.chdir(here)

    def call(*options: str) -> dict[str, float]:
        assert command.main(options) == 0, capsys.readouterr().err
        last = capsys.readouterr().out.splitlines()[-1]
        return {name: float(value) for name, value in re.findall(r"(\w+)=(\S+)", last)}

    return call


@pytest.mark.slow
def test_without_a_stride_it_is_trainings_final_validation_on_any_batch_and_mesh(here, evaluate):
    mesh = make_mesh()
    run = load_run(here / "runs/quick", mesh=mesh)
    data = TextConfig(path="other.txt", val_path="books").load(run.config.model, 4, 0, run.tokenizer)
    validation = Evaluator(TrainSetup(run.config, mesh), data)(run.params)
    found = evaluate("--run", "runs/quick", "--data.path", "books")
    assert found["targets"] == validation.targets == len(data.val.tokens) - 1
    np.testing.assert_allclose(found["loss"], validation.loss, rtol=1e-6)
    np.testing.assert_allclose(found["bpb"], validation.bits_per_byte, rtol=1e-6)
    np.testing.assert_allclose(found["ppl"], validation.perplexity, rtol=1e-5)  # six digits are shown
    for other in (["--batch-size", "1"], ["--batch-size", "3"], ["--mesh", "data=4,tensor=2"]):
        again = evaluate("--data.path", "books", *other)
        np.testing.assert_allclose([again[k] for k in found], [found[k] for k in found], rtol=1e-5)


@pytest.mark.slow
def test_a_stride_changes_the_context_and_not_what_is_counted(here, evaluate):
    plain, wide = evaluate("--data.path", "books"), evaluate("--data.path", "books", "--stride", "4")
    assert plain["targets"] == wide["targets"]
    assert evaluate("--data.path", "books", "--stride", "16") == plain  # the context length
    assert wide["loss"] != plain["loss"]


def test_a_model_of_one_prediction_a_window_has_a_stride_of_one(here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    tokenizer = Tokenizer.train(["a b"], 257)
    model = MLPConfig(vocab_size=257, context_length=8, d_model=4, d_ff=(4,), concatenate=True)
    config = Config("a", model, data=TextConfig(), steps=1)
    params = first_params(model.build(), jnp.zeros(8, jnp.int32))
    run = Run(Path("it"), config, model.build(), params, tokenizer, 0)
    monkeypatch.setattr(command, "open_run", lambda options, mesh: run)
    assert command.main(["--data.path", "books/0.txt"]) == 0
    assert "; windows of 8 tokens, 1 apart\n" in capsys.readouterr().out
    assert command.main(["--data.path", "books/0.txt", "--stride", "4"]) == 2
    assert capsys.readouterr().err == (
        "error: stride is 4; it must be at most 1, as many tokens as a window of this run predicts.\n"
    )


@pytest.mark.slow
def test_bits_per_byte_of_weights_of_8_bits_are_within_a_percent_of_the_trained_ones(evaluate, capsys):
    exact = evaluate("--data.path", "books")["bpb"]
    assert exact < 2  # far from the 8 of a model that knows nothing
    rounded = evaluate("--data.path", "books", "--weights", "int8", "--mesh", "data=4,tensor=2")["bpb"]
    assert 0 < abs(rounded - exact) < 0.01 * exact
    assert command.main(["--data.path", "books", "--weights", "bfloat16"]) == 0
    assert "; weights rounded to bfloat16\n" in capsys.readouterr().out


@pytest.mark.slow
def test_characters_that_the_run_never_saw_count_as_their_bytes(here, evaluate):
    found = evaluate("--data.path", "other.txt")
    run = load_run(here / "runs/quick")
    text = UNKNOWN.strip() + "\n"  # as documents are read
    assert found["targets"] == len(run.tokenizer.encode(text)) + 1  # and the end of text
    bits = found["loss"] / np.log(2) * found["targets"]
    np.testing.assert_allclose(found["bpb"], bits / len(text.encode()), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--data.path empty.txt", "the 1 file(s) at empty.txt hold no text"),
        ("--data.path nowhere", "no data at nowhere"),
        ("--data.path latin1.txt", "latin1.txt is not UTF-8"),
        ("--data.path bare", "holds no .txt file"),
        (
            "--data.path books --stride 17",
            "stride is 17; it must be at most 16, as many tokens",
        ),
        ("--data.path books --run nowhere", "nowhere does not exist"),
        ("--data.path books --checkpoint 7", "7"),
        ("--data.path books --mesh data=3", "the mesh needs data 3 = 3 devices, but there are 8"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(here, monkeypatch, capsys, options, said):
    monkeypatch.chdir(here)
    assert command.main(options.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--stride 4", "--stride and --data.unwrap are for a text; name one with --data.path"),
        ("--data.path x --stride 0", "stride is 0; it must be at least 1"),
        ("--data.path x --batch-size 0", "batch_size is 0; it must be at least 1"),
        ("--data.pth x", "unknown option --data.pth; did you mean --data.path?"),
        ("--data.path x --mesh batch=2", "names an axis 'batch'"),
    ],
)
def test_wrong_options_are_answered_without_a_run(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    assert command.main(options.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err


def test_help_says_exactly_what_is_counted(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for told in ("every token but the first is predicted once", "at least context_length - N tokens before it"):
        assert told in shown
