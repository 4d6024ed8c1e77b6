"""`python -m jaxformer verify`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxformer.cli import verify
from jaxformer.nn import attention as nn_attention
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
    assert [row.split()[0] for row in rows] == ["ok"] * 7 + ["-"] + ["ok"] * 2  # it has no dropout
    assert f"on {jax.local_device_count()} devices and on one" in rows[-1]


@pytest.mark.slow
def test_fault_is_named_and_the_status_is_1(run: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    step = nn_attention.decode_step
    monkeypatch.setattr(nn_attention, "decode_step", lambda *args: step(*args[:-1], 2.0))
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert verify.main([run, "--tokens", "8"]) == 1
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1] == "failed: padding, decoding"
    assert next(row for row in rows if row.startswith("FAIL") and "decoding" in row).endswith("differ from token 4 on")
    assert rows[-2].endswith("there is one device")


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["--examples", "1"], "examples is 1; it must be at least 2"),
        (["--tokens", "1"], "tokens is 1; it must be at least 2"),
        (["--seed", "-1"], "seed is -1; it must be at least 0"),
        (["--example", "3"], "did you mean --examples?"),
        (["--checkpoint", "7"], "checkpoint"),
    ],
)
def test_wrong_input_is_a_user_error(run: str, options: list[str], message: str, capsys) -> None:
    assert verify.main(options if options[0] == "nowhere" else [run, *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
