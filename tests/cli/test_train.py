"""Command-line behaviour of `train.py`; its training is tested end to end."""

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.cli.options import CommandLine
from jaxformer.cli.train import Arguments, _parse, _report, check_resumable, main
from jaxformer.config import Config, TokenModelConfig
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.run import write_config
from jaxformer.train.loop import Outcome
from jaxformer.train.setup import TrainSetup
from tests.helpers import ROOT, tiny, write_books


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from-step", "100"], "--from-step needs --resume"),
        (["--skip-batches", "5"], "--skip-batches needs --resume and --from-step"),
    ],
)
def test_rollback_options_need_resume(options, said):
    with pytest.raises(UserError, match=said):
        _parse(CommandLine(["--config", f"{ROOT}/configs/quick.py", *options]), ExitStack())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from-step", "1", "--skip-batches", "-5"], r"`skip_batches` is -5; it must be at least 0\.$"),
        (["--from-step", "-1"], r"`from_step` is -1; it must be at least 0\.$"),
    ],
)
def test_rollback_goes_neither_before_the_start_nor_back_in_the_data(options, said):
    with pytest.raises(UserError, match=said):
        CommandLine(["--resume", *options]).parse(Arguments(load_config(f"{ROOT}/configs/quick.py")), "", "")


def test_resuming_imports_the_named_config_before_it_reads_that_of_the_run(tmp_path):
    file = tmp_path / "fresh.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from jaxformer.config import Config, TokenModelConfig\n"
        "from jaxformer.data.windows import TextConfig\n"
        "@dataclass(frozen=True)\n"
        "class FreshConfig(TokenModelConfig):\n    pass\n"
        "fresh = Config('fresh', FreshConfig(), TextConfig(), steps=1)\n"
    )
    write_config(tmp_path, Config("fresh", TokenModelConfig(), TextConfig(), steps=1))
    stored = tmp_path / "config.json"
    stored.write_text(
        stored.read_text().replace("jaxformer.config:TokenModelConfig", "/elsewhere/fresh.py:FreshConfig")
    )
    resume = ["--resume", "--run", str(tmp_path)]
    with pytest.raises(UserError, match=r"/elsewhere/fresh.py, which does not exist; .*`config='fresh.py:NAME'`"):
        _parse(CommandLine(resume), ExitStack())
    with pytest.raises(UserError, match="was trained with seed 0, not 1"):
        _parse(CommandLine([*resume, "--config", f"{file}:fresh", "--seed", "1"]), ExitStack())


def test_closing_the_terminal_at_the_end_stops_no_report(monkeypatch, tmp_path, capfd):
    closed = []
    monkeypatch.setattr(
        "jaxformer.inspect.pages.training.write_training_page", lambda *_: os.kill(os.getpid(), signal.SIGHUP)
    )
    before = signal.signal(signal.SIGHUP, lambda *given: closed.append(given))
    try:
        outcome = Outcome("interrupted", 20, None, None, signal=signal.SIGINT)
        setup = TrainSetup(load_config(f"{ROOT}/configs/quick.py"), make_mesh())
        assert _report(setup, None, tmp_path, outcome) == 130
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not closed and "interrupted at step 20 and saved" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_before_the_first_step_leaves_no_run(tmp_path, monkeypatch, capsys, number):
    def load_data(*_: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr("jaxformer.runs.run.load_data", load_data)
    before = signal.getsignal(number)
    options = ["--config", f"{ROOT}/configs/quick.py", "--run", str(tmp_path / "run")]
    assert main(options) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted before the first step; nothing to save"
    assert signal.getsignal(number) is before and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_is_refused_before_its_first_step_leaves_nothing(tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        assert (tmp_path / "runs/quick/config.json").exists()
        raise UserError("a step needs more memory than a device has.")

    monkeypatch.chdir(tmp_path)
    write_books(tmp_path / "books")
    monkeypatch.setattr("jaxformer.train.loop.CompiledStep", refuse)
    assert main(tiny(tmp_path / "books", 4, "--train.batch-size", "8")) == 2
    assert "needs more memory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["books"]


def test_reports_may_change_on_resuming_and_the_batch_may_not():
    config = load_config(f"{ROOT}/configs/quick.py")
    reports = {
        "log_every": 11, "eval_every": 0, "eval_examples": 8, "report_every": 0, "gradients_every": 0,
        "checkpoint_every": 7, "sample_prompt": "A", "sample_tokens": 3, "log_to": ("tensorboard",),
    }  # fmt: skip
    assert not check_resumable(Path("run"), config, replace(config, train=replace(config.train, **reports)), False)
    for name, old, new in (("batch_size", 8, 16), ("label_smoothing", 0.0, 0.1), ("skip_batches", 0, 1)):
        other = replace(config, train=replace(config.train, **{name: new}))
        for given, omitted in (
            ((), "that option"),
            (("--config", "--steps"), "--config"),
            ((f"--train.{name.replace('_', '-')}",), f"--train.{name.replace('_', '-')}"),
        ):
            message = rf"run was trained with train\.{name} {old}, not {new}; omit {omitted} to resume it"
            with pytest.raises(UserError, match=message):
                check_resumable(Path("run"), config, other, False, given)


def test_a_rollback_may_change_the_optimizer_but_not_its_name():
    config = load_config(f"{ROOT}/configs/quick.py:modern")
    other = replace(config, optimizer=replace(config.optimizer, clip_norm=0.5, learning_rate=0.001))
    changes = "optimizer.learning_rate 0.001 instead of 0.003, optimizer.clip_norm 0.5 instead of 1.0"
    assert check_resumable(Path("run"), config, other, True) == changes
    with pytest.raises(UserError, match=r"learning_rate 0\.003, not 0\.001; omit .*, keep it and roll back with --fr"):
        check_resumable(Path("run"), config, other, False)
    named = replace(config, optimizer=replace(config.optimizer, name="lion"))
    with pytest.raises(UserError, match=r"optimizer\.name 'adamw', not 'lion'; omit .* to resume it, or start a new"):
        check_resumable(Path("run"), config, named, True)
    with pytest.raises(UserError, match=r"train\.batch_size 8, not 16"):
        check_resumable(Path("run"), config, replace(other, train=replace(config.train, batch_size=16)), True)


def test_skipped_batches_change_by_rollback_only():
    config = load_config(f"{ROOT}/configs/quick.py")
    other = replace(config, train=replace(config.train, skip_batches=3))
    with pytest.raises(UserError, match=r"skip_batches 0, not 3; omit .*, skip batches with --from-step and --sk"):
        check_resumable(Path("run"), config, other, False)
