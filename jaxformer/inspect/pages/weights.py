"""Parameters of a decoder as `weights.ts` in docs/lab/src/inspect reads them: float16, or 8-bit integers with a scale
per group."""

from __future__ import annotations

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from jaxformer.models.objective import Params

GROUP = 32
"""Weights that share a scale."""


def round_params(params: Params, bits: int = 16) -> Params:
    """Return parameters as `pack_params` stores them, as float32 NumPy arrays. Raises `NotImplementedError` if one is
    then not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = tree_map_with_path(lambda path, x: _rounded(path[-1].key, np.asarray(x), bits), params)
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(rounded)):
        beyond = ", or above 65,504, the largest float16 value" if bits == 16 else ""
        raise NotImplementedError(f"a parameter is not finite{beyond}.")
    return rounded


def pack_names(params: Params) -> list[list]:
    """Return name and size of each parameter, in the order of `pack_params`."""
    return [[keystr(path, simple=True, separator="."), x.size] for path, x in tree_leaves_with_path(params)]


def pack_params(params: Params, bits: int = 16) -> bytes:
    """Return the values of parameters, little-endian, where a matrix has one row per output. In 16 bits, all are
    float16. In 8 bits, vectors come first, as float32, then the scales of matrices, bfloat16, one per `GROUP` values,
    then the values of matrices divided by them, int8."""
    flat = flatten(params)
    if bits == 16:
        return b"".join(x.astype("<f2").tobytes() for _, x in flat)
    vectors = [x.astype("<f4") for key, x in flat if not _is_matrix(key)]
    matrices = [quantize(x) for key, x in flat if _is_matrix(key)]
    scales = [(scales.view(np.uint32) >> 16).astype("<u2") for _, scales in matrices]
    return b"".join(x.tobytes() for x in (*vectors, *scales, *(values for values, _ in matrices)))


def flatten(params: Params) -> list[tuple[str, np.ndarray]]:
    """Return the last part of the name of each parameter, and its values, flat, in the order of `pack_params`."""
    return [(path[-1].key, _rows(path[-1].key, np.asarray(x)).ravel()) for path, x in tree_leaves_with_path(params)]


def quantize(x_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return values from -127 to 127, `(N,)` int8, and the scale that each group of `GROUP` of them is multiplied by,
    float32, but rounded to bfloat16: products have no rounding error, so quantizing them again changes nothing."""
    x_N = x_N.astype(np.float32, copy=False)
    groups = (np.pad(x_N, (0, rest)) if (rest := -len(x_N) % GROUP) else x_N).reshape(-1, GROUP)
    bits = (np.abs(groups).max(axis=1) / 127).view(np.uint32)
    scales = ((bits + 0x8000) & 0xFFFF0000).view(np.float32)
    values = np.rint(groups / np.where(scales, scales, 1)[:, None]).clip(-127, 127).astype(np.int8)
    return values.ravel()[: len(x_N)], scales


def _rounded(key: str, x: np.ndarray, bits: int) -> np.ndarray:
    if bits == 16:
        return x.astype(np.float16).astype(np.float32)
    if not _is_matrix(key):
        return x.astype(np.float32)
    rows = _rows(key, x)
    values, scales = quantize(rows.ravel())
    rounded = (values * np.repeat(scales, GROUP)[: x.size]).reshape(rows.shape)
    return (rounded if rows is x else rounded.T).reshape(x.shape)


def _is_matrix(key: str) -> bool:
    return key.startswith("W_")


def _rows(key: str, x: np.ndarray) -> np.ndarray:
    """Return a matrix with one row per output, and other parameters unchanged."""
    if not _is_matrix(key) or key in ("W_E", "W_pos"):  # tables have a row per token or position
        return x
    return x.reshape((-1, x.shape[-1]) if key == "W_O" else (len(x), -1)).T
