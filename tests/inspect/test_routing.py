"""Router reports of known choices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inspect.routing import router_report
from jaxformer.models.decoder import ExpertsConfig
from jaxformer.nn.execution import Execution
from tests.arrays import build, plain_decoder, random_tokens

V, T, D, E = 23, 8, 7, 4
CONFIG = plain_decoder(V, T, D, n_blocks=2, d_ff=(5,), norm="rmsnorm", experts=ExpertsConfig(E, 1, capacity_factor=1.0))


def test_shares_and_dropped_tokens_are_means_over_the_batch() -> None:
    """A router that sends every token to one expert fills its capacity T/E = 2, and drops 6 of 8."""
    model, params = build(replace(CONFIG, n_blocks=1))
    tokens_BT = random_tokens(V, 3, T)
    [share] = [layer["share"] for layer in router_report(model, params, (tokens_BT,)).values()]
    assert sum(share) == pytest.approx(1) and all(isinstance(x, float) for x in share)
    alone = [router_report(model, params, (jnp.stack([tokens_T] * 3),)) for tokens_T in tokens_BT]
    each = [row["blocks.0.mlp"]["share"] for row in alone]
    np.testing.assert_allclose(share, np.mean(each, axis=0), atol=1e-6)
    assert len({tuple(x) for x in each}) > 1
    params["blocks_0"]["mlp"]["W_router"] = jnp.zeros((D, E))  # of equals, the first
    report = router_report(model, params, (tokens_BT,))
    assert report == {"blocks.0.mlp": {"share": [1.0, 0.0, 0.0, 0.0], "dropped": 0.75}}


@pytest.mark.slow
def test_enough_capacity_drops_nothing_and_a_scan_agrees() -> None:
    config = replace(CONFIG, experts=ExpertsConfig(E, 1))
    model, params = build(config)
    inputs = (random_tokens(V, 3, T),)
    report = router_report(model, params, inputs)
    assert [layer["dropped"] for layer in report.values()] == [0, 0]
    scanned = router_report(config.build(Execution(scan=True)), params, inputs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), report, scanned)


@pytest.mark.slow
def test_padding_counts_in_no_share() -> None:
    """Rows with capacity for their own tokens, of which some are short: their shares are those of all tokens."""
    config = replace(CONFIG, positions="none")
    params = build(config)[1]
    model, tokens_BT = config.build(Execution(scan=True, remat="block")), random_tokens(V, 2, T)
    lengths_B = np.array([8, 5])
    segments_BT = (np.arange(T) < lengths_B[:, None]).astype(np.int32)
    report = router_report(model, params, (tokens_BT, None, segments_BT))
    alone = [router_report(config.build(), params, (tokens_BT[b : b + 1, :n],)) for b, n in enumerate(lengths_B)]
    for layer, found in report.items():
        for name, value in found.items():
            np.testing.assert_allclose(value, lengths_B / 13 @ [row[layer][name] for row in alone], atol=1e-6)
    assert report["blocks.0.mlp"]["dropped"] > 0


def test_model_without_experts_has_an_empty_report() -> None:
    model, params = build(replace(CONFIG, experts=None))
    assert router_report(model, params, (random_tokens(V, 2, T),)) == {}
