"""What the source of the package looks like: imports run downwards only, optional packages are imported by one helper,
output goes through one function, texts name commands as they were started, and the top level matches the design."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from jaxformer.errors import EXTRAS

ROOT = Path(__file__).parents[1]
FLOORS = (
    "config contract errors files terminal",
    "ops",
    "nn data parallel",
    "models",
    "runs",
    "train decode",
    "inspect interop plan ladder",
    "cli",
    "__main__",
)
"""The folders and modules of the package, from the lowest floor to the highest; those of the lowest may import each
other."""
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
BESIDE = {name: {*FLOORS[0].split()} for name in FLOORS[0].split()} | {"ladder": {"inspect"}}
"""What a folder or module may import from its own floor."""
GUESTS = {"inspect", "interop", "plan", "ladder", "cli"}
"""Folders that the others, the core, do not know."""
GUEST_WORDS = {"ladder", "rung", "rungs", "forecast", "forecasts", "influence", "film"}
"""Words of guests, of which no name in the core is made."""
TOP_LEVEL = {
    "pyproject.toml", "constraints.txt", "mkdocs.yml", "Makefile", "README.md", "AGENTS.md", "CHANGELOG.md",
    "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "train.py", "sample.py", "jaxformer", "configs", "tests",
    "benchmarks", "studies", "tools", "docs",
}  # fmt: skip
FILES = sorted((ROOT / "jaxformer").rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


@cache
def tree(path: Path) -> ast.Module:
    """Return the parsed text of a file."""
    return ast.parse(path.read_text("utf-8"))


@cache
def imported_modules(path: Path) -> set[str]:
    """Return the modules of this package that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            qualified = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in qualified}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & MODULES.keys()


def entry(module: str) -> str:
    """Return the entry of the floor plan that a module belongs to: its folder, or its name on the package's level."""
    return module.split(".")[1] if "." in module else "__init__"


def test_imports_run_downwards():
    wrong = {}
    for module, path in MODULES.items():
        here = entry(module)
        if here == "__init__":  # names what lies behind it
            continue
        others = {entry(name) for name in imported_modules(path)} - {here, "__init__"}
        allowed = BESIDE.get(here, set()) | {name for name in others if FLOOR[name] < FLOOR[here]}
        if others - allowed:
            wrong[module] = others - allowed
    assert not wrong


def test_the_core_names_nothing_of_its_guests():
    core = {module: path for module, path in MODULES.items() if entry(module) not in GUESTS | {"__main__", "__init__"}}
    assert {entry(module) for module in core} == FLOOR.keys() - GUESTS - {"__main__"}
    for module, path in core.items():
        fields = (value for node in ast.walk(tree(path)) for _, value in ast.iter_fields(node))
        names = {name for name in fields if isinstance(name, str) and name.isidentifier()}
        words = {word for name in names for word in re.findall("[A-Z]?[a-z]+", name)}
        earlier = {"film"} if module == "jaxformer.runs.convert" else set()  # names that runs were stored with
        assert {word.lower() for word in words} & GUEST_WORDS == earlier, module


NOT_INSTALLED = {"benchmarks", "studies", "tools", "docs", "tests"}
"""Folders of the repository that are not installed."""


@pytest.mark.parametrize("folder", ["jaxformer", "configs"])
def test_installed_files_import_nothing_that_is_not_installed(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    nodes = [(path, node) for path in files for node in ast.walk(tree(path))]
    imports = [(path, node.module or "") for path, node in nodes if isinstance(node, ast.ImportFrom)]
    imports += [(path, alias.name) for path, node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert imports and not [(path, name) for path, name in imports if name.split(".")[0] in NOT_INSTALLED]


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


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_optional_packages_are_imported_by_the_helper_alone():
    for path in FILES:
        typing = {node for block in ast.walk(tree(path)) if is_type_checking(block) for node in ast.walk(block)}
        for node in ast.walk(tree(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert node in typing or not {name.partition(".")[0] for name in names} & EXTRAS.keys(), (path, names)


def test_package_prints_only_through_echo():
    for path in FILES:
        calls = (node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
        names = {ast.unparse(name) for name in calls if isinstance(name, ast.Name | ast.Attribute)}
        assert path.name == "terminal.py" or not names & {"print", "sys.stdout.write", "sys.stderr.write"}, path


def test_no_text_for_users_spells_a_command_out():
    for path in FILES:
        nodes = [*ast.walk(tree(path))]
        docs = {ast.get_docstring(n, clean=False) for n in nodes if isinstance(n, ast.Module | ast.ClassDef)}
        texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)} - docs
        spelled = [text for text in texts if re.search(r"python (-m jaxformer|train\.py|sample\.py)", text)]
        assert path.parent.name == "cli" or not spelled, path


def test_top_level_matches_the_design():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    entries = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL
