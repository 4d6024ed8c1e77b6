"""Videos made from still images, as nothing else is needed to learn motion from: a picture moves over black."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxformer.config import ModelConfig, at_least
from jaxformer.data.dataset import HELD_OUT, Dataset
from jaxformer.data.images import (
    PixelDataset,
    Stills,
    StillsConfig,
    check_classes,
    pixels_of,
    read_stills,
    uniforms,
)
from jaxformer.errors import UserError

DIRECTIONS = {
    "up": (-1, 0), "up right": (-1, 1), "right": (0, 1), "down right": (1, 1), "down": (1, 0), "down left": (1, -1),
    "left": (0, -1), "up left": (-1, -1),
}  # fmt: skip
"""Rows and columns that a picture moves on at a speed of one, by the names of the classes."""


@dataclass(frozen=True)
class MovingImagesConfig(StillsConfig):
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

    def load(self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Any = None) -> Dataset:
        """See `DataConfig`; the model's canvas must have room for the motion, and as many channels and classes."""
        n_frames, *canvas, channels = pixels_of(model, 4)
        if n_frames == 1 and self.label == "direction":
            raise UserError("model.n_frames is 1, but where something moves takes at least 2 to tell; raise it.")
        stills = read_stills(self.path, self.val_fraction, channels)
        *size, found = stills.train.images.shape[1:]
        if found != channels:
            raise UserError(f"the images in {self.path} have {found} channel(s), but model.channels is {channels}.")
        way = (n_frames - 1) * self.max_speed
        if any(room < length + way for room, length in zip(canvas, size, strict=True)):
            needed = " ".join(str(length + way) for length in size)
            raise UserError(
                f"model.image_size is {canvas[0]} x {canvas[1]}, but images of {size[0]} x {size[1]} that move {way} "
                f"pixels in {n_frames} frames need {needed.replace(' ', ' x ')}; set --model.image-size {needed} or "
                "more, lower data.max_speed or model.n_frames."
            )
        check_classes(model, self.n_directions if self.label == "direction" else len(stills.names), self.path)
        return MovingImages(self, stills, (n_frames, canvas[0], canvas[1]), batch_size, seed)


class MovingImages(PixelDataset):
    """What moves, or where it moves, is to be told. In training a still image moves anew in each epoch; held-out videos
    are of held-out images, and always the same."""

    def __init__(
        self, config: MovingImagesConfig, stills: Stills, size: tuple[int, int, int], batch_size: int, seed: int
    ) -> None:
        """`size` is frames, height and width."""
        settings = [config.label, config.n_directions, config.max_speed, size]
        super().__init__(stills, config.path, batch_size, seed, settings)
        self.config, self.size = config, size
        self.directions = tuple(DIRECTIONS)[:: len(DIRECTIONS) // config.n_directions]
        self.classes = self.directions if config.label == "direction" else stills.names

    def varied(self, numbers: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = uniforms(len(self.stills.train.images), 4, self.seed, epoch)[numbers]
        return self._videos(self.stills.train.images[numbers], self.stills.train.labels[numbers], drawn)

    def measured(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drawn = uniforms(len(self.stills.val.images), 4, HELD_OUT, 0)[numbers]
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
        videos = moving(images, moves, drawn[:, 2:], self.size)
        return videos, direction if self.config.label == "direction" else labels


def moving(images: np.ndarray, moves: np.ndarray, start: np.ndarray, size: tuple[int, int, int]) -> np.ndarray:
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
