"""Videos made from still images."""

from dataclasses import replace

import numpy as np
import pytest

from jaxformer.data.videos import DIRECTIONS, MovingImagesConfig, render_motion
from jaxformer.errors import UserError
from jaxformer.models.vit import ViTConfig
from jaxformer.models.vivit import ViViTConfig
from tests.data.test_images import HEIGHT, N_VAL, WIDTH, N, images, labels, write_idx

FRAMES, CANVAS = 4, (14, 12)
"""At speed 2 a picture goes 6 pixels: 10 x 12 would do."""
MODEL = ViViTConfig(
    image_size=CANVAS, channels=1, n_classes=8, patch_size=(2, 2), d_model=4, n_heads=1, n_blocks=1, n_frames=FRAMES
)
NUMBERS = np.arange(N)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MovingImagesConfig:
    return MovingImagesConfig(str(write_idx(tmp_path_factory.mktemp("data") / "idx")), max_speed=2)


def centres(videos: np.ndarray) -> np.ndarray:
    """Of mass, `(n, frames, 2)`."""
    mass = videos[..., 0].astype(np.float64)
    rows, columns = (mass.sum(axis=3 - i) @ np.arange(CANVAS[i]) for i in (0, 1))
    return np.stack([rows, columns], axis=-1) / mass.sum(axis=(2, 3))[..., None]


@pytest.mark.parametrize("n_directions", [4, 8])
def test_the_label_is_where_the_centre_of_mass_goes(config: MovingImagesConfig, n_directions: int) -> None:
    """By the same number of pixels from each frame to the next, 1 or 2."""
    config = replace(config, n_directions=n_directions)
    data = config.load(replace(MODEL, n_classes=n_directions), 2, seed=0)
    names, seen = data.directions, set()
    assert len(names) == n_directions and (n_directions == 8 or names == ("up", "right", "down", "left"))
    for epoch in range(20):
        videos, told = data.train_examples(NUMBERS, epoch)
        moved = np.diff(centres(videos), axis=1)
        speed = np.abs(moved).max(axis=(1, 2)).round()
        for way, v, label in zip(moved, speed, told, strict=True):
            np.testing.assert_allclose(way, np.tile(v * np.array(DIRECTIONS[names[label]]), (FRAMES - 1, 1)), atol=1e-9)
            seen.add((names[label], int(v)))
    assert len(seen) == 2 * n_directions  # 220 draws; one of 16 is missed once in 100,000 times


def test_every_frame_is_the_whole_image_on_black(config: MovingImagesConfig) -> None:
    data = config.load(MODEL, 2, seed=0)
    videos, _ = data.train_examples(NUMBERS, 0)
    assert videos.shape == (N, FRAMES, *CANVAS, 1) and videos.dtype == np.uint8
    for video, image in zip(videos, images(N), strict=True):
        for frame in video[..., 0]:
            top, left = (np.flatnonzero(frame.any(axis=1 - i))[0] for i in (0, 1))
            found = [
                (y, x)
                for y in (top - 1, top)
                for x in (left - 1, left)
                if np.array_equal(frame[max(y, 0) : y + HEIGHT, max(x, 0) : x + WIDTH], image)
            ]
            assert found and frame.sum() == image.sum()


def test_an_image_starts_wherever_it_stays_inside() -> None:
    """A pixel on a line of 5 that goes 2 to the right in 3 frames may start at 0, 1 or 2; to the left at 2, 3 or 4."""
    image, size = np.full((3, 1, 1, 1), 9, np.uint8), (3, 1, 5)
    start = np.array([[0, 0.0], [0, 0.5], [0, 0.999]])
    for step, wanted in ((1, [0, 1, 2]), (-1, [2, 3, 4])):
        videos = render_motion(image, np.array([[0, step]] * 3), start, size)
        assert videos.argmax(axis=3)[:, :, 0, 0].tolist() == [[w, w + step, w + 2 * step] for w in wanted]
        assert videos.sum() == 9 * 9  # in each of 9 frames once


def test_what_is_to_be_told_is_chosen(config: MovingImagesConfig) -> None:
    videos, told = config.load(MODEL, 2, 0).train_examples(NUMBERS, 3)
    same, shown = replace(config, label="class").load(replace(MODEL, n_classes=3), 2, 0).train_examples(NUMBERS, 3)
    np.testing.assert_array_equal(videos, same)
    np.testing.assert_array_equal(shown, labels(N))
    assert told.dtype == shown.dtype == np.int32


def test_a_batch_depends_on_data_seed_and_step_alone(config: MovingImagesConfig) -> None:
    a, b = (config.load(MODEL, 4, seed=3) for _ in range(2))
    for step in (7, 0, 3):
        whole, some = a.batch(step), b.batch(step, np.array([0, 3]))
        np.testing.assert_array_equal(whole.inputs[0][[0, 3]], some.inputs[0])
        np.testing.assert_array_equal(whole.targets[[0, 3]], some.targets)
        assert whole.weights is None
    assert (a.train_examples(NUMBERS, 0)[0] != a.train_examples(NUMBERS, 1)[0]).any()


def test_held_out_videos_are_always_the_same(config: MovingImagesConfig) -> None:
    """Of held-out images, whatever the run's seed; the last batch is filled."""
    one, other = (list(config.load(MODEL, 2, seed).held_out(2)) for seed in (0, 1))
    assert [batch.weights.tolist() for batch in one] == [[1, 1], [1, 1], [1, 0]]
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.inputs[0], b.inputs[0])
        np.testing.assert_array_equal(a.targets, b.targets)
    videos = np.concatenate([batch.inputs[0] for batch in one])[:N_VAL]
    mass = images(N_VAL, seed=1).sum(axis=(1, 2), dtype=np.int64)
    np.testing.assert_array_equal(videos.sum(axis=(2, 3, 4), dtype=np.int64), mass[:, None].repeat(FRAMES, 1))


def test_it_says_that_they_are_made(config: MovingImagesConfig) -> None:
    described = config.load(MODEL, 2, 0).describe()
    assert "videos made from 11 still images that move over black in 8 directions, 4 frames of 14 x 12" in described
    assert "classes: direction (up, up right, " in described


def test_the_fingerprint_is_of_all_that_shapes_a_batch(config: MovingImagesConfig) -> None:
    others = [replace(config, max_speed=1), replace(config, label="class")]
    models = [MODEL, replace(MODEL, n_classes=3)]
    made = [c.load(m, 2, 0) for c, m in zip([config, *others], [MODEL, *models], strict=True)]
    made.append(config.load(replace(MODEL, image_size=(16, 12)), 2, 0))
    assert len({data.fingerprint for data in made}) == 4


@pytest.mark.parametrize(
    ("change", "model", "said"),
    [
        (
            {"max_speed": 3},
            MODEL,
            r"14 x 12, but images of 4 x 6 that move 9 pixels in 4 frames need 13 x 15; .* 13 15",
        ),
        (
            {"max_speed": 3},
            replace(MODEL, n_classes=4),
            r"need 13 x 15; .*n_frames; and .* but model.n_classes is 4; set --model.n-classes 8\.$",
        ),
        ({}, replace(MODEL, n_classes=4), "8 classes, but model.n_classes is 4"),
        ({"label": "class"}, MODEL, "3 classes, but model.n_classes is 8"),
        ({}, replace(MODEL, n_frames=1, tubelet_frames=1), "n_frames is 1, but a direction needs at least 2"),
        ({}, ViTConfig(), "the data is videos, but ViTConfig describes no model of videos"),
    ],
)
def test_a_model_of_something_else_is_refused(
    config: MovingImagesConfig, change: dict, model: ViTConfig, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        replace(config, **change).load(model, 2, 0)


def test_a_canvas_is_made_large_enough_where_it_was_not_given(config: MovingImagesConfig) -> None:
    data = replace(config, max_speed=3).load(replace(MODEL, n_classes=4), 2, 0, fixed=())
    assert data.model == replace(MODEL, image_size=data.model.image_size)
    assert all(side >= least for side, least in zip(data.model.image_size, (13, 15), strict=True))
    assert data.batch(0).inputs[0].shape == (2, 4, *data.model.image_size, 1)
    assert "model.image_size" in data.notes[0] and "model.n_classes 8 (not 4)" in data.notes[0]


def test_settings_that_cannot_be_are_refused() -> None:
    for name, value in (("max_speed", 0), ("n_directions", 6), ("label", "speed")):
        with pytest.raises(UserError, match=f"{name} is {value!r}"):
            MovingImagesConfig(**{name: value})
