"""Configs of published models of images: what they mean, and what is refused by its key."""

from typing import Any

import pytest

from jaxformer.config import Resizing
from jaxformer.errors import UserError
from jaxformer.interop.configs import read_config, write_config
from jaxformer.interop.families import ENCODERS
from jaxformer.interop.obstacles import resolved

PROCESSOR: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "size": {"height": 224, "width": 224}}
CONFIG: dict[str, Any] = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}


def test_the_defaults_of_a_published_vit_are_those_of_transformers():
    """`google/vit-base-patch16-224` of 2021 has no fields but these, and a size that is one number."""
    processor = {"feature_extractor_type": "ViTFeatureExtractor", "size": 224, "resample": 2, "image_mean": [0.5] * 3}
    model: Any = read_config({**CONFIG, "image_processor": processor, "id2label": {"0": "tench", "1": "goldfish"}})
    assert (model.image_size, model.patch_size, model.n_classes, model.d_model) == ((224, 224), (16, 16), 2, 768)
    assert (model.resizing, model.mean, model.std) == (Resizing((224, 224), "bilinear"), (0.5,) * 3, (0.5,))
    assert (model.norm_eps, model.activation, model.pooling) == (1e-12, "gelu_exact", "class")


def test_a_dinov2_has_the_size_of_the_images_of_its_processor():
    """`facebook/dinov2-giant`: positions of 518 pixels, images of 224, SwiGLU of two thirds of the MLP's width."""
    theirs = {
        "model_type": "dinov2", "architectures": ["Dinov2Model"], "image_size": 518, "hidden_size": 1536,
        "num_hidden_layers": 40, "num_attention_heads": 24, "use_swiglu_ffn": True,
        "image_processor": {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256}},
    }  # fmt: skip
    model: Any = read_config(theirs)
    assert (model.image_size, model.grid, model.d_ff, model.activation) == ((224, 224), (16, 16), (4096,), "swiglu")
    assert model.gate_bias and model.n_classes == 0 and model.resizing == Resizing((256,), "bicubic")
    written = write_config(resolved(model), ENCODERS["Dinov2Model"])
    assert written["mlp_ratio"] == 4 and written["hidden_act"] == "gelu" and written["use_swiglu_ffn"]


def test_the_older_configs_of_the_towers_of_clip_take_precedence():
    processor = {"image_processor_type": "CLIPFeatureExtractor", "size": 224, "crop_size": 224}
    theirs = {
        "model_type": "clip", "architectures": ["CLIPModel"], "image_processor": processor, "projection_dim": 768,
        "text_config": {"hidden_size": 512}, "text_config_dict": {"hidden_size": 768, "num_attention_heads": 12},
        "vision_config": {"hidden_act": "gelu"}, "vision_config_dict": None,
    }  # fmt: skip
    model: Any = read_config(theirs)
    assert (model.d_joint, model.text.d_model, model.text.context_length) == (768, 768, 77)
    assert (model.vision.activation, model.text.activation) == ("gelu_exact", "quick_gelu")
    assert model.vision.resizing == Resizing((224,), "bicubic")


@pytest.mark.parametrize(
    ("changes", "processor", "said"),
    [
        ({"qkv_bias": False}, {}, "qkv_bias is False"),
        ({"hidden_act": "mish"}, {}, "hidden_act is 'mish'"),
        ({"problem_type": "multi_label_classification"}, {}, "problem_type is .multi_label_classification"),
        ({"image_size": 384}, {}, r"makes images of \(224, 224\) pixels, but image_size is \(384, 384\)"),
        ({"patch_size": 15}, {}, "patch_size is patch_size"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, {}, "use a checkpoint of ViTModel"),
        ({}, {"do_resize": False}, "do_resize of the image processor is False"),
        ({}, {"do_pad": True}, "do_pad of the image processor is True"),
        ({}, {"rescale_factor": 1.0}, "rescale_factor is 1.0"),
        ({}, {"resample": 9}, "IndexError"),
        ({}, {"size": {"shortest_edge": 224}}, "without do_center_crop"),
        ({}, {"size": {"longest_edge": 224}}, "size of the image processor is {'longest_edge': 224}"),
        ({}, {"image_std": [0.5, 0.0, 0.5]}, "std is 0.0"),
        ({}, {"image_mean": "half"}, "could not convert string"),
        ({}, {"image_processor_type": "SiglipImageProcessor"}, "image_processor_type is SiglipImageProcessor"),
        ({"image_processor": None}, {}, "there is no preprocessor_config.json"),
    ],
)  # fmt: skip
def test_what_has_no_equivalent_is_refused_by_its_key(changes: dict, processor: dict, said: str):
    with pytest.raises(UserError, match=said):
        read_config({**CONFIG, "image_processor": {**PROCESSOR, **processor}, **changes})
