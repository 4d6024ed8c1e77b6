"""Influence of documents: derivatives through training against difference quotients, and training without documents."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer.cli import influence
from jaxformer.cli import train as train_command
from jaxformer.errors import UserError
from jaxformer.inspect.influence import Replay
from jaxformer.runs.run import load_run, read_config, write_config
from jaxformer.train.log import read_metrics
from tests.helpers import tiny, write_books

PHRASE = "Zebras quietly juggle amber violins."

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the folder of a run on six documents, one of which has a sentence of its own."""
    root = tmp_path_factory.mktemp("influence")
    books = write_books(root / "books", 6, 300)
    book = books / "3.txt"
    book.write_text(f"{PHRASE} ".join(book.read_text().split("The ")[:40]))
    # A smooth model and a low rate, so that difference quotients converge to the derivative.
    options = tiny(
        books, 16, "--train.log-every", "1", "--model.activation", "gelu", "--optimizer.name", "adamw",
        "--optimizer.schedule", "constant", "--optimizer.learning-rate", "0.003", "--train.batch-size", "8",
    )  # fmt: skip
    assert train_command.main([*options, "--data.val-path", str(books / "0.txt"), "--run", str(root / "run")]) == 0
    return root / "run"


@pytest.fixture(scope="module")
def replay(folder) -> Replay:
    return Replay(load_run(folder))


def test_training_again_runs_the_programs_of_the_run(folder):
    """Found in the cache of compiled programs, so that they round alike whatever the compiler's flags are. First of all
    tests here: no other one has put programs there."""
    events: list[str] = []
    listener = lambda event, **_: events.append(event.rpartition("/")[2])  # noqa: E731
    run = load_run(folder)
    jax.monitoring.register_event_listener(listener)
    try:
        params = Replay(run).train()
    finally:
        jax.monitoring.unregister_event_listener(listener)
    assert "cache_hits" in events and "cache_misses" not in events
    jax.tree.map(np.testing.assert_array_equal, params, run.params)


def test_weights_and_steps_that_do_not_exist_are_refused_and_a_text_is_its_tokens(replay):
    with pytest.raises(ValueError, match=r"weights of shape \(1,\) for \d+ documents; give one per document"):
        replay.train(np.ones(1))
    for step in (0, 17):
        with pytest.raises(IndexError, match=f"there is no step {step}; the run has 16, from 1 on"):
            replay.train(without=[step])
    run = load_run(replay._run.path)
    tokens = np.array(run.tokenizer.encode_prompt(PHRASE))
    assert replay.log_probability(run.params, PHRASE) == replay.log_probability(run.params, tokens)
    with pytest.raises(ValueError, match="expected 2 tokens or more, got 1"):
        replay.log_probability(run.params, tokens[:1])


def test_documents_are_those_of_the_corpus(folder, replay):
    tokenizer = replay._data.corpus.tokenizer
    texts = [tokenizer.decode(tokens[:-1].tolist()).strip() for tokens in replay.documents]
    assert sorted(texts) == sorted(path.read_text().strip() for path in (folder.parent / "books").glob("[1-5].txt"))
    assert all(tokens[-1] == tokenizer.end_of_text for tokens in replay.documents)


def test_influence_is_the_derivative_of_training(folder, replay, monkeypatch):
    """Of the whole function from weights to log-probabilities, which difference quotients measure by training, by
    Adam: an early update is close to the sign of the gradient, so that quotients converge where rounding begins."""
    monkeypatch.setattr(replay, "n_steps", 6)
    text = np.array(load_run(folder).tokenizer.encode_prompt(f"{PHRASE} The"))
    params, (influence_N,) = replay.influence([text])
    jax.tree.map(np.testing.assert_array_equal, params, replay.train())
    assert influence_N.shape == (5,)
    ends = []
    for weight in (0.95, 1.05):
        weights_N = np.array([1, 1, 1, weight, 1], np.float32)
        ends.append(float(replay.log_probability(replay.train(weights_N), text)))
    np.testing.assert_allclose(influence_N[3], (ends[1] - ends[0]) / 0.1, atol=0.03 * np.abs(influence_N).max())


def test_leaving_out_a_batch_changes_nothing_before_it(folder, replay):
    losses, without = ([loss for *_, loss in replay.steps(without=steps)] for steps in ((), (9,)))
    assert losses == [row["loss"] for row in read_metrics(folder) if "loss" in row]
    assert without[:8] == losses[:8]
    assert without[8] == 0  # all targets have weight 0
    assert all(x != y for x, y in zip(without[9:], losses[9:], strict=True))


@pytest.fixture
def compiled(monkeypatch, replay):
    """Let the command repeat the training by programs that are compiled."""
    monkeypatch.setattr("jaxformer.inspect.influence.Replay", lambda run: replay)


def test_influence_command(folder, compiled, capsys):
    assert influence.main([str(folder), "--text", PHRASE, "--top", "2", "--prove"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert "stability" not in said.err
    assert lines[0].endswith("equals that of the run to the last bit")
    assert lines[2].split(": ")[1].startswith(PHRASE)
    assert lines[4].startswith("trained without those: predicted -")
    assert lines[5].startswith("trained without 2 others: predicted ")
    own, others = (float(line.split()[-1]) for line in lines[4:6])
    assert own < -1 < others  # a unique sentence is due to its document
    page = (folder / "influence.html").read_text()
    assert page.count(PHRASE) > 1 and "Training without" in page and "to the last bit" in page
    assert influence.main([str(folder), "--without-step", "9"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[3].split()[0] == "9" and rows[3].split()[2] == "0.0000"


def test_influences_without_meaning_are_called_so(folder, replay, compiled, capsys, monkeypatch):
    tokens, params = np.array([1, 2, 3]), load_run(folder).params
    with pytest.raises(FloatingPointError, match="derivative of training is not finite") as raised:
        replay.influence([tokens], weights_N=np.full(len(replay.documents), np.nan))
    monkeypatch.setattr(Replay, "influence", lambda *_, **__: (params, np.full((1, 5), 1e6)))
    assert influence.main([str(folder), "--text", PHRASE]) == 0
    assert "note: an estimate exceeds the" in capsys.readouterr().err
    assert "at the edge of stability" in (folder / "influence.html").read_text()

    def without_bound(*_, **__):
        raise raised.value

    monkeypatch.setattr(Replay, "influence", without_bound)
    assert influence.main([str(folder), "--text", PHRASE]) == 2
    assert "is not finite, as training was at the edge of stability; train with a lower" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "--text is missing"),
        (("--text", ""), "no token to predict"),
        (("--without-step", "17"), "the run has 16 steps"),
        (("--without-step", "2", "--text", "x"), "--without-step needs no --text"),
    ],
)
def test_wrong_options_of_influence(folder, compiled, capsys, options, problem):
    assert influence.main([str(folder), *options]) == 2
    assert problem in capsys.readouterr().err


def test_pretrained_run_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    write_config(tmp_path / "run", replace(read_config(folder), init_from=str(folder)))
    with pytest.raises(UserError, match="from random parameters; name such a run"):
        Replay(load_run(tmp_path / "run"))
