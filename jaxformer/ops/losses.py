"""Losses of one example. The leading axes of logits are those of the targets: T, or none for a single class."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxformer.ops.precision import accumulation_dtype, upcast


def negative_log_likelihood(logits_TV: jax.Array, targets_T: jax.Array) -> jax.Array:
    """Compute -log softmax(logits)[target] in nats, `(T,)` float32.

    Targets are integers from 0 to V - 1; any other yields NaN, also a negative one, such as torch's -100. Raises as
    `check_targets` does.
    """
    targets_T = check_targets(logits_TV.shape[:-1], targets_T)
    shifted_TV = shifted(logits_TV)
    # JAX would count a negative index from the end.
    index_T = jnp.where(targets_T < 0, logits_TV.shape[-1], targets_T.astype(jnp.int32))
    chosen_T = jnp.take_along_axis(shifted_TV, index_T[..., None], axis=-1)[..., 0]
    return jnp.log(jnp.sum(jnp.exp(shifted_TV), axis=-1)) - chosen_T


def check_targets(shape: tuple[int, ...], targets_T: ArrayLike, weights_T: ArrayLike | None = None) -> jax.Array:
    """Return targets as an array. Raises `TypeError` for targets that are not integers, `ValueError` for targets or
    weights of another shape, which would broadcast."""
    targets_T = jnp.asarray(targets_T)
    if not jnp.issubdtype(targets_T.dtype, jnp.integer):
        raise TypeError(f"targets are {targets_T.dtype}; give integer classes, after the logits")
    for name, x in (("targets", targets_T), ("weights", targets_T if weights_T is None else weights_T)):
        if jnp.shape(x) != shape:
            raise ValueError(f"expected {name} of shape {shape}, one per row of logits, got {jnp.shape(x)}")
    return targets_T


def uniform_cross_entropy(logits_TV: jax.Array) -> jax.Array:
    """Return the cross-entropy of a uniform target in nats, `(T,)` float32: the mean of -log softmax(logits).

    Label smoothing with ε (Szegedy et al. 2016, section 7) minimises (1 - ε) times the negative log-likelihood plus ε
    times this value.
    """
    shifted_TV = shifted(logits_TV)
    return jnp.log(jnp.sum(jnp.exp(shifted_TV), axis=-1)) - jnp.mean(shifted_TV, axis=-1)


def shifted(logits_TV: jax.Array) -> jax.Array:
    """Subtract the largest logit of each position, in float32: a logarithm added to a large logit would lose its
    digits."""
    logits_TV = upcast(logits_TV)
    return logits_TV - jax.lax.stop_gradient(jnp.max(logits_TV, axis=-1, keepdims=True))


def top1_correct(logits_TV: jax.Array, targets_T: jax.Array) -> jax.Array:
    """Return True where the target's logit is the largest, and the first among equal logits, `(T,)` bool."""
    return jnp.argmax(logits_TV, axis=-1) == targets_T


def pair_nll(
    image_E: jax.Array,
    text_E: jax.Array,
    images_NE: jax.Array,
    texts_NE: jax.Array,
    log_scale: jax.Array,
    counts_N: jax.Array | None = None,
) -> jax.Array:
    """Return the mean of two negative log-likelihoods in nats, a float32 scalar: of a pair's text among N given its
    image, and of its image among N given its text (Radford et al. 2021, figure 3; InfoNCE of van den Oord et al. 2018).

    The pair is one of the N; its index does not matter.

    Args:
      image_E, text_E: embeddings of unit norm, as are `images_NE` and `texts_NE`.
      log_scale: log of the factor from cosine similarities to logits.
      counts_N: bool, False for pairs to leave out of the N; None to include all.
    """
    # Cosines are scaled by up to 100 and then exponentiated, so TF32 or bfloat16 rounding would cause errors of a
    # tenth.
    dot = partial(
        jnp.matmul, precision=jax.lax.Precision.HIGHEST, preferred_element_type=accumulation_dtype(image_E.dtype)
    )
    scale = jnp.exp(upcast(log_scale))
    own = scale * dot(image_E, text_E)
    among = lambda all_NE, one_E: jax.nn.logsumexp(scale * dot(all_NE, one_E), where=counts_N) - own  # noqa: E731
    return (among(texts_NE, image_E) + among(images_NE, text_E)) / 2


def cross_entropy(logits_TV: jax.Array, targets_T: jax.Array, weights_T: jax.Array | None = None) -> jax.Array:
    """Compute the cross-entropy in nats, the weighted mean Σ w·nll / Σ w of `negative_log_likelihood`, a float32
    scalar; 0 if all weights are 0.

    Logits and targets of weight 0 change neither the loss nor its gradient, even if they are NaN or no class: the mask
    `targets_T != -100` as weights is torch's `ignore_index`.
    """
    if weights_T is None:
        return jnp.mean(negative_log_likelihood(logits_TV, targets_T))
    targets_T, weights_T = check_targets(logits_TV.shape[:-1], targets_T, weights_T), jnp.asarray(weights_T)
    logits_TV, targets_T = jnp.where(weights_T[..., None] == 0, 0, logits_TV), jnp.where(weights_T == 0, 0, targets_T)
    loss_T = negative_log_likelihood(logits_TV, targets_T)
    total = jnp.sum(weights_T)
    return jnp.sum(loss_T * weights_T) / jnp.where(total == 0, 1.0, total)
