"""The tools of inspection on published models, against the intermediate values of transformers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import inspect
from jaxformer.cli.explanation import explained_rows
from jaxformer.interop.run import import_run
from jaxformer.runs.run import Run, load_run
from tests.interop.published import publish
from tests.interop.test_parity import CASES

pytestmark = pytest.mark.slow

FAMILIES = ("llama, biases, wide heads", "gemma3, scaling, soft cap")
"""Norms before the parts of a block, and around them."""
T = 13


@pytest.fixture(params=FAMILIES, scope="module")
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Run]:
    """Return a torch model and the run imported from its folder."""
    family, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp("published")
    model = publish(folder / "model", family, **changes, attn_implementation="eager")
    return model, load_run(import_run(folder / "model", folder / "run")[0])


def among(*families: str) -> pytest.MarkDecorator:
    """Return the parametrisation of a test that takes long with the families that need it most."""
    return pytest.mark.parametrize("case", families, indirect=True, scope="module")


def tokens(n: int = T) -> np.ndarray:
    """Return random tokens, some beyond the tokenizer's, `(n,)`."""
    return np.random.default_rng(n).integers(0, 291, n)


def test_captures_equal_the_intermediate_values_of_transformers(case):
    torch = pytest.importorskip("torch")
    model, run = case
    with torch.no_grad():
        theirs = model(torch.tensor(tokens())[None], output_hidden_states=True, output_attentions=True)
    ours = jax.jit(partial(inspect.capture, run.model))(run.params, jnp.asarray(tokens()))
    n_blocks = run.config.model.n_blocks
    assert len(theirs.attentions) == n_blocks
    for i in range(n_blocks):
        stream_TD, weights_HTT = theirs.hidden_states[i][0].numpy(), theirs.attentions[i][0].numpy()
        scale = np.abs(stream_TD).max()
        np.testing.assert_allclose(ours[f"blocks.{i}.resid_pre"], stream_TD, atol=1e-4 * scale, err_msg=f"block {i}")
        np.testing.assert_allclose(ours[f"blocks.{i}.attention.pattern"], weights_HTT, atol=1e-4, err_msg=f"block {i}")
    np.testing.assert_allclose(ours["logits"], theirs.logits[0].numpy(), atol=1e-4)


@among(FAMILIES[0])
def test_explanations_name_tokens_that_the_tokenizer_lacks(case):
    _, run = case
    rows = explained_rows(run, [1, 2, 285], [290, 5])
    assert len(rows) == 2 and rows[0]["token"] == "[290]"
