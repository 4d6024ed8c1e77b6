"""Calibration of the ladder's forecasts: the table of docs/ladder.md.

    python -m studies.forecast FOLDER …

Each folder is one of `python -m jaxformer ladder --folder FOLDER --seed N …`, whose `forecast.json` has the forecast of
each rung, written before it was trained, and its score. They are stored in `forecast.json` by seed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import record
from jaxformer.ladder.results import read_forecasts


def main() -> int:
    """Store the forecasts and scores of some folders; return the exit status."""
    parser = argparse.ArgumentParser(description="Calibration of the ladder's forecasts.", allow_abbrev=False)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, default=record.STUDY_RESULTS)
    own = parser.parse_args()
    figures: dict[str, dict] = {}
    for folder in own.folders:
        for rung, entry in read_forecasts(folder).items():
            config = entry.pop("config")
            shown = {"steps": config["steps"], "corpus": config["data"]["path"]}
            figures.setdefault(rung, {})[str(config["seed"])] = shown | entry
    record.write("forecast", figures, record.versions("jax", "jaxlib", "flax"), own.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
