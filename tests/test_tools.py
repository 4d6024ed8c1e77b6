"""Tools of the repository: what tells two checkouts apart, and what plants faults."""

import ast
import hashlib
import re

import numpy as np
import pytest

from jaxformer.cli.arguments import load_config
from tests.helpers import ROOT
from tools import planted_faults
from tools.equivalence import CLOSE, DIFFERENT, EQUAL, compare
from tools.equivalence_side import contents, shrink
from tools.faults import FAULTS, Fault
from tools.planted_faults import find, package_texts

TESTS = """
import time

import pytest
from jaxformer.numbers import HOURS, ONE

@pytest.mark.slow
def test_one():
    assert ONE == 1

@pytest.mark.slow
def test_hours():
    time.sleep(3600 * HOURS)
"""


def test_every_fault_can_be_planted_and_names_tests():
    texts = package_texts(ROOT)
    for name, fault in FAULTS.items():
        text = texts[find(fault, texts)]
        assert ast.dump(ast.parse(text.replace(fault.old, fault.new))) != ast.dump(ast.parse(text)), name
        for test in fault.tests:
            file, _, function = test.partition("::")
            assert f"def {function or 'test_'}" in (ROOT / file).read_text("utf-8"), test


@pytest.mark.slow
def test_a_selection_without_a_fault_s_tests_misses_it_and_a_hanging_test_catches_nothing(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "jaxformer").mkdir()
    (tmp_path / "jaxformer/__init__.py").touch()
    (tmp_path / "jaxformer/numbers.py").write_text("ONE = 1\nHOURS = 0\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_numbers.py").write_text(TESTS)
    (tmp_path / "tests/test_other.py").write_text("def test_of_a_checkout(): assert False\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -m 'not slow'\nmarkers = slow\n")
    faults = {
        "two": Fault("ONE = 1", "ONE = 2", ("tests/test_numbers.py",)),
        "slow": Fault("HOURS = 0", "HOURS = 1", ("tests/test_numbers.py::test_hours",)),
    }
    monkeypatch.setattr(planted_faults, "ROOT", tmp_path)
    monkeypatch.setattr(planted_faults, "FAULTS", faults)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take a second to load
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    assert planted_faults.main(["--run", "", "--run=-m ''", "--timeout", "30"]) == 1
    lines = [re.sub(r", \d+ s$| +", " ", line).strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "pytest:",
        "left out, as it fails without a fault: tests/test_other.py::test_of_a_checkout",
        "two MISSED",
        "slow MISSED",
        "0 of 2 faults are caught by pytest",
        "pytest -m '':",
        "two caught by tests/test_numbers.py::test_one",
        "slow NO RESULT in time",
        "1 of 2 faults are caught by pytest -m ''",
    ]


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
