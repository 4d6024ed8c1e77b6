"""Tools for work on the project itself."""

import ast
import re

import pytest

from tests.helpers import ROOT
from tools import planted_faults
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
    assert planted_faults.main(["--run", "", "--run=-m ''", "--timeout", "10"]) == 1
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
