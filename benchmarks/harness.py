"""Measurement of a case: ours and its peers in separate processes with interleaved turns, so that other load on the
machine affects all of them alike."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

from benchmarks import record

Size = Literal["full", "quick", "smoke"]
ROUNDS: dict[Size, int] = {"full": 11, "quick": 5, "smoke": 2}
TURN_MS: dict[Size, float] = {"full": 500, "quick": 250, "smoke": 0}
"""Target duration of a turn in milliseconds, which determines its number of steps."""
MAX_STEPS = 500
"""Maximum steps per turn."""
ROUNDED = 2e-3
"""Relative difference that matmuls in bfloat16 or TF32 may cause."""


class MeasurementError(RuntimeError):
    """A measurement cannot be made, with the reason."""


class Milliseconds(float):
    """Result of a step that counts instead of the step's wall-clock time."""


@dataclass(frozen=True)
class Side:
    """One implementation of a case."""

    make: str
    """MODULE:FUNCTION. For each point, the function is called in a separate process with a folder, which all sides of a
    case share, and with the options and the point's settings. It returns a step and facts in JSON types. A step is a
    function of its number, and `float` of its result waits for it; None if nothing is timed. The fact `values` must
    agree between sides; facts whose names begin with an underscore are not stored."""
    options: Mapping[str, Any] = field(default_factory=dict)
    role: Literal["ours", "peer", "reference"] = "peer"
    """'reference' for a side that is excluded from ratios, such as the rate of matmuls."""
    needs: tuple[str, ...] = ()
    """Packages that the side needs; without them it is left out."""
    early: bool = False
    """On a GPU, prepare the side while the points before its first one are measured: a peer that compiles for long."""
    flags: str = ""
    """Further XLA_FLAGS of its process."""
    root: Path = record.ROOT
    """Checkout whose `jaxformer` and `benchmarks` are run."""


Figures = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A benchmark, which measures every point with every side."""

    about: str
    """Markdown above the table in the report."""
    sides: Mapping[str, Side]
    points: Mapping[str, Mapping[str, Any]]
    """Settings of each point, by name; the key `skip` lists sides that the point does not have."""
    quick: Sequence[str] | None = None
    """Points for `--quick`; None for all, an empty sequence for no measurement."""
    smoke: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Points for `--smoke`, which take seconds on any device."""
    gpu: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Points for `--gpu`."""
    unit: str = "ms per step"
    warm_up: bool = True
    """Two turns before the rounds, which compile and determine the steps per turn; False if each step starts its own
    process, so that the first is like the others, and a turn is one step."""
    tolerance: float = 1e-3
    """Relative difference of `values` that rounding may cause."""
    check: Callable[[dict[str, Figures]], None] | None = None
    """Function that raises `MeasurementError` if the sides' facts disagree in another way."""
    derive: Callable[[Mapping[str, Any], dict[str, Figures], dict[str, float]], Figures] | None = None
    """Function from a point's settings, facts and median milliseconds of each side to further columns."""
    summarize: Callable[[dict[str, Figures]], Figures] | None = None
    """Function from the figures of each point to figures of all points together."""
    together: bool = False
    """On a GPU, which is lent by the minute: sides prepare at the same time, in processes that they keep from point to
    point, though their compilers then disturb each other's trials of kernels."""

    def choose(self, size: Size, gpu: bool) -> Mapping[str, Mapping[str, Any]]:
        """Return the points to measure."""
        if size == "smoke":
            return self.smoke
        if gpu:
            return self.gpu
        return self.points if size == "full" or self.quick is None else {name: self.points[name] for name in self.quick}


def against(case: Case, checkout: Path) -> Case:
    """Return the case with our sides only, each beside the same side of another checkout, named 'SIDE, before'."""
    ours = {name: side for name, side in case.sides.items() if side.role == "ours"}
    before = {f"{name}, before": replace(side, root=checkout, role="peer") for name, side in ours.items()}

    def skip(points: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        return {
            name: {**settings, "skip": [each + end for each in settings.get("skip", ()) for end in ("", ", before")]}
            for name, settings in points.items()
        }

    return replace(
        case, sides=ours | before, points=skip(case.points), smoke=skip(case.smoke), gpu=skip(case.gpu),
        check=None, derive=None, summarize=None,  # about peers
    )  # fmt: skip


class Worker:
    """Process of one side, which starts on its first request, idles between requests, and is killed on exit or when it
    is stopped."""

    def __init__(self, name: str, side: Side, folder: Path, environment: Mapping[str, str]) -> None:
        self.name, self.side, self._folder, self._environment = name, side, folder, environment
        self._process: subprocess.Popen[str] | None = None

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(self.side.root), *filter(None, [os.environ.get("PYTHONPATH")])]
        flags = f"{os.environ.get('XLA_FLAGS', '')} {self.side.flags}".strip()
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", self.side.make, str(self._folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=self.side.root,
            env=os.environ | self._environment | {"PYTHONPATH": os.pathsep.join(paths), "XLA_FLAGS": flags},
        )  # fmt: skip

    def start(self) -> None:
        """Start the process, which imports its libraries before it reads its first request."""
        self._process = self._process or self._start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the process; a later request starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.kill()
        process.wait()
        with suppress(BrokenPipeError):  # a request that it no longer read
            process.stdin.close()
        process.stdout.close()

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request to `benchmarks.worker`; return its answer."""
        self._process = process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(request), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError):  # it ended, or was stopped
            line = ""
        if not line:
            self.stop()
            raise MeasurementError(f"the process of {self.name} ended; what it printed stands above.")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise MeasurementError(f"{self.name}: {answer['error']}")
        return answer

    def prepare(self, settings: Mapping[str, Any]) -> Figures:
        """Set up a point; return its facts."""
        arguments = {name: value for name, value in settings.items() if name != "skip"}
        facts: Figures = self.ask({"prepare": arguments | dict(self.side.options)})
        return facts

    def turn(self, steps: int) -> float:
        """Run `steps` steps; return milliseconds per step."""
        return float(self.ask({"steps": steps}))


def measure(
    case: Case, size: Size, gpu: bool, folder: Path, print_line: Callable[[str], None] = print, rounds: int = 0
) -> Iterator[Figures]:
    """Measure a case, in as many rounds as its size has unless told. After each point, yield the figures so far, in the
    form of the case's JSON file, for a case whose time may run out.

    On a GPU, which may not be there again soon, what fails or disagrees is stored beside the rest under 'problems', by
    point, instead of an exception.

    Raises:
      MeasurementError: a process ended, or the sides' results differ.
    """
    rounds = rounds or ROUNDS[size]
    missing = {name: missing_packages(side) for name, side in case.sides.items()}
    missing = {name: packages for name, packages in missing.items() if packages}
    for name, packages in missing.items():
        print_line(f"  {name} is left out: {' and '.join(packages)} not installed")
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several processes share a GPU
    if gpu:  # show one GPU: jaxformer would use all, torch and the matmuls only one
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    elif size != "smoke":  # hide GPUs from JAX and torch
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    figures: Figures = {
        "size": size, "rounds": rounds, "unit": case.unit,
        "roles": {name: side.role for name, side in case.sides.items() if name not in missing},
        "left_out": missing, "points": {},
    }  # fmt: skip
    points = case.choose(size, gpu)
    sides = {
        name: [side for side in figures["roles"] if side not in settings.get("skip", ())]
        for name, settings in points.items()
    }
    together = gpu and case.together
    with ExitStack() as kept:
        pool = kept.enter_context(ThreadPoolExecutor())
        workers = {
            side: kept.enter_context(Worker(side, case.sides[side], folder, environment)) for side in figures["roles"]
        }
        early = {}
        for side in figures["roles"] if gpu else ():
            first = next((name for name in points if side in sides[name]), None)
            if case.sides[side].early and first is not None:
                early[side] = first, pool.submit(workers[side].prepare, points[first])
        for name, settings in points.items():
            of_point = [workers[side] for side in sides[name]]
            known = {side: answer for side, (first, answer) in early.items() if first == name}
            problems: list[str] | None = [] if gpu else None
            try:
                facts = prepare(of_point, settings, pool if together else None, known, problems)
                point = measure_point(case, settings, of_point, facts, TURN_MS[size], rounds, problems)
            except MeasurementError as error:
                if problems is None:
                    raise
                problems, point = [*problems, str(error)], {}
            for worker in [] if together else of_point:  # new processes for each point, so that memory starts fresh
                worker.stop()
            if point:
                figures["points"][name] = point
                print_line(f"  {name}: {describe(point)}")
            if problems:
                figures.setdefault("problems", {})[name] = problems
                print_line("".join(f"  {name}: PROBLEM: {each}\n" for each in problems).rstrip())
            yield figures
    if case.summarize is not None:
        figures["summary"] = case.summarize(figures["points"])
        yield figures


def prepare(
    workers: Sequence[Worker],
    settings: Mapping[str, Any],
    pool: ThreadPoolExecutor | None,
    known: Mapping[str, Future],
    problems: list[str] | None,
) -> dict[str, Figures]:
    """Return the facts of each side at a point, of those that are `known` as soon as they are. Without a pool, one side
    after another prepares, as the first one writes files that the others read. What fails is added to `problems`,
    unless these are None."""
    facts = {}
    for worker in workers:
        if problems is not None and worker.name not in known:
            worker.start()
    answers = dict(known)
    if pool is not None:
        answers |= {w.name: pool.submit(w.prepare, settings) for w in workers if w.name not in known}
    for worker in workers:
        try:
            answer = answers.get(worker.name)
            facts[worker.name] = worker.prepare(settings) if answer is None else answer.result()
        except MeasurementError as error:
            if problems is None:
                raise
            problems.append(str(error))
    return facts


def measure_point(
    case: Case,
    settings: Mapping[str, Any],
    workers: Sequence[Worker],
    facts: dict[str, Figures],
    turn_ms: float,
    n_rounds: int,
    problems: list[str] | None = None,
) -> Figures:
    """Measure one point with the sides that have facts; return times, ratios, facts and derived figures. Disagreement
    is added to `problems`, unless these are None."""
    for check in filter(None, (lambda facts: check_agreement(facts, case.tolerance), case.check)):
        try:
            check(facts)
        except (MeasurementError, KeyError) as error:  # a side may be missing
            if problems is None:
                raise
            problems.append(str(error) if isinstance(error, MeasurementError) else f"{error} is not there to compare")
    stored = {name: {k: v for k, v in each.items() if not k.startswith("_")} for name, each in facts.items()}
    timed = [worker for worker in workers if worker.name in facts and not facts[worker.name].get("_untimed")]
    steps = {worker.name: 1 for worker in timed}
    for is_compiled in (False, True) if case.warm_up else ():  # the first turn finishes compilation and allocation
        for worker in list(timed):
            try:
                ms = worker.turn(1)
                steps[worker.name] = steps_per_turn(ms, turn_ms) if is_compiled else 1
            except MeasurementError as error:  # such as memory that did not suffice
                if problems is None:
                    raise
                problems.append(str(error))
                timed.remove(worker)
    if not timed:
        return {"facts": stored} if stored else {}
    orders = [timed[:: -1 if number % 2 else 1] for number in range(n_rounds)]  # none is always the first
    rounds = [{worker.name: worker.turn(steps[worker.name]) for worker in order} for order in orders]
    medians = {name: median(each[name] for each in rounds) for name in rounds[0]}
    roles = {worker.name: worker.side.role for worker in timed}
    peers = [name for name in medians if roles[name] == "peer"]
    derived: Figures = {}
    if case.derive is not None:
        with suppress(*([LookupError, ValueError] if problems else [])):  # a side that failed
            derived = case.derive(settings, facts, medians)
    return {
        "ms": {name: {**spread([each[name] for each in rounds]), "steps": steps[name]} for name in medians},
        "ratio": {
            ours: {peer: spread([each[peer] / each[ours] for each in rounds]) for peer in peers}
            for ours in medians if roles[ours] == "ours"
        },
        "facts": stored,
        "derived": {name: rounded(value) for name, value in derived.items()},
    }  # fmt: skip


def steps_per_turn(ms: float, turn_ms: float) -> int:
    """Return the number of steps of `ms` milliseconds that take about `turn_ms`."""
    return max(1, min(MAX_STEPS, round(turn_ms / max(ms, 1e-3))))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the minimum, quartiles and median."""
    q1, middle, q3 = map(rounded, quantiles(values, n=4, method="inclusive"))
    return {"min": rounded(min(values)), "q1": q1, "median": middle, "q3": q3}


def rounded(value: Any) -> Any:
    """Return a float rounded to four significant digits; anything else unchanged."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def check_agreement(facts: dict[str, Figures], tolerance: float) -> None:
    """Raise `MeasurementError` unless all sides with `values` agree within the tolerance, or within `ROUNDED` if a side
    computed in another dtype than float32."""
    if {each.get("dtype", "float32") for each in facts.values()} != {"float32"}:
        tolerance = max(tolerance, ROUNDED)
    given = {name: each["values"] for name, each in facts.items() if "values" in each}
    for name, values in given.items():
        first, expected = next(iter(given.items()))
        pairs = list(zip(expected, values, strict=True))
        apart = max((abs(a - b) / max(abs(a), 1e-30) for a, b in pairs), key=lambda x: (isnan(x), x))
        if not apart <= tolerance:
            raise MeasurementError(f"{name} differs from {first}: values {apart:.1e} apart.")


def missing_packages(side: Side) -> list[str]:
    """Return the packages that a side needs but that are not installed."""
    return [name for name in side.needs if importlib.util.find_spec(name) is None]


def describe(point: Figures) -> str:
    """Return a one-line summary for the terminal."""
    if "ms" not in point:
        return json.dumps(point["facts"])
    times = ", ".join(f"{name} {each['median']:.4g} ms" for name, each in point["ms"].items())
    ratios = "; ".join(
        f"{ours} is " + ", ".join(f"{each['median']:.2f} x as fast as {peer}" for peer, each in peers.items())
        for ours, peers in point["ratio"].items() if peers
    )  # fmt: skip
    return "; ".join(filter(None, [times, ratios, ", ".join(f"{k} {v}" for k, v in point["derived"].items())]))
