"""Runs of earlier versions: `config_before_rungs.json` is `quick:modern` as it was stored when one class had the fields
of all decoders; `configs_before_flat_configs.json` are models, and `run_before_flat_configs.zip` is a run at step 4 of
6, as they were stored when RoPE, windows and experts were fields of the model."""

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import ladder
from configs.quick import modern, quick
from jaxformer.cli import sample, train
from jaxformer.cli.arguments import load_config
from jaxformer.inspect.pages.live import film_frames
from jaxformer.ladder.rungs import RungDecoderConfig
from jaxformer.models.clip import CLIPConfig, TextTowerConfig
from jaxformer.models.decoder import BlockAttention, DecoderConfig, ExpertsConfig
from jaxformer.models.encoder import EmbedderConfig
from jaxformer.ops import RoPE
from jaxformer.ops.positions import Llama3Scaling
from jaxformer.runs.convert import convert
from jaxformer.runs.run import load_run, read_config, write_config
from tests.helpers import ROOT, write_books

STORED = json.loads((ROOT / "tests/fixtures/config_before_rungs.json").read_text())
BEFORE = json.loads((ROOT / "tests/fixtures/configs_before_flat_configs.json").read_text())


def read(folder: Path, **changes: Any) -> Any:
    """Return the config of a run that was stored with some fields of its model changed."""
    (folder / "config.json").write_text(json.dumps(STORED | {"model": STORED["model"] | changes}))
    return read_config(folder)


def test_an_earlier_run_has_the_config_that_it_was_trained_with(tmp_path):
    earlier = replace(modern, data=replace(modern.data, unwrap=True))  # then the default
    assert read(tmp_path) == earlier
    write_config(tmp_path, earlier)
    assert read_config(tmp_path) == earlier


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"n_experts": 4, "capacity_factor": 1.5}, DecoderConfig),
        ({"scaled": False, "projection_std": 1.0}, RungDecoderConfig),
        ({"residual": False, "unembedding": "mlp", "unembedding_std": None}, RungDecoderConfig),
        ({"output_projection": False, "local_heads": 0}, RungDecoderConfig),
        ({"value_dim": 7, "n_experts": 2}, RungDecoderConfig),
        ({"value_embedding": True}, RungDecoderConfig),
        ({"qk_norm": False, "window": 9}, DecoderConfig),
    ],
    ids=str,
)
def test_fields_of_an_earlier_decoder_select_its_class(tmp_path, changes, kind):
    model = read(tmp_path, **changes).model
    assert type(model) is kind
    kept = STORED["model"] | changes
    assert all(getattr(model, name) == kept[name] for name in ("d_model", "qk_norm", "embedding_scale", "dropout"))
    assert (model.experts is None) == (kept["n_experts"] is None)
    assert model.block_windows[0] == (kept["window"] or 128) and model.rope == RoPE() and model.positions == "none"
    assert getattr(model, "mlp_logits", False) == (kept["unembedding"] == "mlp")
    assert getattr(model, "value_dim", None) == kept["value_dim"]


BASE: Any = quick.model
LOCAL = BlockAttention(8, RoPE(100.0))
UNNAMED: dict[str, Any] = {
    "gemma": replace(
        BASE, n_blocks=7, rope=RoPE(1e6, 8.0), attention=(*(LOCAL,) * 5, BlockAttention())
    ),
    "mistral": replace(BASE, attention=BlockAttention(8)),
    "llama 3.1": replace(BASE, rope=RoPE(scaling=Llama3Scaling(8.0, 1.0, 4.0, 64))),
    "no positions": replace(
        BASE, rope=None, attention=(BlockAttention(), BlockAttention(8))
    ),
    "mixtral": replace(
        BASE, experts=ExpertsConfig(4, 1, renormalize=True, shared_expert=True, balance_weight=0.5)
    ),
    "no experts": BASE,
    "rung of experts": RungDecoderConfig(
        **vars(BASE) | {"experts": ExpertsConfig(4)}, value_dim=8, output_projection=True
    ),
    "embedder": EmbedderConfig(d_model=16),
    "clip of rope": CLIPConfig(text=TextTowerConfig(49_408, 77, positions="none", rope=RoPE())),
}  # fmt: skip
"""Models that no config names, by their names in the file."""


@pytest.mark.parametrize("name", BEFORE)
def test_a_model_stored_with_flat_fields_is_the_same_model(tmp_path, name):
    config = load_config(name) if ":" in name else replace(quick, model=UNNAMED[name])
    write_config(tmp_path, config)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | {"model": BEFORE[name]}))
    found = read_config(tmp_path).model
    assert found == config.model and type(found) is type(config.model)


def test_earlier_periods_of_rope_are_read(tmp_path):
    earlier = {**BEFORE["llama 3.1"], "rope_low_periods": 2.0, "rope_high_periods": 8.0}
    del earlier["rope_periods"]
    (tmp_path / "config.json").write_text(json.dumps(STORED | {"model": earlier}))
    model: Any = read_config(tmp_path).model
    assert model.rope == RoPE(scaling=Llama3Scaling(8.0, 2.0, 8.0, 64))


def test_fields_of_other_classes_are_left_as_they_are():
    own = {"n_experts": 3, "rope_base": 2.0, "positions": "mine", "window": 4, "text": "a", "vision": {"n_experts": 1}}
    assert convert("model", "/own.py:Own", own) == ("/own.py:Own", own)
    assert convert("data", "/own.py:Own", {"text": "a"}) == ("/own.py:Own", {"text": "a"})


@pytest.mark.slow
def test_an_earlier_run_is_sampled_from_resumed_and_shows_its_film(tmp_path, monkeypatch, capsys):
    """Against the tokens and losses of the version that stored it."""
    monkeypatch.chdir(tmp_path)
    write_books(tmp_path / "books")
    with zipfile.ZipFile(ROOT / "tests/fixtures/run_before_flat_configs.zip") as file:
        file.extractall("earlier")
    run = load_run("earlier")
    model: Any = run.config.model
    local = BlockAttention(4, RoPE(100.0))
    assert model.rope == RoPE(scaling=2.0) and model.attention == (local, BlockAttention())
    words = ["--run", "earlier", "--prompt", "The king", "--temperature", "0", "--max-new-tokens", "4", "--jsonl"]
    assert sample.main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] == [69, 221, 221, 221]
    np.testing.assert_allclose(answer["logprobs"], [-5.267601, -5.32886, -5.224607, -5.319775], rtol=1e-5)
    assert [step for step, _ in film_frames(run)] == [0, 4]
    assert train.main(["--resume", "--run", "earlier", "--mesh", "data=4,tensor=2"]) == 0
    rows = [json.loads(line) for line in Path("earlier/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    np.testing.assert_allclose([losses[5], losses[6]], [5.4026665687561035, 5.440085411071777], rtol=1e-6)


@pytest.mark.parametrize("module", ["{file}.", "jaxformer.models.{file}:", "jaxformer.ladder.{file}:"])
@pytest.mark.parametrize("name", ["mix_qkv", "attention_unscaled", "rmsnorm"])
def test_a_rung_is_found_where_earlier_versions_had_its_class(tmp_path, name, module):
    config = getattr(ladder, name)
    write_config(tmp_path, config)
    stored = json.loads((tmp_path / "config.json").read_text())
    where, _, cls = stored["model"]["kind"].rpartition(":")
    stored["model"]["kind"] = module.format(file=where.rpartition(".")[2]) + cls
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert read_config(tmp_path) == config
    assert type(read_config(tmp_path).model) is type(config.model)


@pytest.mark.slow
def test_a_class_is_imported_from_the_package_alone(tmp_path):
    """A run knows its class by the name of its module, which nothing else need have imported."""
    write_config(tmp_path, ladder.attention_unscaled)
    program = f"""
from pathlib import Path
from jaxformer.runs.run import read_config
print(type(read_config(Path({str(tmp_path)!r})).model).__module__)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (found.stdout, found.stderr) == ("jaxformer.ladder.rungs\n", "")
