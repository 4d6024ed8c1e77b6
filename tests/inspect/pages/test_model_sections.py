"""Sections of a page agree with the probes that they show."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import ModelConfig
from jaxformer.data.dataset import Batch
from jaxformer.inspect import (
    ablate_heads,
    capture,
    explain,
    head_statistics,
    logit_attribution,
    logit_lens,
    path_attribution,
)
from jaxformer.inspect.pages.attention import AttentionSection
from jaxformer.inspect.pages.charts import Heatmap
from jaxformer.inspect.pages.contrast import contrast_sections
from jaxformer.inspect.pages.labels import describe_head
from jaxformer.inspect.pages.model_sections import (
    N_TOP_TOKENS,
    attention_section,
    head_sections,
    residual_stream_sections,
    with_ablation,
)
from jaxformer.inspect.pages.page import Table
from jaxformer.models.encoder import EncoderConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.recurrent import RecurrentConfig
from tests.arrays import apply, plain_rung, random_params

DECODER = plain_rung(
    vocab_size=11, context_length=8, d_model=8, n_blocks=2, n_heads=2, output_projection=True, d_ff=(8,),
    norm="rmsnorm", residual=True, scaled=True,
)  # fmt: skip
ENCODER = EncoderConfig(vocab_size=11, context_length=8, d_model=8, n_heads=2, n_blocks=1, d_ff=(8,))
HEAD_FIELDS = ("entropy", "normalized_entropy", "distance", "first", "previous", "duplicate", "induction")
TOKENS_T = np.array([3, 1, 4, 1, 5, 9], np.int32)
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def random_model(config: ModelConfig) -> tuple[Any, Any]:
    """Return a model with random parameters."""
    model = config.build()
    return model, random_params(model, *config.example(), seed=1)


@pytest.fixture(scope="module")
def decoder() -> tuple[Any, Any]:
    return random_model(DECODER)


@pytest.mark.slow
def test_attention_section_has_maps_and_token_probabilities(decoder):
    model, params = decoder
    result = attention_section(model, params, (jnp.array(TOKENS_T),), WORDS.__getitem__)
    assert result.texts == {"text": ["three", "one", "four", "one", "five", "nine"]}
    expected = capture(model, params, jnp.array(TOKENS_T), names="*.pattern")
    assert [(layer.name, layer.rows, layer.columns) for layer in result.layers] == [
        (f"layer {i}", "text", "text") for i in range(2)
    ]
    for layer, weights_HTS in zip(result.layers, expected.values(), strict=True):
        np.testing.assert_allclose(layer.weights_HTS, weights_HTS, atol=1e-5)
    explanations = explain(model, params, TOKENS_T.tolist(), 1)
    *predictions, last = result.predictions["text"]
    for prediction, before, token in zip(predictions, TOKENS_T, explanations, strict=False):
        assert prediction is not None and prediction.actual is not None
        assert prediction.heading == f"Next token after “{WORDS[before]}”"
        assert prediction.actual == (WORDS[token.token], pytest.approx(token.probability, rel=1e-4))
        others = [(word, p) for word, p in prediction.probabilities if word != prediction.actual[0]]
        expected_others = [(WORDS[other], pytest.approx(p, rel=1e-4)) for other, p in token.alternatives]
        assert others[: len(expected_others)] == expected_others
    assert last is not None and last.actual is None and len(last.probabilities) == N_TOP_TOKENS


@pytest.mark.slow
def test_attention_section_has_cross_attention():
    config = EncoderDecoderConfig(
        vocab_size=11, context_length=8, d_model=8, n_heads=2, d_ff=(8,), n_encoder_blocks=1, n_decoder_blocks=1
    )
    model, params = random_model(config)
    inputs = (jnp.array(TOKENS_T), jnp.ones(6, bool), jnp.array([0, 2, 7], jnp.int32))
    result = attention_section(model, params, inputs, WORDS.__getitem__)
    assert result.texts["target"] == ["zero", "two", "seven"]
    sides = {layer.name: (layer.rows, layer.columns, layer.weights_HTS.shape) for layer in result.layers}
    assert next(iter(sides)) == "decoder layer 0, cross-attention"  # what one looks for first
    assert sides == {
        "encoder layer 0": ("source", "source", (2, 6, 6)),
        "decoder layer 0": ("target", "target", (2, 3, 3)),
        "decoder layer 0, cross-attention": ("target", "source", (2, 3, 6)),
    }
    logits_TV = apply(model, params, *inputs)
    first = result.predictions["target"][0]
    assert first is not None and first.actual == (
        "two",
        pytest.approx(float(jax.nn.softmax(logits_TV[0])[2]), rel=1e-4),
    )
    assert "source" not in result.predictions


@pytest.mark.slow
def test_recurrent_attention_is_one_head():
    config = RecurrentConfig(vocab_size=11, context_length=8, d_embedding=4, d_model=4, attention="additive")
    inputs = (jnp.array(TOKENS_T), jnp.ones(6, bool), jnp.array([0, 2, 7], jnp.int32))
    result = attention_section(*random_model(config), inputs, WORDS.__getitem__)
    [layer] = result.layers
    sides = (layer.name, layer.rows, layer.columns, layer.weights_HTS.shape)
    assert sides == ("attention to the source", "target", "source", (1, 3, 6))
    np.testing.assert_allclose(layer.weights_HTS.sum(-1), 1, atol=1e-5)


@pytest.mark.slow
def test_masked_tokens_have_likeliest_tokens():
    model, params = random_model(ENCODER)
    tokens_T = jnp.array([3, 10, 4], jnp.int32)
    result = attention_section(model, params, (tokens_T, jnp.ones(3, bool)), WORDS.__getitem__, mask_token=10)
    p_V = jax.nn.softmax(apply(model, params, tokens_T, jnp.ones(3, bool))[1])
    first, *_ = np.argsort(-np.asarray(p_V))
    before, masked, after = result.predictions["text"]
    assert before is after is None and masked is not None and masked.actual is None
    assert masked.probabilities[0] == (WORDS[first], pytest.approx(float(p_V[first]), rel=1e-4))


def test_logit_lens_and_attribution_agree_with_the_probes(decoder):
    model, params = decoder
    inputs = (jnp.array(TOKENS_T),)
    lens, spoke = residual_stream_sections(model, params, inputs, WORDS.__getitem__)
    assert isinstance(lens, Heatmap) and isinstance(spoke, Heatmap) and lens.texts
    logits = logit_lens(model, params, *inputs)
    assert lens.rows == ["embedding", "after layer 0", "after layer 1"]
    for probabilities, words, logits_TV in zip(lens.values, lens.texts, logits.values(), strict=True):
        p_TV = jax.nn.softmax(logits_TV)
        np.testing.assert_allclose(probabilities, p_TV.max(-1), atol=1e-5)
        assert words == [WORDS[token] for token in p_TV.argmax(-1)]
    last_TV = np.asarray(list(logits.values())[-1])
    next_T = np.append(TOKENS_T[1:], last_TV[-1].argmax())
    assert spoke.column_notes == [f"for “{WORDS[token]}”" for token in next_T]
    np.testing.assert_allclose(np.sum(spoke.values, axis=0), last_TV[np.arange(6), next_T], atol=1e-4)
    rows = logit_attribution(model, params, *inputs, target_T=jnp.array(next_T))
    names = [name for i in range(2) for name in (f"head {i}.0", f"head {i}.1", f"MLP {i}")]
    assert spoke.rows == ["embed", "pos_embed", *names]
    np.testing.assert_allclose(spoke.values[spoke.rows.index("head 1.1")], rows["blocks.1.attention.z"][1], atol=1e-4)


def test_encoder_has_no_residual_stream_sections():
    model, params = random_model(ENCODER)
    assert residual_stream_sections(model, params, (jnp.array(TOKENS_T), jnp.ones(6, bool)), WORDS.__getitem__) == []


@pytest.mark.slow
def test_head_sections_have_statistics_and_ablation_of_each_head(decoder):
    model, params = decoder
    inputs_BT = np.random.default_rng(0).integers(0, 11, (3, 8)).astype(np.int32)
    batch = Batch((inputs_BT[:, :-1],), inputs_BT[:, 1:])
    figure, table = head_sections(model, params, batch)
    assert isinstance(figure, Heatmap) and isinstance(table, Table)
    maps = attention_section(model, params, (jnp.array(TOKENS_T),), WORDS.__getitem__)
    shown = with_ablation(maps, figure)
    assert isinstance(shown, AttentionSection)
    np.testing.assert_allclose([layer.ablation for layer in shown.layers], figure.values)
    statistics, without = head_statistics(model, params, *batch.inputs), ablate_heads(model, params, batch)
    np.testing.assert_allclose(figure.values, list(without.mean.values()), atol=1e-6)
    row = next(row for row in table.rows if row[0] == "head 1.0")
    heads = statistics["blocks.1.attention"]
    name = "blocks.1.attention"
    np.testing.assert_allclose(
        np.array(row[2:], float),
        [
            *(float(getattr(heads, field)[0]) for field in HEAD_FIELDS),
            *(float(x[name][0]) for x in (without.mean, without.mean_estimate, without.zero, without.zero_estimate)),
        ],
        atol=1e-6,
    )  # fmt: skip
    assert len(table.rows) == 4 and len(row) == len(table.head)
    assert row[1] == describe_head(heads, 0)


@pytest.mark.slow
def test_contrast_sections_show_patching_and_paths_of_the_tokens_that_the_texts_predict(decoder, tmp_path: Path):
    model, params = decoder
    other_T = (TOKENS_T + 1) % 11
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        streams, paths = contrast_sections(model, params, jnp.array(TOKENS_T), jnp.array(other_T), WORDS.__getitem__)
    finally:
        jax.config.update("jax_dump_ir_to", "")
    programs = [file.read_text() for file in tmp_path.glob("*.mlir")]
    stored = [shape for text in programs for shape in re.findall(r'constant dense<["[].*: tensor<(\S+xf32)>', text)]
    assert len(programs) > 3 and stored == []  # parameters are arguments: a program that stores them doubles the memory
    assert isinstance(streams, Heatmap) and isinstance(paths, Table)
    logits_V, other_V = (apply(model, params, jnp.array(tokens))[-1] for tokens in (TOKENS_T, other_T))
    token, rival = int(logits_V.argmax()), int(other_V.argmax())
    assert token != rival and f"The logit of “{WORDS[token]}” minus that of “{WORDS[rival]}”" in streams.about

    def preference(logits_TV: jax.Array) -> jax.Array:
        return logits_TV[-1, token] - logits_TV[-1, rival]

    plain, replaced = preference(logits_V[None]), preference(other_V[None])
    # The last position of the last stream is all that the prediction is made of.
    np.testing.assert_allclose(streams.values[-1], [*[0.0] * 5, replaced - plain], atol=1e-4)
    assert streams.rows == ["before layer 0", "before layer 1", "at the end"]
    assert streams.columns[0] == "three / four"
    edge = path_attribution(model, params, (TOKENS_T,), (other_T,), preference, 1)[0]
    np.testing.assert_allclose(paths.rows[0][2:4], [edge.estimate, edge.exact], rtol=1e-4)


@pytest.mark.slow
def test_contrast_of_texts_with_one_prediction_is_with_the_token_that_rises_most():
    """Of a model whose stream is no sum of parts, it shows no paths."""
    model, params = random_model(replace(DECODER, norm_placement="post"))
    tokens_T = jnp.array(TOKENS_T)
    other_T = next(
        other_T
        for token in range(11)
        if (other_T := tokens_T.at[0].set(token))[0] != tokens_T[0]
        and apply(model, params, other_T)[-1].argmax() == apply(model, params, tokens_T)[-1].argmax()
    )
    before_V, after_V = (jax.nn.log_softmax(apply(model, params, x)[-1]) for x in (tokens_T, other_T))
    rises_V = jnp.where(jnp.arange(11) == before_V.argmax(), -jnp.inf, after_V - before_V)
    [streams] = contrast_sections(model, params, tokens_T, other_T, WORDS.__getitem__)
    assert isinstance(streams, Heatmap) and np.abs(streams.values[-1][-1]) > 1e-3
    assert f"minus that of “{WORDS[int(rises_V.argmax())]}”" in streams.about
