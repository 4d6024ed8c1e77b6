"""Imports run downwards only, and the top level holds what it is meant to hold."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = [
    {"contract", "errors", "signals", "terminal"},
    {"fields"},
    {"config"},
    {"data"},
    {"ops"},
    {"nn"},
    {"models"},
    {"distributed"},
    {"checkpoints", "memory", "parameters", "sharding"},
    {"runs"},
    {"train", "decode", "inspect", "interop"},
    {"comparison", "ladder", "plan"},
    {"cli"},
    {"__main__"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
TOP_LEVEL = {
    "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "train.py", "sample.py",
    "jaxformer", "configs", "tests", "benchmarks", "docs",
}  # fmt: skip
FILES = sorted((ROOT / "jaxformer").rglob("*.py"))


def place(path: Path) -> str:
    """The floor's entry a file belongs to: its folder or, on the package's own level, its name."""
    return path.relative_to(ROOT / "jaxformer").with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """Entries of the floor plan that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "jaxformer" else [f"jaxformer.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("jaxformer.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downwards(path):
    here = place(path)
    if here == "__init__":  # the package's front door names what lies behind it
        return
    wrong = {name for name in imported(path) - {here} if FLOOR[name] >= FLOOR[here]}
    assert not wrong, f"{here} is on floor {FLOOR[here]} and must not import {wrong}"


def test_the_walk_sees_imports():
    assert {"nn", "ops", "config"} <= imported(ROOT / "jaxformer/models/decoder.py")


@pytest.mark.parametrize("folder", ["ops", "nn", "models"])
def test_the_model_knows_no_optimizer_files_or_mesh(folder):
    for path in (ROOT / "jaxformer" / folder).rglob("*.py"):
        text = path.read_text()
        for word in ("optax", "orbax", "pathlib", "jax.sharding") + (("flax",) if folder == "ops" else ()):
            assert f"import {word}" not in text and f"from {word}" not in text, (path, word)


def test_the_top_level_holds_what_the_design_says():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    entries = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL
