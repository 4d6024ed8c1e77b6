"""Runs of earlier versions: `config_before_rungs.json` is `quick:modern` as it was stored when one class had the fields
of all decoders."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs import ladder
from configs.quick import modern
from jaxformer.config.fields import to_dict
from jaxformer.ladder.rungs import RungDecoderConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.moe import MoEConfig
from jaxformer.runs.run import read_config, write_config
from tests.helpers import ROOT

STORED = json.loads((ROOT / "tests/fixtures/config_before_rungs.json").read_text())


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
        ({"n_experts": 4, "capacity_factor": 1.5}, MoEConfig),
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
    stored = STORED["model"] | changes | {"rope_periods": [1.0, 4.0]}
    assert all(stored[name] == value for name, value in json.loads(json.dumps(to_dict(model))).items())


def test_earlier_fields_of_rope_are_read_for_any_decoder(tmp_path):
    write_config(tmp_path, modern)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["model"]["rope_periods"]
    stored["model"] |= {"rope_low_periods": 2.0, "rope_high_periods": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert read_config(tmp_path) == replace(modern, model=replace(modern.model, rope_periods=(2.0, 8.0)))


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
