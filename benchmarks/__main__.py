"""Measure jaxformer against other libraries: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from benchmarks import record
from benchmarks.cases import CASES
from benchmarks.harness import Figures, MeasurementError, Size, against, measure
from benchmarks.report import README, write_report

PROBLEMS = 3
GPU_NAME = "GPU_NAME"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "torch", "transformers")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure jaxformer beside its peers.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="cases to measure (default: all; see --list)")
    parser.add_argument("--list", action="store_true", help="print the cases and their points")
    parser.add_argument("--report", action="store_true", help="write the report from the results, measuring nothing")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="fewer points and rounds: all in ten minutes on two cores")
    sizes.add_argument("--smoke", action="store_true", help="tiny points on any device, in seconds each")
    parser.add_argument("--gpu", action="store_true", help="the points for a GPU, which must be there")
    parser.add_argument(
        "--against", metavar="CHECKOUT", type=Path, help="compare with another checkout instead of other libraries"
    )
    parser.add_argument(
        "--rounds", type=int, default=0, help="number of rounds, at least 2 (default: that of the size)"
    )
    parser.add_argument("--results", type=Path, help="folder of the results (default: benchmarks/results)")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}.")
    size: Size = "quick" if options.quick else "smoke" if options.smoke else "full"
    for name in options.cases:
        if options.gpu and not CASES[name].gpu:
            parser.error(f"case {name!r} has no points for a GPU; omit --gpu.")
        if not CASES[name].choose(size, options.gpu):
            parser.error(f"case {name!r} has no points for --{size}; omit it.")
    if options.against and not (options.against / "benchmarks").is_dir():
        parser.error(f"--against is {options.against}, which is not a checkout with benchmarks; name one.")
    if options.rounds == 1 or options.rounds < 0:
        parser.error(f"--rounds is {options.rounds}, but quartiles need at least 2.")
    if options.results and options.results.exists() and not options.results.is_dir():
        parser.error(f"--results is {options.results}, which is not a folder; name one.")
    options.size = size
    return options


def main() -> int:
    """Run the benchmarks; return the exit status: 0 done, 1 a case failed, 2 wrong input, 3 a case on a GPU has
    problems, which are stored beside what was measured."""
    options = parse()
    if options.list:
        for name, case in CASES.items():
            print(f"{name:<16}{'; '.join(case.points or case.gpu)}")
        return 0
    if options.report:
        write_report(README, record.RESULTS)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that a case's worker processes end, too
    if options.gpu and not options.smoke and (reason := missing_gpu()):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    folder = options.results or (None if options.smoke else record.RESULTS)
    statuses = {name: run(name, options, folder) for name in options.cases or CASES}
    if folder == record.RESULTS and not options.against:
        write_report(README, folder)
    for status, what in ((1, "failed"), (PROBLEMS, "problems")):
        if names := [name for name, each in statuses.items() if each == status]:
            print(f"error: {what}: {', '.join(names)}.", file=sys.stderr)
    return 1 if 1 in statuses.values() else max(statuses.values())


def run(name: str, options: argparse.Namespace, folder: Path | None) -> int:
    """Measure one case, storing the result after each point; return the exit status."""
    case, gpu, began = CASES[name], options.gpu, time.monotonic()
    if not case.choose(options.size, gpu):
        return 0
    prefix, hardware = ("gpu_", {"gpu": gpu_name()}) if gpu else ("", {})
    before = {"against": record.commit(options.against)} if options.against else {}
    versions, path = record.versions(*PACKAGES), None
    if options.against:
        case, prefix = against(case, options.against.resolve()), f"against_{prefix}"
    print(f"{name}:", flush=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for figures in measure(
                case, options.size, gpu, Path(scratch), lambda line: print(line, flush=True), options.rounds
            ):
                figures |= {"seconds": round(time.monotonic() - began), **before}
                if folder is not None:
                    path = record.write(f"{prefix}{name}", figures, versions, folder, **hardware)
    except MeasurementError as error:
        print(f"error: {name}: {error}", file=sys.stderr)
        return 1
    if options.against:
        print("".join(f"  SLOWER: {line}\n" for line in slower(figures)), end="")
    if path is not None:
        print(f"  written: {path}")
    return PROBLEMS if figures.get("problems") else 0


def slower(figures: Figures) -> list[str]:
    """Return the points at which ours is slower than what it is compared with in more than three quarters of rounds."""
    return [
        f"{name}: {side} is {each['q1']:.3f} to {each['q3']:.3f} (quartiles) x as fast as {other}"
        for name, point in figures["points"].items()
        for side, others in point.get("ratio", {}).items()
        for other, each in others.items()
        if other == f"{side}, before" and each["q3"] < 1
    ]


def missing_gpu() -> str:
    """Return the reason why a GPU cannot be measured; empty if it can."""
    return "" if gpu_name() else "there is no GPU; --smoke runs on any device."


@cache
def gpu_name() -> str:
    """Return the name of the first GPU; empty without one. Asks in a separate process, which then frees GPU memory,
    unless the environment variable GPU_NAME has the answer, which may be empty."""
    if (name := os.environ.get(GPU_NAME)) is not None:
        return name
    try:
        return record.output_of(
            sys.executable, "-c",
            "import jax; print(next((d.device_kind for d in jax.devices() if d.platform == 'gpu'), ''))",
        )  # fmt: skip
    except subprocess.CalledProcessError as error:  # such as with JAX_PLATFORMS=cuda but no GPU
        print(error.stderr, end="", file=sys.stderr)
        return ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
