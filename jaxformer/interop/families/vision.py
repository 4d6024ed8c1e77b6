"""Families of image encoders, and of image and text encoders, with what their image processors do to images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isclose
from typing import Any

from flax.traverse_util import unflatten_dict

from jaxformer.config import Resizing
from jaxformer.errors import abbreviate
from jaxformer.interop.families.encoders import N_CLASSES, single_label
from jaxformer.interop.families.tables import (
    ACTIVATIONS,
    IMAGE_PROCESSOR,
    NONE_OF,
    Family,
    Field,
    PublishedConfig,
    Weight,
    norm_rows,
    only_width,
    to_widths,
    with_defaults,
)
from jaxformer.models.clip import CLIPConfig
from jaxformer.models.vit import ViTConfig

RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Filters of interpolation in the order of Pillow's numbers."""
SQUARE = {"do_center_crop": False, "image_mean": 0.5, "image_std": 0.5}
CROPPED = {
    "size": {"shortest_edge": 224}, "resample": 3, "do_center_crop": True, "crop_size": 224,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "ViT": {**SQUARE, "size": 224, "resample": 2},
    "DeiT": {**SQUARE, "size": 256, "resample": 3, "do_center_crop": True, "crop_size": 224},
    "CLIP": CROPPED,
    "Bit": CROPPED,
}
"""Defaults of image processors by the beginning of their names."""
REQUIRED_OF_PROCESSORS: Mapping[str, Any] = {
    "do_resize": True, "do_rescale": True, "do_pad": False, "use_square_size": False
}  # fmt: skip
"""Settings that an image processor must have; others have no equivalent."""


def sides(value: int | Iterable[int]) -> tuple[int, ...]:
    """Return a height and a width."""
    height, width = (value, value) if isinstance(value, int) else value
    return height, width


def side(value: tuple[int, ...]) -> int | list[int]:
    """Return a height and a width as published: one number if they are equal."""
    return value[0] if len({*value}) == 1 else list(value)


def read_processor(theirs: PublishedConfig, kind: str) -> dict[str, Any]:
    """Return what an image processor does: our `image_size`, `mean`, `std` and `resizing`. Raises ordinary exceptions
    for one that does anything else.

    Args:
      kind: beginning of its name if its config has none.
    """
    if (given := theirs.get(IMAGE_PROCESSOR)) is None:
        remedy = "write it with save_pretrained of transformers' AutoImageProcessor"
        raise ValueError(f"there is no preprocessor_config.json; {remedy}")
    name = given.get("image_processor_type", given.get("feature_extractor_type"))
    for ending in ("Fast", "Pil", "ImageProcessor", "FeatureExtractor"):
        name = name and str(name).removesuffix(ending)
    if (kind := name or kind) not in PROCESSORS:
        raise ValueError(f"image_processor_type is {kind}ImageProcessor, not that of {', '.join(PROCESSORS)}")
    settings = {**PROCESSORS[kind], **{key: value for key, value in given.items() if value is not None}}
    for key, expected in REQUIRED_OF_PROCESSORS.items():
        if bool(settings.get(key, expected)) is not expected:
            raise ValueError(f"{key} of the image processor is {settings[key]}, and only {expected} has an equivalent")
    if not isclose(settings.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6):
        raise ValueError(f"rescale_factor is {settings['rescale_factor']}, and only 1/255 has an equivalent")
    size = _size(settings, "size", {"shortest_edge"} if kind in ("CLIP", "Bit") else {"height", "width"})
    cropped = _size(settings, "crop_size", {"height", "width"}) if settings["do_center_crop"] else size
    if len(cropped) != 2:
        raise ValueError(
            f"size is {abbreviate(settings['size'])} without do_center_crop, so that images differ in size"
        )
    resampling = RESAMPLING[settings["resample"]]
    is_plain = size == cropped and resampling == "bicubic"
    normalizes = settings.get("do_normalize", True)
    mean, std = (settings[key] if normalizes else x for key, x in (("image_mean", 0.0), ("image_std", 1.0)))
    return {
        "image_size": cropped,
        "mean": _numbers(mean),
        "std": _numbers(std),
        "resizing": None if is_plain else {"size": size, "resampling": resampling},
    }


def _size(settings: PublishedConfig, key: str, of_number: set[str]) -> tuple[int, ...]:
    """Return a height and a width, or a shorter side. `of_number` are the keys that a single number stands for."""
    size = settings[key]
    if isinstance(size, int):
        size = dict.fromkeys(of_number, size)
    if isinstance(size, list | tuple):
        size = dict(zip(("height", "width"), size, strict=True))
    if size.keys() == {"height", "width"}:
        return size["height"], size["width"]
    if size.keys() == {"shortest_edge"} and key == "size":
        return (size["shortest_edge"],)
    known = "height and width" + (", or shortest_edge" if key == "size" else "")
    raise ValueError(f"{key} of the image processor is {abbreviate(size)}, and only {known} have an equivalent")


def _numbers(value: float | Iterable[float]) -> tuple[float, ...]:
    return (float(value),) if isinstance(value, int | float) else tuple(map(float, value))


def write_processor(size: tuple[int, ...], channels: int, mean: Any, std: Any, resizing: Resizing | None) -> Any:
    """Return the config of an image processor that does the same as ours."""
    own = resizing or Resizing(size)
    height_width = dict(zip(("height", "width"), size, strict=True))
    scaled = {"shortest_edge": own.size[0]} if len(own.size) == 1 else dict(zip(height_width, own.size, strict=True))
    cropped = {"do_center_crop": True, "crop_size": height_width} if own.size != size else {"do_center_crop": False}
    return {
        "image_processor_type": f"{'CLIP' if own.size != size else 'ViT'}ImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "size": scaled,
        "resample": RESAMPLING.index(own.resampling),
        **cropped,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean) * (channels if len(mean) == 1 else 1),
        "image_std": list(std) * (channels if len(std) == 1 else 1),
    }


def with_processor(theirs: PublishedConfig, kind: str) -> dict[str, Any]:
    """Return the config of an image encoder with what its image processor does. Raises `ValueError` if the images have
    another size than the model's, which transformers would refuse."""
    processor = read_processor(theirs, kind)
    own = sides(theirs.get("image_size", 224))
    if processor["image_size"] != own:
        problem = f"the image processor makes images of {processor['image_size']} pixels, but image_size is {own}"
        raise ValueError(problem)
    return {**theirs, **processor, "image_size": own}


def without_processor(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the published form of the fields of an image encoder."""
    pixels = [theirs.pop(name) for name in ("mean", "std", "resizing")]
    processor = write_processor(theirs["image_size"], theirs["num_channels"], *pixels)
    if theirs.get("head_dim") == theirs["hidden_size"] // theirs["num_attention_heads"]:
        del theirs["head_dim"]
    return theirs | {"image_size": side(theirs["image_size"]), IMAGE_PROCESSOR: processor}


VISION_ACTIVATIONS = {**ACTIVATIONS, "quick_gelu": "quick_gelu", "silu": "silu", "swish": "silu"}
BLOCK_FIELDS = (
    Field("d_model", "hidden_size", 768),
    Field("n_blocks", "num_hidden_layers", 12),
    Field("n_heads", "num_attention_heads", 12),
    Field("d_ff", "intermediate_size", 3072, read=to_widths, write=only_width),
)
VIT_FIELDS = (
    Field("image_size", "image_size", 224),
    Field("channels", "num_channels", 3),
    Field("patch_size", "patch_size", 16, read=sides, write=side),
    Field("mean", "mean"),
    Field("std", "std"),
    Field("resizing", "resizing", None, is_optional=True),
    *BLOCK_FIELDS,
    Field("head_dim", "head_dim", None, is_optional=True),
    Field("activation", "hidden_act", "gelu", VISION_ACTIVATIONS),
    Field("norm_eps", "layer_norm_eps", 1e-12),
    Field("dropout", "hidden_dropout_prob", 0.0),
)
VIT_BLOCK, THEIR_LAYER = "blocks_{i}", "vit.encoder.layer.{i}"


def attention_rows(ours: str, **theirs: str) -> tuple[Weight, ...]:
    """Return the rows of multi-head attention with biases, given the names of their linear layers by our letters."""
    return tuple(
        row
        for letter, name in theirs.items()
        for row in (
            Weight(f"{ours}.W_{letter}", f"{name}.weight", "D (H K) -> H K D" if letter == "O" else "(H K) D -> D H K"),
            Weight(f"{ours}.b_{letter}", f"{name}.bias", "D -> D" if letter == "O" else "(H K) -> H 1 K"),
        )
    )


def linear_rows(W: str, b: str, theirs: str, layout: str) -> tuple[Weight, Weight]:
    """Return the rows of a linear layer, given the layout of its matrix, such as `F D -> D F`."""
    out = layout.split()[0]
    return Weight(W, f"{theirs}.weight", layout), Weight(b, f"{theirs}.bias", f"{out} -> {out}")


def mlp_rows(ours: str, first: str, second: str) -> tuple[Weight, ...]:
    """Return the rows of an MLP with one hidden layer and biases."""
    hidden = linear_rows(f"{ours}.W_1", f"{ours}.b_1", first, "F D -> D F")
    return *hidden, *linear_rows(f"{ours}.W_2", f"{ours}.b_2", second, "D F -> F D")


EMBEDDINGS = (
    Weight("patch_embedding.W_patch", "vit.embeddings.patch_embeddings.projection.weight", "D I Y X -> (Y X I) D"),
    Weight("patch_embedding.b_patch", "vit.embeddings.patch_embeddings.projection.bias", "D -> D"),
    Weight(
        "position_embedding.W_pos", "vit.embeddings.position_embeddings", "1 P D -> P D", part=0,
        tokens=("vit.embeddings.cls_token",),
    ),
)  # fmt: skip
VIT_ATTENTION = attention_rows(
    f"{VIT_BLOCK}.attention", **{letter: f"{THEIR_LAYER}.attention.attention.{name}" for letter, name in
    (("Q", "query"), ("K", "key"), ("V", "value"))}, O=f"{THEIR_LAYER}.attention.output.dense",
)  # fmt: skip
VIT_ENDS = (
    *norm_rows("final_norm", "vit.layernorm"),
    *linear_rows("W_out", "b_out", "classifier", "C O -> O C"),
)


VIT_CONSTANTS = {"pooling": "class", "attention_bias": True, "bias": True, "norm": "layernorm", "norm_placement": "pre"}
VIT = Family(
    "vit",
    "ViTForImageClassification",
    fields=(*VIT_FIELDS, N_CLASSES),
    weights=(
        *EMBEDDINGS,
        *norm_rows(f"{VIT_BLOCK}.attention_norm", f"{THEIR_LAYER}.layernorm_before"),
        *VIT_ATTENTION,
        *norm_rows(f"{VIT_BLOCK}.mlp_norm", f"{THEIR_LAYER}.layernorm_after"),
        *mlp_rows(f"{VIT_BLOCK}.mlp", f"{THEIR_LAYER}.intermediate.dense", f"{THEIR_LAYER}.output.dense"),
        *VIT_ENDS,
    ),
    constants=VIT_CONSTANTS,
    required={"qkv_bias": True, "problem_type": single_label},
    rope_base=None,
    model=ViTConfig,
    prefix="vit.",
    ignored=(r"mask_token$", r"pooler\.dense\."),
    read=lambda theirs: with_processor(theirs, "ViT"),
    write=without_processor,
)
VIT_FEATURES = replace(
    VIT,
    architecture="ViTModel",
    fields=VIT_FIELDS,
    constants={**VIT_CONSTANTS, "n_classes": 0},
)


def renamed(family: Family, name: str) -> tuple[Weight, ...]:
    """Return the rows of a family for another whose tensors begin with this name."""
    rename = lambda theirs: theirs.replace(family.prefix, f"{name}.")  # noqa: E731
    return tuple(
        row._replace(theirs=rename(row.theirs), tokens=tuple(map(rename, row.tokens))) for row in family.weights
    )


DEIT_TOKENS = ("deit.embeddings.cls_token", "deit.embeddings.distillation_token")
DEIT = replace(
    VIT,
    model_type="deit",
    architecture="DeiTForImageClassification",
    weights=tuple(row._replace(tokens=DEIT_TOKENS) if row.tokens else row for row in renamed(VIT, "deit")),
    constants={**VIT_CONSTANTS, "n_registers": 1},
    prefix="deit.",
    read=lambda theirs: with_processor(theirs, "DeiT"),
)
DEIT_FEATURES = replace(DEIT, architecture="DeiTModel", fields=VIT_FIELDS, constants={**DEIT.constants, "n_classes": 0})
DEIT_DISTILLED = replace(
    DEIT,
    architecture="DeiTForImageClassificationWithTeacher",
    weights=(
        *(row for row in DEIT.weights if not row.theirs.startswith("classifier.")),
        *linear_rows("W_out", "b_out", "cls_classifier", "C O -> O C"),
        *linear_rows("W_distilled", "b_distilled", "distillation_classifier", "C O -> O C"),
    ),
    constants={**VIT_CONSTANTS, "pooling": "distilled"},
)


def swiglu_width(width: int) -> int:
    """Return the width of DINOv2's SwiGLU for that of an MLP of as many parameters, a multiple of 8."""
    return (int(width * 2 / 3) + 7) // 8 * 8


def position_grid(theirs: PublishedConfig) -> tuple[int, int]:
    """Return the rows and columns of patches that the positions of a published DINOv2 are of."""
    size, patch = sides(theirs.get("image_size", 224)), sides(theirs.get("patch_size", 14))
    return size[0] // patch[0], size[1] // patch[1]


def read_dinov2(theirs: PublishedConfig) -> dict[str, Any]:
    """Return the config of a DINOv2 for images of the size that its image processor makes, with the width of its MLP.
    Raises `ValueError` if transformers would interpolate positions that are no square."""
    processor, published = read_processor(theirs, "Bit"), sides(theirs.get("image_size", 224))
    rows, columns = position_grid(theirs)
    if published[0] != published[1] or (published != processor["image_size"] and rows != columns):
        raise ValueError(f"image_size is {published}, with {rows} x {columns} patches; only squares are interpolated")
    width, gated = int(theirs.get("hidden_size", 768) * theirs.get("mlp_ratio", 4)), theirs.get("use_swiglu_ffn", False)
    own = {"intermediate_size": swiglu_width(width), "hidden_act": "swiglu"} if gated else {"intermediate_size": width}
    return {**theirs, **own, **processor}


def write_dinov2(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the published form of the fields of a DINOv2, which is exact for square images only."""
    theirs = without_processor(theirs | {"image_size": (max(theirs["image_size"]),) * 2})
    width, d_model, gated = theirs.pop("intermediate_size"), theirs["hidden_size"], theirs["use_swiglu_ffn"]
    ratios = range(1, 65)
    fitting = [n for n in ratios if width == (swiglu_width(n * d_model) if gated else n * d_model)]
    theirs |= {"mlp_ratio": next(iter(fitting), 4), "use_mask_token": False}
    return theirs | ({"hidden_act": "gelu"} if gated else {})


DINO_LAYER = "dinov2.encoder.layer.{i}"
SCALES = {
    f"{VIT_BLOCK}.{part}.{name}": f"{DINO_LAYER}.layer_scale{i}.lambda1"
    for i, part, names in ((1, "attention", ("W_O", "b_O")), (2, "mlp", ("W_2", "b_2")))
    for name in names
}
"""Tensors of LayerScale (Touvron et al. 2021) by the parameters of ours that they are multiplied into."""
DINO_MLP = (
    *(
        row._replace(when=("gate_bias", False))
        for row in mlp_rows(f"{VIT_BLOCK}.mlp", f"{DINO_LAYER}.mlp.fc1", f"{DINO_LAYER}.mlp.fc2")
    ),
    *(
        row._replace(part=part, when=("gate_bias", True))
        for part, (W, b) in enumerate((("W_gate_1", "b_gate_1"), ("W_1", "b_1")))
        for row in (
            Weight(f"{VIT_BLOCK}.mlp.{W}", f"{DINO_LAYER}.mlp.weights_in.weight", "(2 F) D -> D F"),
            Weight(f"{VIT_BLOCK}.mlp.{b}", f"{DINO_LAYER}.mlp.weights_in.bias", "(2 F) -> F"),
        )
    ),
    *(
        row._replace(when=("gate_bias", True))
        for row in linear_rows(
            f"{VIT_BLOCK}.mlp.W_2", f"{VIT_BLOCK}.mlp.b_2", f"{DINO_LAYER}.mlp.weights_out", "D F -> F D"
        )
    ),
)
DINOV2_FIELDS = (
    *with_defaults(VIT_FIELDS, patch_size=14, norm_eps=1e-6),
    Field("gate_bias", "use_swiglu_ffn", False),
)
DINOV2 = replace(
    VIT_FEATURES,
    model_type="dinov2",
    architecture="Dinov2Model",
    fields=tuple(
        row._replace(values={**VISION_ACTIVATIONS, "swiglu": "swiglu"}) if row.ours == "activation" else row
        for row in DINOV2_FIELDS
    ),
    weights=tuple(
        row._replace(scale=SCALES.get(row.ours))
        for row in (
            *(row for row in renamed(VIT, "dinov2") if "mlp" not in row.ours and "attention_norm" not in row.ours),
            *norm_rows(f"{VIT_BLOCK}.attention_norm", f"{DINO_LAYER}.norm1"),
            *norm_rows(f"{VIT_BLOCK}.mlp_norm", f"{DINO_LAYER}.norm2"),
            *DINO_MLP,
        )
    ),
    prefix="dinov2.",
    read=read_dinov2,
    write=write_dinov2,
    position_grid=position_grid,
)
DINOV2_CLASSIFIER = replace(
    DINOV2,
    architecture="Dinov2ForImageClassification",
    fields=(*DINOV2.fields, N_CLASSES),
    constants={**VIT_CONSTANTS, "pooling": "class_and_mean"},
)


def read_clip(theirs: PublishedConfig) -> dict[str, Any]:
    """Return the config of a CLIP with the fields of its towers named by dotted paths, and what its image processor
    does. Raises `ValueError` as `with_processor` does."""
    towers = {}
    for name in ("vision", "text"):
        # Older configs have a second object, which replaces the first.
        given = theirs.get(f"{name}_config_dict")
        towers[name] = (theirs.get(f"{name}_config") if given is None else given) or {}
    vision = with_processor({**towers["vision"], IMAGE_PROCESSOR: theirs.get(IMAGE_PROCESSOR)}, "CLIP")
    n = len(vision["mean"])
    vision |= {name: vision[name] * (vision.get("num_channels", 3) if n == 1 else 1) for name in ("mean", "std")}
    dotted = {
        f"{name}_config.{key}": x
        for name, tower in (("vision", vision), ("text", towers["text"]))
        for key, x in tower.items()
    }
    return {**theirs, **dotted}


def write_clip(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the published form of the fields of a CLIP."""
    nested = unflatten_dict({tuple(name.split(".")): value for name, value in theirs.items()})
    vision = nested["vision_config"]
    vision = without_processor(vision | {"num_channels": len(vision["mean"])})
    return nested | {"vision_config": vision, IMAGE_PROCESSOR: vision.pop(IMAGE_PROCESSOR)}


def tower_fields(name: str, **defaults: int) -> tuple[Field, ...]:
    """Return the fields of a tower of CLIP, `vision` or `text`."""
    rows = (
        *with_defaults(BLOCK_FIELDS, **defaults),
        Field("activation", "hidden_act", "quick_gelu", VISION_ACTIVATIONS),
        Field("norm_eps", "layer_norm_eps", 1e-5),
    )
    return tuple(row._replace(ours=f"{name}.{row.ours}", theirs=f"{name}_config.{row.theirs}") for row in rows)


def tower_rows(name: str) -> tuple[Weight, ...]:
    """Return the rows of the blocks of a tower of CLIP, `vision` or `text`."""
    ours, theirs = f"{name}_blocks_{{i}}", f"{name}_model.encoder.layers.{{i}}"
    letters = {"Q": "q_proj", "K": "k_proj", "V": "v_proj", "O": "out_proj"}
    return (
        *norm_rows(f"{ours}.attention_norm", f"{theirs}.layer_norm1"),
        *attention_rows(f"{ours}.attention", **{letter: f"{theirs}.self_attn.{x}" for letter, x in letters.items()}),
        *norm_rows(f"{ours}.mlp_norm", f"{theirs}.layer_norm2"),
        *mlp_rows(f"{ours}.mlp", f"{theirs}.mlp.fc1", f"{theirs}.mlp.fc2"),
    )


TOWERS = ("vision", "text")
CLIP = Family(
    "clip",
    "CLIPModel",
    fields=(
        Field("d_joint", "projection_dim", 512),
        Field("vision.image_size", "vision_config.image_size", 224),
        Field("vision.patch_size", "vision_config.patch_size", 32, read=sides, write=side),
        Field("vision.mean", "vision_config.mean"),
        Field("vision.std", "vision_config.std"),
        Field("vision.resizing", "vision_config.resizing", None, is_optional=True),
        *tower_fields("vision"),
        Field("text.vocab_size", "text_config.vocab_size", 49_408),
        Field("text.context_length", "text_config.max_position_embeddings", 77),
        *tower_fields("text", d_model=512, n_heads=8, d_ff=2048),
    ),
    weights=(
        Weight("vision_embedding.x_class", "vision_model.embeddings.class_embedding", "D -> D"),
        Weight("vision_embedding.W_E", "vision_model.embeddings.patch_embedding.weight", "D I Y X -> (Y X I) D"),
        Weight("vision_embedding.W_pos", "vision_model.embeddings.position_embedding.weight", "P D -> P D"),
        *norm_rows("vision_embedding_norm", "vision_model.pre_layrnorm"),
        *tower_rows("vision"),
        *norm_rows("vision_norm", "vision_model.post_layernorm"),
        Weight("text_embedding.W_E", "text_model.embeddings.token_embedding.weight", "V D -> V D"),
        Weight("text_embedding.W_pos", "text_model.embeddings.position_embedding.weight", "P D -> P D"),
        *tower_rows("text"),
        *norm_rows("text_norm", "text_model.final_layer_norm"),
        Weight("W_i", "visual_projection.weight", "J vision -> vision J"),
        Weight("W_t", "text_projection.weight", "J text -> text J"),
        Weight("t", "logit_scale", " -> "),
    ),
    constants={},
    required={f"{tower}_config.{name}": None for tower in TOWERS for name in NONE_OF},
    rope_base=None,
    model=CLIPConfig,
    prefix="",
    ignored=(r"position_ids$",),
    read=read_clip,
    write=write_clip,
    towers=TOWERS,
)
"""The towers may differ in all fields."""

ALL = (DINOV2, VIT_FEATURES, VIT, DEIT_FEATURES, DEIT, DEIT_DISTILLED, DINOV2_CLASSIFIER, CLIP)
"""All families of vision, those without a head before others of their `model_type`. A ViT without a head is exported as
a DINOv2 whose LayerScale is 1, as transformers adds a pooler to a `ViTModel`."""
