"""Output files of an export, written atomically."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jaxformer.errors import UserError, import_extra, os_error_reason
from jaxformer.interop.formats import Dtype
from jaxformer.models.objective import Params


@contextmanager
def complete_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path for a new file or folder, which is renamed to `target` if the body succeeds. Raises
    `UserError` if the target exists or cannot be written."""
    _check_new(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent) as scratch:
            path = Path(scratch) / target.name
            yield path
            _check_new(target)  # the rename would replace an empty folder that another process has created meanwhile
            path.rename(target)
    except OSError as error:
        remedy = "free some space, or choose another `out`"
        raise UserError(f"{target} cannot be written: {error.strerror or error}; {remedy}.") from error


def _check_new(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists, and an export overwrites nothing; remove it, or choose another `out`.")


def flat_params(params: Params, dtype: Dtype) -> dict[str, np.ndarray]:
    """Return the parameters by path, such as `blocks_0.attention.W_Q`, as NumPy arrays of a dtype. Raises `UserError`
    if a value exceeds the dtype's range."""
    return {name: cast(name, leaf, dtype) for name, leaf in flatten_dict(params, sep=".").items()}


def cast(name: str, array: jax.typing.ArrayLike, dtype: Dtype) -> np.ndarray:
    """Return an array as a contiguous NumPy array of a dtype. Raises `UserError` with the tensor's name if a value
    exceeds the dtype's range."""
    array = np.asarray(jax.device_get(array))
    with np.errstate(over="ignore"):  # reported below, by name
        converted = np.asarray(array.astype(jnp.dtype(dtype)), order="C")  # a scalar stays one
    if dtype == "float16" and not np.isfinite(converted).all() and np.isfinite(array).all():
        largest = np.abs(array).max()
        raise UserError(f"{name} has values up to {largest:.3g}, but float16 ends at 65504; use `dtype='bfloat16'`.")
    return converted


def copy_files(source: Path, folder: Path, *names: str) -> None:
    """Copy a run's named files, such as its tokenizer, to a folder, skipping missing ones."""
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def save_safetensors(tensors: dict[str, np.ndarray], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors by name to a safetensors file. Raises `UserError` if safetensors is not installed, `OSError` if the
    file cannot be written."""
    library = import_extra("safetensors", "writing safetensors")
    try:
        import_extra("safetensors.numpy", "writing safetensors").save_file(tensors, file, metadata)
    except library.SafetensorError as error:  # such as for a full disk
        raise OSError(os_error_reason(error) or str(error)) from error
    file.chmod(0o644)  # the library restricts it to its owner
