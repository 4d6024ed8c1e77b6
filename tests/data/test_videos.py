"""Videos made from still images."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxformer.data.videos import DIRECTIONS, MovingImagesConfig, render_motion
from jaxformer.errors import UserError
from jaxformer.models.vit import ViTConfig
from jaxformer.models.vivit import ViViTConfig
from tests.data.test_images import HEIGHT, N_VAL, WIDTH, N, images, labels, write_idx

FRAMES, CANVAS = 4, (14, 12)
"""Larger than the 10 x 12 that motion by 6 pixels, at speed 2, needs."""
MODEL = ViViTConfig(
    image_size=CANVAS, channels=1, n_classes=8, patch_size=(2, 2), d_model=4, n_heads=1, n_blocks=1, n_frames=FRAMES
)
NUMBERS = np.arange(N)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MovingImagesConfig:
    return MovingImagesConfig(str(write_idx(tmp_path_factory.mktemp("data") / "idx")), max_speed=2)


def centres(videos: np.ndarray) -> np.ndarray:
    """Return the centers of mass, `(n, frames, 2)`."""
    mass = videos[..., 0].astype(np.float64)
    rows, columns = (mass.sum(axis=3 - i) @ np.arange(CANVAS[i]) for i in (0, 1))
    return np.stack([rows, columns], axis=-1) / mass.sum(axis=(2, 3))[..., None]


@pytest.mark.parametrize("n_directions", [4, 8])
def test_label_is_the_direction_of_the_center_of_mass(config: MovingImagesConfig, n_directions: int) -> None:
    """Check that each frame moves by the same number of pixels, 1 or 2."""
    config = replace(config, n_directions=n_directions)
    data = config.load(replace(MODEL, n_classes=n_directions), 2, seed=0)
    names, observed = data.directions, set()
    assert len(names) == n_directions and (n_directions == 8 or names == ("up", "right", "down", "left"))
    for epoch in range(20):
        videos, targets_seen = data.train_examples(NUMBERS, epoch)
        moved = np.diff(centres(videos), axis=1)
        speed = np.abs(moved).max(axis=(1, 2)).round()
        for way, v, label in zip(moved, speed, targets_seen, strict=True):
            np.testing.assert_allclose(way, np.tile(v * np.array(DIRECTIONS[names[label]]), (FRAMES - 1, 1)), atol=1e-9)
            observed.add((names[label], int(v)))
    assert len(observed) == 2 * n_directions  # 220 draws; one of 16 is missed once in 100,000 times


def test_every_frame_shows_the_full_image_on_black(config: MovingImagesConfig) -> None:
    data = config.load(MODEL, 2, seed=0)
    videos, _ = data.train_examples(NUMBERS, 0)
    assert videos.shape == (N, FRAMES, *CANVAS, 1) and videos.dtype == np.uint8
    for video, image in zip(videos, images(N), strict=True):
        for frame in video[..., 0]:
            top, left = (np.flatnonzero(frame.any(axis=1 - i))[0] for i in (0, 1))
            actual = [
                (y, x)
                for y in (top - 1, top)
                for x in (left - 1, left)
                if np.array_equal(frame[max(y, 0) : y + HEIGHT, max(x, 0) : x + WIDTH], image)
            ]
            assert actual and frame.sum() == image.sum()


def test_starts_cover_all_positions_inside() -> None:
    """Check one pixel on a line of 5 over 3 frames: to the right, it may start at 0 to 2; to the left, at 2 to 4."""
    image, size = np.full((3, 1, 1, 1), 9, np.uint8), (3, 1, 5)
    start = np.array([[0, 0.0], [0, 0.5], [0, 0.999]])
    for step, expected in ((1, [0, 1, 2]), (-1, [2, 3, 4])):
        videos = render_motion(image, np.array([[0, step]] * 3), start, size)
        assert videos.argmax(axis=3)[:, :, 0, 0].tolist() == [[w, w + step, w + 2 * step] for w in expected]
        assert videos.sum() == 9 * 9  # in each of 9 frames once


def test_label_option_selects_the_target(config: MovingImagesConfig) -> None:
    videos, targets_seen = config.load(MODEL, 2, 0).train_examples(NUMBERS, 3)
    same, shown = replace(config, label="class").load(replace(MODEL, n_classes=3), 2, 0).train_examples(NUMBERS, 3)
    np.testing.assert_array_equal(videos, same)
    np.testing.assert_array_equal(shown, labels(N))
    assert targets_seen.dtype == shown.dtype == np.int32


def test_batch_depends_only_on_data_seed_and_step(config: MovingImagesConfig) -> None:
    a, b = (config.load(MODEL, 4, seed=3) for _ in range(2))
    for step in (7, 0, 3):
        whole, some = a.batch(step), b.batch(step, np.array([0, 3]))
        np.testing.assert_array_equal(whole.inputs[0][[0, 3]], some.inputs[0])
        np.testing.assert_array_equal(whole.targets[[0, 3]], some.targets)
        assert whole.weights is None
    assert (a.train_examples(NUMBERS, 0)[0] != a.train_examples(NUMBERS, 1)[0]).any()


def test_held_out_videos_do_not_depend_on_the_seed(config: MovingImagesConfig) -> None:
    """Check videos of held-out images for two seeds, and the padding of the last batch."""
    one, other = (list(config.load(MODEL, 2, seed).val_batches(2)) for seed in (0, 1))
    assert [batch.weights.tolist() for batch in one] == [[1, 1], [1, 1], [1, 0]]
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.inputs[0], b.inputs[0])
        np.testing.assert_array_equal(a.targets, b.targets)
    videos = np.concatenate([batch.inputs[0] for batch in one])[:N_VAL]
    mass = images(N_VAL, seed=1).sum(axis=(1, 2), dtype=np.int64)
    np.testing.assert_array_equal(videos.sum(axis=(2, 3, 4), dtype=np.int64), mass[:, None].repeat(FRAMES, 1))


def test_fingerprint_covers_all_settings_of_a_batch(config: MovingImagesConfig) -> None:
    others = [replace(config, max_speed=1), replace(config, label="class")]
    models = [MODEL, replace(MODEL, n_classes=3)]
    created = [c.load(m, 2, 0) for c, m in zip([config, *others], [MODEL, *models], strict=True)]
    created.append(config.load(replace(MODEL, image_size=(16, 12)), 2, 0))
    assert len({data.fingerprint for data in created}) == 4


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        (
            {"max_speed": 3},
            MODEL,
            r"14 x 12, but images of 4 x 6 pixels move 9 in 4 frames; set `model.image_size=.13, 15.`",
        ),
        ({}, replace(MODEL, n_classes=4), "8 classes, but `model.n_classes` is 4"),
        ({"label": "class"}, MODEL, "3 classes, but `model.n_classes` is 8"),
        ({}, replace(MODEL, n_frames=1, tubelet_frames=1), "n_frames` is 1, but a direction needs at least 2"),
        ({}, ViTConfig(), "the data is videos, but ViTConfig does not configure a model of videos"),
    ],
)
def test_unsuitable_model_is_refused(config: MovingImagesConfig, change: dict, model: ViTConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(config, **change).load(model, 2, 0)


def test_canvas_size_is_inferred_from_the_motion(config: MovingImagesConfig) -> None:
    data = replace(config, max_speed=3).load(replace(MODEL, n_classes=4), 2, 0, fixed=())
    model: Any = data.model
    assert model == replace(MODEL, image_size=model.image_size)
    assert all(side >= least for side, least in zip(model.image_size, (13, 15), strict=True))
    assert data.batch(0).inputs[0].shape == (2, 4, *model.image_size, 1)
    assert "model.image_size" in data.notes[0] and "model.n_classes 8 (not 4)" in data.notes[0]
