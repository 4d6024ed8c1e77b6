"""Page section with images, their predictions, and the attention of every head over their patches."""

from __future__ import annotations

import base64
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxformer.contract import contract_of
from jaxformer.inspect.activations import Activations, Inputs, capture
from jaxformer.inspect.pages.attention import as_bars
from jaxformer.inspect.pages.labels import layer_label
from jaxformer.inspect.pages.page import Section, embed
from jaxformer.models.objective import Params

COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
"""PNG colour type by number of channels."""


@dataclass(frozen=True)
class Picture:
    """An image and the model's prediction for it."""

    image_HWC: np.ndarray
    """Pixels, uint8."""
    name: str
    probabilities: Sequence[tuple[str, float]]
    """Most likely classes or captions, and their probabilities."""
    actual: tuple[str, float] | None = None
    """True class or caption and its probability; None if there is none."""


@dataclass(frozen=True)
class PictureSection(Section):
    """Images with their predictions, overlaid with the attention of a selected head."""

    pictures: Sequence[Picture]
    maps: Mapping[str, np.ndarray]
    """Attention over each picture's patches, `(P, H, N)` by layer; see `patch_attention`."""
    grid: tuple[int, int]
    """Rows and columns of patches."""
    mark: str = "true class"
    """Word beside the true class or caption."""

    def body(self) -> str:
        """Return the HTML element. Attention is stored as base64 bytes, the square roots of weights divided by each
        map's largest; non-finite weights are 0."""
        pictures = [
            {"source": png_uri(p.image_HWC), "name": p.name, "bars": as_bars(p.probabilities, p.actual)}
            for p in self.pictures
        ]
        layers = []
        for name, weights_PHN in self.maps.items():
            map_PHN = np.nan_to_num(weights_PHN)
            largest_PH1 = map_PHN.max(axis=-1, keepdims=True)
            shares = np.rint(255 * np.sqrt(map_PHN / np.maximum(largest_PH1, 1e-30))).astype(np.uint8)
            largest = largest_PH1[..., 0].round(4).tolist()
            weights = base64.b64encode(shares).decode()
            layers.append({"name": name, "heads": map_PHN.shape[1], "largest": largest, "weights": weights})
        return embed("pictures", {"pictures": pictures, "layers": layers, "grid": self.grid, "mark": self.mark})


def patch_grid(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of rows and columns of patches in an image; 1 and 1 for a model without patches."""
    config: Any = getattr(model, "config", None)
    patches = contract_of(model).patches
    if patches is None:
        return 1, 1
    config = getattr(config, patches) if patches else config
    rows, columns = (size // patch for size, patch in zip(config.image_size, config.patch_size, strict=True))
    return rows, columns


def patch_attention(model: nn.Module, params: Params, inputs_B: Inputs) -> dict[str, np.ndarray]:
    """Return the attention over each image's patches by layer, `(B, H, N)`, from the class token, or without one the
    mean over all patches. `{}` for a model without patches."""
    if contract_of(model).patches is None:
        return {}
    n_patches = prod(patch_grid(model))
    maps = jax.device_get(_patch_attention(model, n_patches, params, inputs_B))
    return {layer_label(name.removesuffix(".pattern")): map_BHN for name, map_BHN in maps.items()}


@partial(jax.jit, static_argnums=(0, 1))
def _patch_attention(model: nn.Module, n_patches: int, params: Params, inputs_B: Inputs) -> Activations:
    def example_maps(inputs: Inputs) -> OrderedDict[str, jax.Array]:
        weights = capture(
            model, params, *inputs, names=("blocks.*.pattern", "vision_blocks.*.pattern"), missing_ok=True
        )
        return OrderedDict(
            (name, w_HTS.mean(axis=1) if w_HTS.shape[-1] == n_patches else w_HTS[:, 0, -n_patches:])
            for name, w_HTS in weights.items()
        )

    return jax.lax.map(example_maps, inputs_B)


def png_uri(image_HWC: np.ndarray) -> str:
    """Return an image, `(H, W, C)` uint8, as a PNG in a data URI; in greyscale unless C is 1, 3 or 4."""
    if image_HWC.shape[-1] not in COLOUR_TYPES:
        image_HWC = image_HWC.mean(axis=-1, keepdims=True).astype(np.uint8)
    height, width, channels = image_HWC.shape

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    unfiltered = np.pad(image_HWC.reshape(height, -1), ((0, 0), (1, 0)))  # filter 0 before each row
    rows = zlib.compress(unfiltered.tobytes(), 9)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
