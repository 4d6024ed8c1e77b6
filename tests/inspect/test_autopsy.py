"""Autopsies: measurements of a replay, the first value that is not finite, and the files written."""

import json
from dataclasses import asdict, replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.windows import next_token_batch
from jaxformer.inspect import Autopsy, first_non_finite, save_autopsy
from jaxformer.inspect.autopsy import CONTEXT_ROWS, EXAMPLES_PER_CHUNK, Magnitude, Row, _measure, _measure_all, replay
from jaxformer.models.objective import Params
from jaxformer.nn.parameter_norms import dotted
from tests.arrays import build, first_params, normal, plain_decoder, random_tokens

CONFIG = plain_decoder(23, 7, 13, n_blocks=1, n_heads=3, head_dim=5, d_ff=(17,), norm="rmsnorm", final_norm=True)
TOKENS = random_tokens(23, 3, 8)
BATCH = next_token_batch(TOKENS)


def damaged(largest: float, *path: str) -> tuple[nn.Module, Params]:
    """Return the small decoder with one parameter scaled so that its largest magnitude is this."""
    model, params = build(CONFIG)
    *parents, name = path
    tree = params
    for parent in parents:
        tree = tree[parent]
    tree[name] = tree[name] / jnp.abs(tree[name]).max() * largest
    return model, params


def size_of(values: np.ndarray) -> list[float]:
    """Return largest magnitude and root mean square, in float64."""
    values = np.asarray(values, np.float64)
    return [np.abs(values).max(), np.sqrt(np.mean(values**2))]


def sizes(size: Magnitude) -> list[float]:
    return [size.largest, size.rms]


@pytest.mark.slow
def test_replay_rows_agree_with_the_model_in_the_order_of_calls():
    """With more examples than a chunk, and a remainder."""
    model, params = build(replace(CONFIG, dropout=0.5))
    n = EXAMPLES_PER_CHUNK + 3
    batch, keys = random_tokens(23, n, 8), jax.random.split(jax.random.key(5), n)
    modules, parameters = replay(model, params, next_token_batch(batch), keys)

    def one(params, tokens, key):
        rngs = {"dropout": key}
        logits, own = model.apply({"params": params}, tokens[:-1], rngs=rngs, capture_intermediates=True)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], axis=1)
        return nll.mean(), own["intermediates"]

    def mean(params):
        losses, own = jax.vmap(one, in_axes=(None, 0, 0))(params, batch, keys)
        return losses.mean(), (losses, own)

    (_, (losses, own)), grads = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    leaves = jax.tree_util.tree_leaves_with_path(own)
    outputs = {f".{dotted(path)}".split(".__call__")[0][1:]: leaf for path, leaf in leaves}
    outputs["the model (logits)"] = outputs.pop("")
    outputs["the loss"] = losses
    parts = ("attention_norm", "attention", "attention_dropout", "mlp_norm", "mlp", "mlp_dropout")
    block = [*(f"blocks.0.{part}" for part in parts), "blocks.0"]
    assert [row.name for row in modules] == ["embedding", *block, "final_norm", "the model (logits)", "the loss"]
    for row in modules:
        np.testing.assert_allclose(sizes(row.value), size_of(outputs[row.name]), rtol=1e-5, err_msg=row.name)

    expected = {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}
    assert {row.name for row in parameters} == expected.keys()
    for row in parameters:
        np.testing.assert_allclose(sizes(row.gradient), size_of(expected[row.name]), rtol=1e-4, err_msg=row.name)
    assert {size.non_finite for row in (*modules, *parameters) for size in (row.value, row.gradient)} == {0}


class Linear(nn.Module):
    """A matrix product, and a number beside it."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        W = self.param("W", nn.initializers.normal(1.0), (x.shape[-1], self.width))
        return x.astype(W.dtype) @ W, jnp.arange(3)


class TwoLayers(nn.Module):
    """Token one-hot, twice through a square matrix (the same), and to logits."""

    @nn.compact
    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        square = Linear(11, name="square")
        x, _ = square(jax.nn.one_hot(tokens_T, 11))
        x, _ = square(x)
        return Linear(11, name="out")(x)[0]


def test_gradients_of_outputs_agree_with_those_by_hand():
    """By hand: (softmax - one-hot) / (B·T) at the logits, and back through the matrices."""
    model, tokens = TwoLayers(), random_tokens(11, 4, 6)
    params = {name: {"W": normal(11, 11, seed=i) / 3} for i, name in enumerate(("square", "out"))}
    modules, _ = replay(model, params, next_token_batch(tokens))
    W, W_out = (np.asarray(params[name]["W"], np.float64) for name in ("square", "out"))
    logits = np.eye(11)[tokens[:, :-1]] @ W @ W @ W_out
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    at_logits = (softmax - np.eye(11)[tokens[:, 1:]]) / (4 * 5)
    expected = {
        "square": at_logits @ W_out.T @ W.T,
        "square (call 2)": at_logits @ W_out.T,
        "out": at_logits,
        "the model (logits)": at_logits,
        "the loss": np.full(4, 1 / 4),
    }
    assert [row.name for row in modules] == list(expected)
    for row in modules:
        np.testing.assert_allclose(sizes(row.gradient), size_of(expected[row.name]), rtol=1e-4, err_msg=row.name)


def test_first_output_or_parameter_that_is_not_finite_is_the_origin():
    model, batch = TwoLayers(), next_token_batch(random_tokens(11, 4, 6))
    W, large = normal(11, 11), np.full((11, 11), 1e20, np.float32)
    result = first_non_finite(model, {"square": {"W": large}, "out": {"W": W}}, batch)
    assert (result.origin, result.direction) == ("the output of square (call 2)", "forward")  # 11 · 1e40
    broken = np.where(np.arange(11) == 3, np.nan, W)
    result = first_non_finite(model, {"square": {"W": W}, "out": {"W": broken}}, batch)
    assert result.origin == "the parameter out.W"
    assert first_non_finite(model, {"square": {"W": W}, "out": {"W": W}}, batch) is None


@pytest.mark.slow
def test_magnitudes_are_exact_where_squares_overflow():
    model, params = damaged(3e38, "blocks_0", "mlp", "W_1")
    rows = {row.name: row for row in replay(model, params, BATCH)[1]}
    W = np.asarray(params["blocks_0"]["mlp"]["W_1"])
    np.testing.assert_allclose(sizes(rows["blocks.0.mlp.W_1"].value), size_of(W), rtol=1e-5)
    assert rows["blocks.0.mlp.W_1"].gradient.non_finite > 0
    params["W_out"] = params["W_out"].at[0, :2].set([jnp.inf, jnp.nan])
    W_out = {row.name: row for row in replay(model, params, BATCH)[1]}["W_out"].value
    assert W_out.non_finite == 2
    np.testing.assert_allclose(sizes(W_out), size_of(np.asarray(params["W_out"]).ravel()[[*range(2, 13 * 23)]]), 1e-5)


@pytest.mark.slow
def test_memory_of_a_replay_is_independent_of_the_batch_size():
    """Except for the records, 2 · 4 numbers per module and example, and the tokens."""
    model, params = TwoLayers(), {name: {"W": normal(11, 11)} for name in ("square", "out")}
    names = tuple(row.name for row in replay(model, params, next_token_batch(random_tokens(11, 4, 6)))[0])
    batch = next_token_batch(random_tokens(11, 40 * EXAMPLES_PER_CHUNK, 200))
    memory = _measure_all.lower(model, names, params, batch, None).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 40 * EXAMPLES_PER_CHUNK * 199 * 11 * 4  # one array of activations


@pytest.mark.slow
def test_first_module_to_overflow_is_the_origin():
    result = first_non_finite(*damaged(3e38, "blocks_0", "attention", "W_V"), BATCH)
    assert (result.origin, result.direction) == ("the output of blocks.0.attention", "forward")
    before, here = result.modules[: result.index], result.modules[result.index]
    assert here.name == "blocks.0.attention" and here.value.non_finite > 0
    assert all(row.value.non_finite == 0 for row in before)


@pytest.mark.slow
def test_overflow_depends_on_the_compute_dtype():
    """The largest float16 is 65,504."""
    model, tokens = TwoLayers(), random_tokens(11, 4, 6)
    params = {"square": {"W": jnp.full((11, 11), 200.0)}, "out": {"W": normal(11, 11) / 1e6}}
    assert first_non_finite(model, params, next_token_batch(tokens), compute_dtype=jnp.bfloat16) is None
    result = first_non_finite(model, params, next_token_batch(tokens), compute_dtype=jnp.float16)
    assert result.origin == "the output of square (call 2)"  # 11 · 200²
    params["square"]["W"] *= 400  # now the matrix itself
    assert first_non_finite(model, params, next_token_batch(tokens)) is None
    result = first_non_finite(model, params, next_token_batch(tokens), compute_dtype=jnp.float16)
    assert result.origin == "the parameter square.W"


class Table(nn.Module):
    """Logits that are a function of a row of a table."""

    first: float
    root: bool = False

    @nn.compact
    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        W = self.param("W", nn.initializers.constant(self.first), (23, 23))
        return jnp.sqrt(W[tokens_T]) if self.root else W[tokens_T] * jnp.where(jnp.arange(23) % 2, 1, -1)


@pytest.mark.slow
def test_overflow_of_the_loss_alone_is_the_origin():
    model = Table(3e38)  # logits of ±3e38 are finite, their differences are not
    params = first_params(model, TOKENS[0])
    result = first_non_finite(model, params, BATCH)
    assert (result.origin, result.direction) == ("the loss", "forward")
    np.testing.assert_allclose(result.modules[result.index - 1].value.largest, 3e38, rtol=1e-6)


def test_infinite_gradient_of_a_parameter_alone_is_the_origin():
    model = Table(0.0, root=True)  # √0 is 0, its slope is infinite
    params = first_params(model, TOKENS[0])
    result = first_non_finite(model, params, BATCH)
    assert (result.origin, result.direction) == ("the gradient of W", "backward")
    assert result.modules[result.index].name == "the model (logits)"


class UnitNorm(nn.Module):
    """A vector over its norm, bounded below: finite forward for a zero vector, but 0 / 0 backward, as the norm's
    derivative."""

    @nn.compact
    def __call__(self, x_TD: jax.Array) -> jax.Array:
        return x_TD / jnp.maximum(jnp.linalg.norm(x_TD, axis=-1, keepdims=True), 1e-6)


class Layers(nn.Module):
    """Embedding, a layer with a residual, a norm, another layer, logits."""

    @nn.compact
    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        x_TD = nn.Embed(23, 5, name="embedding")(tokens_T)
        x_TD = x_TD + nn.Dense(5, use_bias=False, name="first")(x_TD)
        x_TD = UnitNorm(name="norm")(x_TD)
        return nn.Dense(23, name="out")(nn.Dense(5, name="second")(x_TD))


@pytest.mark.slow
def test_module_whose_backward_pass_broke_is_the_origin():
    """Where the embedding of a token is zero."""
    model = Layers()
    params = first_params(model, TOKENS[0])
    params["embedding"]["embedding"] = params["embedding"]["embedding"].at[TOKENS[1, 2]].set(0.0)
    result = first_non_finite(model, params, BATCH)
    assert (result.origin, result.direction) == ("the gradient that norm passes back to first", "backward")
    assert result.modules[result.index].name == "norm"
    assert all(row.value.non_finite == 0 for row in result.modules)
    assert {row.name for row in result.modules if row.gradient.non_finite} == {"embedding", "first"}
    assert {row.name for row in result.parameters if row.gradient.non_finite} == {
        "embedding.embedding", "first.kernel",
    }  # fmt: skip


@pytest.mark.slow
def test_table_shows_rows_around_the_origin_and_its_parameters():
    result = first_non_finite(*damaged(3e38, "final_norm", "gamma"), BATCH)
    lines = repr(result).splitlines()
    assert lines[0] == "the output of final_norm, forward"
    marked = [line for line in lines if line.startswith(">")]
    assert len(marked) == 1 and marked[0].split()[1] == "final_norm"
    at = lines.index(marked[0])
    names = [row.name for row in result.modules]
    for i in range(-CONTEXT_ROWS, 3):  # down to the loss
        assert lines[at + i].lstrip("> ").startswith(names[result.index + i] + " ")
    assert names[result.index - CONTEXT_ROWS - 1] not in str(result)
    assert lines[-1].split()[0] == "final_norm.gamma"
    row = result.modules[result.index]
    assert f"{row.value.largest:.2e}" in marked[0] and f" {row.value.non_finite} " in marked[0]


MAGNITUDE = Magnitude(1.0, 0.5, 0)
REPORT = Autopsy(
    "the loss",
    "forward",
    1,
    (Row("the model (logits)", MAGNITUDE, MAGNITUDE), Row("the loss", MAGNITUDE, MAGNITUDE)),
    (),
)


def test_save_autopsy_writes_batch_keys_and_report(tmp_path):
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 3)))
    batch = jax.tree.map(np.asarray, BATCH)
    path = save_autopsy(tmp_path, 7, batch, keys, REPORT, "attention: xla")
    assert path == tmp_path / "autopsy/step-7"
    assert [p.name for p in path.parent.iterdir()] == ["step-7"]
    stored = np.load(path / "batch.npz")
    assert sorted(stored) == ["inputs.0", "targets"]
    np.testing.assert_array_equal(stored["inputs.0"], batch.inputs[0])
    np.testing.assert_array_equal(stored["targets"], batch.targets)
    np.testing.assert_array_equal(np.load(path / "key.npy"), keys)
    text = (path / "report.txt").read_text()
    assert "First non-finite value: the loss, forward" in text and "checkpoint 6" in text and str(REPORT) in text
    assert "with the step's attention: xla." in text
    stored = json.loads((path / "report.json").read_text())
    assert stored == {"step": 7, "execution": "attention: xla", "autopsy": json.loads(json.dumps(asdict(REPORT)))}


def test_save_autopsy_replaces_an_earlier_one_atomically(tmp_path, monkeypatch):
    save_autopsy(tmp_path, 7, BATCH, np.zeros((3, 2), np.uint32), REPORT, "")
    path = save_autopsy(tmp_path, 7, jax.tree.map(lambda x: x + 1, BATCH), None, None, "")
    assert sorted(p.name for p in path.iterdir()) == ["batch.npz", "report.json", "report.txt"]
    assert json.loads((path / "report.json").read_text()) == {"step": 7, "execution": "", "autopsy": None}

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        save_autopsy(tmp_path, 7, BATCH, None, REPORT, "")
    assert [p.name for p in path.parent.iterdir()] == ["step-7"]
    np.testing.assert_array_equal(np.load(path / "batch.npz")["targets"], BATCH.targets + 1)


@pytest.mark.parametrize("largest", [1e39, 1e300])
def test_values_beyond_float32_are_finite_in_float64(largest):
    with jax.enable_x64(True):
        measured = np.asarray(_measure({"w": jnp.array([largest, -3.0, jnp.nan, jnp.inf])}))
    np.testing.assert_allclose(measured, [largest, largest / np.sqrt(2), 2, 2], rtol=1e-12)
