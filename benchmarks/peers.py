"""jaxformer and its torch peers on one job: the same model from the same weights, batches and learning rates."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from processes import Failed, Worker

WARM_UP = 5
"""Steps before the first that is timed."""
AGREE = {"exact": 2e-5, "rounded": 1e-2}
"""Nats by which losses may differ in the warm-up: 'exact' where all is float32 on a CPU, which is where to look for a
difference between the models (5e-7 to 1e-6 was seen); a GPU rounds what it multiplies."""


@dataclass(frozen=True)
class Job:
    """One training to measure."""

    config: str
    """FILE:NAME in `configs/`."""
    steps: int
    """The most that are taken."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields that differ from the config's; those of its parts as a mapping, `{"model": {"n_blocks": 1}}`."""


def start(job: Job, folder: Path, peers: Mapping[str, Sequence[str]], python: str, stack: ExitStack) -> list[Worker]:
    """jaxformer, and then each peer: its name, and the arguments of `train_torch.py` run by `python`.

    They start one after another, as the first leaves in the folder what the others read; and have taken `WARM_UP`
    steps, so that everything is compiled.

    Raises:
      Failed: one of them ended, or computes something else than jaxformer does.
    """
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    ours = stack.enter_context(Worker("jaxformer", sys.executable, "train_jaxformer.py", str(folder)))
    losses = ours.take(WARM_UP).values
    workers = [ours]
    for name, arguments in peers.items():
        worker = stack.enter_context(Worker(name, python, "train_torch.py", str(folder), *arguments))
        apart = max(abs(a - b) for a, b in zip(losses, worker.take(WARM_UP).values, strict=True))
        exact = {ours.facts["dtype"], worker.facts["dtype"]} == {"float32"} and ours.facts["platform"] == "cpu"
        allowed = AGREE["exact" if exact else "rounded"]
        if worker.facts["parameters"] != ours.facts["parameters"] or not apart <= allowed:
            raise Failed(
                f"{name} is another model than jaxformer: {worker.facts['parameters']:,} against "
                f"{ours.facts['parameters']:,} parameters, losses {apart:.1e} nats apart."
            )
        worker.facts["losses_apart"] = apart
        workers.append(worker)
    return workers


def software(workers: Sequence[Worker]) -> dict[str, str]:
    """Return the versions of what was measured; of Python, the one that jaxformer ran on."""
    return {name: version for worker in reversed(workers) for name, version in worker.facts["versions"].items()}
