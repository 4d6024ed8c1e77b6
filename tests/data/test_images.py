"""Image files and labelled images in batches."""

import gzip
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxformer.config import Resizing
from jaxformer.data.dataset import epoch_uniforms
from jaxformer.data.image_folder import ImageSplits, LabelledImages, hold_out, open_image_folder
from jaxformer.data.image_io import read_idx, read_image, read_model_input
from jaxformer.data.images import ImagesConfig
from jaxformer.data.infer_config import infer_image_size
from jaxformer.errors import UserError
from jaxformer.models.vit import ViTConfig
from jaxformer.models.vivit import ViViTConfig
from tests.arrays import plain_decoder

HEIGHT, WIDTH, CLASSES = 4, 6, 3
N, N_VAL = 11, 5
MODEL = ViTConfig(
    image_size=(HEIGHT, WIDTH), channels=1, n_classes=CLASSES, patch_size=(2, 2), d_model=4, n_heads=1, n_blocks=1
)


def images(n: int, *channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(n, HEIGHT, WIDTH, *channels)).astype(np.uint8)


def labels(n: int) -> np.ndarray:
    return (np.arange(n) % CLASSES).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    """Return an IDX file: two zeros, the type (8 for bytes), the number of axes, their lengths, the data."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_idx(folder: Path, parts: dict[str, int] | None = None, packed: bool = True) -> Path:
    """Write the images and labels of each split, with the seeds 0, 1, …"""
    folder.mkdir(exist_ok=True)
    for seed, (part, n) in enumerate((parts or {"train": N, "t10k": N_VAL}).items()):
        for name, array in (("images-idx3", images(n, seed=seed)), ("labels-idx1", labels(n))):
            content, file = idx(array), folder / f"{part}-{name}-ubyte{'.gz' if packed else ''}"
            file.write_bytes(gzip.compress(content) if packed else content)
    return folder


def write_pictures(folder: Path, pixels: np.ndarray, suffix: str = ".png") -> Path:
    """Write images into folders a, b and c in turn."""
    for i, image in enumerate(pixels):
        folder_path = folder / "abc"[i % CLASSES]
        folder_path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze()).save(folder_path / f"{i:02}{suffix}")
    return folder


def read_splits(path: str, val_fraction: float, channels: int) -> ImageSplits:
    """Return all images in their own size."""
    folder = open_image_folder(path)
    assert folder.size is not None
    return folder.read(val_fraction, folder.size, channels)


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    return write_idx(tmp_path / "idx")


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_round_trip(tmp_path: Path, packed: bool) -> None:
    splits = read_splits(str(write_idx(tmp_path / "idx", packed=packed)), 0.1, 1)
    for part, n, seed in ((splits.train, N, 0), (splits.val, N_VAL, 1)):
        np.testing.assert_array_equal(part.images, images(n, 1, seed=seed))
        np.testing.assert_array_equal(part.labels, labels(n))
        assert part.labels.dtype == np.int32
    assert splits.classes == ("0", "1", "2")


def test_image_folders_give_labels(tmp_path: Path) -> None:
    pixels = images(N, 3)
    write_pictures(tmp_path / "train", pixels)
    write_pictures(tmp_path / "val", pixels[:4])
    (tmp_path / "train" / "a" / "notes.txt").write_text("not a picture")
    splits = read_splits(str(tmp_path), 0.1, 3)
    by_label = np.argsort(labels(N), kind="stable")
    np.testing.assert_array_equal(splits.train.images, pixels[by_label])
    np.testing.assert_array_equal(splits.train.labels, labels(N)[by_label])
    assert splits.classes == ("a", "b", "c") and len(splits.val.images) == 4


def test_images_convert_to_grayscale_and_rgb(tmp_path: Path) -> None:
    """Check 0.299 R + 0.587 G + 0.114 B (ITU-R 601), rounded, and three equal channels of grayscale."""
    write_pictures(tmp_path / "train", images(N, 3))
    write_pictures(tmp_path / "val", images(N))
    colours = images(N, 3)[np.argsort(labels(N), kind="stable")]
    grey = read_splits(str(tmp_path), 0.1, 1)
    assert np.abs(grey.train.images[..., 0] - colours @ [0.299, 0.587, 0.114]).max() <= 1
    coloured = read_splits(str(tmp_path), 0.1, 3)
    assert (coloured.val.images == grey.val.images).all() and coloured.val.images.shape[-1] == 3


def test_held_out_images_depend_only_on_content() -> None:
    """Check that the split does not depend on the order, and that equal images are in one split."""
    pixels = np.concatenate([images(60, 1), images(60, 1)])
    both = LabelledImages(pixels, np.arange(120, dtype=np.int32))
    train, val = hold_out(both, 0.3)
    held = set(val.labels.tolist())
    assert held == {i + 60 for i in held if i < 60} | {i - 60 for i in held if i >= 60}
    order = np.random.default_rng(1).permutation(120)
    shuffled = hold_out(LabelledImages(pixels[order], both.labels[order]), 0.3)[1]
    assert set(shuffled.labels.tolist()) == held
    assert set(train.labels.tolist()) | held == set(range(120))


def test_epoch_visits_every_image_once_with_its_label(idx_folder: Path) -> None:
    data = ImagesConfig(str(idx_folder)).load(MODEL, 2, seed=0)
    assert (data.steps_per_epoch, data.per_step, data.unit) == (5, 2, "examples")
    known = {image.tobytes(): label for image, label in zip(images(N), labels(N), strict=True)}
    for epoch in (0, 1):
        observed = []
        for step in range(5 * epoch, 5 * epoch + 5):
            batch = data.batch(step)
            assert batch.weights is None and batch.targets.dtype == np.int32
            assert batch.inputs[0].shape == (2, HEIGHT, WIDTH, 1) and batch.inputs[0].dtype == np.uint8
            for image, label in zip(batch.inputs[0], batch.targets, strict=True):
                assert known[image.tobytes()] == label
                observed.append(image.tobytes())
        assert len(set(observed)) == 10  # of 11; one is left for the next epoch's draw


def test_batch_depends_only_on_data_seed_and_step(idx_folder: Path) -> None:
    config = ImagesConfig(str(idx_folder), flip=True, shift=1)
    a, b = (config.load(MODEL, 4, seed=3) for _ in range(2))
    for step in (7, 0, 3):
        whole = a.batch(step)
        some = b.batch(step, np.array([0, 3]))
        np.testing.assert_array_equal(whole.inputs[0][[0, 3]], some.inputs[0])
        np.testing.assert_array_equal(whole.targets[[0, 3]], some.targets)
    assert (a.batch(0).inputs[0] != config.load(MODEL, 4, seed=4).batch(0).inputs[0]).any()


def test_flip_and_shift_are_uniform_over_epochs(idx_folder: Path) -> None:
    """Check the frequencies of two orientations and nine shifts of one image over 400 epochs."""
    data = ImagesConfig(str(idx_folder), flip=True, shift=1).load(MODEL, 11, seed=0)
    original, number = images(N)[4], np.array([4])
    observed = {}
    for mirrored in (False, True):
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                moved = np.zeros((HEIGHT + 2, WIDTH + 2), np.uint8)
                moved[1 + down : 1 + down + HEIGHT, 1 + right : 1 + right + WIDTH] = (
                    original[:, ::-1] if mirrored else original
                )
                observed[moved[1:-1, 1:-1].tobytes()] = 0
    assert len(observed) == 18
    for epoch in range(400):
        pixels, label = data.train_examples(number, epoch)
        observed[pixels.tobytes()] += 1
        assert label == labels(N)[4]
    # 22 of each are expected, with a standard deviation of 4.6.
    assert min(observed.values()) > 5 and max(observed.values()) < 45


def test_epoch_uniforms_are_independent_of_the_permutation() -> None:
    a = epoch_uniforms(1000, 2, 0, 0)
    assert a.shape == (1000, 2) and (a >= 0).all() and (a < 1).all()
    assert abs(a.mean() - 0.5) < 0.03  # 2,000 numbers of spread 0.29
    assert not np.array_equal(a, epoch_uniforms(1000, 2, 0, 1)) and not np.array_equal(a, epoch_uniforms(1000, 2, 1, 0))
    ordered = np.random.Generator(np.random.Philox(key=[0, 0])).random((1000, 2))
    assert not np.intersect1d(a, ordered).size


@pytest.mark.parametrize("n", [None, 3])
def test_held_out_images_are_ordered_and_padded(idx_folder: Path, n: int | None) -> None:
    data = ImagesConfig(str(idx_folder), flip=True, shift=1).load(MODEL, 2, seed=0)
    batches = list(data.val_batches(2, n))
    assert all(batch.inputs[0].shape == (2, HEIGHT, WIDTH, 1) for batch in batches)
    weights = np.concatenate([batch.weights for batch in batches])
    numbers = [0, 1, 2, 3, 4] if n is None else [0, 2, 4]
    assert weights.tolist() == [1.0] * len(numbers) + [0.0] and weights.dtype == np.float32
    actual = np.concatenate([batch.inputs[0] for batch in batches])[weights > 0]
    np.testing.assert_array_equal(actual[..., 0], images(N_VAL, seed=1)[numbers])
    targets_seen = np.concatenate([batch.targets for batch in batches])[weights > 0]
    np.testing.assert_array_equal(targets_seen, labels(N_VAL)[numbers])


def test_fingerprint_covers_all_settings_of_a_batch(idx_folder: Path, tmp_path: Path) -> None:
    config = ImagesConfig(str(idx_folder))
    same = [config.load(MODEL, 2, 0), config.load(MODEL, 3, 1)]
    assert len({data.fingerprint for data in same}) == 1
    other = write_idx(tmp_path / "other", {"train": N, "t10k": N_VAL + 1})
    others = [replace(config, flip=True), replace(config, shift=1), replace(config, path=str(other))]
    assert len({data.fingerprint for data in same} | {c.load(MODEL, 2, 0).fingerprint for c in others}) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it begins with , not with 00 00 08 03"),
        (idx(labels(N)), "it begins with 00 00 08 01"),
        (idx(images(N))[:-1], r"cannot reshape array of size 263 into shape \(11,4,6\)"),
        (idx(images(N)) + b"x", "cannot reshape array of size 265"),
        (idx(images(N))[:9], "buffer is smaller than requested"),
    ],
)
def test_corrupt_idx_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    """Check files around the correct size of 16 + 11 * 24 = 280 bytes."""
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file} is no IDX file of bytes with 3 axes \({message}"):
        read_idx(file, 3)


def test_mismatched_idx_files_are_refused(idx_folder: Path) -> None:
    file = idx_folder / "train-labels-idx1-ubyte.gz"
    file.write_bytes(gzip.compress(idx(labels(N + 1))))
    with pytest.raises(UserError, match=r"has 11 images, but .* 12 labels"):
        read_splits(str(idx_folder), 0.1, 1)
    file.unlink()
    with pytest.raises(UserError, match=r"has no train-labels-idx\*-ubyte"):
        read_splits(str(idx_folder), 0.1, 1)


@pytest.mark.parametrize("part", ["train", "val"])
def test_images_of_several_sizes_are_resized_as_in_sampling(tmp_path: Path, part: str) -> None:
    write_pictures(tmp_path / "train", images(N, 3))
    write_pictures(tmp_path / "val", images(3, 3))
    file = tmp_path / part / "b" / "99.png"
    Image.fromarray(np.random.default_rng(0).integers(256, size=(9, 7, 3)).astype(np.uint8)).save(file)
    data = ImagesConfig(str(tmp_path)).load(MODEL, 2, 0, fixed=())
    assert data.model == replace(MODEL, channels=3)
    assert any("resized from 2 sizes (4 x 6 to 9 x 7 pixels) to 4 x 6 pixels" in note for note in data.notes)
    assert (
        f"{tmp_path} has images of 2 sizes (4 x 6 to 9 x 7 pixels) with 3 channels: model.channels 3" in data.notes[0]
    )
    pixels = {image.tobytes() for image in getattr(data.splits, part).images}
    assert read_image(file, "", 3, (HEIGHT, WIDTH)).tobytes() in pixels
    assert read_model_input(str(file), (HEIGHT, WIDTH, 3)).tobytes() in pixels


def test_model_config_is_inferred_from_images(tmp_path: Path) -> None:
    """Check that the number of patches, 2 x 3, stays where it divides the image."""
    pixels = np.random.default_rng(0).integers(256, size=(N, 10, 9, 3)).astype(np.uint8)
    write_pictures(tmp_path / "train", pixels)
    write_pictures(tmp_path / "test", pixels)
    data = ImagesConfig(str(tmp_path), val_fraction=0.5).load(replace(MODEL, n_classes=10), 2, 0, fixed=())
    assert data.model == replace(MODEL, image_size=(10, 9), channels=3, patch_size=(5, 3))
    assert data.batch(0).inputs[0].shape == (2, 10, 9, 3)
    assert data.notes == (
        f"{tmp_path} has images of 10 x 9 pixels with 3 channels: model.image_size 10 9 (not 4 6), model.channels 3 "
        "(not 1), model.n_classes 3 (not 10), model.patch_size 5 3 (not 2 2)",
        f"the folder {tmp_path / 'test'} is not read: evaluation images are some of train; name it val to evaluate on "
        "it",
    )


def test_fixed_fields_stay_and_images_are_resized(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", np.random.default_rng(0).integers(256, size=(N, 10, 9, 3)).astype(np.uint8))
    config = ImagesConfig(str(tmp_path), val_fraction=0.5)
    data = config.load(MODEL, 2, 0)
    assert data.model == MODEL and data.batch(0).inputs[0].shape == (2, HEIGHT, WIDTH, 1)
    assert data.notes == (f"the images in {tmp_path} are resized from 10 x 9 pixels to 4 x 6 pixels",)


def test_channels_of_idx_files_are_inferred_or_converted(idx_folder: Path) -> None:
    coloured = replace(MODEL, channels=3, mean=(0.25, 0.5, 0.75), std=(0.25, 0.25, 0.25))
    config = ImagesConfig(str(idx_folder))
    assert config.load(coloured, 2, 0, fixed=()).model == replace(coloured, channels=1, mean=(0.5,), std=(0.25,))
    (pixels,) = config.load(coloured, 2, 0).batch(0).inputs
    assert pixels.shape[-1] == 3 and (pixels == config.load(MODEL, 2, 0).batch(0).inputs[0]).all()


@pytest.mark.parametrize(
    ("images", "fixed", "size", "patch"),
    [
        ((28, 28), "", (28, 28), (7, 7)),
        ((40, 32), "", (40, 32), (10, 8)),
        ((37, 28), "", (35, 28), (7, 7)),  # 37 is a prime
        ((300, 28), "", (28, 28), (7, 7)),
        (None, "", (28, 28), (7, 7)),
        ((40, 32), "image", (28, 28), (7, 7)),
        ((40, 35), "patch", (42, 35), (7, 7)),
    ],
)
def test_image_and_patch_sizes_are_inferred(images: tuple | None, fixed: str, size: tuple, patch: tuple) -> None:
    model = infer_image_size(replace(MODEL, image_size=(28, 28), patch_size=(7, 7)), images, {f"{fixed}_size"})
    assert (model.image_size, model.patch_size) == (size, patch)


def test_class_without_training_images_is_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", images(2))
    write_pictures(tmp_path / "val", images(3))
    with pytest.raises(UserError, match="val has a class 'c' that train lacks"):
        read_splits(str(tmp_path), 0.1, 1)


@pytest.mark.parametrize("content", [b"no picture", None])
def test_corrupt_image_is_named(tmp_path: Path, content: bytes | None) -> None:
    write_pictures(tmp_path / "train", images(N))
    file = tmp_path / "train" / "a" / "00.png"
    file.write_bytes(file.read_bytes()[:60] if content is None else content)
    with pytest.raises(UserError, match=f"{file} cannot be read as an image"):
        read_splits(str(tmp_path), 0.1, 1)


def test_transparency_becomes_white(tmp_path: Path) -> None:
    """Check alpha and a palette's transparency; half-transparent black over white is gray."""
    folder_path = tmp_path / "train" / "a"
    folder_path.mkdir(parents=True)
    colours = [(200, 0, 0, 0), (0, 0, 0, 128), (9, 9, 9, 255)]
    for i, colour in enumerate(colours * 10):
        Image.new("RGBA", (WIDTH, HEIGHT), colour).save(folder_path / f"{i:02}.png")
    Image.new("P", (WIDTH, HEIGHT), 0).save(folder_path / "30.png", transparency=0)
    write_pictures(tmp_path / "val", images(1))
    actual = read_splits(str(tmp_path), 0.1, 3).train.images
    assert actual[:3, 0, 0].tolist() == [[255] * 3, [127] * 3, [9] * 3]
    assert (actual[30] == 255).all()


def test_images_of_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    """Check 16 bits, whose values above 255 Pillow would clip to white."""
    write_pictures(tmp_path / "train", images(N))
    Image.fromarray(np.full((HEIGHT, WIDTH), 40_000, np.uint16)).save(tmp_path / "train" / "a" / "16.png")
    with pytest.raises(UserError, match=r"16\.png has more than 8 bits per channel; convert it to 8"):
        read_splits(str(tmp_path), 0.1, 1)


def test_missing_files_are_named(tmp_path: Path) -> None:
    for path, message in (
        ("", "the path of the data is ''; give a folder of images"),
        (str(tmp_path), "is no folder with train-images-idx3-ubyte or with a folder train"),
    ):
        with pytest.raises(UserError, match=message):
            read_splits(path, 0.1, 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(MODEL, n_classes=4), "3 classes, but `model.n_classes` is 4; set `model.n_classes=3`"),
        (plain_decoder(), "the data is images, but DecoderConfig does not configure a model of images"),
        (ViViTConfig(), "the data is images, but ViViTConfig does not configure a model of images"),
    ],
)
def test_unsuitable_model_is_refused(idx_folder: Path, model: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ImagesConfig(str(idx_folder)).load(model, 2, 0)


def test_invalid_numbers_are_refused(idx_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 11 training images, fewer than"):
        ImagesConfig(str(idx_folder)).load(MODEL, 12, 0)
    write_pictures(tmp_path / "train", images(2))
    with pytest.raises(UserError, match=r"`data.val_fraction` 1e-09 of 2 images leaves nothing to evaluate on"):
        read_splits(str(tmp_path), 1e-9, 1)
    with pytest.raises(UserError, match=r"`model\.channels` is 2; set it to 1"):
        read_splits(str(tmp_path), 0.5, 2)


def test_hidden_and_empty_folders_are_no_classes_and_what_is_not_read_is_counted(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", images(N, 3))
    write_pictures(tmp_path / "val", images(4, 3))
    for name in ("train/empty", "train/.ipynb_checkpoints", "val/.ipynb_checkpoints", "val/only", ".git", "val/empty"):
        (tmp_path / name).mkdir()
    for name in ("train/.ipynb_checkpoints/a.png", "train/a/._00.png", "train/a/b.heic", "train/a/notes.txt"):
        (tmp_path / name).write_bytes(b"none of them is an image")
    (tmp_path / "train/loose.png").write_bytes((tmp_path / "train/a/00.png").read_bytes())
    opened = open_image_folder(str(tmp_path))
    assert opened.classes == ("a", "b", "c") and len(opened.train) == N
    left_out = "1 .heic, 1 .txt, 1 in no folder of a class, 1 folder(s) without images"
    assert opened.notes == (
        f"11 file(s) of {tmp_path / 'train'} are read (left out: {left_out})",
        f"4 file(s) of {tmp_path / 'val'} are read (left out: 2 folder(s) without images)",
    )


def test_images_of_all_formats_and_depths_are_read(tmp_path: Path) -> None:
    pixels = np.full((HEIGHT, WIDTH, 3), 77, np.uint8)
    suffixes = (".png", ".PNG", ".jpg", ".jfif", ".webp", ".bmp", ".Gif", ".tif", ".ppm")
    for i, suffix in enumerate(suffixes):
        file = tmp_path / "train/a" / ("deep/er" * (i % 2)) / f"{i}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file, "JPEG" if suffix == ".jfif" else None)
    write_pictures(tmp_path / "val", np.full((1, HEIGHT, WIDTH), 77, np.uint8))
    splits = read_splits(str(tmp_path), 0.1, 1)
    assert len(splits.train.images) == len(suffixes) and np.abs(splits.train.images.astype(int) - 77).max() <= 2


def test_folder_without_images_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "train/a").mkdir(parents=True)
    (tmp_path / "train/a/b.heic").write_bytes(b"")
    message = r"no images in .*train \(left out: 1 \.heic, 1 folder\(s\) without images\); put them into train/LABEL/"
    with pytest.raises(UserError, match=message):
        open_image_folder(str(tmp_path))


def test_an_image_is_resized_and_its_centre_cropped_or_framed_in_black(tmp_path: Path) -> None:
    """A shorter side of 4 of 2 x 4 pixels makes 4 x 8; with nearest neighbours, each pixel becomes 2 x 2."""
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) + 1
    Image.fromarray(pixels).save(tmp_path / "a.png")
    read = partial(read_image, tmp_path / "a.png", "a.png", 3)
    twice = pixels.repeat(2, 0).repeat(2, 1)
    np.testing.assert_array_equal(read((4, 4), Resizing((4,), "nearest")), twice[:, 2:6])
    framed = read((4, 6), Resizing((2, 4), "nearest"))
    np.testing.assert_array_equal(framed, np.pad(pixels, ((1, 1), (1, 1), (0, 0))))
    with pytest.raises(UserError, match=r"a.png has 2 x 4 pixels, and 16384 x 32768 after resizing"):
        read((4, 4), Resizing((16_384,), "nearest"))
