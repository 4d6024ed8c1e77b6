"""The worked examples of docs/extending.md, in a package outside the project."""

import importlib
import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import load_run
from jaxformer.cli import sample
from jaxformer.cli import train as command
from jaxformer.cli.arguments import load_config
from jaxformer.cli.options import CommandLine
from jaxformer.contract import Role
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode import generate_tokens
from jaxformer.errors import UserError
from jaxformer.nn.mlp import ACTIVATIONS
from jaxformer.nn.parameters import parameter_axes
from jaxformer.runs.run import create_run, read_config
from jaxformer.train.log import read_metrics
from jaxformer.train.optimizer import make_optimizer
from tests.arrays import build, random_params
from tests.helpers import ROOT, SMALL, small_run, write_books

PAGE = (ROOT / "docs/extending.md").read_text()
EXAMPLES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.M | re.S))
FAST = [
    *("--train.report-every", "0", "--train.eval-every", "10", "--train.batch-size", "8"),
    *("--train.eval-examples", "8", "--train.log-every", "5", "--train.checkpoint-every", "10"),
]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write the examples into a folder of their own, on the path of imports and the current one."""
    for name, source in EXAMPLES.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    write_books(tmp_path / "books")
    monkeypatch.setitem(ACTIVATIONS, "mish", None)  # which an example sets, for this test only
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_there_are_seven_examples():
    assert set(EXAMPLES) == {"bigram", "mish", "top_a", "signum", "one_cycle", "stripes", "size"}


def losses(run) -> list[float]:
    return [row["val_loss"] for row in read_metrics(run) if "val_loss" in row]


@pytest.mark.slow
def test_a_model_is_one_file(package):
    options = ["--config", "bigram.py:bigram", "--data.path", "books", "--model.vocab-size", "280", *FAST]
    options += ["--model.context-length", "16"]
    assert command.main([*options, "--steps", "20"]) == 0
    first, *_, last = losses(package / "runs/bigram")
    assert last < first
    assert command.main(["--resume", "--run", "runs/bigram", "--steps", "22"]) == 0
    assert sample.main(["--run", "runs/bigram", "--max-new-tokens", "4"]) == 0
    run = load_run("runs/bigram")
    assert run.step == 22
    assert parameter_axes(run.model)["W"].role is Role.EMBEDDING


@pytest.mark.slow
def test_an_activation_is_one_line(package):
    config = load_config("mish.py:mish").model
    model = replace(config, n_blocks=1).build()
    mlp = model.bind({"params": random_params(model, *config.example())}).blocks[0].mlp
    x_D = np.linspace(-1, 1, 64, dtype=np.float32)
    W_1, W_2 = (mlp.variables["params"][name] for name in ("W_1", "W_2"))
    h = x_D @ W_1
    np.testing.assert_allclose(mlp(x_D), (h * np.tanh(np.log1p(np.exp(h)))) @ W_2, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_sampler_is_one_class(package):
    sampler = importlib.import_module("top_a").TopASampling(temperature=1.0, top_a=1.0)
    logits_V = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))
    kept_V = np.isfinite(sampler.filter_logits(logits_V))
    assert kept_V.tolist() == [True, True, False, False]  # at least 0.25
    with pytest.raises(UserError, match=r"`top_a` is 1\.5; it must be from 0 to 1"):  # could exclude all tokens
        replace(sampler, top_a=1.5)
    model, params = build(SMALL)
    pieces = generate_tokens(
        model, params, [[5, 6]], replace(sampler, temperature=0.01), seeds=[0], max_new_tokens=1, context_length=16
    )
    (piece,) = pieces
    assert piece.tokens == model.apply({"params": params}, jnp.array([5, 6]))[-1].argmax()


@pytest.mark.slow
def test_an_optimizer_is_one_file(package):
    arguments = command.Arguments(load_config("signum.py:signum"))
    optimizer = CommandLine(["--optimizer.momentum", "0.5"]).parse(arguments, "", "").run_config.optimizer
    assert (type(optimizer).__name__, optimizer.momentum) == ("SignumConfig", 0.5)
    params = {"W": np.float32([1.0, 2.0])}
    rule = make_optimizer(optimizer, lambda count: 0.25, {})
    updates, _ = rule.update({"W": np.float32([3.0, -4.0])}, rule.init(params), params)
    np.testing.assert_array_equal(updates["W"], [-0.25, 0.25])


@pytest.mark.slow
def test_a_schedule_is_one_class_that_a_run_keeps(package):
    config = load_config("one_cycle.py:one_cycle")
    folder = create_run(package / "run", config, Tokenizer.train([], 257), allow_suffix=False)
    assert read_config(folder) == config
    schedule, peak = config.optimizer.make_schedule(8), config.optimizer.learning_rate
    rates = [float(schedule(i)) for i in range(8)]
    assert rates[0] < max(rates) == pytest.approx(peak) and rates[-1] < peak


@pytest.mark.slow
def test_a_dataset_is_one_file(package):
    assert (
        command.main(
            ["--config", "stripes.py:stripes", "--steps", "20", *FAST, "--model.n-blocks", "1", "--model.d-ff", "16"]
        )
        == 0
    )
    first, *_, last = losses(package / "runs/stripes")
    assert last < first


@pytest.mark.slow
def test_a_command_is_one_function(package, capsys):
    run = load_run(small_run(package / "small", ["The cat sees."]))
    main = importlib.import_module("size").main
    for options, params in (([], run.params), (["--prefix", "blocks_0"], run.params["blocks_0"])):
        assert main(["small", *options]) == 0
        assert capsys.readouterr().out == f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters\n"
    assert main(["missing"]) == 2
    assert "missing" in capsys.readouterr().err
