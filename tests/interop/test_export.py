"""Export as safetensors, and the files of every export."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.errors import UserError
from jaxformer.interop.export import export_run
from jaxformer.interop.output import complete_path
from jaxformer.runs.run import Run, read_config
from tests.runs.random_runs import random_run

WORDS = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return random_run(tmp_path_factory.mktemp("runs") / "small", [WORDS * 3])


def test_safetensors_folder_rebuilds_the_model(run, tmp_path):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    export_run(run, "safetensors", tmp_path / "out")
    params = unflatten_dict(load_file(tmp_path / "out/model.safetensors"), sep=".")
    assert read_config(tmp_path / "out") == run.config
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (run.path / "tokenizer.json").read_bytes()
    assert jax.tree.structure(params) == jax.tree.structure(run.params)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), params, run.params)))


def test_dtypes_round_to_nearest(run, tmp_path):
    safe_open = pytest.importorskip("safetensors").safe_open
    expected = {"bfloat16": ("BF16", jnp.bfloat16), "float16": ("F16", np.float16)}
    W_out = np.asarray(run.params["W_out"])
    for dtype, (stored, scalar) in expected.items():
        export_run(run, "safetensors", tmp_path / dtype, dtype)
        with safe_open(tmp_path / dtype / "model.safetensors", "np") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}  # noqa: SIM118
        header, data = (tmp_path / dtype / "model.safetensors").read_bytes()[8:].split(b"}}", 1)
        start, end = json.loads(header + b"}}")["W_out"]["data_offsets"]
        W = np.frombuffer(data.lstrip(b" ")[start:end], scalar).reshape(W_out.shape)
        assert np.array_equal(W, W_out.astype(scalar))


def test_number_beyond_float16_is_refused_by_name(run, tmp_path):
    pytest.importorskip("safetensors")
    params = flatten_dict(run.params)
    params["blocks_0", "mlp", "W_1"] = params["blocks_0", "mlp", "W_1"].at[0, 0].set(1e5)
    with pytest.raises(UserError, match=r"blocks_0.mlp.W_1 has values up to 1e\+05, but float16 ends at 65504; use"):
        export_run(replace(run, params=unflatten_dict(params)), "safetensors", tmp_path / "out", "float16")
    assert not list(tmp_path.iterdir())


def test_existing_target_is_refused_and_unchanged(run, tmp_path):
    pytest.importorskip("safetensors")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out exists, and an export overwrites nothing; remove it, or choose another"):
        export_run(run, "safetensors", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_failed_export_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), complete_path(tmp_path / "deep/out") as path:
        path.mkdir()
        (path / "half").write_text("written")
        raise ZeroDivisionError
    assert not list((tmp_path / "deep").iterdir())


def test_target_that_appears_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(UserError, match="exists"), complete_path(tmp_path / "out") as path:
        path.mkdir()
        (tmp_path / "out").mkdir()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_target_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    message = r"file/out cannot be written: File exists; free some space, or choose another `out`\."
    with pytest.raises(UserError, match=message), complete_path(tmp_path / "file/out"):
        pass


def test_dangling_link_is_not_replaced(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UserError, match="link exists"), complete_path(tmp_path / "link"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["link"]


def test_full_disk_is_one_sentence_and_leaves_nothing(run, tmp_path):
    pytest.importorskip("safetensors")
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match="out cannot be written: File too large; free some space, or choose"):
            export_run(run, "safetensors", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
