"""Cases of tests/interop/test_families.py that read images."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxformer.data.captions import tokenize_captions
from jaxformer.data.dataset import Batch
from jaxformer.data.image_io import read_model_input
from jaxformer.inspect import attention_maps
from jaxformer.models.objective import Contrastive
from jaxformer.ops.patches import standardize
from jaxformer.runs.run import Run
from tests.interop.family_cases import (
    RATE,
    Case,
    Differences,
    exported_again,
    gradient_difference,
    imported,
    imported_run,
    loss_of,
    relative,
)  # fmt: skip

SIZES = ((23, 31), (31, 23), (8, 8))
"""Heights and widths of the images."""
TEXTS = ["A photo of  the Cat", "the dog's 3 ducks!", "a"]
SIZE = {"height": 8, "width": 8}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", {"size": SIZE}),
    "deit": ("DeiT", {"size": {"height": 11, "width": 11}, "crop_size": SIZE}),
    "dinov2": ("Bit", {"size": {"shortest_edge": 10}, "crop_size": SIZE}),
    "clip": ("CLIP", {"size": {"shortest_edge": 8}, "crop_size": SIZE}),
}
"""Image processors of the families: names, and settings for small images."""


def write_processor(model_type: str, folder: Path) -> Any:
    """Write the image processor of a family to a folder; return it."""
    transformers = pytest.importorskip("transformers")
    name, settings = PROCESSORS[model_type]
    processor = getattr(transformers, f"{name}ImageProcessorPil")(**settings)
    processor.save_pretrained(folder)
    return processor


def write_clip_tokenizer(folder: Path) -> Any:
    """Write a small tokenizer of CLIP, of bytes and bytes that end a word, to a folder; return it."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    (folder / "tokenizer.json").unlink(missing_ok=True)
    letters = sorted(ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e</w>"), ("c", "a"), ("ca", "t</w>"), ("d", "o")]
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
    vocab = {piece: i for i, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=merges)
    tokenizer.save_pretrained(folder)
    return tokenizer


def read_images(run: Run, processor: Any, folder: Path) -> tuple[np.ndarray, Any, float]:
    """Write random images; return them as a run reads them, `(N, H, W, C)` uint8, and their pixel values in
    transformers, with the largest difference from ours."""
    rng, contract = np.random.default_rng(0), run.config.model.contract
    images, ours = [], []
    for i, size in enumerate(SIZES):
        images.append(Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)))
        images[i].save(f"{folder}-{i}.png")
        ours.append(read_model_input(f"{folder}-{i}.png", contract.inputs[0].shape, contract.resizing))
    model = getattr(run.config.model, "vision", run.config.model)
    theirs = processor(images, return_tensors="pt")["pixel_values"]
    pixels = standardize(np.stack(ours), model.mean, model.std)
    return np.stack(ours), theirs, relative(pixels, theirs.permute(0, 2, 3, 1))


def gradients(theirs: Any, folder: Path) -> tuple[Any, Any]:
    """Return the gradients of a torch model after `backward`, times `RATE`, as those of our parameters, our import of a
    model whose parameters they are, and zeros. Ours are products with LayerScale, and sums of a learned token and its
    position."""
    import shutil

    import torch

    with torch.no_grad():
        for name, p in theirs.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None or "_token" in name else p.grad
            p.copy_(1 / p if "lambda1" in name else grad)
    target = Path(f"{folder}-gradient")
    theirs.save_pretrained(target)
    for file in folder.glob("*.json"):
        if file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, target)
    grads = imported(target)[1]
    return jax.tree.map(lambda grad: RATE * grad, grads), jax.tree.map(np.zeros_like, grads)


def compare_images(theirs: Any, folder: Path, gradient: bool) -> Differences:
    """Compare an image encoder, a torch module with eager attention, with its import."""
    import torch
    import transformers

    processor = write_processor(theirs.config.model_type, folder)
    run = imported_run(folder)
    images, pixel_values, pixels = read_images(run, processor, folder)
    features = lambda out: out.logits if "logits" in out else out.last_hidden_state[:, 0]  # noqa: E731
    out = theirs(pixel_values, output_attentions=True)
    weights = np.random.default_rng(1).normal(size=features(out).shape).astype(np.float32)
    (features(out) * torch.tensor(weights)).sum().backward()

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        found = jax.vmap(partial(run.model.apply, {"params": params}))(images)
        return jnp.sum(found * weights), found

    with jax.disable_jit():
        _, ours, grads = loss_of(loss, run.params, gradient)
        maps = attention_maps(run.model, run.params, images[0])
    exported = Path(f"{folder}-export")
    assert exported_again(run, exported) == 0
    name = transformers.AutoConfig.from_pretrained(exported).architectures[0]
    again = getattr(transformers, name).from_pretrained(exported)
    read_again = transformers.AutoImageProcessor.from_pretrained(exported)
    loaded = [Image.open(f"{folder}-{i}.png") for i in range(len(SIZES))]
    with torch.no_grad():
        features_again = features(again(read_again(loaded, return_tensors="pt")["pixel_values"]))
    return {
        "pixels": pixels,
        "logits or features": relative(ours, features(out).detach()),
        "an attention map": relative(maps[-1], out.attentions[-1][0].detach()),
        "logits of the export": relative(ours, features_again),
    } | ({"gradient": gradient_difference(grads, *gradients(theirs, folder))} if gradient else {})


def compare_images_and_texts(theirs: Any, folder: Path, gradient: bool) -> Differences:
    """Compare a CLIP, a torch module with eager attention, with its import."""
    import torch
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    their_tokenizer, processor = write_clip_tokenizer(folder), write_processor("clip", folder)
    run = imported_run(folder)
    images, pixel_values, pixels = read_images(run, processor, folder)
    encoded = their_tokenizer(TEXTS, padding=True, return_tensors="pt")
    tokens_NT, valid_NT, _ = tokenize_captions(TEXTS, run.tokenizer, run.config.model.example()[1].shape[0])
    n = encoded["input_ids"].shape[1]
    assert np.where(valid_NT, tokens_NT, encoded["input_ids"].max())[:, :n].tolist() == encoded["input_ids"].tolist()
    out = theirs(**encoded, pixel_values=pixel_values, output_attentions=True, return_loss=True)
    out.loss.backward()

    def loss(params: Any) -> tuple[jax.Array, Any]:
        apply = partial(run.model.apply, {"params": params})
        image_NE, text_NE, scale = jax.vmap(apply, out_axes=(0, 0, None))(images, tokens_NT, valid_NT)
        return Contrastive().loss(run.model, params, Batch((images, tokens_NT, valid_NT)))[1], (
            image_NE, text_NE, jnp.exp(scale) * image_NE @ text_NE.T
        )  # fmt: skip

    with jax.disable_jit():
        value, (image_NE, text_NE, logits), grads = loss_of(loss, run.params, gradient)
        maps = attention_maps(run.model, run.params, images[0], tokens_NT[1], valid_NT[1])
    exported = Path(f"{folder}-export")
    assert exported_again(run, exported) == 0
    inputs = AutoTokenizer.from_pretrained(exported)(TEXTS, padding=True, return_tensors="pt")
    loaded = [Image.open(f"{folder}-{i}.png") for i in range(len(SIZES))]
    read_again = AutoImageProcessor.from_pretrained(exported)(loaded, return_tensors="pt")
    with torch.no_grad():
        again = CLIPModel.from_pretrained(exported)(**inputs, **read_again).logits_per_image
    vision = out.vision_model_output.attentions[-1][0].detach()
    return {
        "pixels": pixels,
        "embeddings": max(relative(image_NE, out.image_embeds.detach()), relative(text_NE, out.text_embeds.detach())),
        "logits": relative(logits, out.logits_per_image.detach()),
        "loss": relative(value, out.loss.detach()),
        "an attention map": relative(maps[len(theirs.vision_model.encoder.layers) - 1], vision),
        "logits of the export": relative(logits, again),
    } | ({"gradient": gradient_difference(grads, *gradients(theirs, folder))} if gradient else {})


SMALL = {"image_size": 8, "patch_size": 4, "num_labels": 3}
DINO = {**SMALL, "patch_size": 2}
CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu", "gelu_new", "quick_gelu", "silu", "relu"), "layer_norm_eps": (..., 1e-2),
    "patch_size": (4, 2, [4, 2]), "num_attention_heads": (6, 3), "num_hidden_layers": (1, 2),
}  # fmt: skip
DINO_CHOICES = {**CHOICES, "patch_size": (2, 4), "use_swiglu_ffn": (True, False), "mlp_ratio": (2, 4)}
TOWER: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 6, "image_size": 8,
    "patch_size": 4, "vocab_size": 519, "max_position_embeddings": 40, "eos_token_id": 518, "bos_token_id": 517,
}  # fmt: skip
TOWER_CHOICES = (TOWER, {**TOWER, "hidden_act": "gelu", "layer_norm_eps": 1e-2}, {**TOWER, "num_hidden_layers": 2})
VIT = "ViT B, L and H with and without a head, DeiT without distillation"
DEIT = "DeiT Ti, S and B, distilled, with one head or two"
DINOV2 = "DINOv2 S to g, with and without a linear head"

CASES: dict[str, Case] = {
    "ViTModel": Case(VIT, SMALL, CHOICES, compare_images),
    "ViT": Case(VIT, SMALL, CHOICES, compare_images),
    "DeiTStudent": Case(DEIT, SMALL, CHOICES, compare_images),
    "DeiT": Case(DEIT, SMALL, CHOICES, compare_images),
    "Dinov2Classifier": Case(DINOV2, DINO, DINO_CHOICES, compare_images),
    "Dinov2": Case(DINOV2, DINO, DINO_CHOICES, compare_images),
    "CLIP": Case(
        "CLIP of OpenAI and OpenCLIP, B/32 to H/14",
        {"projection_dim": 20},
        {
            "vision_config": TOWER_CHOICES,
            "text_config": (*TOWER_CHOICES, {**TOWER, "hidden_size": 18, "eos_token_id": 2}),
        },
        compare_images_and_texts,
    ),
}
"""Cases by the name of the family in `published.CLASSES`."""
