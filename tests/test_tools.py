"""Tools of the repository: what tells two checkouts apart."""

import hashlib

import numpy as np
import pytest

from jaxformer.cli.arguments import load_config
from tools.equivalence import CLOSE, DIFFERENT, EQUAL, compare
from tools.equivalence_side import contents, shrink


@pytest.mark.parametrize(
    ("base", "ours", "verdict"),
    [
        (np.float64([3.0, np.nan]), np.float64([3.0, np.nan]), EQUAL),
        (np.float32(300), np.float32(300.0002), CLOSE),  # 0.7 millionths of the value
        (np.float32(300), np.float32(300.0005), DIFFERENT),
        (np.float64(0.0), np.float64(-0.0), CLOSE),  # other bits
        (np.float64(0.0), np.float64(2e-6), DIFFERENT),
        (np.float32([1.0]), np.float64([1.0]), DIFFERENT),
        (np.float32([1.0]), np.float32([[1.0]]), DIFFERENT),
        (np.array("the sea"), np.array("the sea."), DIFFERENT),
    ],
)
def test_values_are_compared_by_their_bits_and_then_by_the_tolerance(base, ours, verdict):
    one = {"losses|": np.float64([5.0, 4.0]), "parameters|W": np.asarray(base), "parameters|b": np.float32([0.5])}
    other = one | {"parameters|W": np.asarray(ours)}
    verdicts = compare(one, other)
    assert {quantity: verdict for quantity, (verdict, _) in verdicts.items()} == {
        "losses": EQUAL,
        "parameters": verdict,
    }
    assert verdicts["losses"][1] == "" and verdicts["parameters"][1].startswith("" if verdict == EQUAL else "W")


def test_a_quantity_that_one_side_lacks_is_different():
    base, ours = {"parameters|W": np.zeros(1)}, {"parameters|V": np.zeros(1), "samples|": np.array("")}
    assert compare(base, ours) == {
        "parameters": (DIFFERENT, "only in the base: ['W']; only here: ['V']"),
        "samples": (DIFFERENT, "only in the base: []; only here: ['']"),
    }


def test_models_to_compare_are_small_and_of_the_same_kind():
    options = {name: values for name, *values in shrink(load_config("gpt:llama_70b").model)}
    assert options["--model.n-heads"] == ["4"] and options["--model.n-kv-heads"] == ["2"]
    assert options["--model.d-ff"] == ["48"] and "--model.head-dim" not in options  # as wide as d_model allows
    towers = [name for name, *_ in shrink(load_config("clip").model)]
    assert {"--model.vision.d-model", "--model.text.vocab-size", "--model.d-joint"} <= {*towers}


def test_files_to_compare_are_read_as_tensors_and_values(tmp_path):
    pytest.importorskip("safetensors.numpy").save_file(
        {"W": np.float32([[1, 2]])}, tmp_path / "a.safetensors", {"format": "pt"}
    )
    np.savez(tmp_path / "b.npz", W=np.float32([3]))
    (tmp_path / "c.json").write_text('{"model": {"n": 1, "d_ff": [2, 3]}, "name": "x"}')
    (tmp_path / "d.md").write_text("text")
    found = [{key: value.tolist() for key, value in contents(file).items()} for file in sorted(tmp_path.iterdir())]
    assert found == [
        {"metadata": '{"format": "pt"}', "W F32": [1, 2], "W shape": [1, 2]},
        {"W": [3]},
        {".model.n": "1", ".model.d_ff": "[2, 3]", ".name": '"x"'},
        {"": hashlib.sha256(b"text").hexdigest()},
    ]
