"""TensorBoard and Weights & Biases hold the rows of `metrics.jsonl`, each step once."""

import io
import json
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jaxformer.cli.train import main
from jaxformer.config import Config, TrainConfig
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
from jaxformer.train.log import read_metrics
from jaxformer.train.metric_writers import open_writers, prepare_writers, scalars
from tests.arrays import plain_decoder
from tests.helpers import mounted, tiny, write_books

MODEL = plain_decoder(280, 16, 16, n_blocks=1, n_heads=2, d_ff=(24,), norm="rmsnorm")
CONFIG = Config(
    "test", MODEL, TextConfig(), steps=6,
    train=TrainConfig(
        batch_size=8, log_every=1, eval_every=0, report_every=3, checkpoint_every=3,
        log_to=("tensorboard",),
    ),
)  # fmt: skip
ROW = {
    "step": 3,
    "loss": 2.5,
    "tokens": 384,
    "ppl": None,  # was infinite
    "note": "the wind has turned",
    "entropy": [[1.0, 0.5], [0.25, None]],
    "router": {"blocks.0.mlp": {"share": [0.75, 0.25], "dropped": 0.125}},
    "gradients": [{"name": "W_pos", "g": 1.5, "update": 1e-3}, {"name": "blocks.0.mlp.W_1", "g": 0.0, "update": None}],
}
NAMED = {
    "loss": 2.5,
    "tokens": 384,
    "entropy/0/0": 1.0,
    "entropy/0/1": 0.5,
    "entropy/1/0": 0.25,
    "router/blocks.0.mlp/share/0": 0.75,
    "router/blocks.0.mlp/share/1": 0.25,
    "router/blocks.0.mlp/dropped": 0.125,
    "gradients/W_pos/g": 1.5,
    "gradients/W_pos/update": 1e-3,
    "gradients/blocks.0.mlp.W_1/g": 0.0,
}


class Killed(Exception):
    """Stand-in for a signal that ends a run without a save."""


def events(file: Path) -> Iterator[Any]:
    """Yield the events of a file of TFRecords: length, its checksum, content, its checksum."""
    from tensorboardX.proto.event_pb2 import Event  # takes a second, which other workers need not spend

    content = file.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]


def tensorboard_rows(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the rows that TensorBoard shows: files by name, each superseding the steps from its START event on."""
    from tensorboardX.proto.event_pb2 import SessionLog

    rows: list[tuple[int, dict[str, float]]] = []
    for file in sorted((folder / "tensorboard").iterdir()):
        first, *others = events(file)
        assert first.file_version == "brain.Event:2"
        for event in others:
            if event.session_log.status == SessionLog.START:
                rows = [row for row in rows if row[0] < event.step]
            else:
                rows.append((event.step, {value.tag: value.simple_value for value in event.summary.value}))
    return rows


def logged_rows(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the rows of `metrics.jsonl` in the float32 that TensorBoard stores."""
    return [
        (row["step"], {name: float(np.float32(value)) for name, value in scalars(row).items()})
        for row in read_metrics(folder)
    ]


def write_rows(folder: Path, steps: Iterable[int]) -> None:
    """Write a log whose loss falls by 1 per step."""
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": {5 - step}.0}}\n' for step in steps))


def test_scalars_are_named_by_their_path_in_the_row():
    assert scalars(ROW) == NAMED
    assert scalars({"step": 3, "note": "the wind has turned"}) == {}


@pytest.mark.slow
def test_tensorboard_seldom_waits_for_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", synced.append)
    write_rows(tmp_path, range(3))
    with open_writers(tmp_path, CONFIG) as (writer,):
        for step in range(3, 40):
            writer({"step": step, "loss": 5.0 - step})
    assert tensorboard_rows(tmp_path) == [(step, {"loss": 5.0 - step}) for step in range(40)]
    assert len(synced) <= 3  # the header, the first row of this run, and the end


@pytest.mark.slow
def test_tensorboard_receives_the_rows_logged_before_it_was_enabled(tmp_path):
    write_rows(tmp_path, range(3))
    with open_writers(tmp_path, CONFIG) as (writer,):
        writer({"step": 3, "loss": 2.0})
        assert tensorboard_rows(tmp_path) == [(step, {"loss": 5.0 - step}) for step in range(4)]  # while it trains
    write_rows(tmp_path, range(2))  # as resuming at step 1 cuts it
    with open_writers(tmp_path, CONFIG):
        pass
    assert tensorboard_rows(tmp_path) == [(0, {"loss": 5.0}), (1, {"loss": 4.0})]
    write_rows(tmp_path, range(4))  # after it had trained on without
    with open_writers(tmp_path, CONFIG):
        pass
    assert tensorboard_rows(tmp_path) == [(step, {"loss": 5.0 - step}) for step in range(4)]


def test_full_disk_is_a_user_error(tmp_path):
    pytest.importorskip("tensorboardX")
    full = r"tensorboard cannot be written to .*: No space left on device; free some space, then resume with"
    with (
        mounted(tmp_path, "64k") as disk,
        pytest.raises(UserError, match=full),
        open_writers(disk, CONFIG) as (writer,),
    ):
        for _ in range(1000):  # more than 100 KB
            writer(ROW)


def test_no_folder_opens_no_metric_writers():
    with open_writers(None, CONFIG) as writers:
        assert writers == []


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_missing_package_is_a_user_error_with_the_extra(monkeypatch, name, package):
    for module in (None, ModuleType(package)):  # not installed, or a namespace package
        monkeypatch.setitem(sys.modules, package, module)
        with pytest.raises(UserError, match=rf"log_to` {name} needs {package}, .*pip install 'jaxformer\[{name}\]'"):
            prepare_writers([name])


@pytest.mark.slow
def test_missing_package_stops_training_before_a_run_folder_exists(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    options = tiny(write_books(tmp_path / "books"), 1, "--train.batch-size", "8", "--train.log-to", "tensorboard")
    assert main(options) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --train.log-to tensorboard needs tensorboardX, ") and said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def wandb(tmp_path, monkeypatch) -> Iterator[ModuleType]:
    """Return wandb offline, isolated from the user's settings; it is in no extra of the tests, being large."""
    package = pytest.importorskip("wandb")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "of_wandb"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("API_KEY", "PROJECT", "NAME", "RUN_ID"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    package.teardown()
    yield package
    package.teardown()


def uploads(file: Path) -> list[Any]:
    """Return the records of a file that `wandb sync` uploads: LevelDB's log format after 7 bytes, blocks of 32 KiB with
    complete records (1) or parts of them (2, first; 3; 4, last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts, records = file.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    return records


def uploaded_rows(file: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the history of such a file, without the keys that Weights & Biases adds."""
    rows = []
    for record in uploads(file):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append((items["_step"], {name: value for name, value in items.items() if name[0] != "_"}))
    return rows


@pytest.mark.slow
def test_resumed_run_is_one_wandb_run_and_its_last_upload_is_complete(tmp_path, wandb):
    config, folder = replace(CONFIG, train=replace(CONFIG.train, log_to=("wandb",))), tmp_path / "quick"
    folder.mkdir()
    prepare_writers(config.train.log_to)
    with pytest.raises(Killed), open_writers(folder, config) as (writer,):
        writer({"step": 0, "loss": 5.0})
        writer({"step": 1, "note": "the wind has turned"})
        writer(ROW)
        raise Killed
    wandb.teardown()  # which waits until all is in the file
    (first,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert uploaded_rows(first) == [(0, {"loss": 5.0}), (3, NAMED)]
    write_rows(folder, range(2))  # as resuming at step 1 cuts it
    with open_writers(folder, config) as (writer,):
        writer(ROW)
        writer({"step": 6, "loss": 3.0})  # the last
    wandb.teardown()
    (second,) = set(folder.glob("wandb/offline-run-*/*.wandb")) - {first}
    assert uploaded_rows(second) == [(0, {"loss": 5.0}), (1, {"loss": 4.0}), (3, NAMED), (6, {"loss": 3.0})]
    runs = [record.run for file in (first, second) for record in uploads(file) if record.HasField("run")]
    assert {run.run_id for run in runs} == {(folder / "wandb/id").read_text().strip()}
    assert {(run.project, run.display_name) for run in runs} == {("jaxformer", "quick")}
    values = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert values["steps"] == 6 and values["model"]["kind"] == "jaxformer.models.decoder:DecoderConfig"
    codes = [record.exit.exit_code for file in (first, second) for record in uploads(file) if record.HasField("exit")]
    assert codes == [1, 0]


@pytest.mark.slow
def test_missing_login_is_a_user_error_before_training(wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # no terminal
    with pytest.raises(UserError, match=r"failed: No API key .*; log in with 'wandb login', or set WANDB_MODE=offline"):
        prepare_writers(["wandb"])


@pytest.mark.slow
def test_wandb_errors_are_user_errors(tmp_path, wandb, monkeypatch):
    config = replace(CONFIG, train=replace(CONFIG.train, log_to=("wandb",)))
    lost = rf"Weights & Biases failed: Connection lost; resume with `resume=True` `run='{tmp_path}'`$"
    with pytest.raises(UserError, match=lost), open_writers(tmp_path, config) as (writer,):
        monkeypatch.setattr(
            wandb.Run, "log", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("Connection lost"))
        )
        writer(ROW)

    def refuse(**_: object) -> None:
        raise wandb.errors.CommError("no route\nto host.")

    monkeypatch.setattr(wandb, "init", refuse)
    refused = r"failed: no route to host; try again, or set WANDB_MODE=offline\.$"
    with pytest.raises(UserError, match=refused), open_writers(tmp_path, config):
        raise AssertionError
