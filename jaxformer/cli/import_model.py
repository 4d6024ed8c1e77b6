"""`python -m jaxformer import`: import a published model as a run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxformer.cli import machine
from jaxformer.cli.arguments import RUNS, folder_named
from jaxformer.cli.command import as_command, command
from jaxformer.cli.options import POSITIONAL, CommandLine
from jaxformer.config.fields import Length
from jaxformer.errors import UserError
from jaxformer.files import no_empty_parents
from jaxformer.terminal import echo, echo_status

DESCRIPTION = """Import a published model as a run: a GGUF file, a folder with config.json, weights in safetensors (one
file, or shards with model.safetensors.index.json) and tokenizer.json, the layout of transformers and the model hubs, or
the name of a model that comes in a package, smollm2 or minilm. The run can be sampled from, inspected and evaluated
like any other; train.py --init-from fine-tunes it.

docs/interop.md lists the supported families and types of tensors. Quantised weights of GGUF are dequantised. Pickled
weights (.bin, .pt), which execute code when they are loaded, and quantised safetensors are rejected."""


@dataclass(frozen=True)
class Arguments:
    """Options of import."""

    source: Annotated[str | None, POSITIONAL] = None
    """Folder or GGUF file of the published model, or the name of one in a package: smollm2, minilm."""
    run: str | None = None
    """Folder of the run; by default, the source's name below runs/."""
    context_length: Length | None = None
    """Length of training sequences in tokens, for later training; by default the model's, at most 2048. The model can
    still read longer texts."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the stored parameters; auto is the published one, and float32 for quantised weights."""
    mesh: str = ""
    """Device mesh over which the parameters are split, such as 'fsdp=8'; by default, the first device holds them."""


@as_command()
def main(line: CommandLine) -> int:
    """Import a model; return the exit status."""
    options = line.parse(Arguments(), command("import"), DESCRIPTION)
    from jaxformer.interop.packages import PACKAGES, find_model, published_name

    if options.source is None:
        known = " or ".join(PACKAGES)
        raise UserError(f"no model is named; give a folder with config.json and safetensors, a GGUF file, or {known}.")
    source = find_model(options.source)
    name = options.source if options.source in PACKAGES else published_name(source)
    run = RUNS / name if options.run is None else folder_named("--run", options.run)
    machine.set_up(1, options.mesh)
    machine.return_freed_memory()

    from jaxformer.interop.run import import_run, left_out
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.runs.run import abstract_params, count_parameters, read_tokenizer

    echo_status(f"reading {source} ...")
    mesh = make_mesh(options.mesh) if options.mesh else None
    with no_empty_parents(run):
        folder, config = import_run(source, run, context_length=options.context_length, dtype=options.dtype, mesh=mesh)
    n = count_parameters(abstract_params(config.model.build()))
    tokenizer = read_tokenizer(folder)
    chat = " --chat" if tokenizer is not None and "chat_template" in tokenizer.config else ""
    sample = f"{command('sample')} --run {shlex.quote(str(folder))}{chat}"
    if (parts := left_out(source)) is not None:
        echo(f"without the {parts}: the run reads texts only")
    echo(f"run {folder}: {n:,} parameters from {source}; sample with: {sample}")
    return 0
