"""`sample.py` and `eval` on a run whose model makes one text of another."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxformer import load_run
from jaxformer.cli import eval as evaluation
from jaxformer.cli import sample
from jaxformer.config import Config
from jaxformer.data.dates import DatesConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode.translation import exact_match, scores, translate
from jaxformer.models.recurrent import RecurrentConfig
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.runs.run import create_run

SOURCES = ["de 7.9.23", "é"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model that has learned nothing."""
    folder = tmp_path_factory.mktemp("translating")
    model = RecurrentConfig(257, 40, d_embedding=6, d_model=8)
    config = Config("pairs", model, DatesConfig(n_pairs=40, n_held_out=6, locales=("sv", "de")), steps=1)
    path = create_run(folder / "runs/pairs", config, Tokenizer.train([], 257), allow_suffix=False)
    built = model.build()
    params = jax.jit(built.init)(jax.random.key(1), *map(jnp.asarray, model.example()))["params"]
    with CheckpointManager(path) as checkpoints:
        checkpoints.save(0, params, {"none": jnp.zeros(1)}, {"step": 0}, None)
    return folder


@pytest.fixture
def translate_texts(here: Path) -> Callable:
    """What the run makes of texts."""
    run = load_run(here / "runs/pairs")

    def call(texts: list[str], **options: object) -> list[str]:
        return translate(run.model, run.params, run.tokenizer, texts, context_length=40, **options)

    return call


@pytest.fixture(autouse=True)
def _there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)


@pytest.mark.slow
def test_each_prompt_is_translated(translate_texts: Callable, capsys: pytest.CaptureFixture) -> None:
    assert sample.main(["--prompt", *SOURCES]) == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in translate_texts(SOURCES))
    options = ["--num-beams", "3", "--length-penalty", "0.6", "--max-new-tokens", "9"]
    assert sample.main(["--run", "runs/pairs", "--jsonl", *options, "--prompt", *SOURCES]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == translate_texts(SOURCES, n_beams=3, length_penalty=0.6, max_new_tokens=9)
    assert [(row["line"], row["prompt"]) for row in rows] == [(1, SOURCES[0]), (2, SOURCES[1])]


@pytest.mark.slow
def test_translations_are_sampled(translate_texts: Callable, capsys: pytest.CaptureFixture) -> None:
    """Each by its own seed, whatever its batch; with a single likeliest token, as greedy ones."""
    assert sample.main(["--temperature", "0.9", "--top-k", "1", "--min-p", "0", "--prompt", *SOURCES]) == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in translate_texts(SOURCES))
    drawn = []
    for seed, prompts in (("3", SOURCES), ("3", SOURCES[1:]), ("4", SOURCES)):
        assert sample.main(["--temperature", "0.9", "--seed", seed, "--jsonl", "--prompt", *prompts]) == 0
        drawn.append([json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()])
    assert drawn[0][1:] == drawn[1] != drawn[2][1:] and drawn[0][0] != drawn[2][0]


@pytest.mark.slow
def test_an_invalid_line_of_a_file_is_named_and_the_others_translated(
    here: Path, translate_texts: Callable, capsys: pytest.CaptureFixture
) -> None:
    (here / "texts.txt").write_text(f"{SOURCES[0]}\n{'x' * 41}\n{SOURCES[1]}\n")
    assert sample.main(["--prompts-file", "texts.txt", "--jsonl"]) == 2
    output = capsys.readouterr()
    assert "line 2, has 41 tokens; it may have at most the context's 40" in output.err
    rows = [json.loads(line) for line in output.out.splitlines()]
    assert [(row["line"], row["text"]) for row in rows] == list(zip((1, 3), translate_texts(SOURCES), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "a", "--chat"], "--chat does not apply to translation, the task of runs/pairs"),
        (["--prompt", "a", "--seed", "3"], "--seed has no effect on greedy translations; omit it, or give --temp"),
        ([], "there is nothing for translation; give --prompt or --prompts-file"),
        (["--prompt", "x" * 41], "the prompt has 41 tokens"),
        (["--prompt", "a", "--max-new-tokens", "41"], "max_new_tokens is 41; it must be at least 1 and at most"),
        (["--prompt", "a", "--cache-dtype", "int8"], "dtype is int8; use float32 or bfloat16 for a recurrent model"),
        (["--prompts-file", "seeds.jsonl"], "has a seed, but translation does not sample"),
    ],
    ids=str,
)
def test_options_of_other_tasks_are_refused(
    here: Path, capsys: pytest.CaptureFixture, options: list[str], message: str
) -> None:
    (here / "seeds.jsonl").write_text('{"prompt": "a", "seed": 3}\n')
    assert sample.main(options) == 2
    output = capsys.readouterr()
    assert message in output.err and not output.out


@pytest.mark.slow
def test_eval_scores_the_translations_of_the_held_out_sources(
    translate_texts: Callable, capsys: pytest.CaptureFixture
) -> None:
    assert evaluation.main(["--batch-size", "8"]) == 0
    about, loss, quality = capsys.readouterr().out.splitlines()
    assert "dates in 2 locales" in about and loss.endswith("  66 targets")  # of six dates, ten characters and an end
    run = load_run("runs/pairs")
    val = run.config.data.load(run.config.model, 8, 0, run.tokenizer).val
    texts = translate_texts([pair.source for pair in val])
    results = scores(texts, [pair.target for pair in val]) | {
        "exact": exact_match(texts, [pair.target for pair in val])
    }
    assert quality == " ".join(f"{name}={value:.4f}" for name, value in results.items())
