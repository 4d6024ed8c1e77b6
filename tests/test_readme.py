"""Every command and snippet of the README works."""

import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxformer.checkpoints import CheckpointManager
from jaxformer.cli import diff, inspect, ladder, sample, verify
from jaxformer.cli import eval as evaluate
from jaxformer.cli.arguments import load_config
from jaxformer.runs import create_run
from tests.arrays import first_params
from tests.helpers import ROOT, changed, exhaustive, run, tiny, write_books

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SNIPPETS = [text for text_model, text in BLOCKS if text_model == "python"]
COMMANDS = [line for text_model, text in BLOCKS if text_model == "bash" for line in text.splitlines() if line]
NOT_OF_AN_MLP = {"--model.n-blocks", "--model.n-heads"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def untrained(folder: Path, spec: str, model: dict, data: dict) -> None:
    """A run of a small model that has learned nothing yet."""
    config = load_config(f"{ROOT}/configs/{spec}")
    config = replace(config, model=replace(config.model, d_model=8, **model), data=replace(config.data, **data))
    place = create_run(
        folder / "runs" / config.name, config, config.data.load(config.model, 4, config.seed).tokenizer,
        allow_suffix=False,
    )  # fmt: skip
    with CheckpointManager(place) as checkpoints:
        params = first_params(config.model.build(), *config.model.example())
        checkpoints.save(0, params, {"none": jnp.zeros(1)}, {"step": 0}, None)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder as a reader has it after the first command, with a smaller model."""
    folder = tmp_path_factory.mktemp("reader")
    write_books(folder / "books")
    untrained(folder, "dates.py:bahdanau", {}, {"n_pairs": 64, "n_held_out": 8})
    untrained(folder, "mlm.py", {"vocab_size": 281, "n_blocks": 1}, {"path": str(folder / "books")})
    result = run("train.py", *tiny(folder / "books", steps=2), cwd=folder)  # the newest is what is taken without --run
    assert result.returncode == 0, result.stderr
    (folder / "prompts.jsonl").write_text('{"prompt": "The war", "seed": 3, "id": "a"}\n')
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


def test_the_readme_holds_commands_and_snippets():
    assert len(SNIPPETS) >= 3 and len(COMMANDS) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(here, monkeypatch, capsys, snippet):
    # The reader's text is longer than the small model's context.
    snippet = snippet.replace("The state of the Union is strong.", "The cat sees.").replace(" of the world", "")
    monkeypatch.chdir(here)
    exec(snippet, {})
    assert bool(capsys.readouterr().out) == ("print" in snippet)


ELSEWHERE = (
    "--mesh fsdp=2 --compute",
    "--log-to tensorboard",
    "jaxformer ladder",
    "jaxformer verify ",
    "train.py --resume",
)
"""In what takes seconds and is run by another test, too."""


@pytest.mark.slow
@pytest.mark.parametrize("command", [exhaustive(c) if any(x in c for x in ELSEWHERE) else c for c in COMMANDS])
def test_commands_run(here, monkeypatch, capsys, command):
    """In this process, but for those that ask for devices of their own."""
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "stdin", io.StringIO("The war\n"))  # for a conversation
    for part in command.split("#")[0].split("&&"):
        words = shlex.split(part)
        if words[:3] == ["pip", "install", "-e"]:
            extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[3])
            assert extras and set((extras[1] or "test").split(",")) <= set(EXTRAS)
        elif words == ["pytest"]:
            assert "pytest" in " ".join(EXTRAS["test"])
        elif words[:4] == ["python", "-m", "jaxformer", "plan"]:
            if "--topology" not in words:  # minutes of compiling, and a compiler that may be missing
                env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
                command = [sys.executable, *words[1:]]
                env |= {"PYTHONPATH": str(ROOT)}
                result = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
                assert result.returncode == 0, result.stderr
                assert result.stdout.splitlines()[-1].startswith("fits: ")
        elif words[:4] == ["python", "-m", "jaxformer", "eval"]:
            assert evaluate.main(words[4:]) == 0
            assert "bpb=" in capsys.readouterr().out
        elif words[:4] == ["python", "-m", "jaxformer", "diff"]:
            assert diff.main(words[4:]) == 0
            assert capsys.readouterr().out.count("the same") == 3
        elif words[:4] == ["python", "-m", "jaxformer", "ladder"]:
            monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
            monkeypatch.setenv("PYTHONPATH", str(ROOT))
            small = tiny(here / "books", steps=2)[4:]  # without a config and a path
            few = [word for i, word in enumerate(small) if not {small[i - 1], word} & NOT_OF_AN_MLP]
            given = {few[i]: few[i + 1] for i in range(0, len(few), 2)}
            given |= {words[i]: words[i + 1] for i in range(4, len(words), 2) if words[i] not in given}
            assert ladder.main(["--rungs", "mlp_rowwise", *(word for pair in given.items() for word in pair)]) == 0
            assert (here / "runs/ladder/ladder.html").exists()
        elif words[:4] == ["python", "-m", "jaxformer", "inspect"]:
            assert inspect.main([*words[4:-1], "The people"]) == 0  # the small model's context is short
            assert (here / "runs/quick/inspect.html").exists()
        elif words[:4] == ["python", "-m", "jaxformer", "verify"]:
            assert verify.main(words[4:]) == 0
            assert capsys.readouterr().out.endswith("all that applies is kept\n")
        elif words[:2] == ["python", "sample.py"]:
            assert sample.main(words[2:]) == 0
            assert capsys.readouterr().out
        elif words == ["python", "train.py"]:
            assert (here / "runs/quick/samples.txt").exists()  # that is how the folder was made
        elif words[:2] == ["python", "train.py"] and "--resume" not in words:
            small = tiny(here / "books", steps=2)
            options = changed(words[2:], *small[2:]) if "--config" in words else tiny(here / "books", 2, *words[2:])
            result = run("train.py", *changed(options, "--steps", "2"), cwd=here)
            assert result.returncode == 0, result.stderr
        else:
            assert words[:2] == ["python", "train.py"]
            result = run(words[1], *words[2:], cwd=here)
            assert result.returncode == 0, result.stderr
            assert result.stdout


def test_every_config_and_rung_the_readme_names_is_there():
    ladder = README.split("The ladder is")[1].split(".")[0]
    rungs = re.findall(r"`(\w+)`", ladder)
    assert len(rungs) == 10
    for name in rungs:
        assert load_config(f"{ROOT}/configs/ladder.py:{name}").name == name
    specs = set(re.findall(r"configs/\w+\.py(?::\w+)?", README))
    assert len(specs) >= 12
    for spec in specs - {"configs/ladder.py", "configs/gpt.py"}:
        assert load_config(str(ROOT / spec)).steps > 0
