"""Run the tests of what runs on a GPU, `pytest -m gpu`, and store the outcome of each as soon as it is known.

    python -m benchmarks.gpu_tests --gpu [--quick | --smoke] [--results FOLDER]

`--smoke` runs a few of them on any device.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.__main__ import PACKAGES, PROBLEMS, gpu_name, missing_gpu

FOLDER = record.ROOT / "tests/gpu"
SMOKE = "norms and 192 or shared and xla and bfloat16"


class Recorder:
    """Plugin of pytest that stores outcomes, and by file the numbers of tests and the largest difference."""

    def __init__(self, results: Path | None, gpu: str) -> None:
        self.results, self.gpu = results, gpu
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the outcome of a test, of its call or of what failed or was skipped before or after."""
        if report.when != "call" and report.passed:
            return
        differences = {name: value for name, value in report.user_properties if isinstance(value, float)}
        worst = max(differences, key=lambda name: differences[name], default=None)
        self.tests[report.nodeid] = {
            "outcome": report.outcome, "seconds": round(report.duration, 2),
            **({} if worst is None else {"largest difference": round(differences[worst], 4), "of": worst}),
            **({"message": str(report.longrepr)[-2000:]} if report.failed else {}),
        }  # fmt: skip
        if self.results is not None and report.outcome != "skipped":
            self.store()

    def store(self) -> None:
        """Write the outcomes so far."""
        assert self.results is not None
        record.write("gpu_tests", self.figures(), record.versions(*PACKAGES), self.results, gpu=self.gpu)

    def figures(self) -> dict[str, Any]:
        """Return the outcomes, in the form of a case's figures."""
        points: dict[str, Any] = {}
        for name, test in self.tests.items():
            file = Path(name.partition("::")[0]).stem.removeprefix("test_").replace("_", " ")
            facts = points.setdefault(file, {"facts": {"tests": {}}})["facts"]["tests"]
            facts[test["outcome"]] = facts.get(test["outcome"], 0) + 1
            facts["seconds"] = round(facts.get("seconds", 0) + test["seconds"], 2)
            if test.get("largest difference", 0) > facts.get("largest difference", -1):
                case = name.partition("::")[2].partition("[")[2].removesuffix("]") or name
                facts |= {"largest difference": test["largest difference"], "of": f"{case}, {test['of']}"}
        failed = [name for name, test in self.tests.items() if test["outcome"] == "failed"]
        return {"roles": {"tests": "ours"}, "left_out": {}, "points": points, "tests": self.tests,
                "problems": {"failed": failed} if failed else {}}  # fmt: skip


def main() -> int:
    """Run the tests; return the exit status: 0 all passed, 2 without a GPU, 3 some failed."""
    parser = argparse.ArgumentParser(description="Run the tests of what runs on a GPU, and store their outcomes.")
    parser.add_argument("--gpu", action="store_true", help="as in other benchmarks")
    parser.add_argument("--quick", action="store_true", help="as in other benchmarks")
    parser.add_argument("--smoke", action="store_true", help="a few tests on any device")
    parser.add_argument("--results", type=Path, help="folder of the results (default: benchmarks/results)")
    options = parser.parse_args()
    if not options.smoke and (reason := missing_gpu()):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    # What the suite's own flags turn off, and compiled as for a user.
    os.environ["XLA_FLAGS"] = " ".join([
        os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=3",
        "--xla_llvm_disable_expensive_passes=false",
    ])  # fmt: skip
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    words = ["-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(record.ROOT), "-o", "addopts=",
             "--tb=short", "-q", "-W", "default", "-o", "faulthandler_timeout=60"]  # fmt: skip
    if options.smoke:
        os.environ["GPU_TESTS_ON"] = "cpu"
        words += ["-k", SMOKE]
    files = [FOLDER / f"test_{name}.py" for name in ("attention", "training_step", "ops", "decoding")]
    folder = options.results or (None if options.smoke else record.RESULTS)
    recorder = Recorder(folder, "" if options.smoke else gpu_name())
    status = int(pytest.main([*words, *map(str, files)], plugins=[recorder]))
    return PROBLEMS if status == pytest.ExitCode.TESTS_FAILED else status


if __name__ == "__main__":
    sys.exit(main())
