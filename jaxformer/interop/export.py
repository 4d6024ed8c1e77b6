"""Export of a run to a format that other programs read."""

from __future__ import annotations

from pathlib import Path

from jaxformer.data.tokenizer import TOKENIZER_CONFIG
from jaxformer.decode.text import default_settings
from jaxformer.interop.formats import Dtype, Format
from jaxformer.interop.gguf import export_gguf
from jaxformer.interop.huggingface import export_huggingface
from jaxformer.interop.omissions import omissions
from jaxformer.interop.output import complete_path, copy_files, flat_params, save_safetensors
from jaxformer.interop.stablehlo import export_stablehlo
from jaxformer.runs.run import CLASSES, SAMPLING, TOKENIZER, Run, write_config


def export_run(
    run: Run, file_format: Format, path: Path, dtype: Dtype = "float32", cache_length: int | None = None
) -> list[str]:
    """Write a run with weights in a dtype to a new folder or, as GGUF, to a new file; return what the run knows and the
    export does not hold, one phrase each. For `cache_length` see `export_stablehlo`. Raises `UserError` if the path
    exists, a package for the format is not installed, the format has no equivalent for a part of the model, or a
    sampling setting of the run is out of range."""
    default_settings(run)
    if file_format == "stablehlo":
        export_stablehlo(run, path, dtype, cache_length)
    else:
        exports = {"hf": export_huggingface, "safetensors": export_safetensors, "gguf": export_gguf}
        exports[file_format](run, path, dtype)
    return omissions(run, file_format, path)


def export_safetensors(run: Run, folder: Path, dtype: Dtype = "float32") -> None:
    """Write the parameters of any model, named by their paths, with the run's config, tokenizer, class names and
    sampling settings. Raises `UserError` if the folder exists, or safetensors is not installed."""
    with complete_path(folder) as scratch:
        scratch.mkdir()
        save_safetensors(flat_params(run.params, dtype), scratch / "model.safetensors")
        write_config(scratch, run.config)  # adapters are already merged
        copy_files(run.path, scratch, TOKENIZER, TOKENIZER_CONFIG, CLASSES, SAMPLING)
