"""`sample.py` on the run of a masked language model."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxformer.cli import sample
from jaxformer.config import Config
from jaxformer.data.masked import MaskedTextConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.models.encoder import EncoderConfig
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.runs.run import create_run

MODEL = EncoderConfig(258, 16, 12, n_heads=3, d_ff=(17,), n_blocks=1)
BYTES = Tokenizer.train(["a b"], 257)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With parameters that know one thing: a gap is ' ', or else 'e', whatever stands around it."""
    folder: Path = tmp_path_factory.mktemp("runs") / "mlm"
    path = create_run(folder, Config("mlm", MODEL, MaskedTextConfig(), steps=1), BYTES, allow_suffix=False)
    params = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape), jax.eval_shape(MODEL.build().init, jax.random.key(0), *MODEL.example())
    )["params"]
    space, e = (BYTES.encode(text)[0] for text in (" ", "e"))
    params["b_out"] = params["b_out"].at[jnp.array([space, e])].set(jnp.array([9.0, 8.0]))
    with CheckpointManager(path) as checkpoints:
        checkpoints.save(1, params, {"none": jnp.zeros(1)}, {"step": 1}, None)
    return str(path)


@pytest.mark.slow
def test_masks_are_filled_and_candidates_printed(run: str, capsys: pytest.CaptureFixture) -> None:
    assert sample.main(["--run", run, "--weights", "int8", "--prompt", "th [MASK]", "[MASK]a[MASK][MASK]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "th " and lines[2] == " a  "  # the space before a gap is the gap's own
    # Among 257 tokens, e^9 and e^8 of 11,339.
    assert lines[1].startswith("  ' ' 0.715, 'e' 0.263, ") and lines[1].count(",") == 4
    assert len(lines) == 2 + 4


@pytest.mark.slow
def test_json_rows_have_the_filled_text_and_candidates(run: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "a[MASK]", "id": 7}\n{"prompt": "no gap"}\n{"prompt": "[MASK]", "seed": 1}\n'
    )
    arguments = ["--run", run, "--prompts-file", str(tmp_path / "prompts.jsonl"), "--jsonl", "--top-logprobs", "2"]
    assert sample.main(arguments) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "line": 1, "id": 7, "prompt": "a[MASK]", "text": "a ", "masks": [[[" ", 0.7146], ["e", 0.2629]]],
    }  # fmt: skip
    wrong = printed.err.splitlines()
    assert "line 2, has no [MASK]" in wrong[0] and "line 3, has a seed, but fill-mask does not sample" in wrong[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the prompt has no [MASK]"),
        (["--prompt", "a[MASK]", "--temperature", "0.5"], "--temperature"),
        (["--prompt", "a[MASK]", "no gap"], "prompt 2 has no [MASK]"),
        (["--prompt", "[MASK]" * 17], "has 17 tokens; it may have at most the context's 16"),
    ],
)
def test_options_of_other_tasks_are_refused(
    run: str, options: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert sample.main(["--run", run, *options]) == 2
    assert message in capsys.readouterr().err
