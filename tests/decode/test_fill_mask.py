"""Filled masks against full passes, one mask at a time."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decode.fill_mask import fill_masks
from jaxformer.models.encoder import EncoderConfig
from tests.arrays import apply, assert_close, build

V, T = 23, 9
MASK = V - 1
CONFIG = EncoderConfig(V, T, 12, n_heads=3, d_ff=(17,), n_blocks=1)


@pytest.mark.slow
def test_the_most_probable_mask_is_filled_first_and_is_input_to_the_next() -> None:
    model, params = build(CONFIG)
    text = [3, MASK, 5, MASK, MASK, 7]
    masks = {mask.position: mask.candidates for mask in fill_masks(model, params, text, 4)}
    assert list(masks) == [1, 3, 4]
    filled = list(text)
    while MASK in filled:
        logits_TV = np.array(apply(model, params, jnp.array(filled)))  # unpadded
        probabilities_TV = np.asarray(jax.nn.softmax(logits_TV[:, :MASK]))
        surest = max((probabilities_TV[t].max(), t) for t in range(len(text)) if filled[t] == MASK)[1]
        order = np.argsort(-probabilities_TV[surest])[:4]
        assert [token for token, _ in masks[surest]] == order.tolist()
        assert_close([p for _, p in masks[surest]], probabilities_TV[surest][order])
        filled[surest] = int(order[0])


def test_the_mask_token_is_no_candidate() -> None:
    model, params = build(CONFIG)
    params["b_out"] = params["b_out"].at[MASK].set(100.0)
    (gap,) = fill_masks(model, params, [MASK], MASK)
    tokens, probabilities = zip(*gap.candidates, strict=True)
    assert sorted(tokens) == list(range(MASK)) and sum(probabilities) == pytest.approx(1, abs=1e-5)


def test_a_text_without_masks_is_empty_and_one_too_long_is_refused() -> None:
    model, params = build(replace(CONFIG, context_length=4))
    assert fill_masks(model, params, [1, 2], 3) == []
    with pytest.raises(ValueError, match="5"):
        fill_masks(model, params, [MASK] * 5, 3)
