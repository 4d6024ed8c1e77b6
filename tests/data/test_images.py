"""Images from files, and batches of them."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxformer.data.dataset import epoch_uniforms
from jaxformer.data.image_folder import ImageSplits, LabelledImages, hold_out, open_image_folder
from jaxformer.data.image_io import read_idx, read_image, read_model_input
from jaxformer.data.images import ImagesConfig, shift_images
from jaxformer.data.infer_config import infer_image_size
from jaxformer.errors import UserError
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.vit import ViTConfig
from jaxformer.models.vivit import ViViTConfig

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
    """As the format says: two zeros, the type (8 for bytes), the number of axes, their lengths, the numbers."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_idx(folder: Path, parts: dict[str, int] | None = None, packed: bool = True) -> Path:
    """Both files of each part, with the seeds 0, 1, …"""
    folder.mkdir(exist_ok=True)
    for seed, (part, n) in enumerate((parts or {"train": N, "t10k": N_VAL}).items()):
        for name, array in (("images-idx3", images(n, seed=seed)), ("labels-idx1", labels(n))):
            content, file = idx(array), folder / f"{part}-{name}-ubyte{'.gz' if packed else ''}"
            file.write_bytes(gzip.compress(content) if packed else content)
    return folder


def write_pictures(folder: Path, pixels: np.ndarray, suffix: str = ".png") -> Path:
    """By label: the first to a, the second to b, and so on."""
    for i, image in enumerate(pixels):
        place = folder / "abc"[i % CLASSES]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze()).save(place / f"{i:02}{suffix}")
    return folder


def read_stills(path: str, val_fraction: float, channels: int) -> ImageSplits:
    """All images in their own size."""
    folder = open_image_folder(path)
    assert folder.size is not None
    return folder.read(val_fraction, folder.size, channels)


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    return write_idx(tmp_path / "idx")


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read_as_they_were_written(tmp_path: Path, packed: bool) -> None:
    stills = read_stills(str(write_idx(tmp_path / "idx", packed=packed)), 0.1, 1)
    for part, n, seed in ((stills.train, N, 0), (stills.val, N_VAL, 1)):
        np.testing.assert_array_equal(part.images, images(n, 1, seed=seed))
        np.testing.assert_array_equal(part.labels, labels(n))
        assert part.labels.dtype == np.int32
    assert stills.classes == ("0", "1", "2")


def test_without_files_to_measure_on_some_are_held_out(tmp_path: Path) -> None:
    stills = read_stills(str(write_idx(tmp_path / "idx", {"train": 200})), 0.25, 1)
    held = len(stills.val.images)
    assert len(stills.train.images) + held == 200
    assert abs(held - 50) < 25  # four standard deviations of a draw of 200 at 1/4


def test_pictures_are_read_by_label(tmp_path: Path) -> None:
    pixels = images(N, 3)
    write_pictures(tmp_path / "train", pixels)
    write_pictures(tmp_path / "val", pixels[:4])
    (tmp_path / "train" / "a" / "notes.txt").write_text("not a picture")
    stills = read_stills(str(tmp_path), 0.1, 3)
    by_label = np.argsort(labels(N), kind="stable")
    np.testing.assert_array_equal(stills.train.images, pixels[by_label])
    np.testing.assert_array_equal(stills.train.labels, labels(N)[by_label])
    assert stills.classes == ("a", "b", "c") and len(stills.val.images) == 4


def test_pictures_become_grey_or_coloured_as_the_model_wants(tmp_path: Path) -> None:
    """Grey is 0.299 R + 0.587 G + 0.114 B (ITU-R 601), rounded; a grey picture has three channels alike."""
    write_pictures(tmp_path / "train", images(N, 3))
    write_pictures(tmp_path / "val", images(N))
    colours = images(N, 3)[np.argsort(labels(N), kind="stable")]
    grey = read_stills(str(tmp_path), 0.1, 1)
    assert np.abs(grey.train.images[..., 0] - colours @ [0.299, 0.587, 0.114]).max() <= 1
    coloured = read_stills(str(tmp_path), 0.1, 3)
    assert (coloured.val.images == grey.val.images).all() and coloured.val.images.shape[-1] == 3


def test_jpeg_is_read(tmp_path: Path) -> None:
    """Of one colour, which its compression hardly changes."""
    write_pictures(tmp_path / "train", np.full((40, HEIGHT, WIDTH), 77, np.uint8), ".JPG")
    write_pictures(tmp_path / "val", np.full((3, HEIGHT, WIDTH), 77, np.uint8), ".jpeg")
    stills = read_stills(str(tmp_path), 0.2, 1)
    assert len(stills.train.images) == 40
    assert np.abs(stills.train.images.astype(int) - 77).max() <= 2


def test_what_is_held_out_depends_on_content_alone() -> None:
    """Whatever the order is, and with equal images on one side."""
    pixels = np.concatenate([images(60, 1), images(60, 1)])
    both = LabelledImages(pixels, np.arange(120, dtype=np.int32))
    train, val = hold_out(both, 0.3)
    held = set(val.labels.tolist())
    assert held == {i + 60 for i in held if i < 60} | {i - 60 for i in held if i >= 60}
    order = np.random.default_rng(1).permutation(120)
    shuffled = hold_out(LabelledImages(pixels[order], both.labels[order]), 0.3)[1]
    assert set(shuffled.labels.tolist()) == held
    assert set(train.labels.tolist()) | held == set(range(120))


def test_an_epoch_takes_every_image_once_with_its_label(idx_folder: Path) -> None:
    data = ImagesConfig(str(idx_folder)).load(MODEL, 2, seed=0)
    assert (data.steps_per_epoch, data.per_step, data.unit) == (5, 2, "examples")
    known = {image.tobytes(): label for image, label in zip(images(N), labels(N), strict=True)}
    for epoch in (0, 1):
        seen = []
        for step in range(5 * epoch, 5 * epoch + 5):
            batch = data.batch(step)
            assert batch.weights is None and batch.targets.dtype == np.int32
            assert batch.inputs[0].shape == (2, HEIGHT, WIDTH, 1) and batch.inputs[0].dtype == np.uint8
            for image, label in zip(batch.inputs[0], batch.targets, strict=True):
                assert known[image.tobytes()] == label
                seen.append(image.tobytes())
        assert len(set(seen)) == 10  # of 11; one is left for the next epoch's draw


def test_a_batch_depends_on_data_seed_and_step_alone(idx_folder: Path) -> None:
    config = ImagesConfig(str(idx_folder), flip=True, shift=1)
    a, b = (config.load(MODEL, 4, seed=3) for _ in range(2))
    for step in (7, 0, 3):
        whole = a.batch(step)
        some = b.batch(step, np.array([0, 3]))
        np.testing.assert_array_equal(whole.inputs[0][[0, 3]], some.inputs[0])
        np.testing.assert_array_equal(whole.targets[[0, 3]], some.targets)
    assert (a.batch(0).inputs[0] != config.load(MODEL, 4, seed=4).batch(0).inputs[0]).any()


def test_images_are_mirrored_and_moved_differently_in_each_epoch(idx_folder: Path) -> None:
    """One image, over 400 epochs: half of the time mirrored, and in each of nine places as often."""
    data = ImagesConfig(str(idx_folder), flip=True, shift=1).load(MODEL, 11, seed=0)
    original, number = images(N)[4], np.array([4])
    seen = {}
    for mirrored in (False, True):
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                moved = np.zeros((HEIGHT + 2, WIDTH + 2), np.uint8)
                moved[1 + down : 1 + down + HEIGHT, 1 + right : 1 + right + WIDTH] = (
                    original[:, ::-1] if mirrored else original
                )
                seen[moved[1:-1, 1:-1].tobytes()] = 0
    assert len(seen) == 18
    for epoch in range(400):
        pixels, label = data.train_examples(number, epoch)
        seen[pixels.tobytes()] += 1
        assert label == labels(N)[4]
    # 22 of each are expected, with a standard deviation of 4.6.
    assert min(seen.values()) > 5 and max(seen.values()) < 45


def test_a_move_brings_in_black() -> None:
    image = np.arange(1, 13, dtype=np.uint8).reshape(1, 3, 4, 1)
    assert shift_images(image, np.array([[1, -2]]))[0, ..., 0].tolist() == [[0, 0, 0, 0], [3, 4, 0, 0], [7, 8, 0, 0]]
    np.testing.assert_array_equal(shift_images(image, np.array([[0, 0]])), image)


def test_draws_are_apart_from_the_order() -> None:
    a = epoch_uniforms(1000, 2, 0, 0)
    assert a.shape == (1000, 2) and (a >= 0).all() and (a < 1).all()
    assert abs(a.mean() - 0.5) < 0.03  # 2,000 numbers of spread 0.29
    assert not np.array_equal(a, epoch_uniforms(1000, 2, 0, 1)) and not np.array_equal(a, epoch_uniforms(1000, 2, 1, 0))
    ordered = np.random.Generator(np.random.Philox(key=[0, 0])).random((1000, 2))
    assert not np.intersect1d(a, ordered).size


@pytest.mark.parametrize("n", [None, 3])
def test_held_out_images_come_in_order_and_the_last_batch_is_filled(idx_folder: Path, n: int | None) -> None:
    data = ImagesConfig(str(idx_folder), flip=True, shift=1).load(MODEL, 2, seed=0)
    batches = list(data.held_out(2, n))
    assert all(batch.inputs[0].shape == (2, HEIGHT, WIDTH, 1) for batch in batches)
    weights = np.concatenate([batch.weights for batch in batches])
    numbers = [0, 1, 2, 3, 4] if n is None else [0, 2, 4]
    assert weights.tolist() == [1.0] * len(numbers) + [0.0] and weights.dtype == np.float32
    found = np.concatenate([batch.inputs[0] for batch in batches])[weights > 0]
    np.testing.assert_array_equal(found[..., 0], images(N_VAL, seed=1)[numbers])
    told = np.concatenate([batch.targets for batch in batches])[weights > 0]
    np.testing.assert_array_equal(told, labels(N_VAL)[numbers])


def test_the_fingerprint_is_of_all_that_shapes_a_batch(idx_folder: Path, tmp_path: Path) -> None:
    config = ImagesConfig(str(idx_folder))
    same = [config.load(MODEL, 2, 0), config.load(MODEL, 3, 1)]
    assert len({data.fingerprint for data in same}) == 1
    other = write_idx(tmp_path / "other", {"train": N, "t10k": N_VAL + 1})
    others = [replace(config, flip=True), replace(config, shift=1), replace(config, path=str(other))]
    assert len({data.fingerprint for data in same} | {c.load(MODEL, 2, 0).fingerprint for c in others}) == 4


def test_it_is_described(idx_folder: Path) -> None:
    assert ImagesConfig(str(idx_folder)).load(MODEL, 2, 0).describe() == (
        f"{idx_folder}: 11 images of 4 x 6 pixels with 1 channel in 3 classes (0, 1, 2); held out: 5 images"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "begins with nothing"),
        (b"\x89PNG....", "begins with 89 50 4e 47, but an IDX file of bytes with 3 axes begins with 00 00 08 03"),
        (idx(labels(N)), "begins with 00 00 08 01"),
        (idx(images(N))[:-1], "has 279 bytes, but by its header it should have 280"),
        (idx(images(N)) + b"x", "has 281 bytes"),
        (idx(images(N))[:9], "has 9 bytes"),
    ],
)
def test_a_broken_idx_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    """16 bytes of header and 11 images of 24 pixels are 280."""
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file} {said}"):
        read_idx(file, 3)


@pytest.mark.parametrize("content", [b"not packed", gzip.compress(idx(images(N)))[:-9]])
def test_a_broken_archive_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file} cannot be unpacked"):
        read_idx(file, 3)


def test_a_file_that_the_system_does_not_give_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} cannot be read: Is a directory"):
        read_idx(tmp_path, 3)


def test_home_is_understood(idx_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(idx_folder.parent))
    assert len(read_stills("~/idx", 0.1, 1).train.images) == N


def test_idx_files_that_do_not_belong_together_are_refused(idx_folder: Path) -> None:
    file = idx_folder / "train-labels-idx1-ubyte.gz"
    file.write_bytes(gzip.compress(idx(labels(N + 1))))
    with pytest.raises(UserError, match=r"has 11 images, but .* has 12 labels"):
        read_stills(str(idx_folder), 0.1, 1)
    file.unlink()
    with pytest.raises(UserError, match=r"has no train-labels-idx\*-ubyte"):
        read_stills(str(idx_folder), 0.1, 1)


@pytest.mark.parametrize("part", ["train", "val"])
def test_pictures_of_several_sizes_are_resized_to_the_models_as_in_sampling(tmp_path: Path, part: str) -> None:
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


def test_a_model_is_fitted_to_images_and_says_so(tmp_path: Path) -> None:
    """As many patches as before, where that divides the image: 2 x 3 of them."""
    pixels = np.random.default_rng(0).integers(256, size=(N, 10, 9, 3)).astype(np.uint8)
    write_pictures(tmp_path / "train", pixels)
    write_pictures(tmp_path / "test", pixels)
    data = ImagesConfig(str(tmp_path), val_fraction=0.5).load(replace(MODEL, n_classes=10), 2, 0, fixed=())
    assert data.model == replace(MODEL, image_size=(10, 9), channels=3, patch_size=(5, 3))
    assert data.batch(0).inputs[0].shape == (2, 10, 9, 3)
    assert data.notes == (
        f"{tmp_path} has images of 10 x 9 pixels with 3 channels: model.image_size 10 9 (not 4 6), model.channels 3 "
        "(not 1), model.n_classes 3 (not 10), model.patch_size 5 3 (not 2 2)",
        f"the folder {tmp_path / 'test'} is not read: images to measure on are some of train; call it val to take them "
        "from there",
    )


def test_what_was_given_stays_and_images_are_resized_to_it(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", np.random.default_rng(0).integers(256, size=(N, 10, 9, 3)).astype(np.uint8))
    config = ImagesConfig(str(tmp_path), val_fraction=0.5)
    data = config.load(MODEL, 2, 0)
    assert data.model == MODEL and data.batch(0).inputs[0].shape == (2, HEIGHT, WIDTH, 1)
    assert data.notes == (f"the images in {tmp_path} are resized from 10 x 9 pixels to 4 x 6 pixels",)
    with pytest.raises(UserError, match=r"3 classes, but model.n_classes is 4; set --model.n-classes 3\.$"):
        config.load(replace(MODEL, n_classes=4), 2, 0, fixed={"n_classes"})


def test_the_channels_of_idx_files_are_fitted_or_made(idx_folder: Path) -> None:
    coloured = replace(MODEL, channels=3, mean=(0.25, 0.5, 0.75), std=(0.25, 0.25, 0.25))
    config = ImagesConfig(str(idx_folder))
    assert config.load(coloured, 2, 0, fixed=()).model == replace(coloured, channels=1, mean=(0.5,), std=(0.25,))
    (pixels,) = config.load(coloured, 2, 0).batch(0).inputs
    assert pixels.shape[-1] == 3 and (pixels == config.load(MODEL, 2, 0).batch(0).inputs[0]).all()


@pytest.mark.parametrize(
    ("found", "fixed", "size", "patch"),
    [
        ((28, 28), "", (28, 28), (7, 7)),
        ((40, 32), "", (40, 32), (10, 8)),
        ((37, 28), "", (35, 28), (7, 7)),  # 37 is a prime
        ((300, 28), "", (28, 28), (7, 7)),
        (None, "", (28, 28), (7, 7)),
        ((40, 32), "size", (28, 28), (7, 7)),
        ((40, 35), "patch", (42, 35), (7, 7)),
    ],
)
def test_sizes_and_patches_are_fitted(found: tuple | None, fixed: str, size: tuple, patch: tuple) -> None:
    assert infer_image_size((28, 28), (7, 7), found, fixed == "size", fixed == "patch") == (size, patch)


def test_a_class_that_training_has_not_is_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", images(2))
    write_pictures(tmp_path / "val", images(3))
    with pytest.raises(UserError, match="val has a class 'c' that train has not"):
        read_stills(str(tmp_path), 0.1, 1)


@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_a_broken_picture_is_named(tmp_path: Path, content: bytes | None) -> None:
    write_pictures(tmp_path / "train", images(N))
    file = tmp_path / "train" / "a" / "00.png"
    file.write_bytes(file.read_bytes()[:60] if content is None else content)
    with pytest.raises(UserError, match=f"{file} cannot be read as a picture"):
        read_stills(str(tmp_path), 0.1, 1)


def test_transparent_pictures_are_white_where_nothing_is(tmp_path: Path) -> None:
    """Whatever colour stands there; half of black over white is grey, with alpha and with a palette's transparency."""
    place = tmp_path / "train" / "a"
    place.mkdir(parents=True)
    colours = [(200, 0, 0, 0), (0, 0, 0, 128), (9, 9, 9, 255)]
    for i, colour in enumerate(colours * 10):
        Image.new("RGBA", (WIDTH, HEIGHT), colour).save(place / f"{i:02}.png")
    Image.new("P", (WIDTH, HEIGHT), 0).save(place / "30.png", transparency=0)
    write_pictures(tmp_path / "val", images(1))
    found = read_stills(str(tmp_path), 0.1, 3).train.images
    assert found[:3, 0, 0].tolist() == [[255] * 3, [127] * 3, [9] * 3]
    assert (found[30] == 255).all()


def test_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    """Pillow would make white of all that is above 255."""
    write_pictures(tmp_path / "train", images(N))
    Image.fromarray(np.full((HEIGHT, WIDTH), 40_000, np.uint16)).save(tmp_path / "train" / "a" / "16.png")
    with pytest.raises(UserError, match=r"16\.png has more than 8 bits per channel; convert it to 8"):
        read_stills(str(tmp_path), 0.1, 1)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    for path, said in (
        ("", "data.path is empty; give a folder of images with --data.path"),
        (str(tmp_path / "nowhere"), "there is no such folder"),
        (str(tmp_path), "has neither train-images-idx3-ubyte nor a folder train"),
    ):
        with pytest.raises(UserError, match=said):
            read_stills(path, 0.1, 1)
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="there are no images in"):
        read_stills(str(tmp_path), 0.1, 1)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (replace(MODEL, n_classes=4), "3 classes, but model.n_classes is 4; set --model.n-classes 3"),
        (DecoderConfig(), "the data is images, but DecoderConfig describes no model of images"),
        (ViViTConfig(), "the data is images, but ViViTConfig describes no model of images"),
    ],
)
def test_a_model_of_something_else_is_refused(idx_folder: Path, model: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ImagesConfig(str(idx_folder)).load(model, 2, 0)


def test_numbers_that_cannot_be_are_refused(idx_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 11 training images, fewer than"):
        ImagesConfig(str(idx_folder)).load(MODEL, 12, 0)
    with pytest.raises(UserError, match=r"data.val_fraction is 1\.0"):
        ImagesConfig(val_fraction=1.0)
    with pytest.raises(UserError, match="shift is -1"):
        ImagesConfig(shift=-1)
    write_pictures(tmp_path / "train", images(2))
    with pytest.raises(UserError, match=r"data.val_fraction 1e-09 of 2 images leaves nothing to measure on"):
        read_stills(str(tmp_path), 1e-9, 1)
    with pytest.raises(UserError, match=r"model\.channels is 2, but pictures can be read as 1"):
        read_stills(str(tmp_path), 0.5, 2)
