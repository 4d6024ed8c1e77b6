"""The step computed again: what it measures, what it names, what it leaves."""

import json
from dataclasses import asdict, replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.windows import next_token_batch
from jaxformer.inspect import Autopsy, first_non_finite, save_autopsy
from jaxformer.inspect.autopsy import AROUND, AT_ONCE, Row, Size, _measure_all, replay
from jaxformer.models import objective
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params, next_token_nll
from jaxformer.parameters import dotted
from tests.arrays import build, first_params, normal, random_tokens

CONFIG = DecoderConfig(
    23, 7, 13, n_blocks=2, n_heads=3, head_dim=5, output_projection=True, d_ff=(17,), norm="rmsnorm", final_norm=True
)
TOKENS = random_tokens(23, 3, 8)
BATCH = next_token_batch(TOKENS)
FIRST = jax.tree.map(lambda x: x[:1], BATCH)
each_dtype = pytest.mark.parametrize(
    "dtype", [None, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)


def damaged(largest: float, *path: str) -> tuple[nn.Module, Params]:
    """The small decoder with one parameter multiplied, so that its largest value becomes this."""
    model, params = build(CONFIG)
    *parents, name = path
    place = params
    for parent in parents:
        place = place[parent]
    place[name] = place[name] / jnp.abs(place[name]).max() * largest
    return model, params


def size_of(values: np.ndarray) -> list[float]:
    """Largest magnitude and root mean square, in float64."""
    values = np.asarray(values, np.float64)
    return [np.abs(values).max(), np.sqrt(np.mean(values**2))]


def sizes(size: Size) -> list[float]:
    return [size.largest, size.rms]


@pytest.mark.slow
def test_rows_are_what_the_model_gives_with_the_same_dropout_keys_in_the_order_of_the_calls():
    """More examples than are computed together, with some left over."""
    model, params = build(replace(CONFIG, n_blocks=1, dropout=0.5))
    n = AT_ONCE + 3
    batch, keys = random_tokens(23, n, 8), jax.random.split(jax.random.key(5), n)
    modules, parameters = replay(model, params, next_token_batch(batch), keys)

    @jax.jit
    @jax.vmap
    def one(tokens, key):
        apply = model.apply({"params": params}, tokens[:-1], rngs={"dropout": key}, capture_intermediates=True)
        return apply[1]["intermediates"]

    leaves = jax.tree_util.tree_leaves_with_path(one(batch, keys))
    outputs = {f".{dotted(path)}".split(".__call__")[0][1:]: leaf for path, leaf in leaves}
    outputs["the model (logits)"] = outputs.pop("")
    losses = jax.vmap(lambda p, t, k: next_token_nll(model, p, t, k).mean(), in_axes=(None, 0, 0))
    outputs["the loss"] = jax.jit(losses)(params, batch, keys)
    parts = ("attention_norm", "attention", "attention_dropout", "mlp_norm", "mlp", "mlp_dropout")
    block = [*(f"blocks.0.{part}" for part in parts), "blocks.0"]
    assert [row.name for row in modules] == ["embedding", *block, "final_norm", "the model (logits)", "the loss"]
    for row in modules:
        np.testing.assert_allclose(sizes(row.value), size_of(outputs[row.name]), rtol=1e-5, err_msg=row.name)

    grads = jax.jit(jax.grad(lambda p: jnp.mean(losses(p, batch, keys))))(params)
    expected = {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}
    assert {row.name for row in parameters} == expected.keys()
    for row in parameters:
        np.testing.assert_allclose(sizes(row.gradient), size_of(expected[row.name]), rtol=1e-4, err_msg=row.name)
    assert {size.non_finite for row in (*modules, *parameters) for size in (row.value, row.gradient)} == {0}


@pytest.mark.slow
def test_examples_with_many_logits_are_computed_one_by_one(monkeypatch):
    model, params = build(replace(CONFIG, vocab_size=29, n_blocks=1))  # no other test has compiled this
    batch = next_token_batch(random_tokens(29, 3, 8))
    names = tuple(row.name for row in replay(model, params, batch)[0])
    sizes_asked, lax_map = [], jax.lax.map
    monkeypatch.setattr(jax.lax, "map", lambda *given, batch_size: sizes_asked.append(batch_size) or lax_map(*given))
    found = []
    for limit in (objective.MAX_LOGITS_PER_CHUNK, 7 * 29):
        monkeypatch.setattr(objective, "MAX_LOGITS_PER_CHUNK", limit)
        _measure_all.clear_cache()  # also of what other tests compile, therefore this one comes before them
        found.append(_measure_all(model, names, params, batch, None))
    together, alone = found
    assert sizes_asked == [AT_ONCE, 1]
    assert "the model (logits)" in names and "final_norm" in names
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), alone, together)


class Linear(nn.Module):
    """A matrix, and a number that goes along."""

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


def test_gradients_of_outputs_are_those_of_the_mean_loss_of_the_batch():
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


@pytest.mark.slow
def test_sizes_are_right_where_squares_overflow_and_what_is_not_finite_is_only_counted():
    model, params = damaged(3e38, "blocks_1", "mlp", "W_1")
    rows = {row.name: row for row in replay(model, params, BATCH)[1]}
    W = np.asarray(params["blocks_1"]["mlp"]["W_1"])
    np.testing.assert_allclose(sizes(rows["blocks.1.mlp.W_1"].value), size_of(W), rtol=1e-5)
    assert rows["blocks.1.mlp.W_1"].gradient.non_finite > 0
    params["W_out"] = params["W_out"].at[0, :2].set([jnp.inf, jnp.nan])
    W_out = {row.name: row for row in replay(model, params, BATCH)[1]}["W_out"].value
    assert W_out.non_finite == 2
    np.testing.assert_allclose(sizes(W_out), size_of(np.asarray(params["W_out"]).ravel()[[*range(2, 13 * 23)]]), 1e-5)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_batch():
    """But for the records: 2 · 4 numbers a module and example, and the tokens."""
    model, params = TwoLayers(), {name: {"W": normal(11, 11)} for name in ("square", "out")}
    names = tuple(row.name for row in replay(model, params, next_token_batch(random_tokens(11, 4, 6)))[0])
    few, many = (
        _measure_all.lower(model, names, params, next_token_batch(random_tokens(11, n, 200)), None)
        .compile()
        .memory_analysis()
        for n in (2 * AT_ONCE, 20 * AT_ONCE)
    )
    records = 18 * AT_ONCE * (len(names) * 2 * 4 + 200) * 4
    assert many.temp_size_in_bytes - few.temp_size_in_bytes <= 2 * records
    assert 2 * records < 18 * AT_ONCE * 199 * 11 * 4  # what one array of activations would take


def test_a_finite_model_has_nothing_to_name():
    assert first_non_finite(*build(CONFIG), BATCH) is None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_damaged_parameter_is_named(value):
    found = first_non_finite(*damaged(value, "blocks_1", "attention", "W_K"), BATCH)
    assert found.origin == "the parameter blocks.1.attention.W_K"
    assert found.modules[found.at].name == "blocks.1.attention"


@each_dtype
@pytest.mark.parametrize(
    ("path", "module"),
    [
        (("blocks_0", "mlp", "W_1"), "blocks.0.mlp"),
        (("blocks_1", "attention", "W_V"), "blocks.1.attention"),
        (("blocks_1", "mlp_norm", "gamma"), "blocks.1.mlp_norm"),
        (("W_out",), "the model (logits)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_module_to_overflow_is_named(path, module, dtype):
    model, params = damaged(3e38, *path)  # both dtypes end at 3.4e38
    found = first_non_finite(model, params, BATCH, compute_dtype=dtype)
    assert (found.origin, found.direction) == (f"the output of {module}", "forward")
    before, here = found.modules[: found.at], found.modules[found.at]
    assert here.name == module and here.value.non_finite > 0
    assert all(row.value.non_finite == 0 for row in before)


@pytest.mark.slow
def test_the_dtype_of_the_step_decides():
    """Beyond 65,504 float16 ends."""
    model, tokens = TwoLayers(), random_tokens(11, 4, 6)
    params = {"square": {"W": jnp.full((11, 11), 200.0)}, "out": {"W": normal(11, 11) / 1e6}}
    assert first_non_finite(model, params, next_token_batch(tokens), compute_dtype=jnp.bfloat16) is None
    found = first_non_finite(model, params, next_token_batch(tokens), compute_dtype=jnp.float16)
    assert found.origin == "the output of square (call 2)"  # 11 · 200²
    params["square"]["W"] *= 400  # now the matrix itself
    assert first_non_finite(model, params, next_token_batch(tokens)) is None
    found = first_non_finite(model, params, next_token_batch(tokens), compute_dtype=jnp.float16)
    assert found.origin == "the parameter square.W"


class Table(nn.Module):
    """Logits that are a function of a row of a table."""

    first: float
    root: bool = False

    @nn.compact
    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        W = self.param("W", nn.initializers.constant(self.first), (23, 23))
        return jnp.sqrt(W[tokens_T]) if self.root else W[tokens_T] * jnp.where(jnp.arange(23) % 2, 1, -1)


def test_a_loss_that_overflows_alone_is_named():
    model = Table(3e38)  # logits of ±3e38 are finite, their differences are not
    params = first_params(model, TOKENS[0])
    found = first_non_finite(model, params, BATCH)
    assert (found.origin, found.direction) == ("the loss", "forward")
    np.testing.assert_allclose(found.modules[found.at - 1].value.largest, 3e38, rtol=1e-6)


def test_a_gradient_of_a_parameter_that_is_infinite_alone_is_named():
    model = Table(0.0, root=True)  # √0 is 0, its slope is infinite
    params = first_params(model, TOKENS[0])
    found = first_non_finite(model, params, BATCH)
    assert (found.origin, found.direction) == ("the gradient of W", "backward")
    assert found.modules[found.at].name == "the model (logits)"


class UnitNorm(nn.Module):
    """A vector over its length, kept from dividing by zero by a bound on the length: sound forward, but not
    backward, where the length of a zero vector has a slope of 0 / 0."""

    @nn.compact
    def __call__(self, x_TD: jax.Array) -> jax.Array:
        return x_TD / jnp.maximum(jnp.linalg.norm(x_TD, axis=-1, keepdims=True), 1e-6)


class Layers(nn.Module):
    """Embedding, a layer with a residual, dropout, a norm, another layer, logits."""

    @nn.compact
    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        x_TD = nn.Embed(23, 5, name="embedding")(tokens_T)
        x_TD = x_TD + nn.Dense(5, use_bias=False, name="first")(x_TD)
        if self.has_rng("dropout"):
            x_TD = nn.Dropout(0.9, deterministic=False, name="dropout")(x_TD)
        x_TD = UnitNorm(name="norm")(x_TD)
        return nn.Dense(23, name="out")(nn.Dense(5, name="second")(x_TD))


def layers(zeroed: int | None) -> tuple[nn.Module, Params]:
    """The model, with the vector of a token set to zero."""
    model = Layers()
    params = first_params(model, TOKENS[0])
    if zeroed is not None:
        table = params["embedding"]["embedding"]
        params["embedding"]["embedding"] = table.at[zeroed].set(0.0)
    return model, params


@each_dtype
def test_what_is_finite_forward_alone_is_named_with_the_module_whose_backward_pass_broke(dtype):
    model, params = layers(zeroed=int(TOKENS[1, 2]))
    found = first_non_finite(model, params, BATCH, compute_dtype=dtype)
    assert (found.origin, found.direction) == ("the gradient that norm passes back to first", "backward")
    assert found.modules[found.at].name == "norm"
    assert all(row.value.non_finite == 0 for row in found.modules)
    assert {row.name for row in found.modules if row.gradient.non_finite} == {"embedding", "first"}
    assert {row.name for row in found.parameters if row.gradient.non_finite} == {
        "embedding.embedding", "first.kernel",
    }  # fmt: skip


@pytest.mark.slow
def test_dropout_is_that_of_the_keys():
    """At 0.9 of 5 numbers a whole vector is dropped now and then, and its length has no slope."""
    model, params = layers(zeroed=None)
    keep = lambda key: jnp.any(  # noqa: E731
        model.apply({"params": params}, TOKENS[0, :-1], rngs={"dropout": key}, capture_intermediates=True)[1][
            "intermediates"
        ]["dropout"]["__call__"][0] != 0, axis=-1,
    ).all()  # fmt: skip
    keys = jax.random.split(jax.random.key(0), 4000)
    whole = np.asarray(jax.jit(jax.vmap(keep))(keys))
    assert 0 < whole.sum() < 4000  # 7 positions survive with probability 0.41^7 = 0.2 %
    good, bad = (keys[int(np.flatnonzero(whole == wanted)[0])][None] for wanted in (True, False))
    assert first_non_finite(model, params, FIRST) is None
    assert first_non_finite(model, params, FIRST, good) is None
    assert first_non_finite(model, params, FIRST, bad).origin == "the gradient that norm passes back to dropout"


def test_the_table_shows_rows_around_the_culprit_and_its_parameters():
    found = first_non_finite(*damaged(3e38, "blocks_1", "mlp", "W_1"), BATCH)
    lines = str(found).splitlines()
    assert lines[0] == "the output of blocks.1.mlp, forward"
    marked = [line for line in lines if line.startswith(">")]
    assert len(marked) == 1 and marked[0].split()[1] == "blocks.1.mlp"
    at = lines.index(marked[0])
    names = [row.name for row in found.modules]
    for i in range(-AROUND, 4):  # down to the loss
        assert lines[at + i].lstrip("> ").startswith(names[found.at + i] + " ")
    assert names[found.at - AROUND - 1] not in str(found)
    assert [line.split()[0] for line in lines[-4:]] == [f"blocks.1.mlp.{name}" for name in ("W_1", "W_2", "b_1", "b_2")]
    row = found.modules[found.at]
    assert f"{row.value.largest:.2e}" in marked[0] and f" {row.value.non_finite} " in marked[0]


SIZE = Size(1.0, 0.5, 0)
REPORT = Autopsy("the loss", "forward", 1, (Row("the model (logits)", SIZE, SIZE), Row("the loss", SIZE, SIZE)), ())


def test_the_evidence_lies_whole_in_the_folder_of_the_step(tmp_path):
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 3)))
    batch = jax.tree.map(np.asarray, BATCH)
    place = save_autopsy(tmp_path, 7, batch, keys, REPORT, "attention: xla")
    assert place == tmp_path / "autopsy/step-7"
    assert [p.name for p in place.parent.iterdir()] == ["step-7"]
    stored = np.load(place / "batch.npz")
    assert sorted(stored) == ["inputs.0", "targets"]
    np.testing.assert_array_equal(stored["inputs.0"], batch.inputs[0])
    np.testing.assert_array_equal(stored["targets"], batch.targets)
    np.testing.assert_array_equal(np.load(place / "key.npy"), keys)
    text = (place / "report.txt").read_text()
    assert "First: the loss, forward" in text and "checkpoint 6" in text and str(REPORT) in text
    assert "with the step's attention: xla." in text
    stored = json.loads((place / "report.json").read_text())
    assert stored == {"step": 7, "how": "attention: xla", "autopsy": json.loads(json.dumps(asdict(REPORT)))}


def test_a_second_try_at_a_step_replaces_the_first_and_one_that_fails_leaves_it(tmp_path, monkeypatch):
    save_autopsy(tmp_path, 7, BATCH, np.zeros((3, 2), np.uint32), REPORT, "")
    place = save_autopsy(tmp_path, 7, jax.tree.map(lambda x: x + 1, BATCH), None, None, "")
    assert sorted(p.name for p in place.iterdir()) == ["batch.npz", "report.json", "report.txt"]
    assert json.loads((place / "report.json").read_text()) == {"step": 7, "how": "", "autopsy": None}

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        save_autopsy(tmp_path, 7, BATCH, None, REPORT, "")
    assert [p.name for p in place.parent.iterdir()] == ["step-7"]
    np.testing.assert_array_equal(np.load(place / "batch.npz")["targets"], BATCH.targets + 1)
