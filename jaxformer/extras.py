"""Import of optional packages, which are installed by extras of this project."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from jaxformer.errors import UserError

EXTRAS = {
    "PIL": "images", "babel": "dates", "flatbuffers": "stablehlo", "gguf": "gguf", "jinja2": "hf",
    "matplotlib": "plots", "pyarrow": "data", "sacrebleu": "translation",
    "safetensors": "hf", "tensorboardX": "tensorboard", "wandb": "wandb",
}  # fmt: skip
"""Extra that installs each package."""


def missing_extras(*packages: str) -> str:
    """Return the extras of the packages that are not installed, such as "images,plots"; empty if all are installed."""
    specs = {package: importlib.util.find_spec(package) for package in packages}
    # A namespace package, which is any folder of that name, has no location.
    return ",".join(sorted({EXTRAS[package] for package, spec in specs.items() if not (spec and spec.has_location)}))


def import_extra(module: str, purpose: str) -> ModuleType:
    """Return a module of an optional package, such as `PIL.Image`. Raises `UserError`, with the purpose, such as
    "train.log_to wandb", as its subject, if the package is not installed or its import fails."""
    package = module.partition(".")[0]
    remedy = f"install it with pip install 'jaxformer[{EXTRAS[package]}]'"
    try:
        # Any folder with the package's name can be imported as a namespace package.
        if getattr(importlib.import_module(package), "__file__", None):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise UserError(f"{purpose} needs {package}, which lacks {error.name}; {remedy}.") from error
    except ImportError as error:
        raise UserError(f"{purpose} needs {package}, which cannot be imported: {error}; reinstall it.") from error
    raise UserError(f"{purpose} needs {package}, which is not installed; {remedy}.")
