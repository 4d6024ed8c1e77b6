"""Pages show what their code prints and what is stored: the chapters of docs/story, docs/ladder.md, and pictures."""

import ast
import importlib
import re
from typing import Any

import markdown
import numpy as np
import pytest
import scipy.special

from docs.scripts import formulas, pictures, story
from tests.interop.published import installed_model

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def assert_same_but_for_rounding(shown: str, expected: str) -> None:
    """Compare texts: words are equal, and numbers differ by 3 % or one unit of their last digit at most; those
    with an exponent, such as gradients at the end of a training, by half."""
    assert NUMBER.sub("#", " ".join(shown.split())) == NUMBER.sub("#", " ".join(expected.split()))
    for a, b in zip(NUMBER.findall(shown), NUMBER.findall(expected), strict=True):
        rtol, unit = (0.5, 0) if "e" in a else (0.03, 10.0 ** -len(a.partition(".")[2]))
        np.testing.assert_allclose(*(float(x.replace(",", "")) for x in (a, b)), rtol=rtol, atol=1.01 * unit)


@pytest.mark.slow
@pytest.mark.parametrize("chapter", story.PAGES, ids=lambda path: path.stem)
def test_chapter_shows_what_its_code_prints(chapter):
    if chapter.stem == "real":
        installed_model("smollm2")  # or skip
    page = chapter.read_text()
    assert_same_but_for_rounding(page, story.fill(page))


WRONG_ANSWERS: dict[str, dict[str, Any]] = {
    "types": {
        "bits_per_byte": lambda nats, n_tokens, n_bytes: nats * n_tokens / n_bytes,  # nats per byte
        "loss": lambda logits, targets: -np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))[0, targets[0]],
    },
    "mixing": {"running_mean": lambda X: np.tile(X.mean(0), (len(X), 1)), "weights": np.full(3, 1 / 3)},
    "attention": {
        "new_W_Q": np.array([[0, 0], [1, 0]]),  # that of the chapter
        "attend": lambda Q, K, V: np.tril(scipy.special.softmax(Q @ K.T / 2, 1)) @ V,  # masked too late
    },
    "scale": {"entropy": lambda weights: -(weights * np.log(weights)).sum(), "divisor": 8},
    "residual": {"n_paths": lambda n, k: n**k, "stream_variance": lambda n, v: (1 + v) ** n},
    "heads": {"n_parameters": lambda D, H, K: 4 * D * D, "sum_of_heads": lambda y, W_O: (y @ W_O).mean(0)},
    "depth": {
        "normed": lambda x, gain: gain * x / x.std(axis=-1, keepdims=True),
        "layer_normed": lambda x: x / np.sqrt((x**2).mean(axis=-1, keepdims=True)),
    },
    "training": {"best_loss": lambda V, p, r: np.log(V) / r, "first_loss": lambda V, sigma: np.log(V)},
    "decoding": {
        "top_p": lambda x, p: np.where(np.cumsum(x) <= p, x, 0) / x[np.cumsum(x) <= p].sum(),  # without the last
        "cache_bytes": lambda blocks, heads, width, positions: 2 * blocks * heads * width * positions,  # keys only
    },
    "alignment": {
        "additive": lambda s, h, W_a, U_a, v: scipy.special.softmax((W_a @ s + h @ U_a.T) @ v) @ h,  # no tanh
        "cross_attend": lambda Q, K, V: scipy.special.softmax(Q @ K.T / 2, 0) @ V,  # over the queries
    },
    "masks": {
        "window_mask": lambda T, w: np.tri(T, dtype=bool) & ~np.tri(T, k=-w - 1, dtype=bool),
        "blocks_needed": lambda T, w: -(-T // w),
    },
    "rope": {"rotated": lambda x, position, theta: x + position * theta, "distance": 6},
    "experts": {
        "experts_layer": lambda X, W_r, mlps: np.stack([mlps[(x @ W_r).argmax()](x) for x in X]),  # not times p
        "balance": lambda p: p.shape[1] * (p.mean(0) ** 2).sum(),
    },
    "images": {
        "cut": lambda image, size: image.reshape(-1, size**2),
        "pair_loss": lambda z: (np.log(np.exp(z).sum(1)) - np.diag(z)).mean(),  # one way
    },
    "tasks": {"look_up": lambda X, question: scipy.special.softmax(20 * X @ question) @ X, "guess_rate": 0.25},
    "order": {
        "n_cells": lambda vocabulary, back: vocabulary**back,
        "next_chord": lambda song, n: max(song, key=song.count),
    },
    "problems": {
        "times_read": lambda length, stride, epochs: epochs * length,
        "first_update": lambda g, rate: -rate * g,
    },
    "real": {
        "shadowed": lambda M, D: 1 / M,
        "rounded_to_int8": lambda x: np.clip(np.round(x), -127, 127),  # no scale
    },
    "sharpness": {
        "diverges": lambda rate, curvature: rate * curvature > 1,
        "momentum_limit": lambda beta, rate: 2 * (1 - beta) / rate,
    },
    "film": {
        "frames_of": lambda n_steps: [0, *(2**i for i in range(n_steps.bit_length()))],  # not the last
        "previous_score": lambda map_TS: np.diag(map_TS, k=-1).sum() / len(map_TS),
    },
    "causes": {"derivative_of_mean": lambda x: x / len(x), "effect_of": lambda x: (x - x.mean()) / len(x)},
}
"""An answer to each exercise that has a check, as a reader might give it."""


@pytest.mark.parametrize("chapter", sorted({path.stem for path in story.STORY.glob("*.md")} - {"index"}))
def test_exercises_accept_their_answer_and_reject_a_wrong_one(chapter):
    text = (story.STORY / f"{chapter}.md").read_text().split("\n## Exercises\n")[1].split("\n**3. ")[0]
    scope: dict[str, Any] = {}
    exec("".join(block[2] for block in story.BLOCK.finditer(text)), scope)
    assert {name for name in scope if f"check_{name}" in scope} == WRONG_ANSWERS[chapter].keys()
    with np.errstate(all="ignore"):
        for name, wrong in WRONG_ANSWERS[chapter].items():
            assert scope[f"check_{name}"](scope[name]) and not scope[f"check_{name}"](wrong), name


@pytest.mark.slow
def test_a_chapter_as_a_notebook_has_its_cells_and_outputs_and_a_place_for_each_answer():
    notebook = pytest.importorskip("docs.scripts.notebook", reason="needs the extra docs")
    for chapter, path in notebook.CHAPTERS.items():
        page = path.read_text()
        cells = notebook.chapter_notebook(page).cells
        own = [cell.source for cell in cells if "tags" in cell.metadata]
        blocks = [block[0].strip() for block in story.BLOCK.finditer(page)]
        assert [re.match(r"# Your (\w+):\n", source)[1] for source in own] == [*WRONG_ANSWERS[chapter]]
        checks = {line for block in blocks for line in block.split("\n") if line.startswith("print(check_")}
        assert {source.split("\n")[-1] for source in own} == checks
        shown = []
        for cell in cells:
            if cell.cell_type == "code" and "tags" not in cell.metadata:
                output = "".join(f"\n\n```text\n{output.text}```" for output in cell.outputs)
                shown.append(f"```python\n{cell.source}\n```{output}")
        assert shown == [block for block in blocks if "\nprint(check_" not in block]
        prose = "".join(cell.source for cell in cells if cell.cell_type == "markdown")
        pictures = {name for cell in cells for name in cell.get("attachments", {})}
        assert pictures == set(re.findall(r"\((\w+\.svg)\)", page)) and not re.search(r"<!--|\.md|<a href", prose)


def test_what_chapters_import_of_the_package_exists():
    found = {
        (node.module, alias.name)
        for path in story.PAGES
        for node in ast.walk(ast.parse("".join(block[2] for block in story.BLOCK.finditer(path.read_text()))))
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("jaxformer.")
        for alias in node.names
    }
    missing = {f"{module}.{name}" for module, name in found if not hasattr(importlib.import_module(module), name)}
    assert found and not missing


def test_stored_figures_are_shown_as_they_are():
    for path in (*story.PAGES, story.README):
        page = path.read_text()
        assert page == story.fill_figures(page), path
        assert not re.search(rf"^{story.FIGURE.pattern}", page, re.MULTILINE), f"{path}: a comment ends a paragraph"


def test_output_follows_its_block_and_figures_stand_between_their_marks(monkeypatch):
    figures = {"parameters": 1200, "loss": 2.0, "perplexity": None, "bits_per_byte": 1.5, "ended_early": "x"}
    figures["loss_by_position"] = [5.0, 4.0, 3.0, 2.0]
    timed = {"T 2,048": {"ms": {"a": {"median": 0.5}, "b": {"median": 1234.5}}, "derived": {"MiB": 12.5}}}
    monkeypatch.setattr(
        story, "stored_figures", lambda *_: {"unit": "ms", "roles": {"a": "", "b": ""}, "points": timed}
    )
    rows = {"a": {"0": figures, "1": figures | {"perplexity": 2.5}}}
    monkeypatch.setattr(story, "studies", lambda: {"ladder": {"rows": rows}})
    code = "```python\nimport numpy as np\nnp.set_printoptions(precision=1)\nx = 3\n```\n\n```python\nprint(x)\n```\n"
    page = f"{code}\n```text\nold\n```\n\n<!-- a loss -->0<!-- -->\n"
    tables = ("rungs a", "seeds ladder", "positions ladder", "case speed")
    page += "".join(f"<!-- {table} -->\n<!-- end -->\n" for table in tables)
    options = np.get_printoptions()
    filled = story.fill(page)
    assert np.get_printoptions() == options  # those of the next page
    assert filled.startswith(f"{code}\n```text\n3\n```\n")
    assert "<!-- a loss -->2.000<!-- -->" in filled and "| `a` | 1,200 | 2.000 | - | 1.500 |" in filled
    assert "| perplexity with seed | 0 | 1 | mean |" in filled and "| `a` | x | 2.5 | 2.5 |" in filled
    assert "| nats at position | 1 | 2 | 4 |" in filled and "| `a` | 5.000 | 4.000 | 2.000 |" in filled
    assert "| ms | a | b | MiB |\n| --- | ---: | ---: | ---: |\n| T 2,048 | 0.5 | 1,234 | 12.5 |" in filled
    assert story.fill(filled) == filled


def test_first_run_has_its_log_and_its_text(monkeypatch):
    pieces = [
        {"config": f"quick.py:{name}", "devices": 2, "factor": factor, "val_bpb": bits, "steps": 1200, "step_ms": 80}
        for name, factor, bits in (("quick", 1, 1.5), ("quick", 1, 1.75), ("quick", 2, 9.0), ("modern", 1, 9.0))
    ]
    figures = {"log": ["data: a", "step 0"], "sample": "A\nman said. " + "Yes. " * 80, "pieces": pieces}
    monkeypatch.setattr(story, "stored_figures", lambda _: figures)
    page = "".join(f"<!-- first_run {part} -->\nold\n<!-- end -->\n" for part in ("log", "sample"))
    page += "In <!-- margins/quick seconds -->9<!-- --> seconds, <!-- margins/quick seeds -->9<!-- -->: "
    page += "<!-- margins/quick bits -->9<!-- -->\n"
    filled = story.fill_figures(page)
    assert "-->\n\n```text\ndata: a\nstep 0\n```\n\n<!-- end -->\n" in filled
    assert (
        "-->\n\n> A man said. Yes. " in filled and filled.count("\n> ") == 4 and " Yes. …\n\n<!-- end -->\n" in filled
    )
    assert (
        "seconds -->96<!-- -->" in filled
        and "seeds -->2<!-- -->" in filled
        and "bits -->1.625 ± 0.177<!-- -->" in filled
    )


@pytest.mark.slow
def test_pictures_are_those_that_the_script_draws():
    used = set(re.findall(r"\((\w+\.svg)\)", "".join(path.read_text() for path in story.STORY.glob("*.md"))))
    assert used == pictures.PICTURES.keys() | {"block.svg"}  # which docs/lab builds
    for name, draw in pictures.PICTURES.items():
        shown = (story.STORY / name).read_text()
        assert_same_but_for_rounding(shown, draw())
        assert len(shown) < 20_000


@pytest.mark.parametrize("name", ["page", "laboratory"])
def test_picture_of_a_page_is_an_animation_below_500_kilobytes(name: str):
    image = pytest.importorskip("PIL.Image")
    picture = story.ROOT / f"docs/{name}.webp"
    assert f"(docs/{name}.webp)" in story.README.read_text()
    assert picture.stat().st_size < 500_000
    with image.open(picture) as frames:
        assert frames.n_frames > 20 and frames.width <= 900


def test_perplexity_and_loss_of_each_rung_agree():
    for figures in [x for study in story.studies() for x in story.outcomes(study).values()]:
        assert (figures["loss"] is None) == bool(figures["ended_early"])
        if figures["loss"]:
            np.testing.assert_allclose(np.exp(figures["loss"]), figures["perplexity"], rtol=1e-3)


def render(text: str) -> str:
    options = {"extensions": ["fenced_code", *formulas.EXTENSIONS], "extension_configs": formulas.EXTENSIONS}
    return formulas.on_page_content(markdown.markdown(text, **options))


def test_formulas_are_mathml_and_code_is_left_alone():
    html = render("Let $a < b$.\n\n$$\n\\frac{a}{b}\n$$\n\n`$x$` costs $5 or $6.\n")
    assert html.count("<math") == 2 and "&#x0003C;" in html and "<mfrac>" in html and 'display="block"' in html
    assert "<code>$x$</code> costs $5 or $6." in html


@pytest.mark.slow
def test_formulas_of_all_chapters_are_known():
    for page in story.PAGES:
        html = render(page.read_text())
        text = re.sub("<code.*?</code>", "", html, flags=re.DOTALL)
        assert "$$" not in text and "arithmatex" not in text, page
        assert html.count("<math") >= page.read_text().count("$$") / 2
        assert not re.search(r"<m(?:text|i|o)>[^<]*\\", html), f"{page} has a command that is not known"
