"""Import and export of models in the formats of other libraries."""

from typing import TYPE_CHECKING

from jaxformer import lazy_names

if TYPE_CHECKING:
    from jaxformer.interop.export import export_run
    from jaxformer.interop.packages import find_model
    from jaxformer.interop.run import import_run

__all__ = ["export_run", "find_model", "import_run"]

_NAMES = {"export": ("export_run",), "packages": ("find_model",), "run": ("import_run",)}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
