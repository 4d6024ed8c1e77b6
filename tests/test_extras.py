"""Optional packages are imported by one helper, which names the extra that has them."""

import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from jaxformer.errors import EXTRAS, UserError, import_extra

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"PIL": "pillow"}
"""Names of distributions that differ from their package's."""


def test_import_returns_the_module_itself():
    import PIL.Image

    assert import_extra("PIL.Image", "") is PIL.Image


def test_a_missing_package_is_one_sentence_with_its_extra(monkeypatch):
    for package, extra in EXTRAS.items():
        for module in (None, ModuleType(package)):  # a folder of that name is a namespace package
            with monkeypatch.context() as patch, pytest.raises(UserError) as error:
                patch.setitem(sys.modules, package, module)
                import_extra(package, "this test")
            remedy = f"install it with pip install 'jaxformer[{extra}]'."
            assert str(error.value) == f"this test needs {package}, which is not installed; {remedy}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            "import a_part_of_it",
            "which cannot be imported (No module named 'a_part_of_it'); install it with pip install 'jaxformer[gguf]'.",
        ),
        (
            "raise ImportError('libz is too old')",
            "which cannot be imported (libz is too old); install it with pip install 'jaxformer[gguf]'.",
        ),
        (
            "raise ValueError('no such\\nbackend')",
            "which cannot be imported (ValueError: no such backend); install it with pip install 'jaxformer[gguf]'.",
        ),
        (
            "raise SystemExit('no licence')",
            "which cannot be imported (SystemExit: no licence); install it with pip install 'jaxformer[gguf]'.",
        ),
    ],
)
def test_a_broken_package_is_one_sentence_with_the_reason(monkeypatch, tmp_path, content, reason):
    (tmp_path / "gguf.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    with pytest.raises(UserError) as error:
        import_extra("gguf", "this test")
    assert str(error.value) == f"this test needs gguf, {reason}"


def requirements(extra: str) -> set[str]:
    """Return the names of the distributions that an extra lists."""
    return {"".join(c if c.isalnum() else " " for c in r).split()[0] for r in PROJECT["optional-dependencies"][extra]}


def test_each_extra_installs_its_package():
    for package, extra in EXTRAS.items():
        assert DISTRIBUTIONS.get(package, package) in requirements(extra), package
        assert extra in PROJECT["optional-dependencies"]["all"][0], package


def test_tests_come_with_every_extra_but_wandb():
    first = [PROJECT["optional-dependencies"][extra][0] for extra in ("test", "test-all")]
    listed = ",".join(extras.removeprefix("jaxformer[").removesuffix("]") for extras in first).split(",")
    assert set(EXTRAS.values()) - set(listed) == {"wandb"}  # else CI would skip their tests
