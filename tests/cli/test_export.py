"""`python -m jaxformer export`."""

from pathlib import Path

import pytest

from jaxformer.cli import export
from jaxformer.runs.run import read_config
from tests.helpers import small_run

WORDS = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_run(tmp_path_factory.mktemp("runs") / "small", [WORDS * 3]))


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
        (["--format", "stablehlo", "--cache-length", "0"], "cache_length is 0; it must be at least 1"),
        (["--format", "safetensors", "--checkpoint", "7"], "7"),
    ],
)
def test_wrong_options_are_one_sentence(run, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert export.main([run, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
