"""A run's folder: its config, checkpoints, weights to start from, and classes of the user's own."""

from typing import TYPE_CHECKING

from jaxformer import lazy_names

if TYPE_CHECKING:
    from jaxformer.runs.film import frames, load_frame
    from jaxformer.runs.run import Run, abstract_params, count_parameters, load_run, read_config

__all__ = ["Run", "abstract_params", "count_parameters", "frames", "load_frame", "load_run", "read_config"]

_NAMES = {
    "film": ("frames", "load_frame"),
    "run": ("Run", "abstract_params", "count_parameters", "load_run", "read_config"),
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
