"""Videos made from still images, as in Moving MNIST (Srivastava et al. 2015): an image moves over a black canvas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from jaxformer.config import Fixed, ImageModelConfig, ModelConfig
from jaxformer.config.fields import Side
from jaxformer.data.dataset import VALIDATION_SEED, epoch_uniforms
from jaxformer.data.image_folder import ImageSplits, open_image_folder
from jaxformer.data.image_io import describe_resizing
from jaxformer.data.images import ImageFolderConfig, PixelDataset, infer_channels, model_input_shape
from jaxformer.data.infer_config import MAX_INFERRED_SIDE_PIXELS, describe_changes, infer_n_classes, is_fixed
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError

DIRECTIONS = {
    "up": (-1, 0), "up right": (-1, 1), "right": (0, 1), "down right": (1, 1), "down": (1, 0), "down left": (1, -1),
    "left": (0, -1), "up left": (-1, -1),
}  # fmt: skip
"""Velocity at speed 1 in rows and columns per frame, by class name."""


@dataclass(frozen=True)
class MovingImagesConfig(ImageFolderConfig):
    """Videos made from labelled images: each image moves in a straight line over a black canvas, from a random start
    and at a random speed, and stays inside. The model's config determines the number of frames and the canvas size."""

    label: Literal["direction", "class"] = "direction"
    """Target class: the direction of the motion, or the image's label."""
    n_directions: Literal[4, 8] = 8
    """Number of directions: up, right, down and left, or these and the diagonals."""
    max_speed: Side = 1
    """Maximum speed in pixels per frame, in rows and in columns; each video has a constant speed from 1 to this."""

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None, fixed: Fixed = None
    ) -> MovingImageDataset:
        """Return the data as `DataConfig.load` does; the canvas must be large enough for the motion."""
        n_frames, *canvas, _ = model_input_shape(model, 4)
        assert isinstance(model, ImageModelConfig)
        if n_frames == 1 and self.label == "direction":
            raise UserError("`model.n_frames` is 1, but a direction needs at least 2; raise it.")
        folder = open_image_folder(self.path)
        n_classes = self.n_directions if self.label == "direction" else len(folder.classes)
        inferred = infer_n_classes(infer_channels(model, folder.channels, fixed), n_classes, self.path, fixed)
        distance = (n_frames - 1) * self.max_speed
        size = folder.size
        if size is None or max(size) > MAX_INFERRED_SIDE_PIXELS:
            size = max(1, canvas[0] - distance), max(1, canvas[1] - distance)
        needed = [length + distance for length in size]
        reason = f"images of {size[0]} x {size[1]} pixels move {distance} in {n_frames} frames"
        if any(side < length for side, length in zip(canvas, needed, strict=True)):
            if is_fixed("image_size", fixed):
                remedy = f"set `model.image_size=({needed[0]}, {needed[1]})` or more, or lower `data.max_speed`"
                raise UserError(f"`model.image_size` is {canvas[0]} x {canvas[1]}, but {reason}; {remedy}.")
            patch = getattr(model, "patch_size", (1, 1))
            fitting = tuple(-(-length // side) * side for length, side in zip(needed, patch, strict=True))
            inferred = replace(inferred, image_size=fitting)
        splits = folder.read(self.val_fraction, size, inferred.channels)
        data = MovingImageDataset(self, inferred, splits, batch_size, seed)
        resizing = describe_resizing(self.path, folder.sizes, size)
        data.notes = (*describe_changes(model, inferred, reason), *resizing, *folder.notes)
        return data


class MovingImageDataset(PixelDataset):
    """Video classification, by the direction of the motion or the label of the moving image. In training an image moves
    differently in each epoch; validation videos, made from validation images, are always the same."""

    n_draws = 4
    config: MovingImagesConfig

    def __init__(
        self, config: MovingImagesConfig, model: ImageModelConfig, splits: ImageSplits, batch_size: int, seed: int
    ) -> None:
        self.size = model_input_shape(model, 4)[:3]
        super().__init__(config, model, splits, batch_size, seed)
        self.directions = tuple(DIRECTIONS)[:: len(DIRECTIONS) // config.n_directions]
        self.classes = self.directions if config.label == "direction" else splits.classes

    @property
    def settings(self) -> tuple[object, ...]:
        return self.config.label, self.config.n_directions, self.config.max_speed, self.size

    def transform(self, images: np.ndarray, labels: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return videos and labels; `draws` determine the direction, the speed, and the row and column of the start."""
        direction = np.floor(draws[:, 0] * len(self.directions)).astype(np.int32)
        speed = 1 + np.floor(draws[:, 1] * self.config.max_speed).astype(np.int64)
        velocities = speed[:, None] * np.array([DIRECTIONS[name] for name in self.directions])[direction]
        videos = render_motion(images, velocities, draws[:, 2:], self.size)
        return videos, direction if self.config.label == "direction" else labels

    def val_examples(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        draws = epoch_uniforms(len(self.splits.val.images), self.n_draws, VALIDATION_SEED, 0)[indices]
        return self.transform(*super().val_examples(indices), draws)

    def describe(self) -> str:
        n, (frames, height, width) = len(self.splits.train.images), self.size
        motion = f"{n:,} still images that move on black in {len(self.directions)} directions"
        videos = f"videos made from {motion}, {frames} frames of {height} x {width} pixels"
        return f"{self.config.path}: {videos}; classes: {self.config.label} {self.describe_classes()}"


def render_motion(images: np.ndarray, velocities: np.ndarray, start: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Return videos `(n, frames, height, width, C)` of `size`, in which images `(n, h, w, C)` move over black with
    `velocities`, `(n, 2)` rows and columns per frame, and stay inside; `start`, `(n, 2)` in [0, 1), is relative to the
    range of possible start positions."""
    n, h, w, channels = images.shape
    n_frames, height, width = size
    distance = (n_frames - 1) * velocities
    margin = np.array([height - h, width - w]) - np.abs(distance)
    first = np.floor(start * (margin + 1)).astype(np.int64) + np.maximum(0, -distance)
    corners = first[:, None] + np.arange(n_frames)[:, None] * velocities[:, None]  # (n, frames, 2)
    videos = np.zeros((n, n_frames, height, width, channels), images.dtype)
    rows = (corners[..., 0, None] + np.arange(h))[..., :, None]
    columns = (corners[..., 1, None] + np.arange(w))[..., None, :]
    videos[np.arange(n)[:, None, None, None], np.arange(n_frames)[:, None, None], rows, columns] = images[:, None]
    return videos
