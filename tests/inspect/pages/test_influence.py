"""The page of a text's causes."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxformer.inspect.influence import Causes, Proof
from jaxformer.inspect.pages.influence import INFLUENCE_PAGE, write_influence


def test_documents_are_in_the_order_of_what_they_added(tmp_path):
    tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(f"w{token}" for token in tokens))
    run: Any = SimpleNamespace(path=tmp_path, text_model=lambda: (None, tokenizer))
    replay: Any = SimpleNamespace(n_steps=7, documents=[np.array([n, n + 10]) for n in range(3)])
    causes = Causes(np.array([1, 2, 3]), -4.0, True, np.array([0.5, -2.0, 1.5]), -6.0)
    write_influence(run, replay, causes)
    page = (tmp_path / INFLUENCE_PAGE).read_text()
    assert re.findall(r"<td[^>]*>(w\d w\d+)</td>", page) == ["w2 w12", "w0 w10", "w1 w11"]
    assert "to the last bit" in page and "edge of stability" not in page and "Training without" not in page

    proof = Proof(np.array([2]), -1.5, -1.25)
    write_influence(
        run, replay, Causes(np.array([1, 2, 3]), -4.0, False, np.array([0.5, 9.0, 1.5]), -6.0, (proof, proof))
    )
    page = (tmp_path / INFLUENCE_PAGE).read_text()
    assert "differ from" in page and "Training without" in page
    assert re.search('<p class="caution">An influence .* edge of stability', page)
