"""Sections of a run's page about its task."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect.pages.model import N_PICTURES, _classified_images
from jaxformer.inspect.pages.page import render_page
from jaxformer.models.vit import ViTConfig
from tests.arrays import random_params
from tests.browser import embedded


@pytest.mark.slow
def test_images_are_of_all_held_out_classes():
    """Images from a folder are in the order of their classes."""
    config = ViTConfig((4, 4), 1, n_classes=3, patch_size=(2, 2), d_model=4, n_blocks=1, n_heads=1, d_ff=(4,))
    model = config.build()
    classes = ["circle", "square", "triangle"]
    run: Any = SimpleNamespace(model=model, params=random_params(model, *config.example()), classes=classes)
    images = np.zeros((30, 4, 4, 1), np.uint8)
    section = _classified_images(run, Batch((images,), np.repeat(np.arange(3), 10)))
    [data] = embedded(render_page("t", [], [section]), "Images")
    actual = [next(label for label, _, marked in picture["bars"] if marked) for picture in data["pictures"]]
    assert len(actual) == N_PICTURES and set(actual) == set(classes)
    assert [data["pictures"][i]["name"] for i in (0, -1)] == ["held-out image 0", "held-out image 29"]
