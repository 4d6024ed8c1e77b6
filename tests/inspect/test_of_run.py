"""Instruments accept a run in place of a model and its parameters, and texts in place of tokens and examples."""

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer.inspect
from jaxformer.data.dataset import Batch
from jaxformer.inspect import capture_gradients, logit_lens
from jaxformer.inspect.of_run import of_run
from jaxformer.nn.capture import capture_point
from jaxformer.runs.run import Run
from tests.inspect.test_activations import MODELS
from tests.runs.random_runs import random_run

TEXTS = ["The cat sees.", "A cat sees the sea."]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return random_run(tmp_path_factory.mktemp("runs") / "a", TEXTS)


@of_run
def instrument(
    model: Any, params: Any, *inputs_B: Any, target_mask_BT: Any = None, tokens: Any = None, inputs: Any = None,
    texts: Any = None, tokens_BT: Any = None, example: Any = None, batch: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Return its arguments."""
    return {name: x for name, x in locals().items() if x is not None}


def code_of(function: Any) -> Any:
    return getattr(function, "__code__", None)


def equal(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_every_instrument_of_a_model_accepts_a_run():
    functions = {name: getattr(jaxformer.inspect, name) for name in jaxformer.inspect.__all__}
    of_models = {
        name for name, f in functions.items()
        if inspect.isfunction(inspect.unwrap(f)) and [*inspect.signature(f).parameters][:2] == ["model", "params"]
    }  # fmt: skip
    accepting = {name for name in of_models if code_of(functions[name]) is code_of(instrument)}
    assert of_models == accepting and len(accepting) > 25


def test_a_run_stands_for_its_model_and_parameters_and_a_text_for_its_tokens(run):
    one, two = map(run.tokens, TEXTS)
    got = instrument(run, tokens=TEXTS[0], inputs=TEXTS[0], texts=TEXTS)
    assert got["model"] is run.model and got["params"] is run.params
    equal([got[name] for name in ("tokens", "inputs", "texts")], [one, (one,), [one, two]])
    equal(instrument(run, run.params, texts=one)["texts"], [one])
    equal(instrument(run.model, run.params, inputs=[one, None])["inputs"], (one, None))
    for ids in (one.tolist(), list(np.asarray(one)), list(one)):
        equal([instrument(*of, tokens=ids)["tokens"] for of in ((run,), (run.model, run.params))], [one, one])
    with pytest.raises(ValueError, match="there is no text; give one or more"):
        instrument(run, texts=[])
    with pytest.raises(TypeError, match=r"the text 'The cat sees\.' needs a tokenizer; give the run in place"):
        instrument(run.model, run.params, tokens=TEXTS[0])
    with pytest.raises(TypeError, match="expected a run, or a model and its parameters; got a dict"):
        instrument(run.params, one)


def test_examples_and_batches_are_next_tokens_without_padding(run):
    one, two = map(run.tokens, TEXTS)
    assert len(one) < len(two)
    equal(instrument(run, example=TEXTS[0])["example"], Batch((one[:-1],), one[1:]))
    for same in (TEXTS[0], one, one[None], [one], [one.tolist()]):
        equal(instrument(run, batch=same)["batch"], Batch((one[None, :-1],), one[None, 1:]))
    batch = instrument(run, batch=TEXTS)["batch"]
    assert instrument(run, batch=batch)["batch"] is batch
    equal(batch.targets[1], two[1:])
    equal(batch.weights, np.float32(np.arange(len(two) - 1) < [[len(one) - 1], [len(two) - 1]]))
    several = instrument(run, TEXTS)
    equal(several["target_mask_BT"].sum(axis=1), np.array([len(one), len(two)]))
    equal(several["inputs_B"][0][0, : len(one)], one)
    with pytest.raises(ValueError, match="expected 2 tokens or more, got 1"):
        instrument(run, batch=[[5]])
    with pytest.raises(TypeError, match="predicts no next token; give a Batch of its inputs and targets"):
        instrument(MODELS["encoder-decoder"].build(), {}, example=one)


@pytest.mark.parametrize(
    ("ids", "error", "said"),
    [
        ([1, 300, 2], ValueError, "token 300 at position 1 is not in the vocabulary of 280"),
        ([1, 2, -1], ValueError, "token -1 at position 2 is not in the vocabulary of 280"),
        ([True, False], TypeError, "token ids are bool; give|got a ndarray of bool|got a list"),
        (np.array([1.5, 2.0]), TypeError, "token ids are float.*; give|got a ndarray of float64"),
    ],
)
def test_ids_without_an_embedding_are_refused_where_they_are_values(run: Run, ids: Any, error: Any, said: str):
    """A compiled instrument would take the nearest row."""
    batch = np.asarray(ids)[None]
    given = {"tokens": ids, "inputs": (ids,), "texts": [ids], "example": ids, "batch": batch, "tokens_BT": batch}
    calls = [partial(instrument, run, **{name: x}) for name, x in given.items()]
    calls += [partial(instrument, run.model, run.params, batch), lambda: run.logits(ids)]
    calls += [partial(instrument, run, batch=Batch((batch[:, :-1],), batch[:, 1:]))] * (-1 not in ids)
    for call in calls:
        with pytest.raises(error, match=said):
            call()
    traced = jax.jit(lambda tokens: instrument(run, tokens=tokens, tokens_BT=tokens[None])["tokens"])
    if error is ValueError:
        equal(traced(jnp.asarray(ids)), jnp.asarray(ids))


def test_an_id_that_jax_would_wrap_around_is_refused(run: Run):
    ids = np.array([1, 2**32 + 5])
    texts = lambda ids: instrument(run.model, run.params, texts=[ids])  # noqa: E731
    for call in (run.logits, partial(run.loss, run.params), partial(logit_lens, run), texts):
        with pytest.raises(ValueError, match="4294967301 is beyond the range of int32"):
            call(ids)


def test_a_batch_is_not_an_example_and_an_example_is_not_a_batch(run: Run):
    one = run.tokens(TEXTS[0])
    for name, x, shape in (
        ("inputs", one[None], r"\(T,\)"),
        ("tokens", one[0], r"\(T,\)"),
        ("tokens_BT", one[0], r"\(B, T\)"),
    ):
        with pytest.raises(ValueError, match=f"of shape {shape}, got"):
            instrument(run, **{name: x})
    with pytest.raises(TypeError, match="expected texts, their token ids, or a Batch; got a tuple"):
        instrument(run, batch=(one, one))
    with pytest.raises(ValueError, match="the texts have different numbers of tokens; give texts of one length"):
        instrument(run, tokens_BT=TEXTS)
    equal(instrument(run, tokens_BT=TEXTS[0])["tokens_BT"], one[None])


def test_a_pair_of_texts_is_aligned_as_its_tokens_are(run: Run):
    @of_run
    def align(model: Any, params: Any, source_S: Any, target_T: Any) -> Any:
        return source_S, target_T

    assert run.tokenizer is not None
    one, two = map(run.tokens, TEXTS)
    begun = jnp.array([run.tokenizer.end_of_text, *two.tolist()])
    for source, target in (TEXTS, (one, begun)):
        equal(align(run, source, target), (one, begun))
    with pytest.raises(TypeError, match="needs a tokenizer; give the run in place"):
        align(run.model, run.params, one, TEXTS[1])


class Scaled(nn.Module):
    """A model with one activation and one parameter, in place of a decoder, which takes a second to compile."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return capture_point(self, "product", x * self.param("w", nn.initializers.ones, ())) ** 2


def test_gradients_of_activations_are_those_of_a_loss_with_its_arguments_or_of_the_loss_of_a_run():
    loss = lambda params, x: Scaled().apply({"params": params}, x)  # noqa: E731
    stub = SimpleNamespace(params={"w": jnp.float32(3)}, loss=loss)
    for arguments in ((loss, stub.params, jnp.float32(5)), (stub, jnp.float32(5)), (partial(loss, stub.params, 5.0),)):
        values, grads = capture_gradients(*arguments, names="*product")
        assert values["product"] == 15 and grads["product"] == 30


@pytest.mark.slow
def test_the_last_entry_of_the_logit_lens_of_a_text_has_the_logits_of_the_run(run):
    last = [*logit_lens(run, TEXTS[0]).values()][-1]
    np.testing.assert_allclose(last, run.logits(TEXTS[0]), rtol=1e-5, atol=1e-5)
