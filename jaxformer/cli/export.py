"""`python -m jaxformer export`: write a trained model in a format that other programs read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from jaxformer.cli import machine
from jaxformer.cli.arguments import DEFAULT_CONFIG
from jaxformer.cli.command import as_command, command
from jaxformer.cli.load import CheckpointOptions, open_run, run_folder, with_run
from jaxformer.cli.options import MERGED, CommandLine, as_words, with_flags
from jaxformer.config import Config
from jaxformer.config.fields import Length
from jaxformer.errors import UserError
from jaxformer.files import no_empty_parents
from jaxformer.interop.formats import Dtype, Format
from jaxformer.terminal import echo

if TYPE_CHECKING:
    from jaxformer.interop.obstacles import Obstacle

DESCRIPTION = """Export a trained model to a format that other programs read. The target must not exist, and is written
atomically. Formats:

hf: a model of a published family, such as Llama or BERT, as a folder for transformers and vLLM.

gguf: a decoder of a family that llama.cpp has, such as Llama or Qwen3, as a file for it.

safetensors: any model, as a folder with its parameters by name and the run's config.

stablehlo: any model, as a folder with programs that jax runs without this package, on CPU, GPU and TPU.

Before training, --check --config quick, with the options of training, lists what a format cannot hold, and the options
that change it. The exit status is then 0 if the model can be exported, and 1 otherwise."""


@dataclass(frozen=True)
class Arguments(CheckpointOptions):
    """Options of export."""

    format: Format | None = None
    """Format to write; with --check, all by default."""
    check: bool = False
    """Write nothing, but list what prevents the export of the run or, with --config and the options of training, of a
    model that is yet to be trained."""
    out: str | None = None
    """Folder or, for gguf, file to write; by default exports/RUN-FORMAT or exports/RUN.gguf."""
    dtype: Dtype = "float32"
    """Dtype of the exported weights. Training uses float32; the others take half the bytes and are rounded."""
    cache_length: Length | None = None
    """For stablehlo: number of slots in the KV cache, and length of padded prompts; by default the context length."""


@dataclass(frozen=True)
class CheckArguments:
    """Options of export --check --config: these, and every field of the config."""

    run_config: Annotated[Config, MERGED]
    config: str = DEFAULT_CONFIG
    """Config to check: quick, quick:modern, or FILE.py:NAME for your own file."""
    format: Format | None = None
    """Format to check; by default all."""
    check: bool = True
    """List what prevents the export of a model that is yet to be trained."""


@as_command()
def main(line: CommandLine) -> int:
    """Export; return the exit status: 0 done, 1 a check found obstacles, 2 wrong input."""
    if {"--check", "--config"} <= line.given:
        from jaxformer.cli.train import named_config  # imports jax

        arguments = line.parse(CheckArguments(*named_config(line)), command("export"), DESCRIPTION)
        return _check(arguments.config, arguments.run_config, arguments.format)
    options = line.parse(Arguments(), command("export"), DESCRIPTION)
    if options.check:
        from jaxformer.runs.run import read_config  # orbax takes a second to import

        folder = run_folder(options)
        return _check(str(folder), read_config(folder), options.format)
    if (file_format := options.format) is None:
        raise UserError(f"--format is missing; give one of {', '.join(get_args(Format))}.")
    if options.cache_length is not None and options.format != "stablehlo":
        raise UserError(f"--cache-length has no effect on {options.format}; omit it.")
    machine.set_up()
    from jaxformer.interop.export import export_run
    from jaxformer.interop.obstacles import obstacles
    from jaxformer.interop.omissions import loading
    from jaxformer.runs.run import read_config

    options = with_run(options)
    if found := obstacles(read_config(run_folder(options)), file_format):
        parts = " and ".join(f"{obstacle.field} {_shown(obstacle.value)}" for obstacle in found)
        problem = f"{options.run} cannot be exported as {file_format}: {parts} {'have' if found[1:] else 'has'}"
        raise UserError(f"{problem} no equivalent; use --format safetensors, or train with {_remedy(found)}.")
    run = open_run(options)
    suffix = ".gguf" if file_format == "gguf" else f"-{file_format}"
    path = Path(f"exports/{run.path.resolve().name}{suffix}" if options.out is None else options.out)
    with no_empty_parents(path):
        omitted = export_run(run, file_format, path, options.dtype, options.cache_length)
    written = f"run {run.path}, step {run.step:,}: {type(run.model).__name__} as {file_format} in {path}"
    without = f", without {', '.join(omitted)}" if omitted else ""
    echo(f"{written}{without}; load it with: {loading(file_format, path)}")
    return 0


def _check(name: str, config: Config, file_format: Format | None) -> int:
    """List the obstacles of a config to a format, None for all; return 0 if there are none, and 1 otherwise."""
    from jaxformer.interop.obstacles import obstacles

    formats: Sequence[Format] = get_args(Format) if file_format is None else [file_format]
    is_free = True
    for one in formats:
        found, tokenizer = obstacles(config, one), _tokenizer_obstacle(config) if one == "gguf" else []
        is_free = is_free and not found and not tokenizer
        echo(f"{name} as {one}: " + ("cannot be exported" if found or tokenizer else "can be exported"))
        for obstacle in found:
            echo(f"  {obstacle.field} {_shown(obstacle.value)}; needed: {_remedy([obstacle])}")
        for problem in tokenizer:
            echo(f"  {problem}")
    return 0 if is_free else 1


def _tokenizer_obstacle(config: Config) -> list[str]:
    """Return why llama.cpp cannot hold the tokenizer that a config names, or nothing; one that is trained on the text
    is no obstacle."""
    from jaxformer.data.tokenizer import Tokenizer, find_tokenizer
    from jaxformer.interop.gguf import check_tokenizer

    if (path := getattr(config.data, "tokenizer", None)) is None:
        return []
    content = json.loads(Tokenizer.load(find_tokenizer(path)).as_json())
    try:
        check_tokenizer(content)
    except UserError as error:
        return [with_flags(str(error))]
    return []


def _remedy(found: Sequence[Obstacle]) -> str:
    """Return the options that remove obstacles."""
    words = []
    for field, value, needed in found:
        if field == "model":
            words.append(f"a {needed.removesuffix('Config')} (--config quick:llama)")
        elif needed is None and isinstance(value, bool):
            words.append(f"no {as_words(field, True)}")
        else:
            words.append(as_words(field, needed))
    return " ".join(words)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
