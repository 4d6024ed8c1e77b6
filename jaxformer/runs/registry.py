"""Lookup of config classes by the names that runs store: classes of this package, and others after a note on stderr,
but never code from the run's own folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from jaxformer.config.files import file_of, kind_of, load_module
from jaxformer.errors import UserError, abbreviate
from jaxformer.terminal import echo_error

T = TypeVar("T")
CONFIG = "config.json"
PACKAGE = "jaxformer."
BASE = "base"
"""Folder of the frozen base parameters of a run with adapters; it is itself a run."""


def find_class(kind: str, base: type[T], folder: Path) -> type[T]:
    """Return a config class by its name, see `kind_of`. If its file no longer exists, an already imported class from a
    file of the same name is used. A class from another package is imported, after a note on stderr, from the installed
    modules or from the config file that the run was trained with. Raises `UserError` if there is no such class, it
    cannot be imported, or its file is in the run's folder."""
    where, _, name = kind.rpartition(":")
    found: Any = None
    if where.startswith(PACKAGE):
        if not any(_is_in_run(file, folder) for file in _module_files(where)):
            with suppress(ImportError):
                found = vars(importlib.import_module(where)).get(name)
    elif (found := _find_imported(where, name, base, folder)) is None and where:
        found = vars(_import_foreign(where, name, folder)).get(name)
    if isinstance(found, type) and issubclass(found, base):
        return found
    remedy = "restore the one that was written with the run, or train again"
    raise UserError(f"{folder / CONFIG} cannot be read, as there is no {base.__name__} {abbreviate(kind)}; {remedy}.")


def _find_imported(where: str, name: str, base: type[T], folder: Path) -> type[T] | None:
    """Return an already imported class from another package or a config file; if the file no longer exists, one from a
    file of the same name."""
    classes = [base]
    for cls in classes:
        classes += cls.__subclasses__()
    kinds = [(cls, *kind_of(cls).rpartition(":")) for cls in classes if not cls.__module__.startswith(PACKAGE)]
    named = [(cls, module) for cls, module, _, other in kinds if other == name and _stem(module) == _stem(where)]
    file = Path(where) if where.endswith(".py") else None
    same = [
        cls for cls, module in named if module == where or (file and Path(file_of(cls)).resolve() == file.resolve())
    ]
    has_other_file = file is not None and file.is_absolute() and file.is_file() and not _is_in_run(file, folder)
    return next(reversed(same or ([] if has_other_file else [cls for cls, _ in named])), None)


def _stem(where: str) -> str:
    """Return the last component of a module's name, or the stem of a config file."""
    return Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]


def _import_foreign(where: str, name: str, folder: Path) -> ModuleType:
    """Import the module that defines a class of a run's config, after a note on stderr. Raises `UserError`; see
    `find_class`."""
    remedy = f"restore it, or import a file of that name first (in training: `config='{Path(where).name}:NAME'`)"
    is_file = where.endswith(".py")
    if any(_is_in_run(file, folder) for file in ([Path(where)] if is_file else _module_files(where))):
        raise UserError(f"{folder} names code in its own folder, {where}, which is not executed; put it elsewhere.")
    if is_file and not (Path(where).is_absolute() and Path(where).is_file()):
        raise UserError(f"{folder} was trained with {name} of {where}, which does not exist; {remedy}.")
    echo_error(f"importing {name} from {where}, with which {folder} was trained")
    if is_file:
        return load_module(where)
    try:
        return importlib.import_module(where)
    except Exception as error:  # including errors raised by the module's code
        problem = f"{name} of the module {abbreviate(where)}, which cannot be imported ({error})"
        raise UserError(f"{folder} was trained with {problem}; install it, or add its folder to PYTHONPATH.") from error


def _is_in_run(file: Path, folder: Path) -> bool:
    """Return True if a file is in a run's folder, or in the folder of the run that has this one as its base."""
    run = folder.resolve()
    runs = {run, run.parent} if run.name == BASE and (run.parent / CONFIG).exists() else {run}
    return not runs.isdisjoint(file.resolve().parents)


def _module_files(module: str) -> Iterator[Path]:
    """Yield the files that importing a module would execute, packages first; none if it is already imported."""
    path: Sequence[str] | None = None
    if module in sys.modules:
        return
    for name in module.split("."):  # one by one: a dotted name needs its package imported
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return
        if spec.has_location and spec.origin is not None:
            yield Path(spec.origin)
        path = list(spec.submodule_search_locations or ())
