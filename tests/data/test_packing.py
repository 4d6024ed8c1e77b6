"""Packed examples: their batches, their loss and their gradients."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config import Config
from jaxformer.data.dataset import Batch
from jaxformer.data.masked import MaskedTextConfig
from jaxformer.data.packing import PackedExamples, pack, split_long
from jaxformer.data.prefix import PrefixTextConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.tokens import Corpus, Split
from jaxformer.data.windows import PackedTextDataset, TextConfig, pack_documents
from jaxformer.errors import UserError
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.models.decoder import BlockAttention
from jaxformer.models.encoder import EncoderConfig
from jaxformer.models.objective import next_token_nll, objective_of
from jaxformer.ops import RoPE
from jaxformer.ops.positions import positions_in_segments
from jaxformer.parallel.mesh import make_mesh
from jaxformer.train.setup import TrainSetup
from tests.arrays import build, plain_decoder

TOKENIZER = Tokenizer.train(["a b"], 257)
END = TOKENIZER.end_of_text
LENGTHS = [3, 17, 1, 8, 40, 5, 16, 2, 9, 30, 7, 6]
"""Bytes of the documents; with T = 16, some are split."""


def stream(lengths=LENGTHS):
    """Return documents of different bytes, between end-of-text tokens."""
    ids = iter(range(1, 10_000))
    parts = [[END]] + [[*((next(ids) % 250) + 1 for _ in range(n)), END] for n in lengths]
    return np.concatenate(parts).astype(np.uint16)


def examples_in(batch: Batch):
    """Return the inputs and targets of each packed example of a batch."""
    tokens_BT, _, segments_BT = batch.inputs
    for tokens, segments, targets, weights in zip(tokens_BT, segments_BT, batch.targets, batch.weights, strict=True):
        for segment in range(1, segments.max() + 1):
            here = (segments == segment) & (weights > 0)
            if here.any():
                yield tokens[here].tolist(), targets[here].tolist()


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=150))
def test_rows_hold_each_example_once_and_no_more_than_their_length(lengths):
    rows = pack(np.array(lengths), 12)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 12 for row in rows)
    if sum(lengths) <= 12:
        assert len(rows) == 1


def test_long_examples_are_split_and_empty_ones_left_out():
    starts, lengths = split_long(np.array([0, 10, 20, 50]), np.array([4, 0, 9, 8]), 4)
    assert starts.tolist() == [0, 20, 24, 28, 50, 54] and lengths.tolist() == [4, 4, 4, 1, 4, 4]


def test_held_out_rows_predict_each_token_of_each_document_once():
    tokens, packed = stream(), pack_documents(stream(), TOKENIZER, 16)
    ends, predicted, examples = np.flatnonzero(tokens == END), [], []
    for batch in packed.val_batches(5):
        assert batch.inputs[0].shape == batch.targets.shape == batch.weights.shape == (5, 16)
        for inputs, targets in examples_in(batch):
            assert inputs[1:] == targets[:-1]
            predicted += targets
            examples.append([*inputs, targets[-1]])
    assert sorted(predicted) == sorted(tokens[1:].tolist())
    for start, stop in pairwise(ends):  # those that fit are in one piece, between end-of-text tokens
        assert stop - start > 16 or tokens[start : stop + 1].tolist() in examples


def test_batch_is_a_function_of_data_seed_and_step_and_covers_an_epoch():
    a, b = (pack_documents(stream(), TOKENIZER, 16, 3, seed=1) for _ in range(2))
    for step in (5, 0, 3):
        jax.tree.map(np.testing.assert_array_equal, a.batch(step), b.batch(step))
        assert a.batch(step).weights.sum() == pytest.approx(1)
        part = a.batch(step, np.array([2, 0]))
        jax.tree.map(lambda x, whole: np.testing.assert_array_equal(x, whole[[2, 0]]), part, a.batch(step))
    epoch = [row.tobytes() for step in range(a.steps_per_epoch) for row in a.batch(step).inputs[0]]
    assert len(set(epoch)) == len(epoch) == a.steps_per_epoch * 3
    assert (a.batch(0).inputs[0] != pack_documents(stream(), TOKENIZER, 16, 3, seed=2).batch(0).inputs[0]).any()
    assert a.per_step == pytest.approx(3 * (len(stream()) - 1) / len(a.rows))


@pytest.mark.parametrize(("segments", "expected"), [
    ([1, 1, 1, 2, 2, 3, 0, 0], [0, 1, 2, 0, 1, 0, 0, 1]),
    ([4, 4], [0, 1]),
    ([1, 2, 1], [0, 0, 0]),
])  # fmt: skip
def test_positions_restart_in_each_segment(segments, expected):
    assert positions_in_segments(jnp.array(segments)).tolist() == expected


MODELS = {
    "learned": plain_decoder(vocab_size=257, context_length=16, d_model=16, n_heads=2, n_blocks=1, d_ff=(32,)),
    "rope, window": plain_decoder(
        vocab_size=257, context_length=16, d_model=16, n_heads=2, n_blocks=1, d_ff=(32,), positions="none", rope=RoPE(),
        norm="rmsnorm", attention=BlockAttention(5),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    """Model, parameters, and the gradient `(params, batch)` of its loss."""
    model, params = build(MODELS["rope, window"])
    return model, params, jax.jit(jax.grad(lambda params, batch: objective_of(model).loss(model, params, batch)[0]))


@pytest.mark.slow
def test_packed_loss_equals_the_loss_of_each_document_by_itself(trained):
    (model, params, grad), tokens = trained, stream()
    packed = pack_documents(tokens, TOKENIZER, 16)

    @jax.jit
    def alone(params, tokens, n):
        """Return nats and gradient of the first n predictions, with tokens at the right that they do not attend to."""
        return jax.value_and_grad(lambda p: jnp.sum(next_token_nll(model, p, tokens)[:16] * (jnp.arange(16) < n)))(
            params
        )

    def nats_and_grads(example):
        return alone(params, jnp.array(example + [5] * (17 - len(example))), len(example) - 1)

    batches, measure = list(packed.val_batches(2)), jax.jit(partial(objective_of(model).measure, model))
    measures = [measure(params, batch) for batch in batches]
    singles = [nats_and_grads([*x, y[-1]]) for batch in batches for x, y in examples_in(batch)]
    assert sum(m["weight"].sum() for m in measures) == len(tokens) - 1
    nats = [sum(float(m["nats"].sum()) for m in measures), sum(float(n) for n, _ in singles)]
    assert nats[0] / (len(tokens) - 1) == pytest.approx(nats[1] / (len(tokens) - 1), abs=1e-5)
    # The gradient of a batch is the sum of its documents'.
    grads = grad(params, batches[0])
    expected = [nats_and_grads([*x, y[-1]])[1] for x, y in examples_in(batches[0])]
    expected = jax.tree.map(lambda *leaves: sum(leaves), *expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), grads, expected)


@pytest.mark.slow
def test_targets_of_weight_zero_have_gradient_exactly_zero(trained):
    (_, params, grad), tokens = trained, stream()
    weights = np.zeros(len(tokens), np.float32)
    ends = np.flatnonzero(tokens == END)
    weights[ends[1] + 1 : ends[2]] = 1  # the second document only, of 17 tokens: two examples
    packed = PackedExamples(tokens, *split_long(ends[:-1], np.diff(ends), 16), 16, 2, 0, weights)
    batches = [packed.batch(step) for step in range(packed.steps_per_epoch)]
    assert any(batch.weights.any() for batch in batches) and any(not batch.weights.any() for batch in batches)
    for batch in batches:
        counted = batch.weights > 0
        assert batch.weights.sum() == pytest.approx(1 if counted.any() else 0)
        grads = grad(params, batch)
        others = batch._replace(targets=np.where(counted, batch.targets, (batch.targets + 7) % 250))
        jax.tree.map(np.testing.assert_array_equal, grads, grad(params, others))
        if not counted.any():
            assert not any(leaf.any() for leaf in jax.tree.leaves(grads))
            continue
        # Nor does a token of another document reach it, forward or backward.
        seen = np.unique(batch.inputs[0][np.isin(batch.inputs[2], batch.inputs[2][counted]) & counted.any(1)[:, None]])
        unseen = np.setdiff1d(np.arange(257), seen)
        assert not grads["embedding"]["W_E"][unseen].any()


def dataset(config=None, model=MODELS["learned"]):
    tokens = stream()
    split = Split(tokens, len(LENGTHS), len(tokens))
    corpus = Corpus(split, split, TOKENIZER, "")
    return PackedTextDataset(config or TextConfig(packing="documents"), model, corpus, batch_size=2, seed=0)


def test_stream_equals_batches_and_description_names_the_rows():
    data = dataset()
    for step, batch in enumerate(data.stream(3, 9), start=3):
        jax.tree.map(np.testing.assert_array_equal, batch, data.batch(step))
    assert f"packed into {len(data.train.rows)} rows, " in data.describe() and data.describe().endswith("% full")


def test_setup_expects_the_shapes_of_packed_batches():
    data = dataset()
    config = Config("x", data.model, data=data.config, steps=1)
    batch = data.batch(0)
    setup = TrainSetup(config, make_mesh())
    assert jax.tree.map(
        lambda x: (x.shape[1:], x.dtype), (setup.abstract_batch.inputs, setup.abstract_batch.targets)
    ) == (jax.tree.map(lambda x: (x.shape[1:], x.dtype), (batch.inputs, batch.targets)))
    setup.check_fit(batch)
    with pytest.raises(
        UserError,
        match=r"expects inputs and targets int32 \(16,\), int32 \(16,\), int32 \(16,\) per .* has int32",
    ):
        setup.check_fit(batch._replace(inputs=batch.inputs[:1]))


@pytest.mark.parametrize(("config", "model"), [
    (TextConfig(packing="documents"), MLPConfig()),
    (MaskedTextConfig(packing="documents"), EncoderConfig()),
    (PrefixTextConfig(packing="documents"), plain_decoder(prefix=True)),
])  # fmt: skip
def test_packing_for_a_model_without_segments_is_refused(config, model):
    with pytest.raises(UserError, match=rf"but this {type(model).__name__} does not attend within segments; set `data"):
        TrainSetup(Config("x", model, data=config, steps=1), make_mesh())


def test_packing_with_a_stride_or_of_too_few_documents_is_refused():
    with pytest.raises(UserError, match=r"`data.stride` is 4, but packed documents have no windows"):
        TextConfig(packing="documents", stride=4)
    with pytest.raises(
        UserError, match=r"has 1 row\(s\) of `model.context_length` 16 tokens, fewer than `train.batch_size` 2"
    ):
        pack_documents(stream([3]), TOKENIZER, 16, 2)
