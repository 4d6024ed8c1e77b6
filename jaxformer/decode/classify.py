"""Tell what images show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.models.objective import Params


@partial(jax.jit, static_argnames=("model",))
def classify(model: nn.Module, params: Params, pixels: jax.Array) -> jax.Array:
    """How probable each class is for one image `(height, width, C)` or video, uint8: `(n_classes,)` float32."""
    logits = model.apply({"params": params}, pixels)
    assert isinstance(logits, jax.Array)
    return jax.nn.softmax(logits.astype(jnp.float32))


@partial(jax.jit, static_argnames=("model",))
def match(model: nn.Module, params: Params, images: jax.Array, tokens_NT: jax.Array, valid_NT: jax.Array) -> jax.Array:
    """How probable each text is for each image, were it one of these, `(n_images, N)` float32 (section 3.1.2 of Radford
    et al. 2021).

    Args:
      model: a `CLIP`.
      images: `(n_images, height, width, C)` uint8.
      tokens_NT: int32, of each text, as `data.captions.tokenize_captions` makes them, and where there are any.
    """
    apply: Callable[..., Any] = partial(model.apply, {"params": params})
    image_IE = jax.vmap(partial(apply, method="encode_image"))(images)
    text_NE = jax.vmap(partial(apply, method="encode_text"))(tokens_NT, valid_NT)
    # A device's default would round cosines to a few digits, and the scale is up to 100.
    cosine_IN = jnp.matmul(image_IE, text_NE.T, precision=jax.lax.Precision.HIGHEST)
    return jax.nn.softmax(jnp.exp(apply(method="log_scale")) * cosine_IN)
