"""Which run a command takes."""

import shutil

import pytest

from jaxformer.cli.load import RunOptions, with_run
from jaxformer.errors import UserError
from jaxformer.runs.lock import run_lock
from tests.helpers import write_books
from tests.runs.random_runs import saved_run


@pytest.mark.slow
def test_the_default_run_is_the_newest_with_a_checkpoint_and_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run below runs"):
        with_run(RunOptions())
    saved_run(tmp_path / "runs/quick", [file.read_text() for file in write_books(tmp_path / "books").iterdir()])
    (tmp_path / "runs/newer").mkdir()
    shutil.copy(tmp_path / "runs/quick/config.json", tmp_path / "runs/newer/config.json")
    with run_lock(tmp_path / "runs/quick"):
        assert with_run(RunOptions()).run == "runs/quick"
    assert capsys.readouterr().err == (
        "run runs/quick: Decoder at step 0 (still training), the newest with a checkpoint below runs/; --run names "
        "another\n"
    )
    shutil.rmtree(tmp_path / "runs/newer")
    assert with_run(RunOptions("runs/other")).run == "runs/other"
    assert capsys.readouterr().err == ""
