"""Config files, which are loaded as modules and may define their own classes."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from jaxformer.errors import UserError, foreign

PACKAGE = "config_files"
"""Name of the package that contains the modules of loaded files."""


def kind_of(cls: type) -> str:
    """Return the name under which a run stores a config class: `/folder/FILE.py:Class` for one defined in a config file
    or in the program, else `module:Class`."""
    package = cls.__module__.rpartition(".")[0]
    is_in_file = package == PACKAGE or (cls.__module__ == "__main__" and file_of(cls).endswith(".py"))
    return f"{file_of(cls) if is_in_file else cls.__module__}:{cls.__name__}"


def file_of(cls: type) -> str:
    """Return the file that defines a class; empty if there is none."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or ""


def config_file(path: str) -> Path:
    """Return the config file for a path, or for a name such as `quick`, which is inside the package in a wheel and
    beside it in a checkout. Raises `UserError` if there is none."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    folder = inside if inside.is_dir() else package.parent / "configs"
    names = sorted(file.stem for file in folder.glob("*.py"))
    if path in names:
        return folder / f"{path}.py"
    file = Path(path)
    if file.is_file():
        return file
    beside = sorted(str(p) for p in file.parent.glob("*.py") if p.is_file()) if file.parent.is_dir() else []
    near = get_close_matches(file.stem, names, 1, 0.75) + [other for other in beside if Path(other).stem == file.stem]
    hint = f"did you mean {near[-1]}?" if near else f"there are {', '.join(names + beside[:5])}."
    raise UserError(f"there is no config file {path or repr(path)}; {hint}")


def load_module(path: str) -> ModuleType:
    """Load a config file, see `config_file`, as a module, which executes its code. Raises `UserError` if the file does
    not exist or fails."""
    file = config_file(path)
    name = f"{PACKAGE}.{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()}"  # file names may coincide
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file; a config is FILE.py or FILE.py:NAME.")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look up the module there
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"{path} is not valid Python: {error}.") from error
    except UserError:
        raise
    except Exception as error:  # raised by the user's code
        frames = reversed(traceback.extract_tb(error.__traceback__))
        line = next((frame.lineno for frame in frames if frame.filename == spec.origin), "?")
        raise UserError(f"{path}, line {line}, failed: {type(error).__name__}: {foreign(error)}.") from error
    return module
