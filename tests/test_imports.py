"""Parts to reuse import little, and names of packages are imported on first use."""

import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import jaxformer
import jaxformer.decode
from tests.helpers import ROOT

NEW_MODULES = """
import importlib, pkgutil, sys
for base, package in {parts}:
    for module in base: importlib.import_module(module)
    before = set(sys.modules)
    for module in pkgutil.iter_modules(getattr(importlib.import_module(package), "__path__", ())):
        importlib.import_module(f"{{package}}.{{module.name}}")
    print(*(name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names))
"""


def imported(parts: list[tuple[list[str], str]]) -> list[set[str]]:
    """Return the modules that each part, with all modules in it, imports in addition to those before it and to a base;
    none of Python's."""
    code = NEW_MODULES.format(parts=parts)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return [set(line.split()) for line in result.stdout.splitlines()]


BELOW = {"jaxformer", "jaxformer.errors", "jaxformer.ops", "jaxformer.terminal"}
"""Modules that all parts to reuse may import; a name covers those below it, but for the package's own."""


@pytest.mark.slow
def test_a_part_to_reuse_imports_only_what_it_is_built_on():
    allowed = {
        "jaxformer.ops": set(),
        "jaxformer.decode.samplers": {"jaxformer.decode"},
        "jaxformer.nn": {"jaxformer.nn", "jaxformer.config", "jaxformer.contract"},
    }
    bases = [["jax", "jax.numpy"], [], ["flax.linen"]]
    for part, new in zip(allowed, imported(list(zip(bases, allowed, strict=True))), strict=True):
        assert part in new and {name.partition(".")[0] for name in new} <= {"jaxformer", "jax"}
        assert {name for name in new if name.startswith("jax.")} <= {"jax.ad_checkpoint"}  # no experimental, no pallas
        own = {name for name in new if name.startswith("jaxformer")}
        assert {".".join(name.split(".")[:2]) for name in own} <= BELOW | allowed[part]
        assert {name for name in own if name.startswith("jaxformer.decode.")} <= {part}


@pytest.mark.slow
def test_commands_without_a_config_import_jax_only_when_they_run():
    """Their --help need not wait for it."""
    commands = ("diff", "eval", "export", "import_model", "inspect", "merge", "tokens")
    assert "jax" not in set.union(*imported([(["jaxformer"], f"jaxformer.cli.{name}") for name in commands]))


@pytest.mark.parametrize("package", [jaxformer, jaxformer.decode])
def test_names_of_a_package_are_those_of_its_modules(package: ModuleType):
    submodules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not submodules & {*package.__all__}  # once imported, the module would hide the name
    for name in package.__all__:
        value = getattr(package, name)
        assert value is getattr(importlib.import_module(value.__module__), name)
        assert value.__module__.startswith(f"{package.__name__}.")
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'no_such_name'"):
        package.no_such_name  # noqa: B018
