"""Pairs of texts in batches of similar length."""

from pathlib import Path

import numpy as np
import pytest

from jaxformer.config import ModelConfig
from jaxformer.data.dataset import Batch
from jaxformer.data.pairs import N_BUCKETS, Pair, PairDataset, PairsConfig, read_pairs
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.models.encoder import EncoderConfig
from jaxformer.models.recurrent import RecurrentConfig
from tests.arrays import plain_decoder

BYTES = Tokenizer.train([], 257)
END = BYTES.end_of_text
LONGEST = 16
MODEL = RecurrentConfig(257, LONGEST)
# Each source is its own number, followed by as many letters as make all lengths from 2 to 16; a target has 1 to 15
# tokens, and its end.
TRAIN = [Pair(f"{i:02}".ljust(2 + i % 15, "s"), f"{'t' * (1 + 7 * i % 15)}") for i in range(50)]
VAL = [Pair("a", "bc"), Pair("d" * 20, "e"), Pair("f" * 9, "g" * 15), Pair("h" * 3, "i" * 30), Pair("jk", "l")]


def pairs(train: list[Pair] = TRAIN, val: list[Pair] = VAL, batch_size: int = 4, seed: int = 0) -> PairDataset:
    return PairDataset("numbers", (train, val), BYTES, MODEL, batch_size, seed)


def read_back(batch: Batch) -> list[Pair]:
    """Return the pairs of a batch with weight above 0, after checking that its arrays are consistent."""
    source_BS, valid_BS, target_BT = batch.inputs
    pairs = []
    for i, counts_T in enumerate(batch.weights > 0):
        n_source, n = valid_BS[i].sum(), counts_T.sum()
        if n:
            assert valid_BS[i, :n_source].all() and counts_T[:n].all()  # padding is on the right
            assert target_BT[i, 0] == END
            assert batch.targets[i, n - 1] == END or n == LONGEST
            np.testing.assert_array_equal(target_BT[i, 1:n], batch.targets[i, : n - 1])
            decoded = batch.targets[i, :n] if n == LONGEST else batch.targets[i, : n - 1]
            pairs.append(Pair(BYTES.decode(source_BS[i, :n_source]), BYTES.decode(decoded)))
    return pairs


def assert_same(got: Batch, expected: Batch) -> None:
    for one, other in zip((*got.inputs, *got[1:]), (*expected.inputs, *expected[1:]), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_epoch_visits_every_pair_once_in_new_batches() -> None:
    data = pairs(TRAIN[:48])
    assert data.steps_per_epoch == 12
    epochs = [[frozenset(read_back(data.batch(12 * e + k))) for k in range(12)] for e in range(2)]
    for epoch in epochs:
        assert sorted(pair for batch in epoch for pair in batch) == sorted(TRAIN[:48])
    assert set(epochs[0]) != set(epochs[1])


def test_batch_depends_only_on_pairs_seed_and_step() -> None:
    one, another = pairs(seed=3), pairs(seed=3)
    for step in (40, 7, 0):  # in any order
        assert_same(one.batch(step), another.batch(step))
    assert set(read_back(one.batch(0))) != set(read_back(pairs(seed=4).batch(0)))


def test_rows_equal_those_of_the_full_batch() -> None:
    data = pairs()
    for step in range(5):
        whole = data.batch(step)
        for rows in (slice(1, 3), np.array([3, 0])):
            part = data.batch(step, rows)
            assert_same(part, Batch(tuple(x[rows] for x in whole.inputs), whole.targets[rows], whole.weights[rows]))


def test_weights_are_uniform_over_the_tokens_of_the_full_batch() -> None:
    data = pairs()
    counted = 0
    for step in range(data.steps_per_epoch):
        weights = data.batch(step).weights
        n = (weights > 0).sum()
        assert weights.dtype == np.float32
        assert weights.sum() == pytest.approx(1, abs=1e-6)
        np.testing.assert_array_equal(weights[weights > 0], np.float32(1) / np.float32(n))
        counted += n
    assert data.per_step == pytest.approx(4 * np.mean([len(pair.target) + 1 for pair in TRAIN]))
    every = sum(len(pair.target) + 1 for pair in TRAIN)
    assert every - 2 * LONGEST <= counted < every  # two pairs of fifty are left over


def bucket(pair: Pair) -> int:
    """Return 0 for a longer side of 1 to 4 tokens, … 3 for 13 to 16."""
    return (max(len(pair.source), len(pair.target) + 1) - 1) // 4


def test_bucket_width_is_its_longest_pair() -> None:
    data = pairs()
    fitting = [*TRAIN, VAL[0], VAL[2], VAL[4]]
    widths = [
        tuple(max(len(pair[side]) + side for pair in fitting if bucket(pair) <= number) for side in (0, 1))
        for number in range(N_BUCKETS - 1)
    ] + [(LONGEST, LONGEST)]  # the others of VAL are cut to it
    batches = [data.batch(step) for step in range(3 * data.steps_per_epoch)]
    assert len({batch.inputs[0].shape for batch in batches}) == N_BUCKETS
    for batch in batches:
        S, T = widths[max(map(bucket, read_back(batch)))]
        assert [x.shape for x in batch.inputs] == [(4, S), (4, S), (4, T)]
        assert batch.targets.shape == batch.weights.shape == (4, T)
    # Pairs of several buckets are together only where one bucket ends.
    mixed = [len(set(map(bucket, read_back(batch)))) > 1 for batch in batches[: data.steps_per_epoch]]
    assert sum(mixed) <= N_BUCKETS - 1


def test_targets_are_padded_independently_of_sources() -> None:
    data = pairs([Pair(source, "ok") for source, _ in TRAIN], [Pair("a", "b")])
    for step in range(data.steps_per_epoch):
        batch = data.batch(step)
        assert batch.targets.shape == (4, 3)
    assert {data.batch(step).inputs[0].shape[1] for step in range(12)} == {4, 8, 12, 16}


def test_held_out_pairs_come_once_and_are_truncated() -> None:
    batches = list(pairs().val_batches(3))
    assert [batch.targets.shape[0] for batch in batches] == [3, 3]
    assert [int(batch.weights.any(axis=1).sum()) for batch in batches] == [3, 2]
    assert set(np.unique(batches[0].weights)) == {0, 1}
    actual = [pair for batch in batches for pair in read_back(batch)]
    assert actual[:2] == [VAL[0], VAL[4]]  # the shortest first
    assert sorted(actual) == sorted(Pair(source[:16], target[:16]) for source, target in VAL)
    assert [read_back(batch) for batch in pairs().val_batches(3)] == [read_back(batch) for batch in batches]
    few = [pair for batch in pairs().val_batches(2, 3) for pair in read_back(batch)]
    assert [pair.source[0] for pair in few] == ["a", "j", "f"]  # the first, the last and the one between


def test_too_long_pairs_are_left_out_and_reported() -> None:
    data = pairs([*TRAIN, Pair("x" * 17, "y"), Pair("x", "y" * 16)])
    assert len(data.describe().splitlines()) == 1
    assert "50 pairs" in data.describe() and "2 more are longer than 16 tokens" in data.describe()
    assert "5 pairs, 2 of them truncated to 16 tokens" in data.describe()
    actual = {pair for k in range(2 * data.steps_per_epoch) for pair in read_back(data.batch(k))}
    assert actual <= set(TRAIN)
    assert "longer" not in pairs().describe()
    with pytest.raises(UserError, match=r"numbers has 50 pairs of at most 16 tokens, fewer than `train.batch_size` 51"):
        pairs([*TRAIN, Pair("x" * 17, "y"), Pair("x", "y" * 16)], batch_size=51)


def test_fingerprint_depends_on_texts_and_context_length() -> None:
    changed = [pairs(TRAIN[1:]), pairs(val=VAL[1:]), pairs([Pair("00 ", TRAIN[0].target), *TRAIN[1:]])]
    moved = pairs([TRAIN[0], Pair(TRAIN[1].source + TRAIN[1].target[:1], TRAIN[1].target[1:]), *TRAIN[2:]])
    assert len({data.fingerprint for data in (pairs(), *changed, moved)}) == 5
    assert pairs(seed=7, batch_size=2).fingerprint == pairs().fingerprint
    longer = PairDataset("numbers", (TRAIN, VAL), BYTES, RecurrentConfig(257, LONGEST + 1), 4, 0)
    assert longer.fingerprint != pairs().fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, lines in (("train", TRAIN), ("val", VAL)):
        (tmp_path / f"{name}.tsv").write_text("\n".join("\t".join(pair) for pair in lines))
        (tmp_path / f"s-t.{name}.tsv").write_text("\n".join("\t".join(pair) for pair in lines))
    return tmp_path


def test_path_is_a_folder_a_prefix_or_a_file(folder: Path) -> None:
    ways = [
        PairsConfig(str(folder)),
        PairsConfig(str(folder / "s-t")),
        PairsConfig(str(folder / "train.tsv"), val_path=str(folder / "s-t.val.tsv")),
    ]
    loaded = [way.load(MODEL, 4, 0) for way in ways]
    assert {data.fingerprint for data in loaded} == {pairs().fingerprint}
    assert loaded[0].val == VAL


def test_reverse_swaps_sources_and_targets(folder: Path) -> None:
    data = PairsConfig(str(folder), reverse=True).load(MODEL, 4, 0)
    assert data.val == [Pair(target, source) for source, target in VAL]
    assert all(set(pair.source) == {"t"} for pair in read_back(data.batch(0)))


def test_tokenizer_is_trained_on_both_sides(folder: Path) -> None:
    data = PairsConfig(str(folder)).load(RecurrentConfig(260, LONGEST), 4, 0)
    assert {b"ss", b"tt"} <= set(data.tokenizer.token_bytes)
    given = PairsConfig(str(folder)).load(RecurrentConfig(260, LONGEST), 4, 0, BYTES)
    assert given.tokenizer is BYTES and given.fingerprint == data.fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tb\nno tab\n", "line 2, is 'no tab'; it must be SOURCE<TAB>TARGET"),
        ("a\tb\tc\n", "line 1, is "),
        ("a\tb\n\n \tb\n", "line 3, is "),
        ("\n\n", "holds no pairs"),
    ],
)
def test_invalid_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.tsv").write_text(content)
    with pytest.raises(UserError, match=message):
        read_pairs(tmp_path / "x.tsv", Pair._fields)


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_bytes("\ufeffa\tb\r\n\u2028c\td\u00e9\r\n".encode())
    assert read_pairs(tmp_path / "x.tsv", Pair._fields) == [Pair("a", "b"), Pair("\u2028c", "dé")]


@pytest.mark.parametrize(
    ("path", "message"),
    [("", "the path of the data is ''"), ("nowhere", "nowhere.train.tsv is not a file"), ("train.tsv", "val_path")],
)
def test_missing_files_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=message):
        PairsConfig(path).load(MODEL, 4, 0)


@pytest.mark.parametrize("model", [plain_decoder(257, 16), EncoderConfig(257, 16)], ids=lambda c: type(c).__name__)
def test_model_without_source_and_target_is_refused(folder: Path, model: ModelConfig) -> None:
    with pytest.raises(UserError, match=f"pairs of texts, but {type(model).__name__}"):
        PairsConfig(str(folder)).load(model, 4, 0)
