"""Training that begins with the parameters of a run."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer.cli.train import main
from jaxformer.config import OptimizerConfig
from jaxformer.errors import UserError
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.pretrained import pretrained_run
from jaxformer.runs.run import TOKENIZER, load_run, read_config
from jaxformer.train.log import read_metrics
from jaxformer.train.setup import TrainSetup
from tests.helpers import changed, flip_a_bit, tiny, write_books
from tests.runs.random_runs import saved_run

TEXTS = ["The king sees the cat. The dog likes the sea. " * 20]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return saved_run(tmp_path_factory.mktemp("runs") / "base", TEXTS)


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def begun(run, mesh="", n_devices=1, **changes) -> TrainSetup:
    config = replace(read_config(run), init_from=str(run), **changes)
    return TrainSetup(config, make_mesh(mesh, jax.devices()[:n_devices]), pretrained_run(run))


@pytest.mark.parametrize(("mesh", "n_devices"), [("", 1), ("fsdp=2", 2)])
def test_the_first_state_has_the_parameters_of_the_run_and_a_new_optimizer(run, mesh, n_devices):
    setup = begun(run, mesh, n_devices)
    state = setup.init_state()
    for actual, expected in zip(leaves(state.params), leaves(load_run(run).params), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert all(not leaf.any() for leaf in leaves(state.opt_state))
    assert jax.tree.map(lambda x: x.sharding, state) == setup.state_shardings


def test_the_average_of_schedule_free_has_buffers_of_its_own(run):
    """A step donates parameters and state; an array of both would be donated twice."""
    optimizer = OptimizerConfig("schedule_free", learning_rate=0.1)
    state = begun(run, optimizer=optimizer).init_state()
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(buffers)) == len(buffers)
    for z, x in zip(leaves(state.opt_state.z), leaves(state.params), strict=True):
        np.testing.assert_array_equal(z, x)


def test_a_run_of_another_shape_is_refused(run):
    pretrained = pretrained_run(run)
    pretrained.check_fit(replace(pretrained.model, dropout=0.1))
    with pytest.raises(UserError, match=r"embedding.W_pos is \(16, 16\) there and \(64, 16\) in the model"):
        pretrained.check_fit(replace(pretrained.model, context_length=64))
    with pytest.raises(UserError, match=r"base does not fit the model: W_out is \(16, 280\) there and \(24, 280\)"):
        pretrained.check_fit(replace(pretrained.model, d_model=24))
    with pytest.raises(UserError, match=r"blocks\.1\.attention\.W_K is absent there and \(16, 2, 8\) in the model"):
        pretrained.check_fit(replace(pretrained.model, n_blocks=2))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--init-from", "nowhere"], "nowhere does not exist"),
        (["--init-from", ""], "--init-from is ''; it must be a local folder"),
        (["--model.d-model", "24"], "does not fit the model"),
        (["--data.tokenizer", "other"], "--data.tokenizer has no effect on"),
    ],
)
def test_what_cannot_be_begun_with_is_one_sentence_and_leaves_no_run(run, tmp_path, capsys, changes, said):
    options = [*([] if "--init-from" in changes else ["--init-from", str(run)]), "--run", str(tmp_path / "new")]
    assert main([*options, *changes]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.startswith("error: ") and "\n" not in error
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_corrupt_checkpoint_is_not_begun_with(tmp_path, capsys):
    run = saved_run(tmp_path / "base", TEXTS)
    flip_a_bit(max((run / "checkpoints/0/params").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size))
    assert main(["--init-from", str(run), "--run", str(tmp_path / "new")]) == 2
    assert "every checkpoint of" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_begins_with_another_and_resumes_without_it(tmp_path):
    """The tokenizer is the other's; a restart before the first checkpoint begins with its parameters again."""
    base = saved_run(tmp_path / "base", TEXTS)
    options = changed(
        tiny(write_books(tmp_path / "books"), 2)[2:], "--train.report-every", "0", "--train.batch-size", "8"
    )
    new = tmp_path / "new"
    assert main([*options, "--init-from", str(base), "--run", str(new)]) == 0
    config = read_config(new)
    assert config.init_from == str(base) and config.model == read_config(base).model
    assert (new / TOKENIZER).read_text() == (base / TOKENIZER).read_text()
    losses = [row.get("val_loss") for row in read_metrics(new)]
    shutil.rmtree(new / "checkpoints")
    assert main(["--resume", "--run", str(new)]) == 0
    assert [row.get("val_loss") for row in read_metrics(new)] == losses
    base.rename(tmp_path / "moved")
    assert main(["--resume", "--run", str(new), "--steps", "3"]) == 0
    assert load_run(new).step == 3
    shutil.rmtree(new / "checkpoints")
    assert main(["--resume", "--run", str(new)]) == 2
