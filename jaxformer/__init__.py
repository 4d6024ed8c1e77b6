"""Transformers from first principles in JAX and Flax: training, inspection, and reusable parts."""

from typing import TYPE_CHECKING

from jaxformer.lazy import lazy_names

if TYPE_CHECKING:
    from jaxformer.runs import Run, load_run

__all__ = ["Run", "load_run"]

__getattr__ = lazy_names(__name__, {"runs": __all__})
