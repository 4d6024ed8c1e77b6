"""`python -m jaxformer export`."""

import json
from pathlib import Path

import pytest

from jaxformer.cli import export
from jaxformer.cli.arguments import load_config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.runs.run import read_config, write_config
from tests.runs.random_runs import saved_run

WORDS = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved_run(tmp_path_factory.mktemp("runs") / "small", [WORDS * 3]))


LLAMA_BUT_BIAS = (
    "--config quick --model.n-heads 4 --model.n-kv-heads 2 --model.rope.base 10000 --model.activation swiglu"
)


@pytest.mark.parametrize(
    ("options", "status", "lines"),
    [
        (f"{LLAMA_BUT_BIAS} --format hf", 1, ["  model.bias True; needed: --model.no-bias"]),
        (f"{LLAMA_BUT_BIAS} --model.no-bias", 0, ["quick as hf: can be exported", "quick as gguf: can be exported"]),
        (
            "--config quick --model.attention.window 8 --model.d-ff 4 5 --format gguf", 1,
            [
                "  model.attention.window 8; needed: --model.attention.window none",
                "  model.d_ff 4 5; needed: --model.d-ff 4",
                "  model.activation relu; needed: --model.activation swiglu",
                "  model.bias True; needed: --model.no-bias",
            ],
        ),
        ("--config vision:vivit --format hf", 1, ["  model ViViTConfig; needed: a Decoder (--config quick:llama)"]),
        ("--config vision:vit --format hf", 1, ["  model.pooling mean; needed: --model.pooling class"]),
        ("--config vision:vit --format stablehlo", 0, ["vision:vit as stablehlo: can be exported"]),
    ],
)  # fmt: skip
def test_a_check_lists_all_obstacles_of_a_config_with_the_options_that_remove_them(capsys, options, status, lines):
    assert export.main(["--check", *options.split()]) == status
    shown = capsys.readouterr().out.splitlines()
    assert {*lines} <= {*shown}
    assert len([line for line in shown if line.startswith("  ")]) == len(lines) * status


def test_a_run_with_obstacles_is_refused_with_all_of_them_and_checked_alike(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, load_config("quick"))
    assert export.main([str(tmp_path), "--format", "hf"]) == 2
    obstacles, remedy = "model.activation relu and model.bias True have no equivalent", "--model.activation swiglu"
    error = capsys.readouterr().err
    assert f"cannot be exported as hf: {obstacles}; use --format safetensors, or train with {remedy}" in error
    assert error.endswith("--model.no-bias.\n") and error.count("\n") == 1
    assert export.main(["--check", str(tmp_path), "--format", "hf"]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  model.activation relu; needed: --model.activation swiglu", "  model.bias True; needed: --model.no-bias",
    ]  # fmt: skip


def test_a_tokenizer_that_llama_cpp_does_not_know_is_an_obstacle_to_gguf(tmp_path, capsys):
    content = json.loads(Tokenizer.train([], 257).as_json())
    parts = [{"type": "Punctuation", "behavior": "Isolated"}, content["pre_tokenizer"]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    options = ["--check", "--config", "quick:llama", "--data.tokenizer", str(tmp_path / "tokenizer.json")]
    assert export.main([*options, "--format", "hf"]) == 0
    assert export.main([*options, "--format", "gguf"]) == 1
    assert "  the tokenizer changes or splits text by " in capsys.readouterr().out


@pytest.mark.slow
def test_export_is_named_after_run_and_format(run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    assert export.main([run, "--format", "safetensors"]) == 0
    expected = f"run {run}, step 0: Decoder as safetensors in exports/small-safetensors; load it with: "
    expected += 'safetensors.numpy.load_file("exports/small-safetensors/model.safetensors")\n'
    assert capsys.readouterr().out == expected
    assert read_config(tmp_path / "exports/small-safetensors") == read_config(Path(run))
    assert export.main([run, "--format", "safetensors"]) == 2
    assert "exports/small-safetensors exists" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--format is missing; give one of "),
        (["--format", "safetensors", "--cache-length", "8"], "--cache-length has no effect on safetensors; omit"),
        (["--format", "stablehlo", "--cache-length", "0"], "--cache-length is 0; it must be at least 1"),
    ],
)
def test_wrong_options_are_one_sentence(run, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert export.main([run, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
