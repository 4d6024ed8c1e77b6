"""Dtype of sums and probabilities, independent of the compute dtype."""

import jax
import numpy as np
from jax.typing import DTypeLike


def accumulation_dtype(dtype: DTypeLike) -> np.dtype:
    """Return float32, or float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def upcast(x: jax.Array) -> jax.Array:
    """Return the array converted to `accumulation_dtype` of its dtype."""
    return x.astype(accumulation_dtype(x.dtype))
