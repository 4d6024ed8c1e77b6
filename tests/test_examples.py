"""Every example of docs/examples runs, asserts something, and is short."""

import ast
import runpy
import sys

import pytest

from tests.helpers import ROOT

EXAMPLES = sorted((ROOT / "docs/examples").glob("*.py"))
MAX_LINES = 60
NEEDED = {"in_equinox": "equinox"}
"""Packages of examples, beyond those of the core; CI has them for slow tests."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_checks_itself_and_is_on_the_page(path):
    text = path.read_text()
    assert text.count("\n") < MAX_LINES
    body = ast.parse(text).body
    assert any(isinstance(x, ast.Assert) or "np.testing.assert" in ast.unparse(x) for x in body)
    assert f"examples/{path.name}" in (ROOT / "docs/reuse.md").read_text()


def test_an_example_without_its_package_says_how_to_install_it(monkeypatch):
    for name, package in NEEDED.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(SystemExit, match=f"install it with: pip install {package}"):
            runpy.run_path(str(ROOT / f"docs/examples/{name}.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    if path.stem in NEEDED:
        pytest.importorskip(NEEDED[path.stem])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
