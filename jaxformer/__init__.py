"""Transformers from first principles in JAX and Flax: training, inspection, and reusable parts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer.config import Config
    from jaxformer.decode.text import generate
    from jaxformer.errors import UserError
    from jaxformer.runs.run import Run, load_run

__version__ = "0.1.0"
__all__ = ["Config", "Run", "UserError", "generate", "load_run"]


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package (PEP 562) whose names are imported on first use, so that
    importing one of its modules does not load all of them.

    Args:
      package: name of the package.
      names: public names by the module that defines them. None may equal a module's name, because the imported module
        would hide it.
    """
    modules = {name: module for module, defined in names.items() for name in defined}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})


_NAMES = {
    "config": ("Config",), "decode.text": ("generate",), "errors": ("UserError",), "runs.run": ("Run", "load_run"),
}  # fmt: skip
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
