"""Videos made from still images, as nothing else is needed to learn motion from: a picture moves over black."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxformer.config import ImageModelConfig, ModelConfig
from jaxformer.data.dataset import HELD_OUT_SEED, Dataset
from jaxformer.data.image_folder import ImageSplits, open_image_folder
from jaxformer.data.images import (
    ImageFolderConfig,
    PixelDataset,
    class_count_error,
    epoch_uniforms,
    infer_channels,
    model_input_shape,
)
from jaxformer.data.infer_config import ALL, MAX_INFERRED_SIDE_PIXELS, describe_changes
from jaxformer.errors import UserError
from jaxformer.fields import at_least

DIRECTIONS = {
    "up": (-1, 0), "up right": (-1, 1), "right": (0, 1), "down right": (1, 1), "down": (1, 0), "down left": (1, -1),
    "left": (0, -1), "up left": (-1, -1),
}  # fmt: skip
"""Rows and columns that a picture moves on at a speed of one, by the names of the classes."""


@dataclass(frozen=True)
class MovingImagesConfig(ImageFolderConfig):
    """Videos made from still images: one moves straight over a black canvas, from any place and at any speed from which
    it stays inside. How long they are and how large the canvas is are the model's to say."""

    label: Literal["direction", "class"] = "direction"
    """What is to be told: where it moves, or what it shows."""
    n_directions: Literal[4, 8] = 8
    """Four are up, right, down and left; eight have those between, too."""
    max_speed: int = 1
    """Pixels a frame, in rows and in columns; each video has one speed, from 1 to this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_speed")

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Any = None,
        fixed: Container[str] | None = None,
    ) -> Dataset:  # fmt: skip
        """See `DataConfig`; the model's canvas must have room for the motion, and as many classes."""
        fixed = ALL if fixed is None else fixed
        n_frames, *canvas, _ = model_input_shape(model, 4)
        assert isinstance(model, ImageModelConfig)
        if n_frames == 1 and self.label == "direction":
            raise UserError("model.n_frames is 1, but where something moves takes at least 2 to tell; raise it.")
        folder = open_image_folder(self.path)
        way = (n_frames - 1) * self.max_speed
        size = folder.size
        if size is None or max(size) > MAX_INFERRED_SIDE_PIXELS:
            size = max(1, canvas[0] - way), max(1, canvas[1] - way)
        needed = [length + way for length in size]
        errors: list[str] = []
        changes: dict[str, Any] = {}
        if any(room < length for room, length in zip(canvas, needed, strict=True)):
            if "image_size" in fixed:
                errors.append(
                    f"model.image_size is {canvas[0]} x {canvas[1]}, but images of {size[0]} x {size[1]} that move "
                    f"{way} pixels in {n_frames} frames need {needed[0]} x {needed[1]}; set --model.image-size "
                    f"{needed[0]} {needed[1]} or more, lower data.max_speed or model.n_frames"
                )
            patch = getattr(model, "patch_size", (1, 1))
            changes["image_size"] = tuple(-(-length // side) * side for length, side in zip(needed, patch, strict=True))
        n_classes = self.n_directions if self.label == "direction" else len(folder.names)
        if "n_classes" not in fixed:
            changes["n_classes"] = n_classes
        elif model.n_classes != n_classes:
            errors.append(class_count_error(model, n_classes, self.path))
        if errors:
            raise UserError(f"{'; and '.join(errors)}.")
        fitted = infer_channels(model, folder.channels, fixed, changes)
        stills = folder.read(self.val_fraction, size, fitted.channels)
        height, width = fitted.image_size
        data = MovingImageDataset(self, fitted, stills, (n_frames, height, width), batch_size, seed)
        why = f"images of {size[0]} x {size[1]} pixels move {way} in {n_frames} frames"
        data.notes = (*describe_changes(model, fitted, why), *folder.describe_resizing(size), *folder.notes)
        return data


class MovingImageDataset(PixelDataset):
    """What moves, or where it moves, is to be told. In training a still image moves anew in each epoch; held-out videos
    are of held-out images, and always the same."""

    def __init__(
        self, config: MovingImagesConfig, model: ImageModelConfig, stills: ImageSplits, size: tuple[int, int, int],
        batch_size: int, seed: int,
    ) -> None:  # fmt: skip
        """`size` is frames, height and width."""
        settings = [config.label, config.n_directions, config.max_speed, size]
        super().__init__(stills, config.path, model, batch_size, seed, settings)
        self.config, self.size = config, size
        self.directions = tuple(DIRECTIONS)[:: len(DIRECTIONS) // config.n_directions]
        self.classes = self.directions if config.label == "direction" else stills.names

    def train_examples(self, numbers: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = epoch_uniforms(len(self.stills.train.images), 4, self.seed, epoch)[numbers]
        return self._videos(self.stills.train.images[numbers], self.stills.train.labels[numbers], drawn)

    def val_examples(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drawn = epoch_uniforms(len(self.stills.val.images), 4, HELD_OUT_SEED, 0)[numbers]
        return self._videos(self.stills.val.images[numbers], self.stills.val.labels[numbers], drawn)

    def describe(self) -> str:
        train, val = (len(part.images) for part in (self.stills.train, self.stills.val))
        frames, height, width = self.size
        return (
            f"{self.path}: videos made from {train:,} still images that move over black in {len(self.directions)} "
            f"directions, {frames} frames of {height} x {width} pixels; to be told: {self.config.label} "
            f"({', '.join(self.classes[:12])}{', …' if len(self.classes) > 12 else ''}); held out: {val:,} images"
        )

    def _videos(self, images: np.ndarray, labels: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """From four numbers below 1 a video: direction, speed, row and column of the start."""
        direction = np.floor(drawn[:, 0] * len(self.directions)).astype(np.int32)
        speed = 1 + np.floor(drawn[:, 1] * self.config.max_speed).astype(np.int64)
        moves = speed[:, None] * np.array([DIRECTIONS[name] for name in self.directions])[direction]
        videos = render_motion(images, moves, drawn[:, 2:], self.size)
        return videos, direction if self.config.label == "direction" else labels


def render_motion(images: np.ndarray, moves: np.ndarray, start: np.ndarray, size: tuple[int, int, int]) -> np.ndarray:
    """Images that move over black and stay inside, `(n, frames, height, width, C)`.

    Args:
      images: `(n, h, w, C)`.
      moves: `(n, 2)`, rows and columns a frame.
      start: `(n, 2)` from 0 to below 1: where, of all places from which it stays inside.
      size: frames, height and width.
    """
    n, h, w, channels = images.shape
    n_frames, height, width = size
    way = (n_frames - 1) * moves
    room = np.array([height - h, width - w]) - np.abs(way)
    first = np.floor(start * (room + 1)).astype(np.int64) + np.maximum(0, -way)
    places = first[:, None] + np.arange(n_frames)[:, None] * moves[:, None]  # (n, frames, 2)
    videos = np.zeros((n, n_frames, height, width, channels), images.dtype)
    rows = (places[..., 0, None] + np.arange(h))[..., :, None]
    columns = (places[..., 1, None] + np.arange(w))[..., None, :]
    videos[np.arange(n)[:, None, None, None], np.arange(n_frames)[:, None, None], rows, columns] = images[:, None]
    return videos
