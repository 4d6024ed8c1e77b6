"""Images with captions: files, errors, and batches."""

import io
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxformer.config.fields import from_dict, to_dict
from jaxformer.data.augmentation import augment, draw_augmentations
from jaxformer.data.captions import CaptionDataset, CaptionsConfig, draw_word_masks, select_words, tokenize_captions
from jaxformer.data.dataset import epoch_permutation
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.models.clip import CLIPConfig, ImageTowerConfig, TextTowerConfig

SIDE, T = 4, 12
MODEL = CLIPConfig(
    vision=ImageTowerConfig(image_size=SIDE, patch_size=2, d_model=8, n_heads=2, n_blocks=1),
    text=TextTowerConfig(259, T, d_model=8, n_heads=2, n_blocks=1),
)  # bytes, end-of-text, and two merges: "re" and "ed", or some such
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "reddish": (200, 40, 40), "teal": (0, 99, 99)}
LINES = [f"{i}.png\t{name}\t{'val' if name == 'teal' else 'train'}" for i, name in enumerate(COLOURS)]


def png(colour: tuple[int, ...], size: tuple[int, int] = (SIDE, SIDE), mode: str = "RGB", kind: str = "PNG") -> bytes:
    """Return an image of one color."""
    with io.BytesIO() as file:
        Image.new(mode, size, colour).save(file, kind)
        return file.getvalue()


def noise(rng: np.random.Generator) -> bytes:
    """Return an image of random pixels."""
    with io.BytesIO() as file:
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(file, "PNG")
        return file.getvalue()


IMAGES = {f"{i}.png": png(colour) for i, colour in enumerate(COLOURS.values())}


def write(
    folder: Path, lines: list[str] = LINES, images: dict[str, bytes] = IMAGES, header: str = "file\tcaption\tsplit"
) -> str:
    """Write a folder for `CaptionsConfig.path`."""
    (folder / "captions.tsv").write_text("\n".join([header, *lines]) + "\n")
    with zipfile.ZipFile(folder / "images.zip", "w") as file:
        for name, content in images.items():
            file.writestr(name, content)
    return str(folder)


def load(path: str, batch_size: int = 2, seed: int = 0, model: CLIPConfig = MODEL, **options) -> CaptionDataset:
    return CaptionsConfig(path, **options).load(model, batch_size, seed)


def equal(a, b) -> bool:
    """Return True if two batches are equal."""
    flat = lambda batch: [*batch.inputs, batch.targets]  # noqa: E731
    return all((x == y).all() for x, y in zip(flat(a), flat(b), strict=True))


def test_images_and_captions_are_paired(tmp_path: Path) -> None:
    """Check an epoch of four pairs in two batches, and the held-out pair."""
    data = load(write(tmp_path))
    observed = {}
    for step in (0, 1):
        images, tokens, valid = data.batch(step).inputs
        for image, row, is_token in zip(images, tokens, valid, strict=True):
            assert (image == image[0, 0]).all()
            observed[data.tokenizer.decode(row[is_token])] = tuple(map(int, image[0, 0]))
    assert observed == {name: colour for name, colour in COLOURS.items() if name != "teal"}
    (held,) = data.val_batches(1)
    assert data.tokenizer.decode(held.inputs[1][held.inputs[2]]) == "teal"
    np.testing.assert_array_equal(held.inputs[0][0, 0, 0], COLOURS["teal"])


def test_captions_are_delimited_padded_and_truncated() -> None:
    tokenizer = Tokenizer.train(["abc"], 257)
    a, end = tokenizer.encode("a")[0], tokenizer.end_of_text
    tokens, valid, n_shortened = tokenize_captions(["a", "aa", "aaa", ""], tokenizer, 4)
    assert tokens.tolist() == [[end, a, end, 0], [end, a, a, end], [end, a, a, end], [end, end, 0, 0]]
    assert valid.sum(1).tolist() == [3, 4, 4, 2] and n_shortened == 1
    assert all((np.diff(row.astype(int)) <= 0).all() for row in valid)  # padding on the right


def test_tokenizer_is_trained_on_training_captions_unless_given(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = load(path)
    learned = [piece for piece in data.tokenizer.token_bytes if len(piece) > 1]
    assert learned and all(any(piece in name.encode() for name in COLOURS if name != "teal") for piece in learned)
    given = Tokenizer.train(["tealteal"], 258)
    again = CaptionsConfig(path).load(MODEL, 2, 0, given)
    assert again.tokenizer is given and again.fingerprint == data.fingerprint


def test_equal_captions_have_equal_ids(tmp_path: Path) -> None:
    lines = [line.replace("blue", "red").replace("teal", "red") for line in LINES]
    data = load(write(tmp_path, lines))
    assert data.caption_ids[0] == data.caption_ids[2] == data.caption_ids[4]
    assert len(set(data.caption_ids.tolist())) == 3


def test_batch_depends_only_on_data_seed_and_step_and_rows_are_those_of_the_full_batch(tmp_path: Path) -> None:
    path, rows = write(tmp_path), np.array([1, 0])
    a, b = (load(path, seed=3, jitter=0.5) for _ in range(2))
    for step in (9, 0, 4):  # in any order
        whole, part, example = a.batch(step), b.batch(step, rows), MODEL.example()
        for x, y in zip((*whole.inputs, whole.targets), (*part.inputs, part.targets), strict=True):
            np.testing.assert_array_equal(x[rows], y)
        assert [(x.shape[1:], x.dtype) for x in whole.inputs] == [(x.shape, x.dtype) for x in example]
    batches = [a.batch(step) for step in range(4)]
    assert not any(equal(x, load(path, seed=4, jitter=0.5).batch(step)) for step, x in enumerate(batches))
    assert not any(equal(x, y) for x, y in zip(batches[:2], batches[2:], strict=True))  # epochs differ


def test_held_out_pairs_are_ordered_and_padded(tmp_path: Path) -> None:
    lines = [line.replace("train", "val") if i else line for i, line in enumerate(LINES)]
    model = replace(MODEL, text=replace(MODEL.text, vocab_size=257))
    data = load(write(tmp_path, lines), batch_size=1, model=model, shift=2, flip=True)
    batches = list(data.val_batches(3))
    assert [b.weights.tolist() for b in batches] == [[1, 1, 1], [1, 0, 0]]
    colours = [tuple(map(int, image[0, 0])) for b in batches for image in b.inputs[0][b.weights > 0]]
    assert colours == list(COLOURS.values())[1:]  # as they are: nothing is moved
    assert [b.inputs[0].shape for b in batches] == [(3, SIDE, SIDE, 3)] * 2
    spread = list(data.val_batches(3, 2))
    assert [tuple(map(int, image[0, 0])) for image in spread[0].inputs[0][:2]] == [colours[0], colours[3]]


def test_fingerprint_covers_all_settings_of_the_batches(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = load(path)
    assert len(data.fingerprint) == 64 and data.fingerprint == load(path, batch_size=1, seed=5).fingerprint
    others = [
        load(path, shift=1), load(path, scale=0.1), load(path, rotate=5.0), load(path, flip=True),
        load(path, jitter=0.1), load(path, drop_words=0.5),
        load(path, model=replace(MODEL, text=replace(MODEL.text, context_length=11))),
    ]  # fmt: skip
    others.append(load(write(tmp_path, images={**IMAGES, "0.png": png((254, 0, 0))})))
    others.append(load(write(tmp_path, [LINES[0].replace("red", "Red"), *LINES[1:]])))
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 10


def test_integer_option_has_the_fingerprint_of_its_float(tmp_path: Path) -> None:
    """Check that 10 in a config file equals 10.0."""
    config = CaptionsConfig(write(tmp_path), rotate=10)
    again = from_dict(CaptionsConfig, to_dict(config))
    assert config.load(MODEL, 2, 0).fingerprint == again.load(MODEL, 2, 0).fingerprint


def test_batch_equals_augmentation_by_hand(tmp_path: Path) -> None:
    """Apply `augment` with the parameters of `draw_augmentations` by hand."""
    options = {"shift": 1, "scale": 0.3, "rotate": 40.0, "flip": True, "jitter": 0.4}
    rng = np.random.default_rng(0)
    images = {name: noise(rng) for name in IMAGES}
    data = load(write(tmp_path, images=images), seed=5, **options)
    for step in (0, 1, 2, 3):
        epoch, folder_path = divmod(step, 2)
        numbers = epoch_permutation(4, 5, epoch)[2 * folder_path :][:2]
        views = draw_augmentations(4, 3, 5, epoch, **options)
        expected = [augment(data.images[data.train[i]], *(of_n[i] for of_n in views)) for i in numbers]
        np.testing.assert_array_equal(data.batch(step).inputs[0], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lines": [*LINES, "5.png\tpink\ttrain"]}, r"images\.zip cannot be read .* no item named '5\.png'"),
        ({"images": {**IMAGES, "1.png": b"no image"}}, r"1\.png in .* cannot be read as an image"),
        ({"header": "image\ttext"}, r"the first line of .*captions\.tsv is 'image\\ttext'"),
        ({"lines": [*LINES, "5.png\tpink"]}, r"line 7 of .* is '5\.png\\tpink'; it must be a file, a capti"),
        ({"lines": [*LINES, "5.png\t \ttrain"]}, "line 7 of .*; it must be "),
        ({"lines": [*LINES, "5.png\tpink\ttest"]}, "line 7 of .*; it must be a file, a caption, and train or val"),
        ({"lines": [*LINES, "0.png\tpink\tval"]}, r"has several captions for 0\.png; keep one"),
        ({"lines": LINES[:4]}, "has no line of the split val"),
        ({"lines": LINES[4:]}, "has no line of the split train"),
    ],
)  # fmt: skip
def test_inconsistent_files_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(write(tmp_path, **change))


def test_model_config_is_inferred_from_images_and_captions(tmp_path: Path) -> None:
    path = write(tmp_path, images={name: png((9, 9, 9), (10, 6)) for name in IMAGES})
    model = replace(MODEL, text=replace(MODEL.text, vocab_size=5000))
    data = CaptionsConfig(path).load(model, 2, 0, fixed=())
    vision = replace(MODEL.vision, image_size=(6, 10), patch_size=(2, 5))
    fewer = data.tokenizer.vocab_size
    assert 257 < fewer < 5000
    assert data.model == replace(MODEL, vision=vision, text=replace(MODEL.text, vocab_size=fewer))
    assert data.batch(0).inputs[0].shape == (2, 6, 10, 3)
    assert data.notes == (
        f"{path} has images of 6 x 10 pixels and supports {fewer} tokens: model.vision.image_size 6 10 (not 4 4), "
        f"model.vision.patch_size 2 5 (not 2 2), model.text.vocab_size {fewer} (not 5000)",
    )
    fixed = CaptionsConfig(path).load(MODEL, 2, 0)
    assert fixed.model == MODEL and fixed.batch(0).inputs[0].shape == (2, 4, 4, 3)
    assert fixed.notes == (f"the images in {path} are resized from 6 x 10 pixels to 4 x 4 pixels",)


@pytest.mark.parametrize("name", ["images.zip", "captions.tsv"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=rf"{name} cannot be read.* No such file"):
        load(str(tmp_path))


@pytest.mark.parametrize("damage", [lambda b: b"no zip", lambda b: b.replace(b"IDAT", b"IDAR")])
def test_corrupt_zip_is_refused(tmp_path: Path, damage) -> None:
    write(tmp_path)
    file = tmp_path / "images.zip"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=r"images\.zip cannot be read as a zip file of all images: "):
        load(str(tmp_path))


def test_too_large_image_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check 16 pixels: Pillow refuses more than twice its maximum, here 7."""
    path = write(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7)
    with pytest.raises(UserError, match=r"0\.png in .* cannot be read as an image \(Image size \(16 pixels\)"):
        load(path)


def test_data_that_does_not_match_the_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(UserError, match=r"has 4 pair\(s\) for training, fewer than `train\.batch_size` 5"):
        load(path, batch_size=5)
    with pytest.raises(UserError, match="MLPConfig does not configure a model of both"):
        CaptionsConfig(path).load(MLPConfig(), 2, 0)
    with pytest.raises(UserError, match="channels` is 2; set it to 1"):
        load(path, model=replace(MODEL, vision=replace(MODEL.vision, mean=(0.5, 0.5), std=(0.2, 0.2))))


def test_word_dropout_keeps_at_least_one_word() -> None:
    mask = np.array([True, False, False, True])
    assert select_words("one two three four five six", mask) == "one four five"
    assert select_words("one two", mask[1:3]) == "one"
    drawn = draw_word_masks(1000, 0, 0, 0.3)
    assert abs(drawn.mean() - 0.7) < 0.008  # four times √(0.21/64000)
    assert (drawn != draw_word_masks(1000, 0, 1, 0.3)).any()


def test_word_dropout_applies_in_training_only(tmp_path: Path) -> None:
    """Check that captions of the letters a, b and c keep different ones of them in different epochs."""
    lines = [f"{i}.png\ta b c\t{'val' if i == 4 else 'train'}" for i in range(5)]
    model = replace(MODEL, text=replace(MODEL.text, vocab_size=257))
    data = load(write(tmp_path, lines), batch_size=4, model=model, drop_words=0.5)
    strip = lambda row, valid: data.tokenizer.decode(row[valid])  # noqa: E731
    epochs = [[strip(*pair) for pair in zip(*data.batch(step).inputs[1:], strict=True)] for step in range(4)]
    for message in (text for epoch in epochs for text in epoch):
        assert message and message.split() == sorted(set(message.split()) & {"a", "b", "c"})
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert data.batch(3).targets.tolist() == [data.caption_ids[0]] * 4  # the caption is the same one
    (held,) = data.val_batches(1)
    assert strip(held.inputs[1][0], held.inputs[2][0]) == "a b c"
    assert equal(data.batch(2), load(str(tmp_path), batch_size=4, model=model, drop_words=0.5).batch(2))


def test_files_in_the_zip_without_a_caption_are_ignored(tmp_path: Path) -> None:
    plain = load(write(tmp_path)).fingerprint
    assert load(write(tmp_path, images={**IMAGES, "__MACOSX/._0.png": b"", "x.png": b""})).fingerprint == plain
