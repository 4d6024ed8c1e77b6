from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inspect import gradient_report
from jaxformer.inspect.gradients import Row
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params
from tests.arrays import build, normal

CONFIG = DecoderConfig(
    23, 7, 13, n_blocks=2, n_heads=3, n_kv_heads=1, head_dim=5, output_projection=True, d_ff=(17,), norm="rmsnorm"
)
PARAMS = build(CONFIG)[1]
LR = 0.25


def like(params: Params, seed: int) -> Params:
    """The same structure with other numbers."""
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten([normal(*leaf.shape, seed=seed + i) for i, leaf in enumerate(leaves)])


GRADS, UPDATES = like(PARAMS, 100), like(PARAMS, 200)
REPORT = gradient_report(PARAMS, GRADS, LR, UPDATES)
ROWS = {row.name: row for row in REPORT.rows}


def test_every_parameter_has_a_row_and_heads_have_their_own() -> None:
    per_block = {f"attention.heads.{h}.{name}" for h in range(3) for name in ("W_Q", "W_O")}
    per_block |= {"attention.heads.0.W_K", "attention.heads.0.W_V"}  # one key/value head
    per_block |= {f"mlp.{name}" for name in ("W_1", "b_1", "W_2", "b_2")} | {"attention_norm.gamma", "mlp_norm.gamma"}
    wanted = {f"blocks.{i}.{name}" for i in (0, 1) for name in per_block}
    assert set(ROWS) == wanted | {"embedding.W_E", "embedding.W_pos", "W_out"}
    assert len(ROWS) == len(REPORT.rows)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("W_out", lambda p: p["W_out"]),
        ("blocks.1.mlp.b_1", lambda p: p["blocks_1"]["mlp"]["b_1"]),
        ("blocks.0.attention.heads.1.W_Q", lambda p: p["blocks_0"]["attention"]["W_Q"][:, 1]),
        ("blocks.1.attention.heads.0.W_K", lambda p: p["blocks_1"]["attention"]["W_K"][:, 0]),
        ("blocks.1.attention.heads.2.W_O", lambda p: p["blocks_1"]["attention"]["W_O"][2]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_norms_and_ratios_agree_with_numpy(name: str, part: object) -> None:
    w, g, update = (
        float(np.sqrt((np.asarray(part(tree), np.float64) ** 2).sum())) for tree in (PARAMS, GRADS, UPDATES)
    )
    row = ROWS[name]
    wanted = (g, w, LR * g / w, update / w) if w else (g, w, inf, inf)
    assert (row.g, row.w, row.u, row.update) == pytest.approx(wanted, rel=1e-5)


def test_without_updates_the_column_is_empty() -> None:
    report = gradient_report(PARAMS, GRADS, LR)
    assert {row.update for row in report.rows} == {None}
    assert [row.name for row in report.rows] == [row.name for row in REPORT.rows]


def test_zero_weights_give_no_division_error() -> None:
    zero, one = {"W": jnp.zeros(3)}, {"W": jnp.ones(3)}
    assert gradient_report(zero, one, LR).rows == (Row("W", pytest.approx(3**0.5), 0.0, inf, None),)
    assert gradient_report(zero, zero, LR, zero).rows == (Row("W", 0.0, 0.0, 0.0, 0.0),)


def test_the_table_has_a_line_for_each_row_under_a_heading() -> None:
    heading, *lines = str(REPORT).splitlines()
    assert [line.split()[0] for line in lines] == [row.name for row in REPORT.rows]
    assert all(word in heading for word in ("parameter", "g", "w", "u = lr·g/w", "update/w"))
    row = ROWS["W_out"]
    (line,) = [line for line in lines if line.startswith("W_out ")]
    assert line.split()[1:] == [f"{value:.2e}" for value in (row.g, row.w, row.u, row.update)]
    assert len({len(line) for line in lines}) == 1
