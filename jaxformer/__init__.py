"""Transformers from first principles in JAX and Flax: training, inspection, and reusable parts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer.runs import Run, load_run

__all__ = ["Run", "load_run"]


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that importing one module does not load all."""
    if name in __all__:
        from jaxformer import runs

        return getattr(runs, name)
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")
