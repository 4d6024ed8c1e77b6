"""`film.html` in a run's folder: how its heads, its residual stream and its samples came to be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config.fields import nonfinite_to_none
from jaxformer.errors import UserError
from jaxformer.files import write_atomically
from jaxformer.inspect.attention import named_attention_maps
from jaxformer.inspect.film import Birth, Bump, Frame, births, bumps, film
from jaxformer.inspect.heads import HeadStatistics
from jaxformer.inspect.pages.attention import AttentionLayer, AttentionSection
from jaxformer.inspect.pages.charts import Axis, Grid, Line, Lines
from jaxformer.inspect.pages.labels import LINE_SYMBOLS, describe_head, head_label, layer_label, stream_label
from jaxformer.inspect.pages.model import FILM_PAGE, token_text, validation_batch
from jaxformer.inspect.pages.page import Section, Table, embed, rounded, write_page
from jaxformer.inspect.samples import validation_prompts
from jaxformer.runs.run import Run, count_parameters
from jaxformer.runs.snapshots import load_snapshot, snapshot_steps

FILM_ROWS = "film.jsonl"
MAX_ATTENTION_BYTES = 2_000_000
"""Maximum attention weights on the page, a byte each, in all frames."""
STEP = Axis("step", log=True, offset=1)
LITTLE = 0.005
"""Rise of the loss in nats below which a head has no biography."""
HEAD_CHARTS = {
    "previous": ("Previous-token score", Axis("attention weight", from_zero=True, percent=True)),
    "induction": ("Induction score, on repeated random tokens", Axis("attention weight", from_zero=True, percent=True)),
    "entropy": ("Entropy", Axis("nats", from_zero=True)),
    "ablation": ("Effect of mean ablation", Axis("rise of the loss, nats")),
    "rank_QK": ("Stable rank of W_Q W_Kᵀ", Axis("stable rank")),
    "rank_OV": ("Stable rank of W_V W_O", Axis("stable rank")),
}
"""Title and axis of the charts of heads, by score."""
STREAM_CHARTS = {
    "agreement": ("Logit lens: agreement with the prediction", Axis("positions", from_zero=True, percent=True)),
    "norm": ("Norm of the residual stream", Axis("norm", log=True)),
}


@dataclass(frozen=True)
class FilmSection(Section):
    """A slider over the frames, which moves the cursor of each chart, the attention maps and the continuations."""

    film: Sequence[Frame]
    prompts: Sequence[str]

    def body(self) -> str:
        """Return the HTML element."""
        line = lambda text: text.translate(LINE_SYMBOLS)  # noqa: E731
        steps, losses, texts = zip(*((f.step, rounded(f.loss), [*map(line, f.texts)]) for f in self.film), strict=True)
        return embed("film", {"steps": steps, "losses": losses, "texts": texts, "prompts": [*map(line, self.prompts)]})


@dataclass(frozen=True)
class ContinuationsSection(Section):
    """The place for the continuations of `FilmSection`."""

    def body(self) -> str:
        """Return the HTML element."""
        return '<div class="continued"></div>'


def write_film(
    run: Run, prompts: Sequence[str] = (), n_examples: int | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Frame]:  # fmt: skip
    """Measure the film of a run, write `FILM_ROWS`, a line per frame, and `FILM_PAGE` to its folder, and return the
    frames.

    Args:
      prompts: texts to continue; by default some from the held-out text.
      n_examples: held-out examples to measure on; by default as for `write_model_page`.

    Raises:
      UserError: the run has no film or no data, or its model has none; see `inspect.film.film`.
    """
    batch, source, reason = validation_batch(run, n_examples)
    if batch is None:
        raise UserError(reason)
    prompts = prompts or validation_prompts(run)
    rows = list(film(run, batch, prompts, progress))
    lines = (json.dumps(nonfinite_to_none(asdict(frame)), ensure_ascii=False) for frame in rows)
    write_atomically(run.path / FILM_ROWS, "".join(f"{line}\n" for line in lines))
    facts = [
        f"{type(run.model).__name__} of {count_parameters(run.params):,} parameters, {len(rows)} frames from step "
        f"{rows[0].step:,} to {rows[-1].step:,}, measured on {len(batch.inputs[0]):,} held-out examples of {source}."
    ]
    sections = [FilmSection("Film", rows, prompts), *film_sections(rows)]
    if rows[0].heads:
        sections.append(_attention(run, np.asarray(batch.inputs[0])[0]))
    sections.append(ContinuationsSection("Continuations", about="The same prompts, continued greedily by each frame."))
    write_page(run.path / FILM_PAGE, f"{run.path.resolve().name}: film", facts, sections)
    return rows


def film_sections(rows: Sequence[Frame]) -> list[Section]:
    """Return the sections about the measurements of the frames."""
    x = [frame.step for frame in rows]
    found = bumps(rows)
    loss = Line(x, [frame.loss for frame in rows], "held-out", points=True)
    marks = [(bump.step, "") for bump in found]
    about = "The dashed lines are the steps at which the loss changes its slope most."
    sections: list[Section] = [Lines("Held-out loss", [loss], STEP, Axis("loss, nats"), marks=marks, about=about)]
    if rows[0].heads:
        sections.append(Grid("Heads", [Lines(*chart, 240) for chart in _head_charts(rows, x)]))
    if rows[0].stream:
        names = {name: stream_label(name).removeprefix("after ") for name in rows[0].stream}
        charts = [
            Lines(
                title,
                [Line(x, [f.stream[name][key] for f in rows], label) for name, label in names.items()],
                STEP,
                axis,
                240,
            )
            for key, (title, axis) in STREAM_CHARTS.items()
        ]
        sections.append(Grid("Residual stream", charts))
    if rows[0].heads:
        sections += [_bump_table(found), *_biographies(rows, x)]
    return sections


def _head_charts(rows: Sequence[Frame], x: Sequence[int]) -> Iterator[tuple[str, list[Line], Axis, Axis]]:
    for score, (title, axis) in HEAD_CHARTS.items():
        if any(score in scores for scores in rows[0].heads.values()):
            yield title, _head_lines(rows, x, score), STEP, axis


def _head_lines(rows: Sequence[Frame], x: Sequence[int], score: str) -> list[Line]:
    """Return a line per head, in a colour per layer."""
    return [
        Line(x, [frame.heads[layer][score][head] for frame in rows], layer_label(layer), f"head {head}")
        for layer, scores in rows[0].heads.items()
        for head in range(len(scores.get(score, ())))
    ]


def _bump_table(found: Sequence[Bump]) -> Table:
    """Return a table of the bumps of the loss, with the heads whose scores changed most around them."""
    words = {"previous": "previous-token score", "induction": "induction score", "normalized_entropy": "entropy / most"}
    table: list[list[str | float]] = [
        [
            b.step,
            *b.slopes,
            f"{b.before:,} to {b.after:,}",
            "; ".join(f"{head_label(layer, h)}: {words[name]} {a:.2f} → {z:.2f}" for layer, h, name, a, z in b.changes),
        ]
        for b in found
    ]
    about = (
        "The steps at which the held-out loss changes its slope most, in nats per doubling of the steps, and the heads "
        "whose scores changed most between the frames around them. That they changed together "
        "does not show which caused which."
    )
    head = ("step", "slope before", "slope after", "between steps", "heads that changed most")
    return Table("Bumps of the loss", head, table, about=about)


def _biographies(rows: Sequence[Frame], x: Sequence[int]) -> Iterator[Section]:
    about = (
        "Rise of the last frame's held-out loss when one head alone is as it was at an earlier step: its parts of W_Q, "
        "W_K, W_V and W_O, patched back. A head became what it is where its line falls."
    )
    axis = Axis("rise of the loss, nats")
    yield Lines("Heads patched back", _head_lines(rows, x, "patched"), STEP, axis, about=about)
    table: list[list[str | float]] = [
        [head_label(layer, head), biography(rows[-1], layer, head, birth), birth.at, birth.use]
        for (layer, head), birth in births(rows).items()
    ]
    about = (
        "The step is the first from which on the head, patched back, costs less than half of what ablating it costs: "
        "by then, it does at least half of its work."
    )
    yield Table("Biographies", ("head", "biography", "step", "ablation"), table, about=about)


def biography(last: Frame, layer: str, head: int, birth: Birth) -> str:
    """Return a sentence about a head: what it does in the last frame, and when it became that."""
    scores = last.heads[layer]
    statistics = HeadStatistics(**{each.name: jnp.array(scores[each.name]) for each in fields(HeadStatistics)})
    does = f"{head_label(layer, head).capitalize()} {describe_head(statistics, head)}"
    if not math.isfinite(birth.use):
        return f"{does}. What it does for the loss is not finite."
    if birth.use < LITTLE:
        return f"{does}. Without it, the loss rises by less than {LITTLE} nats."
    without = f"{does}. Without it, the loss rises by {birth.use:.3f} nats; as it was after step {birth.before:,}"
    if birth.before == birth.at:
        return f"{without}, by {birth.rises[0]:z.3f}."
    return f"{without}, by {birth.rises[0]:z.3f}, and after step {birth.at:,}, by {birth.rises[1]:z.3f}."


def _attention(run: Run, tokens_T: np.ndarray) -> AttentionSection:
    """Return the attention maps of all frames on the beginning of a held-out text."""
    steps, maps = snapshot_steps(run.path), jax.jit(lambda params, x_T: named_attention_maps(run.model, params, x_T))
    n_heads = sum(len(x_HTS) for x_HTS in jax.eval_shape(maps, run.params, tokens_T).values())
    tokens_T = tokens_T[: int((2 * MAX_ATTENTION_BYTES / (len(steps) * n_heads)) ** 0.5)]
    films = [jax.device_get(maps(load_snapshot(run, step), tokens_T)) for step in steps]
    layers = [
        AttentionLayer(layer_label(name), "text", "text", np.stack([frame[name] for frame in films]))
        for name in films[0]
    ]
    about = "Point at a token, or tap it to pin it, for the attention from it, in the frame that the slider shows."
    texts = {"text": [token_text(run, int(token)) for token in tokens_T]}
    return AttentionSection("Attention maps", texts, layers, about=about)
