"""`python -m jaxformer import`: import a published model as a run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxformer.cli import machine
from jaxformer.cli.arguments import RUNS, folder_named
from jaxformer.cli.command import as_command
from jaxformer.cli.options import POSITIONAL, CommandLine
from jaxformer.config.fields import Length
from jaxformer.errors import UserError, command
from jaxformer.files import no_empty_parents
from jaxformer.terminal import echo, echo_status

DESCRIPTION = """Import a published model as a run, from a folder with config.json, weights in safetensors (one file, or
shards with model.safetensors.index.json) and tokenizer.json, the layout of transformers and the model hubs. The run can
be sampled from, inspected and evaluated like any other; train.py --init-from fine-tunes it.

docs/interop.md lists the supported families. Pickled weights (.bin, .pt), which execute code when they are loaded, and
quantised weights are rejected."""


@dataclass(frozen=True)
class Arguments:
    """Options of import."""

    source: Annotated[str | None, POSITIONAL] = None
    """Folder of the published model."""
    run: str | None = None
    """Folder of the run; by default, the source's name below runs/."""
    context_length: Length | None = None
    """Length of training sequences in tokens, for later training; by default the model's, at most 2048. The model can
    still read longer texts."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the stored parameters; auto is the published one."""


@as_command()
def main(line: CommandLine) -> int:
    """Import a model; return the exit status."""
    options = line.parse(Arguments(), command("import"), DESCRIPTION)
    if options.source is None:
        raise UserError("no folder is named; give that of a published model, with config.json and safetensors.")
    source = Path(options.source)
    run = RUNS / source.resolve().name if options.run is None else folder_named("--run", options.run)
    machine.set_up(1, "")

    from jaxformer.interop.run import import_run
    from jaxformer.runs.run import abstract_params, count_parameters

    echo_status(f"reading {source} ...")
    with no_empty_parents(run):
        folder, config = import_run(source, run, context_length=options.context_length, dtype=options.dtype)
    n = count_parameters(abstract_params(config.model.build()))
    sample = f"{command('sample')} --run {shlex.quote(str(folder))}"
    echo(f"run {folder}: {n:,} parameters from {source}; sample with: {sample}")
    return 0
