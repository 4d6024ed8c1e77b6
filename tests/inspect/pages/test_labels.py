"""Words for readers of a page."""

import math

import numpy as np
import pytest

from jaxformer.inspect.heads import HeadStatistics
from jaxformer.inspect.pages.labels import describe_head, head_label, layer_label, position_unit, token_label
from tests.inspect.test_activations import MODELS


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("blocks.2.attention", "layer 2"),
        ("encoder_blocks.0.attention", "encoder layer 0"),
        ("decoder_blocks.11.cross_attention", "decoder layer 11, cross-attention"),
        ("vision_blocks.1.attention", "image layer 1"),
        ("reader", "attention to the source"),
        ("my_blocks.1.attention", "my_blocks.1.attention"),
        ("mixer", "mixer"),
    ],
)
def test_layers_have_names_for_readers(name: str, label: str):
    assert layer_label(name) == label
    expected = "head 2.3" if name.startswith("blocks") else f"head 3 of {label}"
    assert head_label(name, 3) == expected


@pytest.mark.parametrize(
    ("piece", "label"),
    [
        (b"  the", "␣␣the"), (b"\n\t\x1b", "⏎⇥␛"), ("é日🙂\ufffd".encode(), "é日🙂\ufffd"), (b"\xd9", "⟨D9⟩"),
        (b" \xf0\x9fa", "␣⟨F0⟩⟨9F⟩a"), (b"", ""),
    ],
)  # fmt: skip
def test_each_token_has_a_label_that_shows_it(piece: bytes, label: str):
    assert token_label(piece) == label


def test_only_layers_of_images_have_patches():
    clip, vit = MODELS["clip"].contract.patches, MODELS["vit"].contract.patches
    assert position_unit(clip, "vision_blocks.0.attention") == position_unit(vit, "blocks.0.attention") == "patch"
    assert position_unit(clip, "text_blocks.0.attention") == position_unit(None, "blocks.0.attention") == "token"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"previous": 0.83, "induction": 0.1}, "looks at the previous patch (83%)"),
        ({"induction": 0.6}, "looks at the patch that followed the same one before: induction (60%)"),
        ({"first": 0.3}, "gives part of its attention to the first position (30%)"),
        ({"normalized_entropy": 0.9, "first": 0.3}, "spreads its attention evenly"),
        ({"distance": 1.84}, "looks at patches nearby (1.8 positions away)"),
        ({"entropy": math.log(5), "distance": math.nan}, "attends to about 5 positions"),
        (
            {"entropy": math.nan, "normalized_entropy": math.nan, "distance": math.nan},
            "has weights that are not finite",
        ),
    ],
)
def test_heads_are_described_by_their_largest_score(changes: dict[str, float], words: str):
    values = {"entropy": 1.0, "normalized_entropy": 0.4, "distance": 9.0, "first": 0.1, "previous": 0.1,
              "duplicate": math.nan, "induction": math.nan} | changes  # fmt: skip
    statistics = HeadStatistics(**{name: np.array([0.0, value]) for name, value in values.items()})
    assert describe_head(statistics, 1, "patch") == words
