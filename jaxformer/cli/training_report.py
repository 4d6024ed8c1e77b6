"""Terminal output at the beginning and end of a training run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxformer.cli.command import command, resume_command
from jaxformer.cli.options import with_flags
from jaxformer.config import Config
from jaxformer.contract import Task
from jaxformer.data.chat import ChatDataset
from jaxformer.data.dataset import Dataset
from jaxformer.data.pairs import PairDataset
from jaxformer.decode.fill_mask import MASK
from jaxformer.errors import missing_extras, run_name
from jaxformer.inspect import first_non_finite, save_autopsy
from jaxformer.nn.execution import Execution
from jaxformer.parallel.mesh import local_copy
from jaxformer.parallel.processes import is_main_process
from jaxformer.runs.run import count_parameters
from jaxformer.train.hints import hint_text, hints
from jaxformer.train.kernels import FusedAttention
from jaxformer.train.log import VAL_METRICS, Row
from jaxformer.train.loop import Outcome
from jaxformer.train.optimizer import eval_point
from jaxformer.train.setup import TrainSetup


def header(setup: TrainSetup, data: Dataset, folder: Path, resumed: bool) -> list[str]:
    """Return lines that describe the run, its devices, data, model and budget."""
    config, mesh = setup.config, setup.mesh
    axes = ",".join(f"{axis}={n}" for axis, n in mesh.shape.items() if n > 1)
    split = f", mesh {axes}" if axes else ""
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    kind, parameters = type(setup.model).__name__, count_parameters(setup.abstract_params)
    trained = count_parameters(setup.abstract_state.params)
    share = f", frozen, and {trained:,} of adapters" if config.lora.rank else ""
    tokens = f" ({data.per_step:,.0f} tokens)" if data.unit == "tokens" else ""
    lines = [
        f"run {run_name(folder)}{' (resumed)' if resumed else ''}",
        f"devices: {mesh.size} x {mesh.devices.flat[0].device_kind}{split}{processes}, jax {jax.__version__}",
        f"data: {data.describe()}",
        *(f"note: {with_flags(note)}" for note in data.notes),
        f"model: {kind}, {parameters:,} parameters{share}; matmuls in {setup.compute_dtype}; {setup.attention.line}",
        f"training: {config.steps:,} steps of {config.train.batch_size:,} examples{tokens}, "
        f"{config.steps / data.steps_per_epoch:.2f} epochs; "
        f"{config.optimizer.name}, peak learning rate {config.optimizer.learning_rate:g}",
    ]
    if setup.attention.warning:
        lines.append(with_flags(setup.attention.warning))
    if (warmup := config.optimizer.warmup_steps) > config.steps:
        lines.append(
            f"warning: the warm-up of {warmup:,} steps is longer than the run of {config.steps:,}, which never "
            f"reaches the peak learning rate; shorten it, such as --optimizer.warmup-steps {config.steps // 10}"
        )
    if config.train.report_every and isinstance(data, PairDataset) and missing_extras("matplotlib"):
        lines.append("note: the alignment is not drawn; enable it with pip install 'jaxformer[plots]'")
    return lines


def footer(setup: TrainSetup, data: Dataset, folder: Path, outcome: Outcome, rows: Sequence[Row]) -> list[str]:
    """Return lines with the outcome and the next command, from the rows of the run's log; after a non-finite step, also
    save the autopsy."""
    config, quoted, step = setup.config, shlex.quote(run_name(folder)), outcome.step
    help_line = f"What usually helps: {with_flags(hint_text(config))}."
    if outcome.status == "interrupted":
        return [f"interrupted at step {step:,} and saved; resume with: {resume_command(folder)}"]
    if outcome.status == "non_finite":
        origin, evidence = _autopsy(setup, folder, outcome)
        return [
            f"step {step:,} is not finite; first non-finite value: {origin}; the inputs to reproduce it are in "
            f"{evidence}.",
            f"Everything up to step {step - 1:,} is saved in {run_name(folder)}. {help_line}",
            rollback_line(config, outcome, folder),
        ]
    if outcome.status == "diverged":
        cause = f"stopped at step {step:,}: {outcome.divergence}."
        return [cause, help_line, rollback_line(config, outcome, folder)]
    lines = []
    if (warning := no_improvement(rows, outcome)) is not None:
        lines.append(f"warning: {warning}: training did not improve the model. {help_line}")
    if outcome.diverging_since and config.train.divergence == "warn":
        lines.append(
            f"warning: the loss has been diverging since step {outcome.diverging_since:,} and has not recovered to "
            f"near its minimum. {help_line}"
        )
    last: Row = next((row for row in reversed(rows) if "loss" in row), {})
    lines.append(final_line(step, outcome.evaluation.as_row() if outcome.evaluation else last))
    if (prompt := example_prompt(config, data)) is not None:
        options = "--chat" if isinstance(data, ChatDataset) else f"--prompt {shlex.quote(prompt)}"
        lines.append(f"sample from it: {command('sample')} --run {quoted} {options}")
    return lines


def final_line(step: int, row: Row) -> str:
    """Return the last line of a run: held-out loss and all other validation metrics of `row`, or the loss of the last
    batch if there is no evaluation."""
    if "val_loss" not in row:
        return f"final: step {step:,}" + (f"  loss {row['loss']:.3f}" if row.get("loss") is not None else "")
    others = {name: x for name, x in row.items() if isinstance(x, float) and name.startswith("val_")}
    loss = others.pop("val_loss")
    words = {name: name.removeprefix("val_").replace("ppl", "perplexity").replace("_", " ") for name in others}
    shown = [VAL_METRICS.get(name, f"{words[name]} {{:.4g}}").format(x) for name, x in others.items()]
    return f"final: step {step:,}  held-out {loss:.3f}" + (f" ({', '.join(shown)})" if shown else "")


def no_improvement(rows: Sequence[Row], outcome: Outcome) -> str | None:
    """Return a sentence if a run's loss is no lower at the end than at the beginning, else None. The loss is measured
    on the same held-out examples or, without evaluations, on training batches."""
    if outcome.evaluation is not None:
        split, first = "on held-out data", [row["val_loss"] for row in rows if "val_loss" in row]
        last = [] if outcome.val_loss is None else [outcome.val_loss]
        since = "before the first step"
    else:  # a skipped step has no loss
        losses = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
        split, first = "on the last training batch", [loss for _, loss in losses[:1]]
        last = [loss for _, loss in losses[1:]]
        since = f"at step {losses[0][0]:,}" if losses else ""
    if not first or not last or first[0] is None or last[-1] < first[0]:
        return None
    return f"the loss {split} is {last[-1]:.4f}, no better than {first[0]:.4f} {since}"


def example_prompt(config: Config, data: Dataset) -> str | None:
    """Return a prompt for `sample.py`; None for a model without one."""
    task = config.model.contract.task
    if task is Task.CAUSAL_LM:
        return config.train.sample_prompt
    if task is Task.MASKED_LM:
        return f"The {MASK} of"
    return data.val[0].source if isinstance(data, PairDataset) else None


def rollback_line(config: Config, outcome: Outcome, folder: Path) -> str:
    """Return a line with the checkpoint from before a divergence and the command to roll back to it."""
    # A change of the optimizer fits the checkpoints; one of the model does not.
    remedy = next(field for _, field in hints(config) if field.startswith("`optimizer."))
    roll_back = f"{resume_command(folder)} --from-step {outcome.healthy} {with_flags(remedy)}"
    if not outcome.healthy:
        return f"No checkpoint precedes the divergence; start again with: {roll_back}"
    retained = f"Checkpoint {outcome.healthy:,} precedes the divergence and is retained"
    return f"{retained}; roll back to it with: {roll_back}"


def _autopsy(setup: TrainSetup, folder: Path, outcome: Outcome) -> tuple[str, Path]:
    """Repeat the non-finite step; return its first non-finite value and the path of the evidence."""
    config, mesh, attention = setup.config, setup.mesh, setup.attention.function
    if isinstance(attention, FusedAttention):
        attention = dataclasses.replace(attention, tensor=1)  # the autopsy runs on one device with all heads
    state = outcome.state
    state = state._replace(params=eval_point(config.optimizer, state.params, state.opt_state))
    params = local_copy(setup.model_params(state), mesh)
    keys_B = setup.example_keys(outcome.step - 1)
    batch = local_copy(outcome.batch, mesh)
    model = config.model.build(Execution(attention=attention))
    report = first_non_finite(model, params, batch, keys_B, setup.compute_dtype)
    evidence = folder / "autopsy"
    if is_main_process():
        evidence = save_autopsy(
            folder,
            outcome.step,
            jax.tree.map(np.asarray, batch),
            np.asarray(jax.random.key_data(keys_B)),
            report,
            f"{setup.attention.line}, precision: {setup.compute_dtype}",
        )
    overflow = "the norm of the gradient, although every entry is finite"
    return overflow if report is None else report.origin, evidence
