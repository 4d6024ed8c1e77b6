"""MXFP4, the format of GPT-OSS's experts: numbers of four bits, 32 of which share a power of two (Rouhani et al. 2023,
"Microscaling Data Formats for Deep Learning").

A tensor `(E, D, F)` is stored as bytes of two numbers, the lower bits first, in `name_blocks` `(E, F, D/32, 16)`, and
biased exponents in `name_scales` `(E, F, D/32)`.
"""

from __future__ import annotations

from math import prod

import jax.numpy as jnp
import numpy as np

METHOD = "mxfp4"
"""Name of the format in a config."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors."""
BYTES_PER_BLOCK, EXPONENT_BIAS = 16, 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)
"""Number by its four bits."""


def dequantized_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of the tensor that two of these shapes hold; None if they do not fit together."""
    if len(blocks) != 4 or blocks != (*scales, BYTES_PER_BLOCK):
        return None
    return blocks[0], 2 * blocks[2] * blocks[3], blocks[1]


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the tensor `(E, D, F)` in bfloat16, which holds these numbers exactly; one expert at a time, in little
    more memory than the result."""
    (E, F, *block), dtype = blocks.shape, jnp.dtype(jnp.bfloat16)
    result: np.ndarray = np.empty((E, 2 * prod(block), F), dtype)
    for expert, blocks_FNB, scales_FN in zip(result, blocks, scales, strict=True):
        numbers = NUMBERS[np.stack([blocks_FNB & 15, blocks_FNB >> 4], axis=-1)]
        exponents = scales_FN.astype(np.int32)[..., None, None] - EXPONENT_BIAS
        expert[:] = np.ldexp(numbers, exponents).reshape(len(blocks_FNB), -1).T
    return result
