"""`python -m jaxformer film`, on a run that was trained, and in a browser."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxformer.cli import film, train
from jaxformer.inspect.heads import ablate_heads, head_statistics, target_mask
from jaxformer.inspect.pages import film as film_page
from jaxformer.inspect.pages import live
from jaxformer.inspect.pages.labels import LINE_SYMBOLS
from jaxformer.inspect.pages.live import film_frames
from jaxformer.inspect.pages.model import validation_batch
from jaxformer.inspect.residual_stream import logit_lens
from jaxformer.runs.run import load_run
from studies import film as study
from tests.browser import browsing, complaints, embedded, wait_for
from tests.helpers import tiny, write_books

pytestmark = pytest.mark.slow


def test_film_of_a_run_in_a_browser(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    changes = ["--train.batch-size", "8", "--run", str(tmp_path / "run"), "--train.snapshots", "doubling"]
    nothing_else = ["--train.report-every", "0", "--train.eval-every", "0", "--train.checkpoint-every", "0"]
    assert train.main(tiny(write_books(tmp_path / "books"), 6, *changes, *nothing_else)) == 0
    capsys.readouterr()
    written, write_film = [], film_page.write_film
    monkeypatch.setattr(film_page, "write_film", lambda *given: written.append(write_film(*given)))
    assert film.main([str(tmp_path / "run"), "--prompt", "The king", "--examples", "3"]) == 0
    page = tmp_path / "run/film.html"
    assert capsys.readouterr().out.startswith(f"{page}: ")
    rows = [json.loads(line) for line in (tmp_path / "run/film.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 4, 6]

    run, last = load_run(tmp_path / "run"), rows[-1]
    batch, _, _ = validation_batch(run, 3)
    assert batch is not None
    layer, (tokens_BT,) = "blocks.0.attention", batch.inputs
    mask_BT = target_mask(batch)
    statistics = head_statistics(run.model, run.params, tokens_BT, target_mask_BT=mask_BT)[layer]
    ablation = ablate_heads(run.model, run.params, batch)
    scores = last["heads"][layer]
    np.testing.assert_allclose(scores["previous"], statistics.previous, rtol=1e-5)
    np.testing.assert_allclose(scores["ablation"], ablation.mean[layer], atol=1e-6)
    np.testing.assert_allclose(last["loss"], ablation.loss, rtol=1e-6)
    assert scores["patched"] == [0, 0] and all(rows[0]["heads"][layer]["patched"])
    lens = [list(logit_lens(run.model, run.params, tokens_T).values()) for tokens_T in tokens_BT]
    agreement = np.mean(np.array([first.argmax(-1) == final.argmax(-1) for first, final in lens])[mask_BT])
    np.testing.assert_allclose(last["stream"]["blocks.0.resid_pre"]["agreement"], agreement, rtol=1e-6)
    assert last["stream"]["blocks.0.resid_post"]["agreement"] == 1

    frames = dict(film_frames(run))  # of the inspect page's slider
    assert list(frames) == [0, 1, 2, 4, 6] and frames[6] is run.params
    monkeypatch.setattr(live, "MAX_FILM_PARAMETERS", 0)
    assert list(film_frames(run)) == []

    [shown] = embedded(page.read_text(encoding="utf-8"), "Attention maps")
    assert [len(layer["frames"]) for layer in shown["layers"]] == [5]
    with browsing(page, 390, "dark") as browser:
        wait_for(browser, "return document.querySelector('.map canvas')")
        state = """const find = (selector) => document.querySelector(selector);
            return [find('output').textContent, find('.continued').textContent,
                Number(find('.cursor').getAttribute('x1')), find('.map canvas').toDataURL(),
                document.documentElement.scrollWidth]"""
        end = browser.execute_script(state)
        browser.find_element("css selector", ".frames input").send_keys(*["\ue012"] * 4)  # arrow left
        start = browser.execute_script(state)
        assert [text.split(",")[0] for text in (start[0], end[0])] == ["step 0", "step 6"]
        lines = ["The king" + row["texts"][0].translate(LINE_SYMBOLS) for row in (rows[0], last)]
        assert [start[1], end[1]] == lines
        assert 0 < start[2] < end[2] < 390 and start[3] != end[3] and start[4] == 390
        assert complaints(browser) == []

    monkeypatch.setattr(study, "write_film", lambda *_, **__: written[0])
    stored = study.measure(tmp_path / "run", 3)
    assert stored["steps"] == [0, 1, 2, 4, 6] and stored["loss"] == [round(row["loss"], 4) for row in rows]
    assert [(head["layer"], head["head"]) for head in stored["heads"]] == [(layer, 0), (layer, 1)]
    for head in stored["heads"]:
        expected = [row["heads"][layer]["patched"][head["head"]] for row in rows]
        np.testing.assert_allclose(head["patched"], expected, atol=1e-4)
        assert head["born"] in stored["steps"] and len(stored["texts"]) == 5
