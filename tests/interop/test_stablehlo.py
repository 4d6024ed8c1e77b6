"""Export as StableHLO."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.decode import Sampling, generate_tokens
from jaxformer.errors import UserError
from jaxformer.interop.stablehlo import export_stablehlo
from jaxformer.runs.run import Run
from tests.arrays import apply, random_params
from tests.helpers import ROOT
from tests.runs.random_runs import random_run

pytest.importorskip("flatbuffers")
WORDS = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop")
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(['jaxformer', 'flax', 'orbax', 'optax', 'tokenizers'])); "
PROMPTS = [[1, 2, 3], [4, 5]]
"""Prompts of the program in the README of an export."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return random_run(tmp_path_factory.mktemp("runs") / "small", [WORDS * 3])


def run_of(run: Run, spec: str, **changes) -> Run:
    """Return the run with a small untrained model of a config."""
    config = load_config(f"{ROOT}/configs/{spec}")
    config = replace(config, model=replace(config.model, d_model=16, **changes))
    model = config.model.build()
    return replace(run, config=config, model=model, params=random_params(model, *config.model.example()))


def readme_program(folder) -> str:
    (program,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return program


def run_readme(folder, program: str) -> str:
    """Return the output of the README's program in a process without this package and those it needs."""
    result = subprocess.run([sys.executable, "-c", WITHOUT + program], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def greedy(run: Run, n: int) -> np.ndarray:
    """Return n greedy tokens for each of `PROMPTS`, `(B, n)`."""
    context = run.text_model()[0].context_length
    pieces = generate_tokens(
        run.model, run.params, PROMPTS, Sampling(temperature=0), [0, 0], max_new_tokens=n, context_length=context
    )
    return np.concatenate([piece.tokens for piece in pieces], axis=1)


@pytest.mark.slow
def test_readme_program_draws_the_same_tokens_without_this_package(run, tmp_path):
    rope = run_of(run, "quick.py", vocab_size=280, context_length=16, n_blocks=1, n_heads=2, d_ff=(32,))
    export_stablehlo(rope, tmp_path / "out")
    printed = run_readme(tmp_path / "out", readme_program(tmp_path / "out"))
    tokens_NB = np.array([line[1:-1].split() for line in printed.splitlines()], int)
    assert tokens_NB.shape == (64, 2)  # 64 tokens go around the 16 slots four times
    assert np.array_equal(tokens_NB.T, greedy(rope, 64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        ("quick.py", {"positions": "learned", "rope": None, "n_heads": 2, "n_blocks": 1}),
        ("moe.py:moe", {"n_heads": 2, "n_blocks": 1}),
        ("prefix.py", {"n_heads": 2, "n_blocks": 1}),
    ],
)
def test_programs_give_the_logits_of_a_full_pass(run, tmp_path, spec, changes):
    run = run_of(run, spec, vocab_size=64, context_length=16, **changes)
    export_stablehlo(run, tmp_path / "out")
    weights = dict(np.load(tmp_path / "out/weights.npz").items())
    prefill, decode = (
        jax.export.deserialize(bytearray((tmp_path / f"out/{name}.bin").read_bytes())) for name in ("prefill", "decode")
    )
    tokens = np.random.default_rng(0).integers(64, size=9).astype(np.int32)
    n, is_prefix = 6, run.config.model.prefix
    padded = np.pad(tokens[:n], (0, 16 - n), constant_values=7)[None]
    logits, cache = prefill.call(weights, padded, np.array([n], np.int32))
    prefix = (n,) if is_prefix else ()
    expected_TV = apply(run.model, run.params, tokens, *prefix)
    for i in range(n, 9):
        np.testing.assert_allclose(logits[0], expected_TV[i - 1], atol=1e-5)
        logits, cache = decode.call(weights, cache, tokens[i : i + 1], np.array([i], np.int32))
    np.testing.assert_allclose(logits[0], expected_TV[-1], atol=1e-5)


@pytest.mark.slow
def test_programs_are_lowered_for_all_platforms(run, tmp_path):
    export_stablehlo(run, tmp_path / "out")
    for name in ("prefill", "decode"):
        program = jax.export.deserialize(bytearray((tmp_path / f"out/{name}.bin").read_bytes()))
        assert program.platforms == ("cpu", "cuda", "tpu")
        assert not re.findall(r"custom_call @(?!shape_assertion|Sharding)\w+", str(program.mlir_module()))


@pytest.mark.slow
def test_other_models_have_a_forward_program(run, tmp_path):
    run = run_of(run, "vision.py:vit", image_size=(8, 8), patch_size=(4, 4), n_heads=2, n_blocks=1, d_ff=(8,))
    export_stablehlo(run, tmp_path / "out")
    assert len(run_readme(tmp_path / "out", readme_program(tmp_path / "out")).splitlines()) >= 2
    forward = jax.export.deserialize(bytearray((tmp_path / "out/forward.bin").read_bytes()))
    (shape,) = [
        x["shape"] for name, x in signature(tmp_path)["programs"]["forward"]["arguments"].items() if name != "weights"
    ]
    images = np.random.default_rng(0).integers(256, size=(3, *shape[1:])).astype(np.uint8)
    logits = forward.call(dict(np.load(tmp_path / "out/weights.npz").items()), images)
    expected = jax.vmap(lambda x: run.model.apply({"params": run.params}, x))(images)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def signature(tmp_path) -> dict:
    return json.loads((tmp_path / "out/signature.json").read_text())


@pytest.mark.slow
def test_signature_describes_arguments_in_order(run, tmp_path):
    export_stablehlo(run, tmp_path / "out", cache_length=12)
    arguments = signature(tmp_path)["programs"]["prefill"]["arguments"]
    assert list(arguments) == ["weights", "tokens", "length"]
    assert arguments["tokens"] == {"shape": ["B", 12], "dtype": "int32"}
    decode = signature(tmp_path)["programs"]["decode"]
    assert decode["outputs"]["cache"] == decode["arguments"]["cache"]
    assert decode["outputs"]["logits"] == {"shape": ["B", 280], "dtype": "float32"}


@pytest.mark.slow
def test_bfloat16_weights_are_rounded(run, tmp_path):
    export_stablehlo(run, tmp_path / "out", "bfloat16")
    printed = run_readme(tmp_path / "out", readme_program(tmp_path / "out").replace("range(64)", "range(2)"))
    assert len(printed.splitlines()) == 2
    stored = np.load(tmp_path / "out/weights.npz")["W_out"].view(jnp.bfloat16)
    assert np.array_equal(stored, np.asarray(run.params["W_out"].astype(jnp.bfloat16)))


@pytest.mark.slow
def test_options_without_meaning_are_refused(run, tmp_path):
    with pytest.raises(UserError, match="float16"):
        export_stablehlo(run, tmp_path / "out", "float16")
    image = run_of(run, "vision.py:vit", image_size=(8, 8), patch_size=(4, 4), n_heads=2, n_blocks=1, d_ff=(8,))
    with pytest.raises(UserError, match=r"`cache_length` is 8, but .* holds a ViT without a cache"):
        export_stablehlo(image, tmp_path / "out", cache_length=8)
    assert not list(tmp_path.iterdir())
