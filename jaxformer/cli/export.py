"""`python -m jaxformer export`: write a trained model in a format that other programs read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from jaxformer.cli import machine
from jaxformer.cli.command import as_command
from jaxformer.cli.load import CheckpointOptions, open_run, with_run
from jaxformer.cli.options import CommandLine
from jaxformer.config.fields import Length
from jaxformer.errors import UserError, command
from jaxformer.files import no_empty_parents
from jaxformer.interop.formats import Dtype, Format
from jaxformer.terminal import echo

DESCRIPTION = """Export a trained model to a format that other programs read. The target must not exist, and is written
atomically. Formats:

hf: a model of a published family, such as Llama or BERT, as a folder for transformers and vLLM.

gguf: a Llama or Qwen3, as a file for llama.cpp.

safetensors: any model, as a folder with its parameters by name and the run's config.

stablehlo: any model, as a folder with programs that jax runs without this package, on CPU, GPU and TPU."""


@dataclass(frozen=True)
class Arguments(CheckpointOptions):
    """Options of export."""

    format: Format | None = None
    """Format to write."""
    out: str | None = None
    """Folder or, for gguf, file to write; by default exports/RUN-FORMAT or exports/RUN.gguf."""
    dtype: Dtype = "float32"
    """Dtype of the exported weights. Training uses float32; the others take half the bytes and are rounded."""
    cache_length: Length | None = None
    """For stablehlo: number of slots in the KV cache, and length of padded prompts; by default the context length."""


@as_command()
def main(line: CommandLine) -> int:
    """Export; return the exit status: 0 done, 2 wrong input."""
    options = line.parse(Arguments(), command("export"), DESCRIPTION)
    if options.format is None:
        raise UserError(f"--format is missing; give one of {', '.join(get_args(Format))}.")
    if options.cache_length is not None and options.format != "stablehlo":
        raise UserError(f"--cache-length has no effect on {options.format}; omit it.")
    machine.set_up()
    from jaxformer.interop.export import export_run
    from jaxformer.interop.omissions import loading

    run = open_run(with_run(options))
    suffix = ".gguf" if options.format == "gguf" else f"-{options.format}"
    path = Path(f"exports/{run.path.resolve().name}{suffix}" if options.out is None else options.out)
    with no_empty_parents(path):
        omitted = export_run(run, options.format, path, options.dtype, options.cache_length)
    written = f"run {run.path}, step {run.step:,}: {type(run.model).__name__} as {options.format} in {path}"
    without = f", without {', '.join(omitted)}" if omitted else ""
    echo(f"{written}{without}; load it with: {loading(options.format, path)}")
    return 0
