"""Text in windows."""

import jax
import numpy as np
import pytest

from jaxformer.config import TokenModelConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.tokens import Corpus, Split
from jaxformer.data.windows import TextConfig, TextDataset, ValidationText, Windows, eval_batches, next_token_batch
from jaxformer.errors import UserError

TOKENS = np.arange(103, dtype=np.uint16)  # each token is its own place, so windows tell where they start


def test_epoch_visits_every_window_once_in_a_new_order():
    windows = Windows(TOKENS, 5, 1, 3, seed=0)
    assert windows.n_windows == 99 and windows.steps_per_epoch == 33
    epochs = [np.concatenate([windows.batch(e * 33 + k) for k in range(33)]) for e in range(2)]
    for rows in epochs:
        assert sorted(rows[:, 0]) == list(range(99))
        np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(5))
        assert rows.dtype == np.int32
    assert (epochs[0] != epochs[1]).any()


def test_windows_start_at_multiples_of_the_stride():
    windows = Windows(TOKENS, 7, 6, 2, seed=1)
    starts = {int(s) for k in range(windows.steps_per_epoch) for s in windows.batch(k)[:, 0]}
    assert starts <= set(range(0, 97, 6)) and len(starts) == windows.steps_per_epoch * 2
    assert windows.n_windows == 17  # starts 0, 6, …, 96; the last covers tokens 96 to 102


def test_batch_depends_only_on_tokens_seed_and_step():
    a, b = (Windows(TOKENS, 5, 1, 4, seed=3) for _ in range(2))
    for step in (40, 7, 0):  # in any order
        np.testing.assert_array_equal(a.batch(step), b.batch(step))
    assert (a.batch(0) != Windows(TOKENS, 5, 1, 4, seed=4).batch(0)).any()


@pytest.mark.parametrize("start", [0, 5, 23])
def test_stream_equals_batches_across_epochs(start):
    split = Split(TOKENS, 1, 103)
    corpus = Corpus(split, split, Tokenizer.train(["a"], 257), "")
    text = TextDataset(TextConfig(stride=2), TokenModelConfig(257, 4), corpus, batch_size=7, seed=0)  # 7 steps an epoch
    streamed = list(text.stream(start, 30))
    assert len(streamed) == 30 - start
    for i, batch in enumerate(streamed):
        jax.tree.map(np.testing.assert_array_equal, batch, text.batch(start + i))


def test_too_short_text_is_refused():
    with pytest.raises(
        UserError,
        match=r"of 103 tokens has 0 window\(s\) of `model.context_length` \+ 1 = 200 tokens .* shorten `model",
    ):
        Windows(TOKENS, 200, 1, 1, 0)
    with pytest.raises(
        UserError, match=r"has 10 window.* fewer than `train.batch_size` 11; set it to at most 10, or give more"
    ):
        Windows(TOKENS, 11, 10, 11, 0)


@pytest.mark.parametrize("n", [2, 5, 6, 7, 11, 12, 103])
@pytest.mark.parametrize("n_predicted", [5, 1])
def test_eval_batches_predict_each_token_once(n, n_predicted):
    predicted = []
    for batch, weights in eval_batches(TOKENS[:n], 6, n_predicted, 4):
        assert batch.shape == (4, 6) and weights.shape == (4, n_predicted)
        predicted += batch[:, -n_predicted:][weights > 0].tolist()
    first = 6 - n_predicted  # a model that predicts only after a full window cannot predict the first five
    assert predicted == list(range(first, n))


@pytest.mark.parametrize("n", [2, 6, 7, 9, 10, 103])
@pytest.mark.parametrize("stride", [1, 2, 4, 5])
def test_eval_stride_predicts_each_token_once_with_enough_context(n, stride):
    predicted = []
    for batch, weights in eval_batches(TOKENS[:n], 6, 5, 3, stride=stride):
        for window, counted in zip(batch, weights > 0, strict=True):
            predicted += window[1:][counted].tolist()
            if counted.any():
                first = window[1:][counted][0]
                assert first - window[0] > 5 - stride or window[0] == 0  # its own place is its number
    assert predicted == list(range(1, n))


def test_subset_of_eval_windows_is_evenly_spaced():
    starts = [b[:, 0][w[:, 0] > 0] for b, w in eval_batches(TOKENS, 6, 5, 2, n_windows=4)]
    assert np.concatenate(starts).tolist() == [0, 30, 65, 100]  # of windows 0, …, 20: numbers 0, 6, 13, 20


def test_targets_are_the_next_tokens():
    windows = np.arange(10).reshape(2, 5)
    whole, last = next_token_batch(windows), next_token_batch(windows, 1)
    np.testing.assert_array_equal(whole.inputs[0], [[0, 1, 2, 3], [5, 6, 7, 8]])
    np.testing.assert_array_equal(whole.targets, [[1, 2, 3, 4], [6, 7, 8, 9]])
    np.testing.assert_array_equal(last.inputs[0], whole.inputs[0])
    np.testing.assert_array_equal(last.targets, [[4], [9]])
    assert whole.weights is None


@pytest.mark.parametrize(
    ("n", "n_predicted", "length"), [(34, 300, 128), (130, 300, 256), (280, 300, 300), (302, 1, 300)]
)
def test_the_only_window_of_a_short_text_fits_it(n, n_predicted, length):
    text = ValidationText(np.arange(n), np.ones(n), 300, n_predicted)
    batch = next(text.val_batches(2))
    assert batch.inputs[0].shape == (2, length) and batch.targets.shape == batch.weights.shape == (
        2,
        min(length, n_predicted),
    )
    assert batch.targets[batch.weights > 0].tolist() == ([*range(1, n)] if n_predicted > 1 else [300, 301])


def test_held_out_text_of_one_token_is_refused():
    with pytest.raises(UserError, match="the held-out text has 1 tokens, too few to predict one, which needs 1 before"):
        ValidationText(TOKENS[:1], np.ones(103), 4, 4)
