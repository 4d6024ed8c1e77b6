"""Whether the tests catch faults: `python -m tools.planted_faults [FAULT …] [--run 'PYTEST OPTIONS']`.

Each fault is planted, by itself, in a copy of the checkout; then tests run until one fails. Without `--run`, these are
the tests that the fault names. With it, they are a whole selection, of which those in the files that the fault names
run first: `--run ''` is all that `pytest` runs, `--run "-m ''"` every test, and `--run` may be repeated.

Before, in the copy without a fault, the named tests must pass, or what is selected in their files. A test that fails
elsewhere in a selection, and without the fault, too, catches nothing and is left out from then on.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tools.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
ONE_PROCESS, ALL = ("-n", "0"), ("-m", "")
"""Options of pytest: a file or two, in this process; tests of any mark."""
PASSED, NONE_SELECTED = 0, 5
"""Exit statuses of pytest without a failure."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)

Calls = list[list[str]]
"""Arguments of pytest, one list per call."""


def package_texts(checkout: Path) -> dict[Path, str]:
    """Return the package's modules."""
    return {file: file.read_text(encoding="utf-8") for file in sorted((checkout / "jaxformer").rglob("*.py"))}


def find(fault: Fault, texts: Mapping[Path, str]) -> Path:
    """Return the module in which a fault is planted. Raises `ValueError` unless its text is there exactly once."""
    files = [file for file, text in texts.items() for _ in range(text.count(fault.old))]
    if len(files) != 1:
        raise ValueError(f"the package has {fault.old!r} {len(files)} times; it must be there once.")
    return files[0]


@contextmanager
def planted(checkout: Path, fault: Fault) -> Iterator[None]:
    """Plant a fault in a checkout, and take it back."""
    texts = package_texts(checkout)
    file = find(fault, texts)
    file.write_text(texts[file].replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(texts[file], encoding="utf-8")


def named_calls(tests: Iterable[str]) -> Calls:
    """Return the calls that run named tests: of a file those that `pytest` runs, and single ones whatever their
    marks."""
    single = sorted(test for test in tests if "::" in test)
    files = sorted({*tests} - {*single})
    options = [*ONE_PROCESS, *files], [*ONE_PROCESS, *ALL, *single]
    return [call for call, some in zip(options, (files, single), strict=True) if some]


def file_call(tests: Iterable[str], run: str) -> list[str]:
    """Return the call that runs what is selected in the files of named tests."""
    return [*ONE_PROCESS, *shlex.split(run), *files_of(tests)]


def files_of(tests: Iterable[str]) -> list[str]:
    """Return the files of named tests."""
    return sorted({test.partition("::")[0] for test in tests})


def first_failure(checkout: Path, arguments: Iterable[str], seconds: float | None = None) -> str:
    """Run tests until one fails; return its name, or how else pytest ended, and an empty text if all pass or none is
    selected. Raises `TimeoutExpired` after some seconds, and leaves no process behind."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *arguments]
    with subprocess.Popen(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too
            raise
    if process.returncode in (PASSED, NONE_SELECTED):
        return ""
    test = FAILED.search(output)
    return test[1] if test else f"exit status {process.returncode}: {output.strip()[-300:]}"


def catch(checkout: Path, fault: Fault, run: str | None, seconds: float, left_out: list[str]) -> str:
    """Plant a fault and run its named tests, or a selection; return the test that caught it, and an empty text if none
    did. Tests that fail without the fault are appended to `left_out`. Raises `TimeoutExpired` after some seconds of
    tests."""
    deadline = time.monotonic() + seconds
    remaining = lambda: max(1.0, deadline - time.monotonic())  # noqa: E731
    for call in named_calls(fault.tests) if run is None else [file_call(fault.tests, run)]:
        with planted(checkout, fault):
            if test := first_failure(checkout, call, remaining()):
                return test
    while run is not None:
        done = [f"--ignore={file}" for file in files_of(fault.tests)]
        deselected = [f"--deselect={test}" for test in left_out]
        with planted(checkout, fault):
            test = first_failure(checkout, [*shlex.split(run), *done, *deselected], remaining())
        is_test = test.startswith("tests/")
        if not is_test or not first_failure(checkout, [*ONE_PROCESS, *ALL, test], remaining()):
            return test
        left_out.append(test)
        print(f"left out, as it fails without a fault: {test}", flush=True)
    return ""


def not_of_the_checkout(folder: str, names: list[str]) -> set[str]:
    """Return the names in a folder that need no copy: caches, and the runs at the top."""
    caches = shutil.ignore_patterns(".git", "__pycache__", ".*cache")(folder, names)
    return caches | ({"runs", "build"} if Path(folder) == ROOT else set())


def main(arguments: list[str] | None = None) -> int:
    """Plant the faults; return the exit status: 0 if all are caught, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.planted_faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"all by default: {'; '.join(FAULTS)}")
    parser.add_argument("--run", action="append", metavar="OPTIONS", help="options of pytest that select tests")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds of tests per fault; 3600 by default")
    options = parser.parse_args(arguments)
    names = options.faults or [*FAULTS]
    if unknown := {*names} - {*FAULTS}:
        parser.error(f"there is no fault {unknown.pop()!r}; see --help.")
    texts = package_texts(ROOT)
    for name in names:
        find(FAULTS[name], texts)  # before anything runs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that nothing is left behind
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=not_of_the_checkout)
        tests, n_caught = {test for name in names for test in FAULTS[name].tests}, []
        for run in options.run or [None]:
            for call in named_calls(tests) if run is None else [file_call(tests, run)]:
                if problem := first_failure(checkout, call):
                    print(f"without a fault, a test fails: {problem}", file=sys.stderr)
                    return 1
            selection, left_out = "the named tests" if run is None else f"pytest {run}".strip(), list[str]()
            print(f"{selection}:", flush=True)
            caught = [is_caught(checkout, name, run, options.timeout, left_out) for name in names]
            n_caught.append(sum(caught))
            print(f"{sum(caught)} of {len(names)} faults are caught by {selection}", flush=True)
    return int(min(n_caught) < len(names))


def is_caught(checkout: Path, name: str, run: str | None, seconds: float, left_out: list[str]) -> bool:
    """Return whether `catch` finds a test; print what came of it."""
    began = time.monotonic()
    try:
        test = catch(checkout, FAULTS[name], run, seconds, left_out)
        result = f"caught by {test}" if test else "MISSED"
    except subprocess.TimeoutExpired:
        test, result = "", "NO RESULT in time"
    print(f"{name:<60} {result}, {time.monotonic() - began:.0f} s", flush=True)
    return bool(test)


if __name__ == "__main__":
    sys.exit(main())
