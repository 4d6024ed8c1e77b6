"""Each published family computes what transformers computes: one test decides, and writes the table of docs/interop.md.

    pytest -m '' -n 0 tests/interop/test_families.py --families-table

compares all variations of each family, of which a run without the option takes the first, and writes their rows, each
with the worst of the forms of one `model_type` that it compares.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from jaxformer.interop.families import ENCODER_DECODERS, ENCODERS, FAMILIES
from tests.helpers import ROOT
from tests.interop import family_cases, vision_cases
from tests.interop.published import publish

PAGE = ROOT / "docs/interop.md"
ROW = re.compile(r"^\| `(\S+)` \|.*$", re.MULTILINE)
TABLE = re.compile(r"(<!-- families -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = """| `model_type` | published models | compared | worst difference |
|---|---|---|---|
"""
CASES = family_cases.CASES | vision_cases.CASES
GRADIENTS = {"Gemma2", "GptOss", "DeepseekV3", "Bloom", "Bert", "Albert", "T5", "DeiT", "Dinov2", "CLIP"}
"""Families whose gradients every run compares: those with soft caps and windows, experts and sinks, latents, biases of
positions, shared blocks, and what images have. Where the values are equal, a gradient is wrong only if a rule that
families share is, and with `--families-table` all are compared."""
N_VARIATIONS, LIMIT = 10, 1e-4
WORST: defaultdict[str, float] = defaultdict(float)
"""Worst difference so far by `model_type`."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of older fields, by transformers
@pytest.mark.parametrize("family", CASES)
def test_a_family_computes_what_transformers_computes(family: str, tmp_path: Path, request: pytest.FixtureRequest):
    case, writes = CASES[family], request.config.getoption("--families-table")
    worst = 0.0
    for i in range(N_VARIATIONS if writes else 1):
        theirs = publish(tmp_path / str(i), family, attn_implementation="eager", **case.variation(i))
        found = case.compare(theirs, tmp_path / str(i), writes or family in GRADIENTS)
        print(f"\n{family} {i}: {case.variation(i)}: {found}")
        worst = max(worst, *found.values())
        assert worst < LIMIT
    if writes:
        model_type = theirs.config.model_type
        WORST[model_type] = max(WORST[model_type], worst)
        write_row(model_type, f"{case.models} | {', '.join(found)} | {WORST[model_type]:.0e}")


def write_row(model_type: str, cells: str) -> None:
    """Write a family's row of the table."""
    text = PAGE.read_text(encoding="utf-8")
    rows = {**table_rows(), model_type: f"| `{model_type}` | {cells} |"}
    table = HEAD + "".join(f"{row}\n" for row in rows.values())
    PAGE.write_text(TABLE.sub(lambda match: match[1] + table + match[2], text), encoding="utf-8")


def table_rows() -> dict[str, str]:
    """Return the rows of the table, by model type."""
    match = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None
    return {row[1]: row[0] for row in ROW.finditer(match[0].removeprefix(match[1] + HEAD))}


def test_the_table_has_a_row_for_each_family():
    families: list[Any] = [*FAMILIES.values(), *ENCODERS.values(), *ENCODER_DECODERS.values()]
    assert table_rows().keys() == {family.model_type for family in families}
