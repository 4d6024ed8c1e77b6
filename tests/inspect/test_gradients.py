from dataclasses import replace
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect import PerExampleGradients, gradient_report, gradients_by_position, per_example_gradients
from jaxformer.inspect.gradients import EXAMPLES_PER_CHUNK, Row, noise_scale, update_grid
from jaxformer.models.objective import Params, objective_of
from jaxformer.models.recurrent_lm import RecurrentLMConfig
from jaxformer.nn.parameter_norms import in_order
from jaxformer.runs.run import parameter_order
from tests.arrays import build, normal, plain_decoder, random_tokens
from tests.inspect.test_activations import MODELS, T, V, random_model

CONFIG = plain_decoder(23, 7, 13, n_blocks=2, n_heads=3, n_kv_heads=1, head_dim=5, d_ff=(17,), norm="rmsnorm")
PARAMS = build(CONFIG)[1]
LR = 0.25


def like(params: Params, seed: int) -> Params:
    """Return the same structure with other numbers."""
    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, [normal(*leaf.shape, seed=seed + i) for i, leaf in enumerate(leaves)])


GRADS, UPDATES = like(PARAMS, 100), like(PARAMS, 200)
REPORT = gradient_report(PARAMS, GRADS, LR, UPDATES)
ROWS = {row.name: row for row in REPORT.rows}


def test_update_grid_has_a_line_per_block_and_columns_in_order() -> None:
    order = parameter_order(CONFIG.build())
    lines = update_grid(REPORT.rows, order, 0.00012).splitlines()
    assert lines[0].startswith("update ratios at learning rate 0.00012: norm of update / ")
    assert lines[1].split()[::2] == ["embedding.W_E", "embedding.W_pos"] and lines[-1].split()[0] == "W_out"
    columns = ["attention_norm", "W_Q", "W_K", "W_V", "W_O", "mlp_norm", "W_1", "b_1", "W_2", "b_2"]
    assert lines[2].split() == ["blocks", *columns]
    assert [line.split()[0] for line in lines[3:5]] == ["0", "1"] and len(lines) == 6
    assert max(map(len, lines)) <= 100
    cell = float(lines[4].split()[2].replace(",", ""))  # W_Q of the second block, its three heads together
    moved, weights = (tree["blocks_1"]["attention"]["W_Q"] for tree in (UPDATES, PARAMS))
    assert cell == pytest.approx(1e3 * np.linalg.norm(moved) / np.linalg.norm(weights), rel=5e-3)


def test_rows_come_in_the_order_of_the_computation_heads_in_theirs() -> None:
    names = [row.name for row in in_order(REPORT.rows, parameter_order(CONFIG.build())[:-1])]
    assert sorted(names) == sorted(ROWS)
    assert names[:3] == ["embedding.W_E", "embedding.W_pos", "blocks.0.attention_norm.gamma"]
    heads = [f"blocks.0.attention.heads.{h}.W_Q" for h in range(3)]
    assert names[3:8] == [*heads, "blocks.0.attention.heads.0.W_K", "blocks.0.attention.heads.0.W_V"]
    assert names[-1] == "W_out"  # which the order lacks


def test_update_grid_disambiguates_names_wraps_and_falls_back_to_u() -> None:
    names = [f"{stack}_blocks.0.{part}.W_Q" for stack in ("encoder", "decoder") for part in ("attention", "cross")]
    rows = [Row(name, 1.0, 1.0, u, None) for name, u in zip(names, (0.5, 1e-9, 0.0, inf), strict=True)]
    assert [line.split() for line in update_grid(rows, names, 1.0).splitlines()[1:]] == [
        ["encoder_blocks", "attention.W_Q", "cross.W_Q"], ["0", "500", "<0.001"],
        ["decoder_blocks", "attention.W_Q", "cross.W_Q"], ["0", "0.00", "inf"],
    ]  # fmt: skip
    names = [f"blocks.0.mlp.a_rather_long_name_{i}" for i in range(9)]
    lines = update_grid([Row(name, 1.0, 1.0, 0.1, 2.0) for name in names], names, 1.0).splitlines()
    assert max(map(len, lines)) <= 100 and sum(line.count("2,000") for line in lines) == 9


def test_report_has_a_row_per_parameter_and_head() -> None:
    per_block = {f"attention.heads.{h}.{name}" for h in range(3) for name in ("W_Q", "W_O")}
    per_block |= {"attention.heads.0.W_K", "attention.heads.0.W_V"}  # one key/value head
    per_block |= {f"mlp.{name}" for name in ("W_1", "b_1", "W_2", "b_2")} | {"attention_norm.gamma", "mlp_norm.gamma"}
    expected = {f"blocks.{i}.{name}" for i in (0, 1) for name in per_block}
    assert set(ROWS) == expected | {"embedding.W_E", "embedding.W_pos", "W_out"}
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
    expected = (g, w, LR * g / w, update / w) if w else (g, w, inf, inf)
    assert (row.grad_norm, row.param_norm, row.sgd_ratio, row.update_ratio) == pytest.approx(expected, rel=1e-5)


def test_report_without_updates_has_an_empty_column() -> None:
    report = gradient_report(PARAMS, GRADS, LR)
    assert {row.update_ratio for row in report.rows} == {None}
    assert [row.name for row in report.rows] == [row.name for row in REPORT.rows]


def test_report_has_no_column_without_values() -> None:
    alone = gradient_report(PARAMS, GRADS)
    assert repr(alone).splitlines()[0].split() == ["parameter", "g", "w", "g/w"]
    assert [row.sgd_ratio for row in alone.rows] == [row.sgd_ratio / LR for row in REPORT.rows]  # LR is a power of 2
    assert "update/w" not in repr(gradient_report(PARAMS, GRADS, LR))


def test_per_example_gradients_are_shown_on_a_screen() -> None:
    values = np.linspace(1, 2, 50)
    shown = repr(PerExampleGradients(values, values, values / 2, {"W": np.ones((50, 300))}, 1.5)).splitlines()
    assert shown[0].split() == ["example", "loss", "norm", "cosine"]
    assert shown[1].split() == ["0", "1", "1", "0.5"] and shown[-2] == "… 30 more"
    assert shown[-1].startswith("mean gradient: norm 1.5, noise scale") and len(shown) == 23


def test_zero_weights_have_infinite_ratios() -> None:
    zero, one = {"W": jnp.zeros(3)}, {"W": jnp.ones(3)}
    assert gradient_report(zero, one, LR).rows == (Row("W", pytest.approx(3**0.5), 0.0, inf, None),)
    assert gradient_report(zero, zero, LR, zero).rows == (Row("W", 0.0, 0.0, 0.0, 0.0),)


def test_report_prints_a_line_per_row_under_a_heading() -> None:
    heading, *lines = str(REPORT).splitlines()
    assert [line.split()[0] for line in lines] == [row.name for row in REPORT.rows]
    assert all(word in heading for word in ("parameter", "g", "w", "u = lr·g/w", "update/w"))
    row = ROWS["W_out"]
    (line,) = [line for line in lines if line.startswith("W_out ")]
    assert line.split()[1:] == [
        f"{value:.2e}" for value in (row.grad_norm, row.param_norm, row.sgd_ratio, row.update_ratio)
    ]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.slow
def test_per_example_gradients_agree_with_a_loop() -> None:
    """With weights that differ, and more examples than one chunk."""
    model, params, inputs = random_model(replace(MODELS["masked"], n_blocks=1))
    n, rng = EXAMPLES_PER_CHUNK + 2, np.random.default_rng(0)

    def others(x: jax.Array) -> jax.Array:
        if x.dtype == bool:
            return jnp.stack([x] * n)
        return jnp.asarray(rng.integers(0, V, (n, *x.shape)), x.dtype)

    weights = rng.uniform(0.1, 2, (n, T)).astype(np.float32)
    batch = Batch(tuple(map(others, inputs)), jnp.asarray(rng.integers(0, 3, (n, T)), jnp.int32), weights)
    grads = []
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
        result = per_example_gradients(model, params, batch)
        one = jax.jit(jax.value_and_grad(lambda p, example: objective_of(model).example_loss(model, p, example)))
        total_B = weights.sum(axis=1)
        alone = [one(params, jax.tree.map(lambda x, b=b: x[b], batch)) for b in range(n)]
    for b, (nats, grad) in enumerate(alone):
        grad = jax.tree.map(lambda g, b=b: np.asarray(g) / total_B[b], grad)
        assert result.loss_B[b] == pytest.approx(float(nats) / total_B[b], rel=1e-5)
        grads.append(np.concatenate([g.ravel() for g in jax.tree.leaves(grad)]))
        for row in gradient_report(params, grad, lr=1.0).rows if b in (0, n - 1) else ():
            part, _, head = row.name.partition(".heads.")
            if head:
                h, of_head = head.split(".")
                assert result.parameters[f"{part}.{of_head}"][b, int(h)] == pytest.approx(
                    row.grad_norm, rel=1e-5, abs=1e-7
                )
            else:
                assert result.parameters[row.name][b] == pytest.approx(row.grad_norm, rel=1e-5, abs=1e-7)
    g_BP = np.stack(grads)
    mean_P, norm_B = g_BP.mean(axis=0), np.linalg.norm(g_BP, axis=1)
    np.testing.assert_allclose(result.norm_B, norm_B, rtol=1e-5)
    np.testing.assert_allclose(result.cosine_B, g_BP @ mean_P / norm_B / np.linalg.norm(mean_P), rtol=1e-5, atol=1e-6)
    assert result.mean_norm == pytest.approx(np.linalg.norm(mean_P), rel=1e-5)
    trace = g_BP.var(axis=0, ddof=1).sum()  # of the covariance, without bias
    expected = trace / (mean_P @ mean_P - trace / n) if mean_P @ mean_P > trace / n else inf
    assert result.noise_scale == pytest.approx(expected, rel=1e-3)


def test_noise_scale_by_hand() -> None:
    """Of gradients (1, 0) and (1, 1): their mean is (1, 1/2), the trace of their covariance 1/2, and so |G|² is
    5/4 - 1/4. Of (1, 0) and (0, 1) it is 1/2 - 1/2. One example alone says nothing of noise."""
    assert noise_scale(np.sqrt([1.0, 2.0]), 1.25**0.5) == pytest.approx(0.5)
    assert noise_scale(np.array([1.0, 1.0]), 0.5**0.5 * (1 - 1e-12)) == inf
    assert np.isnan(noise_scale(np.array([1.0]), 1.0))


def test_gradients_by_position_are_those_of_backpropagation_through_time():
    """In float64 by hand, of a plain recurrent network that forgets: squares of the first norms are below float32's
    smallest number."""
    model, params = build(RecurrentLMConfig(V, T, "tanh", d_model=5))
    layer = params["layers_0"] = params["layers_0"] | {"U": params["layers_0"]["U"] * 1e-4}
    tokens_T = random_tokens(V, T + 1)
    norms = gradients_by_position(model, params, Batch((tokens_T[:-1],), tokens_T[1:], jnp.eye(T)[-1]))

    x_TD, W, U, b = (
        np.asarray(x, np.float64) for x in (params["embedding"]["W_E"], layer["W"], layer["U"], layer["b_W"])
    )
    h_TD = [np.zeros(5)]
    for x_D in x_TD[np.asarray(tokens_T[:-1])]:
        h_TD.append(np.tanh(x_D @ W[0] + b[0] + h_TD[-1] @ U[0]))
    W_out = np.asarray(params["W_out"], np.float64)
    p_V = np.exp(h_TD[-1] @ W_out)
    d_h, expected = W_out @ (p_V / p_V.sum() - np.eye(V)[tokens_T[-1]]), []
    for h_D in h_TD[:0:-1]:
        d_D = d_h * (1 - h_D**2)
        expected.insert(0, np.linalg.norm(W[0] @ d_D))
        d_h = U[0] @ d_D
    assert list(norms) == ["embed"] and expected[0] < 1e-22
    np.testing.assert_allclose(norms["embed"], expected, rtol=1e-3)
