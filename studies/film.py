"""How the heads of a trained rung came to be: the figures of docs/story/film.md.

    python -m studies.film RUN … [--examples 256] [--results FOLDER]

For each run, trained with `--train.snapshots doubling`: `film.html` and `film.jsonl` in its folder, as by `jaxformer
film RUN`, and of each frame the held-out loss, some scores of each head, and the continuation of a held-out prompt.
Stored in `film.json` by the names of the runs.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import record
from jaxformer.inspect.film import births, bumps
from jaxformer.inspect.pages.film import write_film
from jaxformer.runs.run import load_run

SCORES = ("previous", "induction", "entropy", "patched", "ablation")


def measure(folder: Path, n_examples: int) -> dict[str, Any]:
    """Return what is stored of a run's film."""
    frames = write_film(load_run(folder), n_examples=n_examples)
    born = births(frames)
    heads = [
        {"layer": layer, "head": head, "before": birth.before, "born": birth.at}
        | {score: [round(frame.heads[layer][score][head], 4) for frame in frames] for score in SCORES}
        for (layer, head), birth in born.items()
    ]
    return {
        "steps": [frame.step for frame in frames],
        "loss": [round(frame.loss, 4) for frame in frames],
        "heads": heads,
        "bumps": [asdict(bump) for bump in bumps(frames)],
        "texts": [frame.texts[0] for frame in frames],
    }


def main() -> int:
    """Measure, store and print; return the exit status."""
    parser = argparse.ArgumentParser(description="How the heads of trained rungs came to be.", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs with a film")
    parser.add_argument("--examples", type=int, default=256, help="held-out examples (default: 256)")
    parser.add_argument("--results", type=Path, default=record.STUDY_RESULTS, help="folder of film.json")
    own = parser.parse_args()
    figures = {run.name: measure(run, own.examples) for run in own.runs}
    print(record.write("film", figures, record.versions("jax", "jaxlib"), own.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
