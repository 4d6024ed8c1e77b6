"""Traces of training steps."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
from jaxformer.parallel.mesh import make_mesh
from jaxformer.train import profile
from jaxformer.train.log import read_metrics, without_timings
from jaxformer.train.loop import Callback, Outcome, Throughput, train
from jaxformer.train.profile import SESSIONS, Profiler
from jaxformer.train.resume import Resume
from jaxformer.train.setup import TrainSetup
from tests.arrays import plain_decoder
from tests.helpers import fill, mounted, write_books

STEPS = 8
MODEL = plain_decoder(280, 8, 8, n_blocks=1, n_heads=2, d_ff=(8,), norm="rmsnorm")
CONFIG = Config(
    "test", MODEL, TextConfig(), STEPS, optimizer=OptimizerConfig("adamw", 1e-3),
    train=TrainConfig(batch_size=4, log_every=1, eval_every=0, report_every=0, gradients_every=0, checkpoint_every=3),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled_in_half_the_time() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def setup_and_data(tmp_path_factory):
    config = replace(CONFIG, data=TextConfig(str(write_books(tmp_path_factory.mktemp("text") / "books"))))
    data = config.data.load(MODEL, config.train.batch_size, config.seed)
    return config, data


@pytest.fixture
def profiled(setup_and_data, tmp_path):
    """Return a function that trains in `tmp_path / name`."""
    config, data = setup_and_data

    def run(name: str, profile: str | None, call: Any = None, steps: int = STEPS, **options: Any) -> Outcome:
        folder, changed = tmp_path / name, replace(config, steps=steps, train=replace(config.train, profile=profile))
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").exists():
            (folder / "config.json").write_text("{}")
        setup = TrainSetup(changed, make_mesh("", jax.devices()[:1]))
        return train(setup, data, folder, [Callback(1, call)] if call else [], **options)

    return run


def markers(file: Path, name: str = "train") -> list[int | None]:
    """Return the step of each event of this name in a trace of either format, in the order of time."""
    if file.name.endswith(".trace.json.gz"):
        content = json.loads(gzip.decompress(file.read_bytes()))
        assert content.keys() == {"displayTimeUnit", "traceEvents"}  # Perfetto refuses other keys
        found = [(e["ts"], e.get("args", {})) for e in content["traceEvents"] if e.get("name") == name]
    else:
        lines = [line for plane in ProfileData.from_file(str(file)).planes for line in plane.lines]
        found = [(e.start_ns, dict(e.stats)) for line in lines for e in line.events if e.name == name]
    return [int(stats["step_num"]) if "step_num" in stats else None for _, stats in sorted(found, key=lambda x: x[0])]


def traces(run: Path) -> dict[str, list[Path]]:
    """Return the files of each trace of a run."""
    sessions = (run / "profile" / SESSIONS).glob("*")
    return {session.name: sorted(session.iterdir()) for session in sessions}


@pytest.mark.slow
def test_trace_holds_a_marker_per_step_and_losses_are_bit_identical(profiled, tmp_path, capsys):
    profiled("with", "3:6")
    assert "trace of steps 3 to 5: " in capsys.readouterr().out
    profiled("without", None)
    losses = [[without_timings(row) for row in read_metrics(tmp_path / name)] for name in ("with", "without")]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS + 1
    ((session, files),) = traces(tmp_path / "with").items()
    assert session == "steps-3-5" and [file.name.split(".", 1)[1] for file in files] == ["trace.json.gz", "xplane.pb"]
    for file in files:
        assert markers(file) == [3, 4, 5]
        assert markers(file, "data wait") == 3 * [None]
    assert not traces(tmp_path / "without")


@pytest.mark.slow
def test_resumed_run_traces_the_remaining_steps(profiled, tmp_path, capsys):
    profiled("run", None, steps=3)
    profiled("run", "2:6", resume=Resume())
    ((session, files),) = traces(tmp_path / "run").items()
    assert session == "steps-4-5" and markers(files[0]) == [4, 5]
    capsys.readouterr()
    profiled("run", "2:6", resume=Resume())
    assert "no trace: training starts after step 8, past steps 2 to 5" in capsys.readouterr().out
    assert list(traces(tmp_path / "run")) == ["steps-4-5"]


@pytest.mark.slow
def test_error_inside_the_window_keeps_the_trace_and_stops_the_profiler(profiled, tmp_path):
    def fail(step: int, *_: object) -> None:
        if step == 4:
            raise KeyboardInterrupt  # as a second Ctrl-C does

    with pytest.raises(KeyboardInterrupt):
        profiled("run", "3:7", fail)
    assert list(traces(tmp_path / "run")) == ["steps-3-4"]
    jax.profiler.start_trace(tmp_path)  # raises while another trace is running
    jax.profiler.stop_trace()


def trace_two_steps(folder: Path) -> list[str]:
    """Trace two steps of a small program; return the lines that were printed."""
    lines: list[str] = []
    with Profiler(folder, range(1, 3), 0, lines.append) as profiler:
        for step in (1, 2, 3):
            profiler.begin(step, None)
            state = jnp.ones(3) + step
            profiler.end(step, state)
    return lines


@pytest.mark.parametrize("leave", [0, 4096])
def test_full_disk_leaves_no_part_of_a_trace(tmp_path, leave):
    with mounted(tmp_path, "256k") as disk:
        fill(disk, leave)
        (line,) = trace_two_steps(disk)
        assert line == f"no trace in {disk / 'profile'}: No space left on device; training continues"
        assert not [path for path in disk.rglob("*") if path.is_file() and path.name != "full"]


def test_failure_of_the_profiler_is_one_line(tmp_path, monkeypatch):
    stop = jax.profiler.stop_trace

    def fail() -> None:
        stop()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: /tmp/x/vm.trace.json.gz; No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    assert trace_two_steps(tmp_path) == [
        f"no trace in {tmp_path / 'profile'}: No space left on device; training continues"
    ]
    assert not traces(tmp_path)


def test_ctrl_c_while_a_trace_is_written_leaves_no_part_of_it(tmp_path, monkeypatch):
    write = profile.write_atomically

    def interrupt(file: Path, content: bytes) -> None:
        write(file, content)
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "write_atomically", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trace_two_steps(tmp_path)
    assert not traces(tmp_path)


def test_vanished_folder_is_not_made_again(tmp_path):
    (line,) = trace_two_steps(tmp_path / "gone")
    assert line.endswith("No such file or directory; training continues") and not (tmp_path / "gone").exists()


def test_trace_of_the_program_itself_is_left_alone(tmp_path):
    with jax.profiler.trace(tmp_path / "own"):
        (line,) = trace_two_steps(tmp_path)
    assert "Only one profile may be run at a time" in line and line.endswith("; training continues")
    assert list((tmp_path / "own").rglob("*.xplane.pb")) and not traces(tmp_path)


def test_excluded_time_does_not_count_as_step_time(setup_and_data, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    throughput = Throughput(0, setup_and_data[1])
    now[0] += 3.0
    throughput.exclude(2.0)
    assert throughput.since_restart(2)["step_ms"] == pytest.approx(500)


@pytest.mark.parametrize("window", ["13:10", "10:10", "0:3", "3", "x:5", "1:2:3", "-1:3", "1:102", "1:99999999999", ""])
def test_invalid_windows_are_refused(window):
    with pytest.raises(UserError, match=rf"`train.profile` is '{window}'; it must be START:STOP .* at most 100 steps"):
        TrainConfig(profile=window)


def test_window_beyond_the_last_step_is_refused():
    assert replace(CONFIG, train=replace(CONFIG.train, profile="8:9")).train.profiled_steps == range(8, 9)
    with pytest.raises(
        UserError, match=r"`train\.profile` is 8:10, but the last step is 8; name earlier steps, or none"
    ):
        replace(CONFIG, train=replace(CONFIG.train, profile="8:10"))
