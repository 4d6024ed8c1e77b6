"""`python -m jaxformer verify`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxformer.cli import verify
from jaxformer.parallel.mesh import sum_over_batch
from jaxformer.train import step
from jaxformer.train.setup import TrainSetup
from tests.helpers import small_run

WORDS = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_run(tmp_path_factory.mktemp("runs") / "small", [WORDS * 3]))


@pytest.mark.slow
def test_all_invariants_hold_also_on_several_devices(run: str, capsys: pytest.CaptureFixture) -> None:
    assert verify.main([run, "--examples", "2", "--tokens", "8"]) == 0
    first, _, *rows, last = capsys.readouterr().out.splitlines()
    assert first == f"run {run}, step 0: Decoder, on 2 random examples"
    assert last == "all invariants hold"
    assert [row.split()[0] for row in rows] == ["ok"] * 8 + ["-"] * 2 + ["ok"] * 3  # it has no dropout
    assert f"on {jax.local_device_count()} devices and on one" in rows[-1]


@pytest.mark.slow
def test_shard_that_is_summed_twice_is_found_in_a_parameter_with_a_small_gradient(run, monkeypatch) -> None:
    options, opened = verify.Arguments(tokens=8), verify.open_run(verify.CheckpointOptions(run))
    opened.params["blocks_0"]["mlp"]["W_2"] *= 1e-6
    assert verify._several_devices(opened, options).deviation < 1e-6  # of gradients rounded to float32

    def sum_gamma_twice(tree, *specs):
        total = sum_over_batch(tree, *specs)
        if specs:
            norm = total["blocks_0"]["mlp_norm"]
            norm["gamma"] = sum_over_batch(norm["gamma"])
        return total

    monkeypatch.setattr(step, "sum_over_batch", sum_gamma_twice)
    assert verify._several_devices(opened, options).deviation > 1e-2


@pytest.mark.slow
def test_examples_that_share_a_dropout_key_are_found(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, options = verify.open_run(verify.CheckpointOptions(run)), verify.Arguments(examples=3)
    assert verify._example_keys(opened, options).deviation == 0
    keys = TrainSetup.example_keys
    monkeypatch.setattr(TrainSetup, "example_keys", lambda self, step: keys(self, 0))
    assert verify._example_keys(opened, options).deviation == 3
    monkeypatch.setattr(TrainSetup, "example_keys", lambda self, step: keys(self, step)[jnp.array([0, 0, 1])])
    assert verify._example_keys(opened, options).deviation == 2


@pytest.mark.slow
def test_non_finite_outputs_fail_alone(run: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has diverged fails the first check, and the others do not run."""
    open_run = verify.open_run

    def diverged(*args):
        run = open_run(*args)
        return replace(run, params=jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), run.params))

    monkeypatch.setattr(verify, "open_run", diverged)
    assert verify.main([run, "--tokens", "8", "--examples", "2"]) == 1
    *_, row, last = capsys.readouterr().out.splitlines()
    assert row.split()[:4] == ["FAIL", "finite", f"{2 * 8 * 280:.1e}", "0e+00"]
    assert last == "failed: finite"  # 280 logits of 8 tokens of 2 texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["--examples", "1"], "--examples is 1; it must be at least 2"),
        (["--checkpoint", "7"], "checkpoint"),
    ],
)
def test_wrong_input_is_a_user_error(run: str, options: list[str], message: str, capsys) -> None:
    assert verify.main(options if options[0] == "nowhere" else [run, *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
