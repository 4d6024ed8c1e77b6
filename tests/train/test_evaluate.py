"""Evaluation of a text."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Config, TrainConfig
from jaxformer.data.dataset import Batch
from jaxformer.data.windows import TextConfig, ValidationText
from jaxformer.errors import UserError
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.models.objective import next_token_nll
from jaxformer.parallel.mesh import make_mesh
from jaxformer.train.evaluate import BATCHES_IN_FLIGHT, Evaluator, perplexity
from jaxformer.train.setup import TrainSetup
from tests.arrays import first_params, plain_decoder

TOKENS = np.random.default_rng(0).integers(0, 37, 101)
LENGTHS = np.arange(37) % 5  # bytes of each token; some have none, as end-of-text
SHAPE = {"vocab_size": 37, "context_length": 7, "d_model": 8, "d_ff": (5,)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (plain_decoder(**SHAPE), [(6, ""), (16, "fsdp=2,tensor=2")]),
        (MLPConfig(**SHAPE, mixing="concatenate"), [(6, "")]),
    ],
    ids=["all", "last"],
)
def test_evaluation_covers_all_tokens_at_any_batch_size(config, sizes):
    model = config.build()
    params = first_params(model, jnp.zeros(7, jnp.int32))
    losses = jax.jit(lambda window: next_token_nll(model, params, window))
    every = 1 if config.n_predicted == 1 else 7
    nll, n_bytes = [], 0
    for first in range(0, 100 - 7 + every, every):
        window = TOKENS[first : first + 8]
        if len(window) < 8 and every == 1:
            break
        part = losses(window)
        nll += part.tolist()
        n_bytes += LENGTHS[window[-len(part) :]].sum()
    for batch_size, mesh in sizes:
        run_config = Config("test", config, data=TextConfig(), steps=1, train=TrainConfig(batch_size=batch_size))
        evaluation = Evaluator(
            TrainSetup(run_config, make_mesh(mesh, jax.devices()[: 4 if mesh else 1])),
            ValidationText(TOKENS, LENGTHS, 7, config.n_predicted),
        )(params)
        assert evaluation.targets == len(nll) == (94 if every == 1 else 100)
        np.testing.assert_allclose(evaluation.loss, np.mean(nll), rtol=1e-5)
        assert 0 < evaluation.others["accuracy"] < 0.3
        np.testing.assert_allclose(evaluation.bits_per_byte, np.sum(nll) / np.log(2) / n_bytes, rtol=1e-5)
        np.testing.assert_allclose(evaluation.perplexity, np.exp(np.mean(nll)), rtol=1e-5)


@pytest.mark.parametrize(("batch_size", "n", "rows"), [(64, 10, 12), (8, 10, 8), (64, None, 16), (8, None, 8)])
def test_few_examples_are_not_padded_to_a_batch(monkeypatch, batch_size, n, rows):
    config = Config(
        "test", plain_decoder(**SHAPE), data=TextConfig(), steps=1, train=TrainConfig(batch_size=batch_size)
    )
    setup, sizes = TrainSetup(config, make_mesh("data=4", jax.devices()[:4])), []
    evaluate = Evaluator(setup, ValidationText(TOKENS, LENGTHS, 7, 7))

    def step(_: object, batch: Batch) -> dict[str, np.ndarray]:
        sizes.append(len(batch.targets))
        return {"nats": np.ones(len(batch.targets)), "correct": np.zeros(1), "weight": batch.weights.sum(axis=-1)}

    monkeypatch.setattr(evaluate, "_step", step)
    evaluate({}, n)
    assert set(sizes) == {rows}


SHORT = TOKENS[:34]


@pytest.mark.slow
def test_a_short_text_is_one_short_window_with_the_loss_of_its_tokens(monkeypatch):
    model_config = plain_decoder(37, 300, 8, d_ff=5)
    config = Config("test", model_config, data=TextConfig(), steps=1, train=TrainConfig(batch_size=16))
    model = model_config.build()
    params = first_params(model, jnp.zeros(7, jnp.int32))
    evaluate = Evaluator(TrainSetup(config, make_mesh("", jax.devices()[:1])), ValidationText(SHORT, LENGTHS, 300, 300))
    shapes, step = [], evaluate._step

    def recorded(params: object, batch: Batch) -> dict[str, jax.Array]:
        shapes.append((batch.inputs[0].shape, batch.targets.shape))
        return step(params, batch)

    monkeypatch.setattr(evaluate, "_step", recorded)
    evaluation = evaluate(params)
    assert shapes == [((1, 128), (1, 128))] and evaluation.targets == 33
    np.testing.assert_allclose(
        evaluation.loss, np.mean(jax.jit(partial(next_token_nll, model))(params, SHORT)), rtol=1e-6
    )


def test_results_are_read_while_other_batches_are_in_flight(monkeypatch):
    """So that devices need not wait for the next batch; and never more than a few, whose inputs take memory."""
    config = Config("test", plain_decoder(**SHAPE), data=TextConfig(), steps=1, train=TrainConfig(batch_size=2))
    evaluate = Evaluator(TrainSetup(config, make_mesh("", jax.devices()[:1])), ValidationText(TOKENS, LENGTHS, 7, 7))
    events: list[str] = []

    class Nats:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            events.append("read")
            return np.array([0.5, 1.5])

    def step(*_: object) -> dict[str, object]:
        events.append("begin")
        return {"nats": Nats(), "correct": np.array([0, 1]), "weight": np.array([2, 2])}

    monkeypatch.setattr(evaluate, "_step", step)
    n = 8  # of 100 tokens, 14 in a batch
    evaluation = evaluate({})
    assert (evaluation.loss, evaluation.others, evaluation.targets) == (2 / 4, {"accuracy": 1 / 4}, 100)
    assert (
        events
        == ["begin"] * BATCHES_IN_FLIGHT + ["begin", "read"] * (n - BATCHES_IN_FLIGHT) + ["read"] * BATCHES_IN_FLIGHT
    )


def test_evaluation_without_targets_is_a_user_error(monkeypatch):
    """And no loss that is not a number, which would look as if training had gone wrong."""

    class Nothing:
        token_lengths = None

        def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
            yield Batch((), np.zeros((2, 7), np.int32), np.zeros((2, 7), np.float32))

    config = Config("test", plain_decoder(**SHAPE), data=TextConfig(), steps=1, train=TrainConfig(batch_size=2))
    evaluate = Evaluator(TrainSetup(config, make_mesh("", jax.devices()[:1])), Nothing())
    monkeypatch.setattr(evaluate, "_step", lambda *_: {"nats": np.zeros(2)})
    with pytest.raises(UserError, match="have 0 targets; hold out more data"):
        evaluate({})


@pytest.mark.slow
def test_stride_predicts_each_token_from_the_longest_context():
    stride = 3
    config = plain_decoder(**SHAPE)
    model = config.build()
    params = first_params(model, jnp.zeros(7, jnp.int32))
    nll, windows = [], jax.jit(lambda tokens_8: next_token_nll(model, params, tokens_8))
    for place in range(1, 101):
        first = max(0, -(-(place - 7) // stride) * stride)  # the first window, at a multiple of stride, that has it
        window = np.resize(TOKENS[first : first + 8], 8)  # what comes after a token does not change its loss
        nll.append(float(windows(window)[place - first - 1]))
    run_config = Config("test", config, data=TextConfig(), steps=1, train=TrainConfig(batch_size=8))
    evaluation = Evaluator(TrainSetup(run_config, make_mesh("data=8")), ValidationText(TOKENS, LENGTHS, 7, 7, stride))(
        params
    )
    assert evaluation.targets == 100
    np.testing.assert_allclose(evaluation.loss, np.mean(nll), rtol=1e-5)


def test_perplexity_of_a_huge_loss_is_infinite():
    assert perplexity(1e4) == float("inf")
    assert np.isnan(perplexity(float("nan")))
