"""A run's folder: its config, checkpoints, weights to start from, and classes of the user's own."""

from typing import TYPE_CHECKING

from jaxformer import lazy_names

if TYPE_CHECKING:
    from jaxformer.runs.run import Run, abstract_params, count_parameters, load_run, read_config
    from jaxformer.runs.snapshots import load_snapshot, snapshot_steps

__all__ = [
    "Run", "abstract_params", "count_parameters", "load_run", "load_snapshot", "read_config", "snapshot_steps",
]  # fmt: skip

_NAMES = {
    "run": ("Run", "abstract_params", "count_parameters", "load_run", "read_config"),
    "snapshots": ("load_snapshot", "snapshot_steps"),
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
