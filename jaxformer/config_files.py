"""Files of configs, which are loaded as modules; they may define classes of their own."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from jaxformer.errors import UserError

PACKAGE = "config_files"
"""Name of the package of the modules that files are loaded as."""


def kind_of(cls: type) -> str:
    """Return the name under which a run stores a class of configs: `file.Class` for one of this package,
    `/folder/FILE.py:Class` for one that a file of configs defines, else `module:Class`."""
    package, _, stem = cls.__module__.rpartition(".")
    if package.partition(".")[0] == "jaxformer":
        return f"{stem}.{cls.__name__}"
    return f"{sys.modules[cls.__module__].__file__ if package == PACKAGE else cls.__module__}:{cls.__name__}"


def load_module(path: str) -> ModuleType:
    """Return a file of configs as a module; its code is executed.

    Raises:
      UserError: there is no such file, or it fails.
    """
    file = Path(path)
    if not file.is_file():
        near = sorted(str(p) for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        remedy = (
            f"there are {', '.join(near)}" if near else "give one that exists, or go where the project's configs/ is"
        )
        raise UserError(f"there is no config file {path}; {remedy}.")
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file; a config is FILE.py or FILE.py:NAME.")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"{path} is not Python that can be read: {error}.") from error
    except UserError:
        raise
    except Exception as error:  # of the user's code
        line = next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(file)), "?"
        )
        raise UserError(f"{path}, line {line}, failed: {type(error).__name__}: {error}.") from error
    return module
