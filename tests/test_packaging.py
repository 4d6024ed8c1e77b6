"""The source archive is complete, and the wheel that is built from it works in an empty folder."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers import ROOT, tiny, write_books

pytestmark = pytest.mark.slow
pytest.importorskip("build")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the source archive and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_source_archive_has_all_files(built, tracked):
    with tarfile.open(built[0]) as archive:
        assert tracked <= {name.partition("/")[2] for name in archive.getnames()}


def test_wheel_has_the_package_and_the_configs(built, tracked):
    package = {name for name in tracked if name.startswith("jaxformer/")}
    configs = {f"jaxformer/{name}" for name in tracked if name.startswith("configs/")}
    with zipfile.ZipFile(built[1]) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == package | configs


def test_wheel_trains_in_an_empty_folder(built, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (site,) = (tmp_path / "env").glob("[Ll]ib/**/site-packages")
    # What is installed here, but not the checkout: a folder that a .pth file adds has its own .pth files ignored.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    scripts = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", built[1]], check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    books = write_books(tmp_path / "books")

    def jaxformer(*arguments: str) -> str:
        env = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "JAX_NUM_CPU_DEVICES")}
        command = [scripts / "jaxformer", *arguments]
        result = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    options = tiny(books, 1, "--config", "quick:modern", "--train.report-every", "0", "--train.eval-every", "0")
    assert jaxformer("train", *options).splitlines()[-1].startswith("sample from it: jaxformer sample --run runs/mod")
