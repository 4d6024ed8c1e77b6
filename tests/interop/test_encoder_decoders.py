"""Configs and tensors of published encoder-decoders: what is read, and what is refused. That they compute what
transformers computes, `test_families` shows."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxformer.data.pairs import TARGET_TOKENS, encode_sources, encode_targets
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.interop.configs import read_config
from jaxformer.interop.families.encoder_decoders import with_stored_head
from jaxformer.interop.obstacles import obstacles
from jaxformer.interop.run import finetuning_config, load_published_tokenizer, pretrained_model
from jaxformer.interop.sampling import as_generation_tokens, target_tokens
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.ops.positions import sinusoidal

WIDTHS = {"d_model": 16, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "encoder_attention_heads": 2}
MARIAN = {"model_type": "marian", "vocab_size": 50, "decoder_attention_heads": 2, **WIDTHS}
BART = {**MARIAN, "model_type": "bart"}
T5 = {"model_type": "t5", "vocab_size": 50, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 4, "d_ff": 20}


def read(config: dict[str, Any], **changes: Any) -> EncoderDecoderConfig:
    model = read_config({**config, **changes})
    assert isinstance(model, EncoderDecoderConfig)
    return model


def test_fields_have_the_defaults_of_their_classes():
    marian, bart, t5 = read(MARIAN), read(BART), read(T5)
    assert (marian.n_encoder_blocks, marian.context_length, marian.activation) == (12, 1024, "gelu_exact")
    assert (marian.embedding_scale, bart.embedding_scale) == (1.0, 1.0)
    assert read(MARIAN, scale_embedding=True).embedding_scale is None  # √D
    assert (bart.positions, bart.target_positions, bart.embedding_norm) == ("learned", True, True)
    m2m = read({**BART, "model_type": "m2m_100"})
    assert (m2m.activation, m2m.embedding_scale, m2m.norm_placement, m2m.fairseq_sinusoids) == (
        "relu",
        None,
        "pre",
        True,
    )
    assert (t5.n_decoder_blocks, t5.position_buckets, t5.max_distance, t5.context_length) == (1, 32, 128, 512)
    assert (t5.score_scale, t5.embedding_scale, t5.unembedding, t5.scale_logits) == (1.0, 1.0, "tied", True)
    assert read_config(T5, context_length=2000).context_length == 2000  # its bias has no end


def test_logits_of_t5_have_the_matrix_of_the_file_and_the_scale_of_the_config():
    """Version 5 of transformers writes that they are tied even if they are not."""
    for theirs, names, expected in (
        ({}, [], ("tied", True)),
        ({"tie_word_embeddings": False}, ["lm_head.weight"], ("linear", False)),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, ["lm_head.weight"], ("linear", False)),
        ({"tie_word_embeddings": False}, [], ("tied", False)),
    ):
        model = read(dict(with_stored_head({**T5, **theirs}, names)))
        assert (model.unembedding, model.scale_logits) == expected


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (MARIAN, {"decoder_ffn_dim": 24}, "encoder_ffn_dim is 20 and decoder_ffn_dim 24"),
        (MARIAN, {"decoder_attention_heads": None}, "encoder_attention_heads is 2 and decoder_attention_heads None"),
        (MARIAN, {"decoder_vocab_size": 60}, "vocab_size is 50 and decoder_vocab_size 60"),
        (MARIAN, {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings is False"),
        (BART, {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        (BART, {"is_decoder": True}, "is_decoder is True"),
        (BART, {"model_type": "m2m_100", "pad_token_id": 0}, "pad_token_id is 0, and only 1 has an equivalent"),
        (BART, {"activation_function": "tanh"}, "activation_function is 'tanh'"),
        (T5, {"feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu'"),
        (T5, {"dense_act_fn": "silu"}, "dense_act_fn is 'silu', and only relu"),
        (T5, {"is_gated_act": True}, "is_gated_act is True, and only False"),
        (T5, {"relative_attention_num_buckets": 2}, "position_buckets is 2"),
        (T5, {"architectures": ["T5EncoderModel"]}, "T5EncoderModel"),
    ],
    ids=str,
)
def test_what_has_no_equivalent_is_refused_by_its_name(config: dict[str, Any], changes: dict[str, Any], message: str):
    with pytest.raises(UserError) as refused:
        read(config, **changes)
    assert message in str(refused.value)


def test_an_own_encoder_decoder_lacks_what_exports_need():
    needed = {lacking.field for lacking in obstacles(finetuning_config("own", EncoderDecoderConfig()), "hf")}
    assert needed == {"model.interleaved_sinusoids", "model.attention_bias", "model.unembedding_bias"}
    assert not obstacles(finetuning_config("own", read(T5)), "hf")


def test_tokens_of_targets_are_read_and_written(caplog: pytest.LogCaptureFixture):
    values = {"decoder_start_token_id": 4, "forced_eos_token_id": [2], "bad_words_ids": [[7], [8, 9]], "num_beams": 4}
    with caplog.at_level(logging.WARNING):
        tokens = target_tokens(values, None, "generation_config.json")
    assert tokens == {"start": 4, "first": None, "last": 2, "banned": [7]}
    assert "sets num_beams, bad_words_ids, which" in caplog.text
    again = as_generation_tokens(tokens)
    assert again == {"decoder_start_token_id": 4, "forced_eos_token_id": 2, "bad_words_ids": [[7]]}
    with pytest.raises(UserError, match="decoder_start_token_id is None"):
        target_tokens({}, None, "config.json")


@pytest.mark.slow
def test_ids_of_nllb_are_those_of_its_tokenizer_after_a_code_of_the_language(tmp_path: Path):
    """BPE without bytes: an unknown character has a token. A target begins with the code that the model is to force."""
    transformers = pytest.importorskip("transformers")
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abc", "▁a", "ab", "▁ab"]
    theirs = transformers.NllbTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("▁", "a"), ("a", "b"), ("▁", "ab")],
        src_lang="eng_Latn", additional_special_tokens=["eng_Latn", "fra_Latn"],
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    texts = ["ab c", "a  zé ab", " a", ""]
    assert encode_sources(texts, tokenizer) == theirs(texts).input_ids
    first = theirs.convert_tokens_to_ids("fra_Latn")
    forcing = tokenizer.with_settings({TARGET_TOKENS: {"start": 2, "first": first}})
    assert encode_targets(["ab"], forcing) == [[first, *theirs("ab", add_special_tokens=False).input_ids]]
    assert tokenizer.decode(theirs("ab c").input_ids) == "ab c"


@pytest.mark.slow
def test_positions_of_marian_must_be_sinusoidal(tmp_path: Path):
    """Older checkpoints hold them; with others, they were trained."""
    from safetensors.numpy import load_file, save_file

    from tests.interop.family_cases import CASES
    from tests.interop.published import publish

    publish(tmp_path / "model", "Marian", **CASES["Marian"].variation(0))
    file, name = tmp_path / "model/model.safetensors", "model.encoder.embed_positions.weight"
    table_PD = np.array(sinusoidal(np.arange(96), 24, interleaved=False))
    save_file({**load_file(file), name: table_PD}, file)
    pretrained_model(tmp_path / "model")
    table_PD[3, 5] += 0.1
    save_file({**load_file(file), name: table_PD}, file)
    with pytest.raises(UserError, match=r"embed_positions\.weight in .* is not the sinusoidal encoding"):
        pretrained_model(tmp_path / "model")


def test_a_token_of_targets_without_an_embedding_is_refused():
    tokenizer = Tokenizer.train([], 257).with_settings({TARGET_TOKENS: {"start": 58_100}})
    published = SimpleNamespace(path="opus", tokenizer=lambda: tokenizer)
    with pytest.raises(UserError, match="names the token 58100 for targets, but the model embeds 300"):
        load_published_tokenizer(published, read(MARIAN, vocab_size=300))
