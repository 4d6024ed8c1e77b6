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
ON_TOKENS_ONLY = {"alignment", "check_init", "first_non_finite", "verify"}
"""Instruments of pairs of texts, of new models and of batches as training reads them."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return random_run(tmp_path_factory.mktemp("runs") / "a", TEXTS)


@of_run
def instrument(
    model: Any, params: Any, *inputs_B: Any, target_mask_BT: Any = None, tokens: Any = None, inputs: Any = None,
    texts: Any = None, example: Any = None, batch: Any = None,
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
    assert of_models - accepting == ON_TOKENS_ONLY and len(accepting) > 20


def test_a_run_stands_for_its_model_and_parameters_and_a_text_for_its_tokens(run):
    one, two = map(run.tokens, TEXTS)
    got = instrument(run, tokens=TEXTS[0], inputs=TEXTS[0], texts=TEXTS)
    assert got["model"] is run.model and got["params"] is run.params
    equal([got[name] for name in ("tokens", "inputs", "texts")], [one, (one,), [one, two]])
    equal(instrument(run, run.params, texts=one)["texts"], [one])
    equal(instrument(run.model, run.params, inputs=[one, None])["inputs"], (one, None))
    equal([instrument(*of, tokens=one.tolist())["tokens"] for of in ((run,), (run.model, run.params))], [one, one])
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
def test_gradients_of_activations_of_a_run_are_those_of_its_loss(run):
    tokens = run.tokens(TEXTS[0])
    expected = capture_gradients(lambda: run.loss(run.params, tokens))[1]
    for arguments in ((run.loss, run.params, tokens), (run.loss, run.params, TEXTS[0]), (run, TEXTS[0])):
        equal(capture_gradients(*arguments)[1], expected)


@pytest.mark.slow
def test_the_last_entry_of_the_logit_lens_of_a_text_has_the_logits_of_the_run(run):
    last = [*logit_lens(run, TEXTS[0]).values()][-1]
    np.testing.assert_allclose(last, run.logits(TEXTS[0]), rtol=1e-5, atol=1e-5)
