"""A transformer built up from first principles in JAX: train it, look inside it, take pieces of it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer.runs import Run, load_run

__all__ = ["Run", "load_run"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that taking one piece does not load all of them."""
    if name in __all__:
        from jaxformer import runs

        return getattr(runs, name)
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")
