"""`influence.html` in a run's folder: the training documents that made a text likely or unlikely."""

from __future__ import annotations

from jaxformer.inspect.influence import Causes, Replay
from jaxformer.inspect.pages.page import Caution, Section, Table, Texts, write_page
from jaxformer.runs.run import Run

INFLUENCE_PAGE = "influence.html"
BEGINNING = 40
"""Tokens shown of a document."""


def beginning(run: Run, replay: Replay, document: int) -> str:
    """Return the first words of a document, on one line."""
    return " ".join(run.text_model()[1].decode(replay.documents[document][:BEGINNING].tolist()).split())


def write_influence(run: Run, replay: Replay, causes: Causes) -> None:
    """Write the page."""
    tokens = causes.tokens
    facts = [
        f"{replay.n_steps:,} steps on {len(replay.documents):,} documents, repeated: the parameters "
        f"{'equal' if causes.is_equal else 'differ from'} those of the run{' to the last bit' * causes.is_equal}.",
        f"The text's log-probability is {causes.log_probability:.2f} nats, {len(tokens) - 1:,} tokens.",
    ]
    rows = [
        (int(n), beginning(run, replay, n), len(replay.documents[n]), float(causes.added_N[n])) for n in causes.ranked
    ]
    about = (
        "The derivative of the text's log-probability by the weight of each document's loss, through all steps of "
        "training: to first order, what the document added. A click on a heading sorts."
    )
    unstable = (
        f"An influence exceeds the {-causes.untrained:.0f} nats that there were to learn of the text: a sign of "
        "training at the edge of stability, where small changes say nothing about leaving a document out."
    )
    sections: list[Section] = [
        *([] if causes.is_plausible else [Caution("The estimates do not hold", unstable)]),
        Texts("Text", [run.text_model()[1].decode(tokens.tolist())]),
        Table("Documents", ("document", "beginning", "tokens", "added, nats"), rows, about=about),
    ]
    if causes.proofs:
        names = ("that added most", "others, at random")
        proven = [
            (f"{len(proof.documents)} {name}", ", ".join(map(str, proof.documents)), proof.predicted, proof.measured)
            for name, proof in zip(names, causes.proofs, strict=True)
        ]
        about = (
            "Training again with weight 0 for the losses of some documents, and everything else equal: the change of "
            "the text's log-probability in nats, as the influences predict it to first order, and as measured."
        )
        sections.append(Table("Training without", ("documents", "which", "predicted", "measured"), proven, about=about))
    write_page(run.path / INFLUENCE_PAGE, f"{run.path.resolve().name}: influence", facts, sections)
