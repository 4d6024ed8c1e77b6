"""Texts with a label per word: tokens with and without a label, weights, files, errors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxformer.data.labelled_tokens import LabelledTokensConfig, LabelledTokensDataset
from jaxformer.errors import UserError
from jaxformer.models.encoder import TokenClassifierConfig
from tests.arrays import plain_decoder

MODEL = TokenClassifierConfig(vocab_size=257, context_length=12, d_model=8, n_blocks=1, n_heads=2, d_ff=(8,))
TRAIN = "\nAnna NNP B\nsaw VB O\nRome NNP B\n\nhe\tO\nsaw\tO\n\n\nAnnaanna B\n"
VAL = "Rome B\nsaw O\n\nanna O\n"


def load(folder: Path, train: str = TRAIN, val: str = VAL, **fields) -> LabelledTokensDataset:
    (folder / "train.tsv").write_text(train)
    (folder / "val.tsv").write_text(val)
    return LabelledTokensConfig(str(folder)).load(replace(MODEL, **fields), 2, 0, fixed=())


def test_the_first_token_of_each_word_has_its_label(tmp_path: Path) -> None:
    data = load(tmp_path, context_length=40)
    assert data.classes == ("B", "O") and data.model.contract.n_classes == 2 and data.steps_per_epoch == 1
    words = {"Anna saw Rome": "BOB", "he saw": "OO", "Annaanna": "B"}
    (tokens_BT, _), targets_BT, weights_BT = data.batch(0)
    seen = [data.tokenizer.decode(tokens_T[tokens_T > 0].tolist()) for tokens_T in tokens_BT]
    assert weights_BT.sum() == pytest.approx(1) and len(np.unique(weights_BT)) == 2 and weights_BT.dtype == np.float32
    for text, tokens_T, targets_T, weights_T in zip(seen, tokens_BT, targets_BT, weights_BT, strict=True):
        assert [data.classes[i] for i in targets_T[weights_T > 0]] == [*words[text]]
        starts = [data.tokenizer.decode_part(tokens_T[t:][:1]) for t in np.flatnonzero(weights_T)]
        assert all(word.startswith(start.strip()) for word, start in zip(text.split(), starts, strict=True))
        assert weights_T[0] == 0  # end-of-text
    rows = data.batch(0, slice(1, 2))
    np.testing.assert_array_equal(rows.weights, weights_BT[1:])  # of the whole batch
    (batch,) = data.val_batches(4)
    assert batch.weights.sum() == 3 and set(np.unique(batch.weights)) == {0, 1}
    assert data.describe().endswith("held out: 2 texts of 3 words, 66.7% of them 'O'")
    assert load(tmp_path, context_length=4).describe().endswith("truncated to 4 tokens")


def test_files_and_models_of_another_kind_are_refused(tmp_path: Path) -> None:
    for text, said in (
        ("Anna B\nsaw\n", "line 2, is 'saw'; it must be a word and its label"),
        ("\n \n", "holds no texts; give a word and its label per line"),
        ("saw O\n\nhe O\n", "has held-out texts of 'B', which no training text has"),
        ("saw O\nRome B\n", "has 1 training texts, fewer than `train.batch_size` 2"),
    ):
        with pytest.raises(UserError, match=said):
            load(tmp_path, text)
    with pytest.raises(UserError, match="a label for each word, but DecoderConfig does not configure a token"):
        LabelledTokensConfig(str(tmp_path)).load(plain_decoder(), 2, 0)
