"""The film of a run: scores of heads over training, and heads patched back to earlier selves."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.errors import UserError
from jaxformer.inspect import capture
from jaxformer.inspect.film import Birth, Frame, births, bumps, film, repeated_tokens
from jaxformer.inspect.heads import patched_back, singular_values
from jaxformer.inspect.pages.film import biography
from jaxformer.models.decoder import LatentsConfig
from jaxformer.runs.run import load_run
from tests.arrays import plain_decoder, random_params
from tests.helpers import slow
from tests.runs.random_runs import saved_run

GROUPED = plain_decoder(
    31, 7, 12, n_blocks=2, n_heads=4, n_kv_heads=2, head_dim=5, d_ff=(6,), attention_bias=True, norm="rmsnorm"
)
LATENTS = replace(GROUPED, attention_bias=False, n_kv_heads=None, latents=LatentsConfig(9, 11, 2, 3))
LAYER = "blocks.1.attention"
TOKENS = jnp.array([3, 1, 4, 1, 5, 9, 2])


@pytest.mark.parametrize("config", [GROUPED, slow(LATENTS)], ids=["grouped", "latents"])
def test_singular_values_are_those_of_the_whole_matrices(config):
    attention = random_params(config.build(), TOKENS, seed=0)["blocks_1"]["attention"]
    W = {name: np.asarray(value, np.float64) for name, value in attention.items()}
    qk_HK, ov_HK = singular_values(attention)
    for h in range(4):
        if config.latents is None:
            g = h // 2
            qk, ov = W["W_Q"][:, h] @ W["W_K"][:, g].T, W["W_V"][:, g] @ W["W_O"][h]
        else:
            W_Q, W_K, W_V = W["W_DQ"] @ W["W_Q"][:, h], W["W_DKV"] @ W["W_K"][:, h], W["W_DKV"] @ W["W_V"][:, h]
            qk, ov = W_Q[:, :-2] @ W_K.T + W_Q[:, -2:] @ W["W_KR"].T, W_V @ W["W_O"][h]
        for values_K, matrix in ((qk_HK[h], qk), (ov_HK[h], ov)):
            np.testing.assert_allclose(values_K, np.linalg.svd(matrix, compute_uv=False)[: len(values_K)], rtol=1e-4)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), attention)
    assert {x.dtype for x in jax.eval_shape(singular_values, half)} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
def test_head_patched_back_computes_what_it_did_and_others_do_not_change():
    """The input of the last layer's attention is that of the later parameters, which the earlier ones share here."""
    model = GROUPED.build()
    now, then = (random_params(model, TOKENS, seed=seed) for seed in (0, 1))
    then = {**now, "blocks_1": {**now["blocks_1"], "attention": then["blocks_1"]["attention"]}}
    heads = jax.jit(lambda params: capture(model, params, TOKENS, names=f"{LAYER}.z")[f"{LAYER}.z"])
    patched = patched_back(now, then, LAYER, 3)
    new_HTK, old_HTK, mixed_HTK = heads(now), heads(then), heads(patched)
    np.testing.assert_array_equal(mixed_HTK[:2], new_HTK[:2])
    np.testing.assert_array_equal(mixed_HTK[3], old_HTK[3])
    assert not np.allclose(mixed_HTK[2], new_HTK[2])  # it shares its keys and values with head 3
    np.testing.assert_array_equal(patched["blocks_1"]["attention"]["W_O"][3], then["blocks_1"]["attention"]["W_O"][3])
    both = patched_back(patched_back(patched, then, LAYER, 2), then, LAYER, 0)
    whole = patched_back(both, then, LAYER, 1)  # all but the bias of the output
    for name, value in whole["blocks_1"]["attention"].items():
        expected = now if name == "b_O" else then
        np.testing.assert_array_equal(value, expected["blocks_1"]["attention"][name])
    jax.tree.map(np.testing.assert_array_equal, patched_back(now, now, LAYER, 1), now)


def frame(step: int, loss: float, previous: list[float], patched: list[float], ablation: list[float]) -> Frame:
    n = len(previous)
    scores = dict.fromkeys(
        ("entropy", "normalized_entropy", "distance", "first", "duplicate", "induction"), [0.125] * n
    )
    return Frame(step, loss, {LAYER: {**scores, "previous": previous, "patched": patched, "ablation": ablation}}, {})


FILM = [
    frame(0, 6.0, [0.1, 0.1], [0.4, 0.001], [0.0, 0.0]),
    frame(1, 5.9, [0.1, 0.1], [0.4, 0.004], [0.0, 0.0]),
    frame(3, 5.8, [0.1, 0.2], [0.3, 0.002], [0.1, 0.0]),
    frame(7, 4.8, [0.9, 0.2], [0.05, 0.001], [0.2, 0.0]),
    frame(15, 4.7, [0.9, 0.2], [0.0, 0.0], [0.25, 0.01]),
]


def test_bump_names_the_head_that_changed_around_it():
    first, second, third = bumps(FILM)
    assert {(first.step, second.step), (second.step, first.step)} == {(3, 7), (7, 3)} and third.step == 1
    at = first if first.step == 3 else second
    np.testing.assert_allclose(at.slopes, (-0.1, -1.0))  # nats per doubling of step + 1
    assert at.changes[0] == (LAYER, 0, "previous", 0.1, 0.9) and at.changes[1][:2] == (LAYER, 1)
    assert (at.before, at.after) == (1, 7) and bumps(FILM[:2]) == []


def test_head_is_born_where_patching_it_back_costs_less_than_half_of_its_ablation():
    found = births(FILM)
    assert found[LAYER, 0] == Birth(0.25, 3, 7, (0.3, 0.05))
    assert biography(FILM[-1], LAYER, 0, found[LAYER, 0]) == (
        "Head 1.0 looks at the previous token (90%). Without it, the loss rises by 0.250 nats; as it was after step 3, "
        "by 0.300, and after step 7, by 0.050."
    )
    assert found[LAYER, 1] == Birth(0.01, 0, 0, (0.001, 0.001))  # it was there from the start
    assert biography(FILM[-1], LAYER, 1, found[LAYER, 1]).endswith("by 0.010 nats; as it was after step 0, by 0.001.")
    useless = replace(found[LAYER, 1], use=0.001)
    assert biography(FILM[-1], LAYER, 1, useless).endswith("Without it, the loss rises by less than 0.005 nats.")
    lost = replace(found[LAYER, 1], use=math.nan)
    assert biography(FILM[-1], LAYER, 1, lost).endswith("What it does for the loss is not finite.")


def test_repeated_tokens_repeat_their_first_half():
    tokens_BT = repeated_tokens(50, 11)
    assert tokens_BT.shape == (16, 11) and tokens_BT.max() < 50
    np.testing.assert_array_equal(tokens_BT[:, 6:], tokens_BT[:, :5])


@pytest.mark.slow
def test_run_without_a_film_says_how_to_get_one(tmp_path):
    run = load_run(saved_run(tmp_path / "run", ["The cat sees the dog."]))
    tokens_BT = np.zeros((1, 8), np.int32)
    with pytest.raises(UserError, match=r"run has no snapshots; train it anew with `train\.snapshots='doubling'`\.$"):
        next(film(run, Batch((tokens_BT,), tokens_BT)))
