"""Optional packages are imported by one helper, which names the extra that has them."""

import ast
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
    import tensorboardX.record_writer

    assert import_extra("tensorboardX.record_writer", "") is tensorboardX.record_writer


@pytest.mark.parametrize("package", EXTRAS)
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_missing_package_is_one_sentence_with_its_extra(monkeypatch, package, has_folder):
    monkeypatch.setitem(sys.modules, package, ModuleType(package) if has_folder else None)  # a namespace package
    with pytest.raises(UserError) as error:
        import_extra(package, "this test")
    remedy = f"install it with pip install 'jaxformer[{EXTRAS[package]}]'."
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


@pytest.mark.parametrize("package", EXTRAS)
def test_each_extra_installs_its_package(package):
    assert DISTRIBUTIONS.get(package, package) in requirements(EXTRAS[package])
    assert EXTRAS[package] in PROJECT["optional-dependencies"]["all"][0]


def test_tests_come_with_every_extra_but_wandb():
    listed = PROJECT["optional-dependencies"]["test"][0].removeprefix("jaxformer[").removesuffix("]").split(",")
    assert set(EXTRAS.values()) - set(listed) == {"wandb"}  # else CI would skip their tests


@pytest.mark.slow
def test_optional_packages_are_imported_by_the_helper_alone():
    for path in (ROOT / "jaxformer").rglob("*.py"):
        tree = ast.parse(path.read_text())
        typing = {
            node for block in ast.walk(tree) if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }  # fmt: skip
        for node in set(ast.walk(tree)) - typing:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & EXTRAS.keys(), (path, names)
