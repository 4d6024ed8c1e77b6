"""Training and sampling as a user runs them; in processes of their own where signals and terminals matter."""

import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxformer import load_run
from jaxformer.cli import sample, train
from jaxformer.data.dataset import Batch
from jaxformer.errors import UserError
from jaxformer.inspect import first_non_finite
from jaxformer.runs.checkpoints import TEMPORARY, CheckpointReader
from jaxformer.runs.integrity import find_corruption
from jaxformer.train.log import read_metrics, read_samples
from tests.helpers import (
    ROOT,
    fill,
    flip_a_bit,
    mounted,
    run,
    start,
    start_in_terminal,
    tiny,
    write_books,
)
from tests.shared import options_of_trained, trained

WITHOUT_REPORTS = ("--train.report-every", "0")
"""Options of runs that no sample or report is read of."""
ON_EIGHT = (*WITHOUT_REPORTS, "--train.batch-size", "8")
"""The same on the devices of this process."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder with a run of 20 steps, `runs/quick`, that nothing disturbed."""
    return trained(tmp_path_factory)


@pytest.fixture(scope="module")
def here(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "books").symlink_to(finished / "books")
    return folder


@pytest.fixture(scope="module")
def plain(here):
    """Return the folder of a run of 20 steps that nothing disturbed, without reports and samples."""
    assert train.main([*tiny(here / "books", 20, *ON_EIGHT), "--run", str(here / "plain")]) == 0
    return here / "plain"


@pytest.fixture
def train_here(here, monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Return a function that trains in this process; it returns the status, and what was printed to either stream."""
    monkeypatch.chdir(here)

    def call(*options: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return train.main([*options]), *capsys.readouterr()

    return call


def options_of(advice: str) -> list[str]:
    """Return the options of a command of `train` at the end of a sentence."""
    return ["--resume", *shlex.split(advice.partition(" --resume ")[2])]


def losses(folder) -> list[tuple]:
    """What must not depend on where a run was interrupted."""
    keys = ("step", "epoch", "tokens", "loss", "val_loss", "val_bpb", "lr", "entropy", "gradients")
    return [tuple((k, row[k]) for k in keys if k in row) for row in read_metrics(folder)]


def rows_in(folder) -> int:
    """Rows of metrics so far."""
    return len(read_metrics(folder)) if folder.exists() else 0


def wait_for(condition) -> None:
    """Until it holds, a few minutes at most."""
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def assert_same_run(a, b):
    """Parameters, optimizer state, losses and samples, to the last bit."""
    assert losses(a) == losses(b)
    one, other = CheckpointReader(a), CheckpointReader(b)
    assert one.step() == other.step()
    ours, theirs = one.arrays(one.step()), other.arrays(other.step())
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    assert read_samples(a) == read_samples(b)


def test_training_prints_and_writes_what_the_docs_describe(finished):
    lines = (finished / "stdout").read_text().splitlines()
    assert lines[0] == "run runs/quick"
    assert re.fullmatch(r"devices: \d+ x .+, jax [\d.]+", lines[1])
    assert lines[2].startswith("data: ") and "documents" in lines[2] and "bytes per token" in lines[2]
    # embedding 280·16, W_out 16·280, gains (2+1)·16 and 2·8 of a head; the block: 4·16·16 and an MLP of width 32
    parameters = 2 * 280 * 16 + 3 * 16 + 2 * 8 + (4 * 16 * 16 + 16 * 32 + 32 + 32 * 16 + 16)
    assert lines[3].startswith(f"model: Decoder, {parameters:,} parameters; ")
    assert lines[4].startswith("training: 20 steps of 8 examples (128 tokens), ")
    (init_check,) = [i for i, line in enumerate(lines) if line == "initialisation check, observed (expected):"]
    assert re.fullmatch(r" +0( +[\d.]+ \([\d.]+\)){3}", lines[init_check + 2]), lines[init_check + 2]
    assert all(len(line) <= 100 for line in lines if line.startswith("step "))
    assert lines[-1].startswith(f"sample from it: python {ROOT}/sample.py --run runs/quick")
    folder = finished / "runs/quick"
    rows = read_metrics(folder)
    last = rows[-1]
    assert lines[-2] == (
        f"final: step 20  held-out {last['val_loss']:.3f} (perplexity {last['val_ppl']:.4g}, "
        f"{last['val_bpb']:.3f} bits/byte, {last['val_accuracy']:.1%} accuracy)"
    )
    assert [row["step"] for row in rows] == [0, 3, 5, 6, 9, 10, 12, 15, 18, 20]  # every 3, 5 or 10 steps
    keys = "step epoch tokens loss ppl val_loss val_ppl val_bpb entropy lr step_ms tokens_per_s data_wait_ms"
    assert set(keys.split()) <= last.keys()
    assert np.array(last["entropy"]).shape == (1, 2)
    norms = {row["step"]: [each["name"] for each in row["gradients"]] for row in rows if "gradients" in row}
    assert list(norms) == [3, 6, 10, 12, 20]  # early, at reports, at the end
    order = ["embedding.W_E", "blocks.0.attention.heads.1.W_Q", "blocks.0.attention.heads.0.W_K", "W_out"]
    assert all([name for name in names if name in order] == order for names in norms.values())
    assert last["val_loss"] < rows[0]["val_loss"]
    assert len(rows[0]["init_check"]["observed"]) == 1 and "init_check" not in last
    counted = rows[0]["count_losses"]
    assert counted["pairs"] < counted["tokens"] < rows[0]["val_loss"] and "count_losses" not in last
    assert f"counting tokens {counted['tokens']:.3f}, pairs {counted['pairs']:.3f}" in "\n".join(lines)
    for name in ("config.json", "tokenizer.json", "samples.txt", "report.html"):
        assert (folder / name).stat().st_size > 0
    assert "temperature 0]" in (folder / "samples.txt").read_text()
    assert not (finished / "stderr").read_text()


def test_a_moved_run_can_be_sampled_from(finished, tmp_path, monkeypatch, capsys):
    shutil.copytree(finished / "runs/quick", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert sample.main(["--run", "elsewhere", "--prompt", "The cat", "--max-new-tokens", "25"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("The cat") and len(out) > len("The cat\n")


def test_resuming_after_sigkill_is_bit_identical(here, finished):
    options = [*options_of_trained(here / "books"), "--run", "killed"]
    process = start("train.py", *options, cwd=here)
    checkpoints, reader = here / "killed/checkpoints", CheckpointReader(here / "killed")
    wait_for(lambda: process.poll() is not None or reader.steps())
    process.kill()
    process.communicate()
    # As if it had been killed in the middle of writing the second checkpoint, however far it came.
    step, *later = sorted(reader.steps())
    for each in later:
        shutil.rmtree(checkpoints / f"{each}")
    torn = checkpoints / f"{step + 5}{TEMPORARY}1/params"
    shutil.copytree(checkpoints / f"{step}/params", torn)
    max((file for file in torn.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size).unlink()
    result = run("train.py", *options, "--resume", cwd=here)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_same_run(finished / "runs/quick", here / "killed")
    assert len(read_samples(here / "killed")) == 4
    assert step < 20 and not torn.exists()


def copy_corrupt(folder, name: str, harm):
    """A copy of the run, beside it, whose last parameters are harmed."""
    copy = shutil.copytree(folder, folder.parent / name)
    harm(max((copy / "checkpoints/20/params").rglob("d/*"), key=lambda file: file.stat().st_size))


@pytest.mark.slow
def test_a_corrupt_last_checkpoint_is_skipped_and_resuming_is_bit_identical(here, plain, train_here, caplog):
    copy_corrupt(plain, "flipped", flip_a_bit)
    with pytest.raises(UserError, match="the nearest intact one is 15"):
        load_run(here / "flipped", 20)
    assert train_here("--resume", "--run", "flipped")[0] == 0
    (warning,) = caplog.messages
    assert warning.startswith("checkpoint 20 of flipped is corrupt: params/")
    assert warning.endswith("; quarantined as 20.corrupt, 15 is used instead")
    assert_same_run(plain, here / "flipped")


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_run_can_be_resumed(plain, train_here, tmp_path):
    with mounted(tmp_path, "8m") as disk:
        shutil.copytree(plain, disk / "run")
        shutil.rmtree(disk / "run/checkpoints/20")
        full = fill(disk, leave=60_000)  # for the log, not for a checkpoint
        status, out, err = train_here("--resume", "--run", str(disk / "run"))
        assert status == 2, out + err
        assert err.startswith(f"error: checkpoint 20 (15 is intact) cannot be written to {disk}/run: No space")
        assert err.count("\n") == 1
        assert {folder.name for folder in (disk / "run/checkpoints").iterdir()} <= {"10", "15"}
        full.unlink()
        status, _, err = train_here(*options_of(err))
        assert status == 0 and not err, err
        assert_same_run(disk / "run", plain)


@pytest.mark.slow
def test_a_removed_run_folder_is_one_sentence(here):
    options = tiny(here / "books", 5000, *WITHOUT_REPORTS)
    process = start("train.py", *options, "--run", "gone", cwd=here)
    wait_for(lambda: process.poll() is not None or rows_in(here / "gone") > 3)
    (here / "gone").rename(here / "moved")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    *_, last = err.splitlines()  # Orbax may have warned of what it found missing first
    assert re.fullmatch(r"error: .* cannot be written: gone no longer exists; restore it .*", last)
    assert "Traceback" not in err
    moved = CheckpointReader(here / "moved")
    assert all(find_corruption(here / f"moved/checkpoints/{step}") is None for step in moved.steps())


@pytest.mark.slow
def test_a_closed_terminal_saves_a_closed_pipe_does_not_interrupt_and_a_second_interruption_stops_at_once(
    here, train_here
):
    """And while a process trains, no other one may."""
    rarely = ("--train.checkpoint-every", "200")  # so that none is removed while it is read
    options = [*tiny(here / "books", 1_000_000, *WITHOUT_REPORTS, *rarely), "--run", "busy"]
    process, terminal = start_in_terminal("train.py", *options, cwd=here)
    wait_for(lambda: process.poll() is not None or rows_in(here / "busy") > 1)
    os.close(terminal)
    assert process.wait(timeout=300) == 128 + signal.SIGHUP
    saved = load_run(here / "busy").step
    with start("train.py", "--resume", "--run", "busy", cwd=here) as process:
        process.stdout.readline()
        process.stdout.close()  # as `| head -n 1` does
        wait_for(lambda: process.poll() is not None or read_metrics(here / "busy")[-1]["step"] > saved + 5)
        status, _, refused = train_here("--resume", "--run", "busy")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
    assert status == 2 and refused.startswith(f"error: process {process.pid} is training in busy; wait")
    assert process.returncode == 130 and "Traceback" not in err and "Broken pipe" not in err
    steps = CheckpointReader(here / "busy").steps()
    assert steps and all(find_corruption(here / f"busy/checkpoints/{step}") is None for step in steps)


@pytest.mark.slow
def test_resuming_with_another_config_or_data_is_refused(here, finished, monkeypatch, capsys):
    monkeypatch.chdir(here)
    shutil.copytree(finished / "runs/quick", here / "runs/quick")

    def content() -> dict:
        return {p: p.read_bytes() for p in (here / "runs/quick").rglob("*") if p.is_file()}

    before = content()
    assert train.main(["--resume", "--run", "runs/quick", "--model.n-blocks", "3"]) == 2
    assert "model.n_blocks 1, not 3" in capsys.readouterr().err
    write_books(here / "others", words=800)
    for options, said in ((["--data.path", "others"], "differs from what this run was trained on"),
                          (["--steps", "5"], "it must be at least 20, the steps that")):  # fmt: skip
        on_eight = ("--mesh", "data=4,tensor=2")  # the devices of this process
        assert train.main(["--resume", "--run", "runs/quick", *on_eight, *options]) == 2
        assert said in capsys.readouterr().err
    assert content() == before


@pytest.mark.slow
def test_allowed_changed_data_keeps_the_tokenizer_of_the_run(here, plain, train_here):
    shutil.copytree(plain, here / "allowed")
    write_books(here / "other", words=700)
    (here / "other/0.txt").write_text("Zebras zigzag. " * 100)  # a tokenizer trained on this would differ
    options = ["--resume", "--run", "allowed", "--data.path", "other"]
    status, out, err = train_here(*options, "--steps", "22", "--allow-changed-data")
    assert status == 0, err
    notes = [row for row in read_metrics(here / "allowed") if "note" in row]
    assert [row["step"] for row in notes] == [20]
    assert notes[0]["note"].startswith("the data has changed; it is now other: 5 documents, ")
    assert "step 20  note: the data" in out
    tokenizer = (plain / "tokenizer.json").read_bytes()
    assert (here / "allowed/tokenizer.json").read_bytes() == tokenizer


@pytest.mark.slow
def test_a_non_finite_loss_stops_and_names_step_and_module(here, train_here):
    options = tiny(here / "books", 20, "--run", "broken", "--optimizer.learning-rate", "1e18", *ON_EIGHT)
    status, out, err = train_here(*options)
    assert status == 1, out + err
    last = out.splitlines()[-3:]
    assert last[2].startswith("No checkpoint precedes the divergence; start again with: ")
    assert last[2].endswith("train --resume --run broken --from-step 0 --optimizer.learning-rate 1")
    assert last[0].startswith("step ") and "is not finite; first non-finite value: " in last[0]
    step = int(last[0].split()[1])
    assert f"Everything up to step {step - 1} is saved" in last[1] and "(--optimizer.learning-rate 1)" in last[1]
    assert load_run(here / "broken").step == step - 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(load_run(here / "broken").params))
    assert json.loads((here / "broken/metrics.jsonl").read_text().splitlines()[-1])["step"] < step

    evidence = here / f"broken/autopsy/step-{step}"
    assert str(evidence.relative_to(here)) in last[0]
    broken = load_run(here / "broken")
    keys = jax.random.wrap_key_data(np.load(evidence / "key.npy"))
    stored = np.load(evidence / "batch.npz")
    batch = Batch((stored["inputs.0"],), stored["targets"])
    found = first_non_finite(broken.model, broken.params, batch, keys)
    assert f"first non-finite value: {found.origin};" in last[0]
    report = (evidence / "report.txt").read_text()
    assert found.origin in report and "with the step's attention: xla" in report and "float32" in report


@pytest.mark.slow
def test_a_divergence_stops_and_its_rollback_command_trains(here, train_here):
    options = tiny(here / "books", 40, "--optimizer.learning-rate", "100", *ON_EIGHT)
    status, out, err = train_here(*options, "--optimizer.name", "adamw", "--run", "lost")
    assert status == 1, out + err
    what, helps, back = out.splitlines()[-3:]
    stopped = r"stopped at step (\d+): the loss has been diverging since step \d+: [\d.e+]+ at step \1, after"
    assert re.match(stopped, what), what
    assert "--optimizer.learning-rate 0.003" in helps
    status, out, err = train_here(*options_of(back))
    assert status == 0, out + err
    notes = [row["note"] for row in read_metrics(here / "lost") if "note" in row]
    assert len(notes) == 1 and "; optimizer.learning_rate 0.003 instead of 100.0" in notes[0]
    assert "final: step 40" in out and "no better than" not in out
