"""Attribution by path: first order, and exact."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inspect import Edge, capture, path_attribution, run_from
from jaxformer.ops import RoPE
from tests.arrays import apply, plain_decoder
from tests.inspect.test_activations import DECODER, MODELS, T, V, random_model

TOKENS = jnp.arange(T)[::-1]
OTHER = (TOKENS + 5) % V
DIRECT = 1 + 2 * (3 + 1)
"""Parts of two blocks with three heads."""
GROUPED = replace(DECODER, n_heads=4, n_kv_heads=2, norm="rmsnorm", positions="none", rope=RoPE(), head_dim=4)


@pytest.fixture(scope="module")
def grouped() -> tuple[Any, Any, list[Edge]]:
    """Return a model, its parameters, and all edges by head, exact too."""
    model, params, _ = random_model(GROUPED)
    return model, params, path_attribution(model, params, [TOKENS], [OTHER], preference, n_exact=None, by_head=True)


def preference(logits_TV: jax.Array) -> jax.Array:
    return logits_TV[-1, 3] - logits_TV[-1, 4]


def test_estimates_of_edges_into_the_logits_sum_to_the_change_without_a_final_norm():
    model, params, _ = random_model(plain_decoder(V, 3, 4, n_blocks=1, n_heads=2, d_ff=(4,), norm="rmsnorm"))
    tokens, other = jnp.array([3, 1, 4]), jnp.array([1, 5, 9])
    edges = path_attribution(model, params, [tokens], [other], preference, n_exact=0)
    direct = [edge.estimate for edge in edges if edge.target == "logits"]
    assert len(direct) == 1 + 2 + 1  # the embedding, heads, and the MLP
    change = preference(apply(model, params, other)) - preference(apply(model, params, tokens))
    np.testing.assert_allclose(sum(direct), change, rtol=1e-4)


@pytest.mark.parametrize(
    ("estimate", "exact", "is_linear"),
    [
        (0.311, -0.335, False),
        (-1.0, -0.6, True),
        (0.2, 0.5, False),
        (0.0, 0.0, True),
        (0.0, 0.1, False),
        (1, None, None),
    ],
)
def test_an_edge_says_where_its_estimate_is_wrong(estimate, exact, is_linear):
    assert Edge("embedding", "logits", estimate, exact).is_linear is is_linear


@pytest.mark.slow
def test_edges_into_the_logits_are_exact_without_a_final_norm_and_sum_to_the_change(grouped):
    model, params, edges = grouped
    direct = [edge for edge in edges if edge.target == "logits"]
    assert len(direct) == 1 + 2 * (4 + 1)
    np.testing.assert_allclose([edge.exact for edge in direct], [edge.estimate for edge in direct], atol=1e-4)
    change = preference(apply(model, params, OTHER)) - preference(apply(model, params, TOKENS))
    np.testing.assert_allclose(sum(edge.estimate for edge in direct), change, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("is_parallel", [False, True])
def test_every_edge_leads_to_a_later_part_and_the_largest_come_first(is_parallel: bool):
    """No head leads to the MLP parallel to it."""
    parallel = {"norm": "rmsnorm", "norm_placement": "parallel_two", "embedding_norm": True}
    model, params, _ = random_model(replace(DECODER, **parallel if is_parallel else {}))
    edges = path_attribution(model, params, [TOKENS], [OTHER], preference, n_exact=2)
    pairs = {(edge.source, edge.target) for edge in edges}
    assert len(pairs) == len(edges) == (1 + 1 + 5 + 5 if is_parallel else 1 + 4 + 5 + 8) + DIRECT
    assert (("blocks.0.attention.z.2", "blocks.0.mlp") in pairs) is not is_parallel
    assert ("blocks.0.mlp_out", "blocks.0.attention") not in pairs
    sizes = [abs(edge.estimate) for edge in edges]
    assert sizes == sorted(sizes, reverse=True)
    assert [edge.exact is None for edge in edges] == [False] * 2 + [True] * (len(edges) - 2)


@pytest.mark.slow
def test_edges_into_heads_are_those_into_their_layer_in_parts(grouped):
    model, params, heads = grouped
    whole = path_attribution(model, params, [TOKENS], [OTHER], preference, n_exact=0)
    parts = {edge.target for edge in heads if edge.target.startswith("blocks.1.attention")}
    assert parts == {f"blocks.1.attention.{kind}.{h}" for kind, n in (("q", 4), ("k", 2), ("v", 2)) for h in range(n)}
    for edge in whole:
        of_heads = [
            e.estimate
            for e in heads
            if e.source == edge.source and re.sub(r"\.[qkv]\.\d+$", "", e.target) == edge.target
        ]
        np.testing.assert_allclose(sum(of_heads), edge.estimate, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_an_edge_is_the_change_of_what_its_target_alone_reads(grouped):
    """The first MLP's edges into one head of the second block and into its MLP, written out."""
    model, params, edges = grouped
    edge_to = {edge.target: edge for edge in edges if edge.source == "blocks.0.mlp_out"}
    ours, theirs = (jax.jit(partial(capture, model))(params, tokens) for tokens in (TOKENS, OTHER))
    block = model.bind({"params": params}).blocks[1]
    stream_TD, difference = ours["blocks.1.resid_pre"], theirs["blocks.0.mlp"] - ours["blocks.0.mlp"]

    def reads(target: str, stream_TD: jax.Array) -> jax.Array:
        """Return the metric where one target reads another stream."""
        if target == "mlp":
            others_TD = ours["blocks.1.resid_mid"] - ours["blocks.1.resid_pre"]
            value = block.mlp(block.mlp_norm(stream_TD + others_TD))
        else:
            x_TK = block.attention_norm(stream_TD) @ params["blocks_1"]["attention"][f"W_{target[-1].upper()}"][:, 1]
            x_TK = x_TK if target[-1] == "v" else block.attention.rope(x_TK[None], jnp.arange(T))[0]
            value = ours[f"blocks.1.{target}"].at[1].set(x_TK)
        return preference(run_from(model, params, (TOKENS,), {f"blocks.1.{target}": value}))

    for target in ("attention.q", "attention.k", "attention.v", "mlp"):
        metric = jax.jit(jax.value_and_grad(partial(reads, target)))
        edge = edge_to[f"blocks.1.{target}" + ".1" * (target != "mlp")]
        (before, slope_TD), (after, _) = metric(stream_TD), metric(stream_TD + difference)
        np.testing.assert_allclose(edge.exact, after - before, atol=1e-4)
        np.testing.assert_allclose(edge.estimate, jnp.vdot(slope_TD, difference), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_normalised_outputs_have_no_heads_of_their_own():
    model, params, inputs = random_model(replace(DECODER, norm_placement="both"))
    with pytest.raises(ValueError, match="normalised"):
        path_attribution(model, params, inputs, inputs, preference)
    model, params, inputs = random_model(replace(DECODER, norm="rmsnorm", norm_placement="parallel"))
    with pytest.raises(ValueError, match="read the stream through one norm"):
        path_attribution(model, params, inputs, inputs, preference)
    model, params, inputs = random_model(MODELS["vit"])
    with pytest.raises(ValueError, match="stream"):
        path_attribution(model, params, inputs, inputs, preference)
