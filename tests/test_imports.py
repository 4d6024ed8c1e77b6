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
for module in {base}: importlib.import_module(module)
before = set(sys.modules)
for package in {packages}:
    for module in pkgutil.iter_modules(getattr(importlib.import_module(package), "__path__", ())):
        importlib.import_module(f"{{package}}.{{module.name}}")
print(*(name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names))
"""


def imported(packages: list[str], base: list[str]) -> set[str]:
    """Return the modules that packages, with all modules in them, import in addition to others; none of Python's."""
    code = NEW_MODULES.format(packages=packages, base=base)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(result.stdout.split())


BELOW = {"jaxformer", "jaxformer.errors", "jaxformer.ops", "jaxformer.terminal"}
"""Modules that all parts to reuse may import; a name covers those below it, but for the package's own."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "base", "allowed"),
    [
        ("jaxformer.ops", ["jax", "jax.numpy"], set()),
        (
            "jaxformer.nn",
            ["jax", "jax.numpy", "flax.linen"],
            {"jaxformer.nn", "jaxformer.config", "jaxformer.contract"},
        ),
        ("jaxformer.decode.samplers", ["jax", "jax.numpy"], {"jaxformer.decode"}),
    ],
)
def test_a_part_to_reuse_imports_only_what_it_is_built_on(part, base, allowed):
    new = imported([part], base)
    assert part in new and {name.partition(".")[0] for name in new} <= {"jaxformer", "jax"}
    assert {name for name in new if name.startswith("jax.")} <= {"jax.ad_checkpoint"}  # no experimental, no pallas
    own = {name for name in new if name.startswith("jaxformer")}
    assert {".".join(name.split(".")[:2]) for name in own} <= BELOW | allowed
    assert {name for name in own if name.startswith("jaxformer.decode.")} <= {part}


@pytest.mark.slow
def test_commands_without_a_config_import_jax_only_when_they_run():
    """Their --help need not wait for it."""
    commands = ("diff", "eval", "export", "import_model", "inspect", "merge", "tokens")
    assert "jax" not in imported([f"jaxformer.cli.{name}" for name in commands], ["jaxformer"])


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
