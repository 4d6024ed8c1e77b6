"""Transformers from first principles in JAX and Flax: training, inspection, and reusable parts."""

from typing import TYPE_CHECKING

from jaxformer.lazy import lazy_names

if TYPE_CHECKING:
    from jaxformer.config import Config
    from jaxformer.errors import UserError
    from jaxformer.runs import Run, load_run

__version__ = "0.1.0"
__all__ = ["Config", "Run", "UserError", "load_run"]

__getattr__, __dir__ = lazy_names(
    __name__, {"config": ("Config",), "errors": ("UserError",), "runs": ("Run", "load_run")}
)
