"""Imports run downwards only, and the top level matches the design."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    "config contract errors files terminal",
    "ops",
    "nn data parallel",
    "models",
    "runs",
    "train decode interop inspect plan",
    "cli",
    "__main__",
)
"""The folders and modules of the package, from the lowest floor to the highest; those of the lowest may import each
other."""
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
ACROSS = {"inspect", "plan"}
"""Folders that may import from the others on their floor, but not from each other."""
TOP_LEVEL = {
    "pyproject.toml", "constraints.txt", "mkdocs.yml", "Makefile", "README.md", "AGENTS.md", "CHANGELOG.md",
    "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "train.py", "sample.py", "jaxformer", "configs", "tests",
    "benchmarks", "tools", "docs",
}  # fmt: skip
FILES = sorted((ROOT / "jaxformer").rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def imported_modules(path: Path) -> set[str]:
    """Return the modules of this package that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            qualified = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in qualified}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & MODULES.keys()


def entry(module: str) -> str:
    """Return the entry of the floor plan that a module belongs to: its folder, or its name on the package's level."""
    return module.split(".")[1] if "." in module else "__init__"


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downwards(module):
    here = entry(module)
    if here == "__init__":  # names what lies behind it
        return
    others = {entry(name) for name in imported_modules(MODULES[module])} - {here, "__init__"}
    below = {name for name in others if FLOOR[name] < FLOOR[here]}
    beside = {name for name in others if FLOOR[name] == FLOOR[here]}
    wrong = others - below - (beside if here in FLOORS[0].split() else beside - ACROSS if here in ACROSS else set())
    assert not wrong, f"{here} is on floor {FLOOR[here]} and must not import {wrong}"


def test_files_have_no_import_circle():
    imports = {module: imported_modules(path) - {module} for module, path in MODULES.items()}
    above = {module: set(names) for module, names in imports.items()}
    for middle in above:  # transitive closure
        for names in above.values():
            if middle in names:
                names |= above[middle]
    circles = {frozenset(n for n in names if module in above[n]) for module, names in above.items() if module in names}
    assert not circles


def test_imports_are_found_anywhere_in_a_file():
    modules = imported_modules(ROOT / "jaxformer/models/decoder.py")
    assert {"nn", "ops", "config"} <= {entry(module) for module in modules}


@pytest.mark.parametrize("folder", ["ops", "nn", "models"])
def test_models_import_no_optimizer_files_or_mesh(folder):
    for path in (ROOT / "jaxformer" / folder).rglob("*.py"):
        text = path.read_text()
        for word in ("optax", "orbax", "pathlib", "jax.sharding") + (("flax",) if folder == "ops" else ()):
            assert f"import {word}" not in text and f"from {word}" not in text, (path, word)


def test_top_level_matches_the_design():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    entries = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL
