"""Texts with labels: batches, inferred classes, errors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxformer.data.labelled import LabelledTextConfig, LabelledTextDataset
from jaxformer.data.pairs import read_splits
from jaxformer.errors import UserError
from jaxformer.models.encoder import ClassifierConfig
from tests.arrays import plain_decoder

MODEL = ClassifierConfig(vocab_size=300, context_length=12, d_model=8, n_blocks=1, n_heads=2, d_ff=(8,), n_classes=9)
TRAIN = "good film\tyes\nbad film\tno\na long text that the model does not read to its end\tno\ngood\tyes\n"


def load(
    folder: Path, train: str = TRAIN, val: str = "a film\tyes\nbad\tno\nbad bad\tno\n", **fields
) -> LabelledTextDataset:
    (folder / "x.train.tsv").write_text(train)
    (folder / "x.val.tsv").write_text(val)
    return LabelledTextConfig(str(folder / "x")).load(replace(MODEL, **fields), 2, 0, fixed=())


def test_an_epoch_has_each_text_with_its_label_and_padding_is_masked(tmp_path: Path) -> None:
    data = load(tmp_path)
    assert data.classes == ("no", "yes") and data.model.contract.n_classes == 2 and data.model.vocab_size <= 300
    assert (data.steps_per_epoch, data.unit, data.per_step) == (2, "examples", 2)
    seen = {}
    for step in range(2):
        (tokens_BT, valid_BT), targets_B, weights = data.batch(step)
        assert tokens_BT.shape == valid_BT.shape == (2, 12) and weights is None
        assert (tokens_BT[:, 0] == data.tokenizer.end_of_text).all() and valid_BT[:, 0].all()
        for tokens_T, valid_T, target in zip(tokens_BT, valid_BT, targets_B, strict=True):
            assert (np.diff(valid_T.astype(int)) <= 0).all() and (tokens_T[~valid_T] == 0).all()
            seen[data.tokenizer.decode(tokens_T[valid_T][1:].tolist())] = data.classes[target]
    (long,) = (text for text in seen if text not in TRAIN.replace("\t", "\n").split("\n"))
    assert "a long text that the model does not read to its end".startswith(long) and seen.pop(long) == "no"
    assert seen == {"good film": "yes", "bad film": "no", "good": "yes"}
    np.testing.assert_array_equal(data.batch(1, slice(1, 2)).inputs[0], data.batch(1).inputs[0][1:])


def test_tokens_are_dropped_from_training_texts_only_and_anew_at_each_step(tmp_path: Path) -> None:
    text = " ".join("abcdefghij"[i % 10] for i in range(400))
    train = "".join(f"{text} {i}\tyes\n" for i in range(4))
    whole = load(tmp_path, train, f"{text}\tyes\n", context_length=500)
    splits = read_splits(str(tmp_path / "x"), None, ("text", "label"))
    data = LabelledTextDataset("x", splits, whole.tokenizer, whole.model, 2, 0, drop_tokens=0.25)
    lengths = np.concatenate([data.batch(step).inputs[1].sum(axis=1) for step in range(4)])
    n = whole.batch(0).inputs[1].sum(axis=1)[0]
    assert len({*lengths}) > 4 and 0.7 * n < lengths.mean() < 0.8 * n
    tokens_BT, _ = data.batch(3).inputs
    assert (tokens_BT[:, 0] == data.tokenizer.end_of_text).all()
    np.testing.assert_array_equal(data.batch(3, np.array([1])).inputs[0], tokens_BT[1:])
    for a, b in zip(whole.val_batches(2), data.val_batches(2), strict=True):
        np.testing.assert_array_equal(a.inputs[0], b.inputs[0])


def test_held_out_texts_come_once_and_the_last_batch_is_padded_with_weight_0(tmp_path: Path) -> None:
    data = load(tmp_path)
    batches = list(data.val_batches(2))
    assert [batch.weights.tolist() for batch in batches] == [[1, 1], [1, 0]]
    assert [data.classes[t] for batch in batches for t in batch.targets][:3] == ["yes", "no", "no"]
    assert "held out: 3 texts, 66.7% of them 'no'; 1 are truncated to 12 tokens" in data.describe()


def test_the_fingerprint_is_that_of_texts_and_labels(tmp_path: Path) -> None:
    first = load(tmp_path).fingerprint
    assert load(tmp_path).fingerprint == first
    assert load(tmp_path, TRAIN.replace("good\tyes", "good\tno")).fingerprint != first


@pytest.mark.parametrize(
    ("train", "val", "said"),
    [
        ("good yes\n", "a\tb\n", r"x\.train\.tsv, line 1, is 'good yes'; it must be TEXT<TAB>LABEL\.$"),
        (TRAIN, "a\tmaybe\n", r"held-out texts of 'maybe', which no training text has; remove them\.$"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused_in_one_sentence(tmp_path: Path, train: str, val: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(tmp_path, train, val)


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    data = load(tmp_path)
    config = LabelledTextConfig(str(tmp_path / "x"))
    with pytest.raises(UserError, match=r"has 2 classes, but `model\.n_classes` is 9; set `model\.n_classes=2`\.$"):
        config.load(MODEL, 2, 0)
    with pytest.raises(UserError, match="DecoderConfig does not configure a text classifier; change one"):
        config.load(plain_decoder(), 2, 0)
    with pytest.raises(
        UserError, match=r"4 training texts, fewer than `train\.batch_size` 5; set it to at most 4, or give more\.$"
    ):
        config.load(data.model, 5, 0, data.tokenizer)
    assert config.load(data.model, 2, 0, data.tokenizer).fingerprint == data.fingerprint  # as on resuming
