"""Checkpoints: corruption is detected and skipped, and failures of the disk lose none."""

import fcntl
import gc
import hashlib
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxformer.errors import UserError
from jaxformer.runs import checkpoints, integrity
from jaxformer.runs.checkpoints import (
    CheckpointManager,
    CheckpointReader,
)
from jaxformer.runs.integrity import CHECKSUMS, find_corruption
from jaxformer.runs.lock import LOCK, check_not_locked, is_run_locked, run_lock
from tests.helpers import fill, flip_a_bit, mounted, slow

PARAMS = {"W": np.arange(64.0, dtype=np.float32).reshape(8, 8), "b": {"c": np.float32([1.5, -2.0])}}
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)


def state(step: int) -> dict:
    """Return parameters that depend on the step."""
    return jax.tree.map(lambda x: jnp.asarray(x + step), PARAMS)


def write(folder: Path, *steps: int, losses: dict[int, float] | None = None) -> None:
    """Save checkpoints at these steps."""
    with CheckpointManager(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), (state(-step), None), {"step": step}, (losses or {}).get(step))


def assert_step(folder: Path, step: int) -> None:
    """Assert that a checkpoint holds the parameters of its step."""
    restored = CheckpointReader(folder).restore_params(step, SHAPES)
    jax.tree.map(np.testing.assert_array_equal, restored, state(step))


@pytest.mark.parametrize(("least", "parts"), [(2**26, [{"W", "b"}]), (1, [{"W"}, {"b"}])])
def test_parameters_are_converted_in_parts_as_they_are_read(tmp_path, monkeypatch, least, parts):
    write(tmp_path, 3)
    monkeypatch.setattr("jaxformer.runs.checkpoints.PART_BYTES", least)
    read = []

    def halve(part: dict) -> dict:
        read.append(set(part))
        return jax.tree.map(lambda x: (x / 2).astype(jnp.bfloat16), part)

    halved = CheckpointReader(tmp_path).restore_params(3, SHAPES, halve)
    jax.tree.map(np.testing.assert_array_equal, halved, halve(state(3)))
    assert read[:-1] == parts


def array_file(checkpoint: Path) -> Path:
    """Return the largest file of the parameters."""
    return max((checkpoint / "params").rglob("d/*"), key=lambda file: file.stat().st_size)


def exchange(file: Path, target: str) -> None:
    """Replace a file by a link."""
    file.unlink()
    file.symlink_to(target)


def unmerge(checkpoint: Path) -> None:
    """Leave what Orbax wrote at a path that it could not read, with the checksums of that."""
    shutil.rmtree(checkpoint / "params/d")
    (checkpoint / "params/manifest.ocdbt").unlink()
    integrity.write_checksums(checkpoint)


CORRUPTIONS = {
    "a bit flipped": lambda folder: flip_a_bit(array_file(folder)),
    "file missing": lambda folder: array_file(folder).unlink(),
    "no checksums": lambda folder: (folder / CHECKSUMS).unlink(),
    "checksums of another's": lambda folder: (folder / CHECKSUMS).write_text('{"params/../../10/sha256.json": ""}'),
    "arrays never merged": lambda folder: unmerge(folder),
    "a device in it": lambda folder: exchange(array_file(folder), "/dev/zero"),
    "metadata cut off": lambda folder: (folder / "_CHECKPOINT_METADATA").write_text('{"item'),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a run with checkpoints 5, 10 and 15; the first is the best."""
    folder = tmp_path_factory.mktemp("saved")
    write(folder, 5, 10, 15, losses={5: 1.0, 10: 2.0, 15: 3.0})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """Return a copy of the run, for a test to corrupt."""
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


def test_saving_copies_of_all_devices_compiles_nothing(tmp_path):
    params = jax.device_put(state(3), NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec()))
    compiled = []
    listener = lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(3, params, params, {"step": 3}, None)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not compiled
    assert_step(tmp_path, 3)


def test_restore_has_requested_shardings(folder):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    options = {**SHAPES, "W": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split)}
    params, (momentum, nothing), metadata = CheckpointReader(folder).restore(15, options, (options, None))
    jax.tree.map(np.testing.assert_array_equal, params, state(15))
    jax.tree.map(np.testing.assert_array_equal, momentum, state(-15))
    assert nothing is None and metadata == {"step": 15}
    for tree in (params, momentum):
        assert tree["W"].sharding == split
        assert tree["b"]["c"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_arrays_are_returned_by_path(folder):
    arrays = CheckpointReader(folder).arrays(15)
    assert arrays.keys() == {"params/W", "params/b/c", "opt_state/0/W", "opt_state/0/b/c"}
    np.testing.assert_array_equal(arrays["params/W"], PARAMS["W"] + 15)
    np.testing.assert_array_equal(arrays["opt_state/0/b/c"], PARAMS["b"]["c"] - 15)


def test_orbax_reads_a_checkpoint(folder):
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        assert sorted(manager.all_steps()) == [5, 10, 15]
        restored = manager.restore(15)
    jax.tree.map(np.testing.assert_array_equal, restored["params"], state(15))
    assert restored["position"] == {"step": 15}


@pytest.mark.parametrize(
    "name",
    [
        "proj [v2]",
        slow("a\\b ** *? {a}%20#~ \n-é"),
        slow("caf\udce9"),
    ],
)
def test_checkpoints_are_read_at_any_path(tmp_path, name):
    folder = tmp_path / name / "run"
    folder.mkdir(parents=True)
    write(folder, 5, 10)
    write(folder, 15)
    assert CheckpointReader(folder).steps() == [10, 15]
    assert_step(folder, 15)
    np.testing.assert_array_equal(CheckpointReader(folder).arrays(10)["opt_state/0/W"], PARAMS["W"] - 10)
    assert list(tmp_path.iterdir()) == [tmp_path / name]  # nothing beside it
    with CheckpointManager(folder) as checkpoints:
        assert checkpoints.remove_after(10) == [15]


def as_bfloat16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        pytest.param("PLAIN_PATH", re.compile("(?s).*"), r"it cannot be read back: \w+Error .*", id="not merged"),
        pytest.param(
            "_from_one_device", as_bfloat16,
            r"opt_state/0/W is float32\[8, 8\] in memory and bfloat16\[8, 8\] when it is read back", id="another dtype",
        ),
        slow(
            "_from_one_device", lambda tree: {"W": tree["W"]} if "W" in tree else tree,
            r"params/b/c is float32\[2\] in memory and absent when it is read back", id="array missing",
        ),
    ],
)  # fmt: skip
def test_save_that_cannot_be_read_back_removes_no_checkpoint(saved, tmp_path, monkeypatch, name, value, reason):
    folder = shutil.copytree(saved, tmp_path / "[v2]")
    monkeypatch.setattr(checkpoints, name, value)
    with pytest.raises(UserError) as caught:
        write(folder, 20, 25)
    message = rf"checkpoint 25 \(15 is intact\) was written to .*, but {reason}; move the run to another disk, then"
    assert re.match(message, str(caught.value))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["10", "15", "5"]


@pytest.mark.slow
def test_save_after_one_that_could_not_be_read_back_succeeds_with_a_warning(tmp_path, caplog, monkeypatch):
    with CheckpointManager(tmp_path) as opened:
        monkeypatch.setattr(checkpoints, "_from_one_device", as_bfloat16)
        opened.save(5, state(5), state(-5), {}, None)
        monkeypatch.undo()
        opened.save(10, state(10), state(-10), {}, None)
        assert CheckpointReader(tmp_path).steps() == [10]
    (record,) = caplog.records
    message = r"checkpoint 5 of .* could not be written: .* when it is read back; 10 is saved instead"
    assert re.fullmatch(message, record.getMessage())


def test_errors_that_orbax_also_raises_are_not_logged_and_others_are(caplog):
    log, logged = logging.getLogger("absl"), ["the disk is slow", "Failed to remove checkpoint (5)"]
    for message in (*logged, "[process=0][thread=a] _SignalingThread.run() raised an exception: it is full"):
        log.error(message)
    assert caplog.messages == logged


def test_last_two_and_best_checkpoints_are_preserved(tmp_path):
    write(tmp_path, 5, 10, 15, 20, 25, losses={5: 3.0, 10: 1.0, 15: 2.0})
    stored = CheckpointReader(tmp_path)
    assert stored.steps() == [10, 20, 25]
    assert (stored.step("last"), stored.step("best"), stored.step(20), stored.step("20")) == (25, 10, 20, 20)


def test_nonfinite_loss_is_not_the_best(tmp_path):
    write(tmp_path, 5, 10, 15, 20, losses={5: 1.0, 10: math.nan, 15: math.inf, 20: math.nan})
    stored = CheckpointReader(tmp_path)
    assert stored.steps() == [5, 15, 20] and stored.step("best") == 5


def test_every_flipped_bit_is_detected(folder):
    checkpoint = folder / "checkpoints/15"
    files = [file for file in checkpoint.rglob("*") if file.is_file() and file.stat().st_size]
    # Orbax dates and marks a checkpoint after its sums are made; these two say nothing of its content.
    files = [file for file in files if file.parent != checkpoint or file.name == CHECKSUMS]
    assert len(files) > 10 and find_corruption(checkpoint) is None
    for file in files:
        whole = file.read_bytes()
        flip_a_bit(file)
        assert find_corruption(checkpoint) is not None, file
        file.write_bytes(whole)
    assert find_corruption(checkpoint) is None


@pytest.mark.parametrize("corrupt_file", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_reader_skips_a_corrupt_checkpoint_with_a_warning(folder, caplog, corrupt_file):
    corrupt_file(folder / "checkpoints/15")
    before = sorted(folder.rglob("*"))
    assert CheckpointReader(folder).step("last") == 10
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"checkpoint 15 of {folder} is corrupt: ")
    assert record.getMessage().endswith("10 is used instead")
    assert sorted(folder.rglob("*")) == before  # reading leaves it as it is
    with pytest.raises(UserError, match=r"checkpoint 15 of .* is corrupt: .*; the nearest intact one is 10"):
        CheckpointReader(folder).step(15)


@pytest.mark.slow
def test_corrupt_checkpoint_is_quarantined_on_resume(folder, caplog):
    CORRUPTIONS["a device in it"](folder / "checkpoints/15")
    with CheckpointManager(folder) as checkpoints:
        assert checkpoints.step("last") == 10
        assert len(caplog.records) == 1 and "quarantined as 15.corrupt, 10 is used" in caplog.text
        checkpoints.save(15, state(15), (state(-15), None), {}, None)
    assert CheckpointReader(folder).steps() == [5, 10, 15]  # 5 is the best
    assert find_corruption(folder / "checkpoints/15") is None
    assert_step(folder, 15)


def test_corrupt_best_checkpoint_is_skipped(folder, caplog):
    flip_a_bit(array_file(folder / "checkpoints/5"))
    assert CheckpointReader(folder).step("best") == 10
    assert "checkpoint 5 of" in caplog.text
    (folder / "checkpoints/10/metrics/metrics").write_text("no JSON")
    assert CheckpointReader(folder).step("best") == 15


@pytest.mark.slow
@pytest.mark.parametrize(("best", "n_warnings"), [(10, 0), (5, 1)], ids=["not wanted", "the best"])
def test_rest_of_an_interrupted_deletion_is_removed_silently(tmp_path, caplog, best, n_warnings):
    write(tmp_path, 5, 10, losses={5: 2.0, 10: 1.0 if best == 10 else 3.0})
    path = tmp_path / "checkpoints/5/params"
    shutil.copytree(path.parent, tmp_path / "copy")
    write(tmp_path, 15)
    if best == 10:
        (tmp_path / "copy").rename(path.parent)  # it had been deleted
    shutil.rmtree(path)
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.steps() == [10, 15]
    assert len(caplog.records) == n_warnings
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["10", "15"]


@pytest.mark.parametrize("name", ["file missing", "no checksums", "metadata cut off"])
def test_incomplete_older_checkpoint_is_removed_with_a_warning(folder, caplog, name):
    CORRUPTIONS[name](folder / "checkpoints/5")
    with CheckpointManager(folder) as checkpoints:
        assert checkpoints.steps() == [10, 15]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"checkpoint 5 of {folder} is corrupt: ")
    assert record.getMessage().endswith("; removed")


def test_resume_verifies_only_the_checkpoint_it_uses(folder, caplog, monkeypatch):
    read: list[str] = []
    hash_files = integrity.hash_files

    def listen(folder_path: Path, names: list[str]) -> dict[str, str]:
        read.extend(f"{folder_path.name}/{name}" for name in names)
        return hash_files(folder_path, names)

    monkeypatch.setattr(integrity, "hash_files", listen)
    flip_a_bit(array_file(folder / "checkpoints/15"))
    with CheckpointManager(folder) as opened:
        assert opened.step("last") == 10
    assert "quarantined as 15.corrupt" in caplog.text
    saved = json.loads((folder / "checkpoints/10" / CHECKSUMS).read_text())
    assert sorted(name for name in read if name.startswith("10/")) == sorted(f"10/{name}" for name in saved)
    assert not any(name.startswith(("5/params", "5/opt_state")) for name in read)
    assert len(read) == len(set(read))  # and nothing twice


def test_verification_shared_by_processes_detects_all_corruption(folder):
    checkpoint = folder / "checkpoints/15"
    arrays = sorted(p for item in ("params", "opt_state") for p in (checkpoint / item).rglob("*") if p.is_file())
    shares = [slice(i, None, 3) for i in range(3)]
    assert len(arrays) > 3 and not any(find_corruption(checkpoint, share) for share in shares)
    for file in arrays[:3]:  # one in each share
        flip_a_bit(file)
        message = [find_corruption(checkpoint, share) for share in shares]
        assert [verdict for verdict in message if verdict] == [find_corruption(checkpoint)]  # one of them has read it
        flip_a_bit(file)
        file.rename(checkpoint / "elsewhere")
        assert None not in [find_corruption(checkpoint, share) for share in shares]
        (checkpoint / "elsewhere").rename(file)


def test_step_saved_again_after_quarantine_is_verified_again(folder, caplog):
    flip_a_bit(array_file(folder / "checkpoints/15"))
    with CheckpointManager(folder) as checkpoints:
        assert checkpoints.step("last") == 10
        checkpoints.save(15, state(15), (state(-15), None), {}, None)
        checkpoints.save(20, state(20), (state(-20), None), {}, None)  # waits for the one before
        assert checkpoints.step(15) == 15
    assert len(caplog.records) == 1


def test_process_wide_settings_are_restored(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    settings = lambda: (sys.unraisablehook, logging.getLogger("asyncio").filters[:])  # noqa: E731
    before = settings()
    with mounted(tmp_path, "2m") as disk:
        opened = CheckpointManager(disk)
        assert settings() == before
        fill(disk, 16_384)
        with pytest.raises(UserError), opened:
            opened.save(10, state(10), state(-10), {}, None)
        assert settings() == before
        gc.collect()
    assert not heard  # the parts of the save that failed have said what they had to say


def test_all_corrupt_checkpoints_are_refused_and_stay(folder):
    for step in (5, 10, 15):
        flip_a_bit(array_file(folder / "checkpoints" / str(step)))
    before = {file: file.read_bytes() for file in (folder / "checkpoints").rglob("*") if file.is_file()}
    with pytest.raises(UserError, match=r"every checkpoint of .* is corrupt \(15: params.* not match its checksum\)"):
        CheckpointReader(folder).step()
    with pytest.raises(UserError, match="every checkpoint"), CheckpointManager(folder):
        pass
    with pytest.raises(UserError, match="no other is intact"):
        CheckpointReader(folder).step(5)
    assert {file: file.read_bytes() for file in (folder / "checkpoints").rglob("*") if file.is_file()} == before


def test_temporary_folder_of_a_killed_save_is_removed(folder):
    half = folder / "checkpoints/20.orbax-checkpoint-tmp"
    shutil.copytree(folder / "checkpoints/15", half)
    assert CheckpointReader(folder).step("last") == 15
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(20, state(20), state(-20), {}, None)
    assert not half.exists()
    assert_step(folder, 20)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {**SHAPES, "W": jax.ShapeDtypeStruct((8, 9), jnp.float32)},
            r"params/W is \(8, 8\) in the checkpoint and \(8, 9\) in the config",
        ),
        ({"W": SHAPES["W"]}, r"params/b/c is \(2,\) in the checkpoint and absent in the config"),
        ({**SHAPES, "V": SHAPES["W"]}, r"params/V is absent in the checkpoint and \(8, 8\) in the config"),
    ],
)
def test_mismatched_array_shape_is_named(folder, shapes, message):
    with pytest.raises(UserError, match=rf"checkpoint 15 of .* does not fit the config: {message}; restore"):
        CheckpointReader(folder).restore_params(15, shapes)


@pytest.mark.parametrize("name", ["²", "007", "12.corrupt"])
def test_folder_without_a_step_name_is_ignored(folder, name):
    (folder / "checkpoints" / name).mkdir()
    assert CheckpointReader(folder).steps() == [5, 10, 15]
    with pytest.raises(UserError, match=r"no checkpoint '.*'; it has \[5, 10, 15\], 'last' and 'best'"):
        CheckpointReader(folder).step(name)


def test_run_lock_is_released_and_names_no_process_at_the_end(tmp_path):
    with run_lock(tmp_path):
        lock = os.open(tmp_path / LOCK, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(UserError, match=f"process {os.getpid()} is training in"):
            check_not_locked(tmp_path)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
    check_not_locked(tmp_path)
    with pytest.raises(KeyError), run_lock(tmp_path):
        raise KeyError
    assert (tmp_path / LOCK).read_bytes() == b""  # also after an error


def test_is_run_locked_does_not_block_training(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxformer.runs.lock.TIMEOUT_SECONDS", 300.0)
    lock = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_SH)  # as `is_run_locked` does
    threading.Timer(0.1, os.close, [lock]).start()
    with run_lock(tmp_path):
        assert is_run_locked(tmp_path)


def test_step_saved_again_while_diverging_is_unhealthy(tmp_path):
    with CheckpointManager(tmp_path) as saved:
        for step in (5, 10):
            saved.save(step, state(step), (state(-step), None), {"step": step}, None)
        assert saved.last_healthy_step(20) == 10
        assert saved.remove_after(5) == [10] and saved._healthy == {5}
        saved._healthy.add(10)  # as after a save that failed
        saved.save(10, state(10), (state(-10), None), {"step": 10, "healthy": False}, None)
        assert saved.last_healthy_step(20) == 5


def test_checkpoint_removed_while_it_is_read_is_a_user_error(folder):
    reader = CheckpointReader(folder)
    step = reader.step()
    shutil.rmtree(folder / f"checkpoints/{step}/params")
    with pytest.raises(
        UserError, match=r"checkpoint 15 of .* cannot be read: FileNotFoundError params is missing; a run"
    ):
        reader.restore_params(step, SHAPES)


def test_run_lock_excludes_writers_not_readers(folder):
    with CheckpointManager(folder):
        with (
            pytest.raises(UserError, match=r"process \d+ is training in .*; wait for it or stop it"),
            CheckpointManager(folder),
        ):
            pass
        assert CheckpointReader(folder).step("last") == 15
    write(folder, 20)
    assert_step(folder, 20)


@pytest.mark.slow
def test_full_disk_is_a_user_error_and_loses_no_checkpoint(tmp_path):
    with mounted(tmp_path, "2m") as disk:
        write(disk, 5)
        full = fill(disk, leave=65_536)  # for half an item
        with pytest.raises(UserError) as caught, CheckpointManager(disk) as checkpoints:
            noise = jax.random.normal(jax.random.key(0), (64, 1024))  # 256 KiB that do not compress
            checkpoints.save(10, {"W": noise}, state(-10), {}, None)
            checkpoints.save(15, {"W": noise}, state(-15), {}, None)
        message = str(caught.value)
        assert message.startswith(f"checkpoint 15 (5 is intact) cannot be written to {disk}: No space left on device;")
        assert message.endswith(f"free some space, then resume with `resume=True` `run='{disk}'`")
        assert [p.name for p in (disk / "checkpoints").iterdir()] == ["5"]
        assert find_corruption(disk / "checkpoints/5") is None
        full.unlink()
        write(disk, 10)
        assert_step(disk, 10)


@pytest.mark.slow
def test_save_after_a_failed_one_succeeds_with_a_warning(tmp_path, caplog):
    with mounted(tmp_path, "2m") as disk:
        write(disk, 5)
        full = fill(disk, 16_384)
        with CheckpointManager(disk) as checkpoints:
            checkpoints.save(10, state(10), state(-10), {}, None)
            until = time.monotonic() + 60
            while checkpoints._manager.is_saving_in_progress() and time.monotonic() < until:
                time.sleep(0.01)
            full.unlink()
            checkpoints.save(15, state(15), state(-15), {}, None)
            assert find_corruption(disk / "checkpoints/15") is None  # there already
        (record,) = caplog.records
        message = f"checkpoint 10 of {disk} could not be written: No space left on device; 15 is saved instead"
        assert record.getMessage() == message
        assert CheckpointReader(disk).steps() == [5, 15]


def test_failed_last_save_is_a_user_error(tmp_path):
    with mounted(tmp_path, "2m") as disk:
        fill(disk, 0)
        message = r"checkpoint 10 \(there is none before it\) cannot"
        with pytest.raises(UserError, match=message), CheckpointManager(disk) as checkpoints:
            checkpoints.save(10, state(10), state(-10), {}, None)
        assert not CheckpointReader(disk)


def test_error_of_the_caller_is_raised_unchanged(tmp_path):
    with pytest.raises(ValueError, match="Found empty item"), CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(10, state(10), {}, {}, None)


def test_parameters_alone_are_restored_but_not_resumed(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(0, state(10), None, {"step": 0}, None)
    reader = CheckpointReader(tmp_path)
    shapes = jax.eval_shape(lambda: state(10))
    jax.tree.map(np.testing.assert_array_equal, reader.restore_params(reader.step(), shapes), state(10))
    with pytest.raises(UserError, match=r"has parameters only, so training cannot resume from it; .* `init_from='"):
        reader.restore(0, shapes, shapes)


@pytest.mark.slow
def test_error_takes_precedence_over_one_of_saving(tmp_path):
    with mounted(tmp_path, "2m") as disk:
        fill(disk, 0)
        with pytest.raises(ZeroDivisionError), CheckpointManager(disk) as checkpoints:
            checkpoints.save(10, state(10), state(-10), {}, None)
            raise ZeroDivisionError
        write(shutil.copytree(disk, tmp_path / "elsewhere"), 5)  # nothing is left locked or open


def test_unwritable_folder_is_a_user_error(tmp_path):
    with mounted(tmp_path, "2m") as disk:
        write(disk, 5)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        message = r"cannot be written to .*: Read-only file system; make the folder writable"
        with pytest.raises(UserError, match=message), CheckpointManager(disk):
            pass
        assert_step(disk, 5)


def test_vanished_folder_is_a_user_error_and_not_recreated(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with (
        pytest.raises(UserError, match=r"checkpoint 5 cannot be written: .*run no longer exists"),
        CheckpointManager(folder) as c,
    ):
        shutil.rmtree(folder)
        c.save(5, state(5), state(-5), {}, None)
    assert not folder.exists()


def test_checksums_are_sha256(folder):
    sums = json.loads((folder / "checkpoints/15" / CHECKSUMS).read_text())
    name = next(iter(sums))
    assert hashlib.sha256((folder / "checkpoints/15" / name).read_bytes()).hexdigest() == sums[name]
