"""Published encoders of the BERT family compute what transformers computes."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxformer.__main__ import main
from jaxformer.data.labelled import LabelledTextConfig, tokenize_text
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode.classify import classify_text
from jaxformer.decode.embed import embed
from jaxformer.errors import UserError
from jaxformer.interop.folder import read_modules
from jaxformer.interop.run import import_run, pretrained_model
from jaxformer.models.encoder import ClassifierConfig, EncoderConfig
from jaxformer.runs.checkpoints import CheckpointReader
from jaxformer.runs.run import load_run
from tests.arrays import apply
from tests.helpers import ROOT
from tests.interop.published import SHAPES, installed_model, publish

pytestmark = pytest.mark.slow

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "##s", "see", "."]
TEXT = [2, 5, 6, 9, 8, 5, 7, 10, 3]
"""[CLS] the cat sees the dog . [SEP]"""


def write_tokenizer(folder: Path) -> None:
    """Write a WordPiece tokenizer of `WORDS`, as BERT's."""
    inner = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.decoder, inner.post_processor = decoders.WordPiece(), processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    inner.add_special_tokens(WORDS[:5])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]", "sep_token": "[SEP]"}))


IDS = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def publish_bert(folder: Path, family: str = "Bert", **changes: Any) -> Any:
    """Write a random model of `WORDS`; return it, a torch module."""
    theirs = publish(
        folder, family, vocab_size=len(WORDS), pad_token_id=0, bos_token_id=None, eos_token_id=None, **changes
    )
    write_tokenizer(folder)
    return theirs


def test_logits_of_the_first_checkpoints_and_of_two_segments_equal_those_of_transformers(tmp_path: Path):
    torch = pytest.importorskip("torch")

    theirs = publish_bert(tmp_path / "model", hidden_act="gelu_new", type_vocab_size=2, layer_norm_eps=1e-3)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for new, first in {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}.items():
        tensors = {name.replace(new, first): tensor for name, tensor in tensors.items()}
    save_file(tensors, file)
    run = load_run(import_run(tmp_path / "model", tmp_path / "run")[0])
    assert isinstance(run.config.model, EncoderConfig)
    tokens_T, segments_T = np.array([*TEXT, 4, 5]), (np.arange(11) > 4).astype(int)
    ours_TV = apply(run.model, run.params, tokens_T, None, segments_T)
    with torch.no_grad():
        out = theirs(torch.tensor(tokens_T)[None], token_type_ids=torch.tensor(segments_T)[None])
    theirs_TV = out.logits[0].numpy()
    np.testing.assert_allclose(ours_TV, theirs_TV, rtol=0, atol=1e-5 * np.abs(theirs_TV).max())


def test_masks_are_filled_as_by_transformers(tmp_path: Path, capsys: Any):
    torch = pytest.importorskip("torch")

    theirs = publish_bert(tmp_path / "model")
    run = import_run(tmp_path / "model", tmp_path / "run")[0]
    assert main(["sample", "--run", str(run), "--prompt", "The cats see the [MASK].", "--jsonl"]) == 0
    (candidates,) = json.loads(capsys.readouterr().out)["masks"]
    with torch.no_grad():
        logits_V = theirs(torch.tensor([[2, 5, 6, 8, 9, 5, 4, 10, 3]])).logits[0, 6]
    logits_V[4] = -torch.inf
    probs, ids = logits_V.softmax(-1).topk(5)
    expected = [WORDS[i].removeprefix("##") if i > 4 else "" for i in ids]
    assert [text for text, _ in candidates] == expected
    np.testing.assert_allclose([p for _, p in candidates], probs, rtol=1e-3)


def test_masked_training_with_another_mask_token_is_refused(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    publish_bert(tmp_path / "model")
    Path("x.txt").write_text("the cat sees the dog . " * 2000)
    assert main(["train", "--init-from", "model", "--data.path", "x.txt", "--run", "runs/x"]) == 2
    assert "the mask token is 4, but masked training uses the vocabulary's last, 10; fine-" in capsys.readouterr().err


def write_modules(folder: Path, mode: str, *kinds: str) -> None:
    """Make a folder one of sentence-transformers, with a mode of pooling, by its older or newer name, and the modules
    after it."""
    kinds = ("Transformer", "Pooling", *kinds)
    modules = [{"path": "1_Pooling" if i == 1 else "", "type": f"s.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens")}
    modes = modes if any(modes.values()) else {"pooling_mode": mode}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **modes}))


def their_vectors(folder: Path, texts: list[str]) -> np.ndarray:
    """Return the vectors of texts by a folder of sentence-transformers, by that library if it is installed, else by
    transformers and the definitions of the modules, `(N, D)`."""
    if importlib.util.find_spec("sentence_transformers"):
        library = importlib.import_module("sentence_transformers")
        vectors_ND: np.ndarray = library.SentenceTransformer(str(folder), device="cpu").encode(texts)
        return vectors_ND
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    vectors = []
    for text in texts:
        with torch.no_grad():
            x_TD = model(**tokenizer(text, truncation=True, return_tensors="pt")).last_hidden_state[0].numpy()
        for module in json.loads((folder / "modules.json").read_text())[1:]:
            at, kind = folder / module["path"], module["type"].rpartition(".")[2]
            config = {} if kind == "Normalize" else json.loads((at / "config.json").read_text())
            if kind == "Pooling":
                x_D = x_TD.mean(0) if config["pooling_mode_mean_tokens"] else x_TD[0]
            elif kind == "Normalize":
                x_D = x_D / np.linalg.norm(x_D)
            else:
                layer = load_file(at / "model.safetensors")
                x_D = layer["linear.weight"] @ x_D + layer["linear.bias"]
                x_D = np.tanh(x_D) if config["activation_function"] == "torch.nn.Tanh" else x_D
        vectors.append(x_D)
    return np.stack(vectors)


@pytest.mark.parametrize(("mode", "kinds"), [(None, ()), ("mean_tokens", ("Normalize",)), ("cls", ())])
def test_vectors_of_sentence_encoders_equal_those_of_transformers(
    tmp_path: Path, mode: str | None, kinds: tuple[str, ...]
):
    torch = pytest.importorskip("torch")

    theirs = publish_bert(tmp_path / "model", "BertModel")
    if mode is not None:
        write_modules(tmp_path / "model", mode, *kinds)
    run = load_run(import_run(tmp_path / "model", tmp_path / "run")[0])
    texts = [TEXT, TEXT[:5], [*TEXT * 4]]
    ours_ND = embed(run.model, run.params, texts, batch_size=2)
    for ours_D, text in zip(ours_ND, texts, strict=True):
        with torch.no_grad():
            x_TD = theirs(torch.tensor([text])).last_hidden_state[0].numpy()
        theirs_D = x_TD[0] if mode == "cls" else x_TD.mean(0)
        theirs_D = theirs_D if mode == "cls" else theirs_D / np.linalg.norm(theirs_D)
        np.testing.assert_allclose(ours_D, theirs_D, rtol=0, atol=1e-5 * np.abs(theirs_D).max())


def test_modules_that_are_no_objects_are_refused(tmp_path: Path):
    (tmp_path / "modules.json").write_text('["Transformer", 1]')
    with pytest.raises(UserError, match="has the modules Transformer, 1, and pools by nothing"):
        read_modules(tmp_path)


@pytest.mark.parametrize(("mode", "kinds", "said"), [
    ("max_tokens", (), "pools by pooling_mode_max_tokens; .* and pooling by mean or cls; use another"),
    ("lasttoken", ("Normalize",), "pools by lasttoken;"),
    ("mean", ("Dense",), "has the modules Transformer, Pooling, Dense, and pools"),
])  # fmt: skip
def test_other_modules_are_refused(tmp_path: Path, mode: str, kinds: tuple[str, ...], said: str):
    write_modules(tmp_path, mode, *kinds)
    with pytest.raises(UserError, match=said):
        read_modules(tmp_path)


@pytest.mark.parametrize(("change", "said"), [
    ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', and only absolute has"),
    ({"is_decoder": True}, "is_decoder is True, and only False has an equivalent"),
    ({"architectures": ["BertForPreTraining"]}, "architectures is 'BertForPreTraining', which is not supported; "
        r"use a checkpoint of BertModel or BertForMaskedLM or BertForSequenceClassification or BertForTokenC"),
    ({"max_position_embeddings": 95}, "embeddings.position_embeddings.weight in .* has shape"),
])  # fmt: skip
def test_other_models_are_refused(tmp_path: Path, change: dict[str, Any], said: str):
    publish_bert(tmp_path / "model", "BertModel")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=said):
        import_run(tmp_path / "model", tmp_path / "run")


def test_a_head_that_is_no_copy_of_the_embedding_is_refused(tmp_path: Path):
    publish_bert(tmp_path / "model", "Bert")
    file = tmp_path / "model" / "model.safetensors"
    table = "bert.embeddings.word_embeddings.weight"
    for name, first in {
        "cls.predictions.decoder.weight": table,
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }.items():
        tensors = load_file(file)
        save_file(tensors | {name: tensors[first]}, tmp_path / "model" / "model.safetensors")
        pretrained_model(tmp_path / "model")
        save_file(tensors | {name: tensors[first] + 1}, tmp_path / "model" / "model.safetensors")
        with pytest.raises(UserError, match=f"ties {name} to {first}, but the two differ; set tie_word_embeddings"):
            pretrained_model(tmp_path / "model")
        save_file(tensors, file)


def test_what_has_no_equivalent_for_an_encoder_is_refused(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    publish_bert(tmp_path / "model", "BertModel")
    run = str(import_run(tmp_path / "model", tmp_path / "run")[0])
    assert main(["eval", run]) == 2
    assert "run holds a sentence encoder, which has no loss to evaluate; compare texts with" in capsys.readouterr().err
    assert main(["inspect", run]) == 2
    error = capsys.readouterr().err
    assert error == "error: the run's data is not available; give a text with --prompt.\n"


def test_texts_of_sentence_encoders_are_as_long_as_sentence_transformers_allows(
    tmp_path: Path, capsys: Any, caplog: Any
):
    torch = pytest.importorskip("torch")

    theirs = publish_bert(tmp_path / "model", "BertModel")
    write_modules(tmp_path / "model", "mean_tokens")
    limit = tmp_path / "model" / "sentence_bert_config.json"
    for written, expected in ((7, 7), (97, 96), (None, 96)):
        limit.write_text(json.dumps({"max_seq_length": written, "do_lower_case": False}))
        path = import_run(tmp_path / "model", tmp_path / f"run {written}")[0]
        run = load_run(path)
        assert run.text_model()[0].context_length == expected
        tokens = [2, *([5, 6, 9] * 40)[: expected - 2], 3]
        with torch.no_grad():
            theirs_D = theirs(torch.tensor([tokens])).last_hidden_state[0].mean(0).numpy()
        ours_D = embed(run.model, run.params, [tokens])[0]
        np.testing.assert_allclose(ours_D, theirs_D, rtol=0, atol=1e-5 * np.abs(theirs_D).max())
    short, long = load_run(tmp_path / "run 7"), "the cat sees the dog ."
    tokens = tokenize_text(long, short.tokenizer)
    assert tokenize_text(long, short.tokenizer, 7) == [*tokens[:6], tokens[-1]] and len(tokens) == 9
    capsys.readouterr()
    assert main(["sample", "--run", str(tmp_path / "run 7"), "--jsonl", "--prompt", long, "the"]) == 0
    vectors = [json.loads(line)["vector"] for line in capsys.readouterr().out.splitlines()]
    expected_D = embed(short.model, short.params, [[*tokens[:6], tokens[-1]]])[0]
    np.testing.assert_allclose(vectors[0], expected_D, rtol=0, atol=1e-6)
    assert caplog.messages == ["1 of 2 texts are truncated to the 7 tokens that fit."]
    with pytest.raises(ValueError, match="a text has 97 tokens; the model reads at most 96: truncate it"):
        embed(run.model, run.params, [[2] * 97])
    for written in (0, "7", True):
        limit.write_text(json.dumps({"max_seq_length": written}))
        with pytest.raises(UserError, match=f"max_seq_length in .* is {written!r}; it must be a number of tokens"):
            import_run(tmp_path / "model", tmp_path / "other")


@pytest.mark.parametrize(
    ("file", "option", "value"),
    [
        ("sentence_bert_config.json", "do_lower_case", True),
        ("config_sentence_transformers.json", "default_prompt_name", "query"),
    ],
)
def test_changes_of_texts_by_sentence_transformers_are_refused(tmp_path: Path, file: str, option: str, value: object):
    write_modules(tmp_path, "mean_tokens")
    (tmp_path / file).write_text(json.dumps({option: value}))
    with pytest.raises(UserError, match=f"{option} in .*{file} is {value!r}, which is not supported; use another"):
        read_modules(tmp_path)


def test_context_of_an_encoder_is_its_own(tmp_path: Path):
    publish_bert(tmp_path / "model", "BertModel")
    with pytest.raises(
        UserError, match="`context_length` is 64; the model has 96 positions, all of which an encoder takes; omit it"
    ):
        import_run(tmp_path / "model", tmp_path / "run", context_length=64)


TRAIN = [
    "--data.path", "x", "--run", "runs/x", "--train.batch-size", "8", "--steps", "60", "--optimizer.warmup-steps", "5",
    "--model.dropout", "0", "--train.report-every", "0", "--optimizer.learning-rate",
]  # fmt: skip


def test_an_encoder_is_fine_tuned_as_a_classifier(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    publish_bert(tmp_path / "model", std=0.1)
    words = {"cat": "c", "dog": "d", "see": "e"}
    lines = [f"{'the ' * (i % 4)}{word} .\t{label}\n" for i in range(20) for word, label in words.items()]
    Path("x.train.tsv").write_text("".join(lines[:40]))
    Path("x.val.tsv").write_text("".join(lines[40:]))
    start = ["train", "--config", "classify", "--model.pooling", "first", "--init-from", "model"]
    assert main([*start, "--model.context-length", "12", *TRAIN, "0.02", "--lora.rank", "4"]) == 0
    assert "n_classes 3 (not 2)" in capsys.readouterr().out
    run, source = load_run("runs/x"), load_run(import_run(tmp_path / "model", tmp_path / "source")[0])
    old, new = source.params["embedding"]["W_pos"], run.params["embedding"]["W_pos"]
    assert new.shape == (12, 24) and np.array_equal(new, old[:12])
    assert jax.tree.map(np.shape, run.params["blocks_0"]) == jax.tree.map(np.shape, source.params["blocks_0"])
    assert main(["eval", "--run", "runs/x"]) == 0
    captured = capsys.readouterr()
    assert main(["export", "runs/x", "--format", "hf", "--out", "out"]) == 0
    transformers, texts = pytest.importorskip("transformers"), ["the cat .", "the dog ."]
    classify = transformers.pipeline("text-classification", "out", top_k=None)
    theirs = [{row["label"]: row["score"] for row in scores} for scores in classify(texts)]
    for text, scores in zip(texts, theirs, strict=True):
        assert scores == pytest.approx(dict(classify_text(run, tokenize_text(text, run.tokenizer))), abs=1e-5)
    accuracy = float(re.findall(r"([\d.]+)% accuracy", captured.out)[0]) / 100
    assert accuracy > 0.5  # LoRA leaves random embeddings as they are
    saved = CheckpointReader(Path("runs/x")).arrays(60).keys()  # the new head is not frozen
    assert {"params/head/W_1", "params/blocks_0/attention/W_Q/A"} <= saved


@pytest.mark.parametrize(
    ("family", "activation"),
    [("BertModel", "gelu"), ("BertClassifier", "relu")],
)
def test_exported_encoders_have_the_same_outputs_in_transformers(
    tmp_path: Path, capsys: Any, family: str, activation: str
):
    torch = pytest.importorskip("torch")
    import transformers

    theirs = publish_bert(tmp_path / "model", family, num_labels=3, hidden_act=activation)
    if family == "BertModel":
        write_modules(tmp_path / "model", "cls_token", "Normalize")
    run = import_run(tmp_path / "model", tmp_path / "run")[0]
    assert main(["export", str(run), "--format", "hf", "--out", str(tmp_path / "out")]) == 0
    again, info = type(theirs).from_pretrained(tmp_path / "out", local_files_only=True, output_loading_info=True)
    assert not info["unexpected_keys"] and {*info["missing_keys"]} <= {"pooler.dense.weight", "pooler.dense.bias"}
    with torch.no_grad():
        first, second = (model.eval()(torch.tensor([TEXT]))[0].numpy() for model in (theirs, again))
    np.testing.assert_allclose(second, first, rtol=0, atol=1e-6 * np.abs(first).max())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer("The cats see the dog.")["input_ids"] == [2, 5, 6, 8, 9, 5, 7, 10, 3]
    ours, back = load_run(run), load_run(import_run(tmp_path / "out", tmp_path / "back")[0])
    assert back.config.model == ours.config.model and back.classes == ours.classes
    outputs = [np.asarray(apply(run.model, run.params, np.array(TEXT))) for run in (ours, back)]
    np.testing.assert_array_equal(*outputs)
    if family == "BertModel":
        texts = ["The cats see the dog.", "the dog"]
        ours_ND = embed(ours.model, ours.params, [tokenize_text(text, ours.tokenizer) for text in texts])
        np.testing.assert_allclose(their_vectors(tmp_path / "out", texts), ours_ND, rtol=0, atol=1e-5)
    if family == "BertClassifier":
        np.testing.assert_allclose(outputs[0], first[0], rtol=0, atol=1e-5 * np.abs(first).max())
        assert back.classes == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert main(["export", str(run), "--format", "gguf", "--out", str(tmp_path / "out.gguf")]) == 2
    assert "has no equivalent; use --format safetensors" in capsys.readouterr().err


def publish_roberta(folder: Path, family: str, **changes: Any) -> Any:
    """Write a random model with a byte-level tokenizer, as RoBERTa's; return it, a torch module."""
    theirs = publish(folder, family, pad_token_id=1, eos_token_id=2, type_vocab_size=1, num_labels=3, **changes)
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>", tokenizers.AddedToken("<mask>", lstrip=True, special=True)]
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPES["vocab_size"], initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    inner.train_from_iterator([ROBERTA_TEXT] * 9, trainer)
    inner.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    inner.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RobertaTokenizer", **names}))
    return theirs


ROBERTA_TEXT = "The cats see the dog, naïve as it is."


@pytest.mark.parametrize("family", ["Roberta", "RobertaModel", "RobertaClassifier"])
def test_roberta_has_the_outputs_of_transformers_and_is_exported_as_bert(tmp_path: Path, capsys: Any, family: str):
    torch = pytest.importorskip("torch")
    import transformers

    theirs = publish_roberta(tmp_path / "model", family, hidden_act="gelu" if family == "Roberta" else "relu")
    if family == "RobertaModel":
        write_modules(tmp_path / "model", "mean_tokens")
        config = tmp_path / "model" / "config.json"  # as many published sentence encoders say
        config.write_text(config.read_text().replace("RobertaModel", "RobertaForMaskedLM"))
    path = import_run(tmp_path / "model", tmp_path / "run")[0]
    run = load_run(path)
    assert getattr(run.config.model, "context_length", None) == 94 and run.params["W_segment"].shape == (1, 24)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    tokens = tokenize_text(ROBERTA_TEXT, run.tokenizer)
    assert tokens == tokenizer(ROBERTA_TEXT)["input_ids"] and tokens[0] == 0 and tokens[-1] == 2
    long, short = np.resize(tokens, 94), np.array(tokens)
    assert main(["export", str(path), "--format", "hf", "--out", str(tmp_path / "out")]) == 0
    bert = type(theirs).__name__.replace("Roberta", "Bert")
    exported = getattr(transformers, bert).from_pretrained(tmp_path / "out", local_files_only=True).eval()
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert again(ROBERTA_TEXT)["input_ids"] == tokens and again.mask_token == "<mask>"
    for tokens_T in (short, long):
        padded_T, valid_T = np.ones(94, int), np.arange(94) < len(tokens_T)
        padded_T[: len(tokens_T)] = tokens_T
        ours = np.asarray(apply(run.model, run.params, padded_T, valid_T))
        for model in (theirs, exported):
            with torch.no_grad():
                out = model(torch.tensor(padded_T)[None], attention_mask=torch.tensor(valid_T.astype(int))[None])[0]
            expected = out[0].numpy()
            if family != "RobertaClassifier":
                expected = expected[valid_T]
            got = ours[valid_T] if family == "Roberta" else ours
            expected = expected.mean(0) if family == "RobertaModel" else expected
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    if family == "Roberta":
        assert main(["sample", "--run", str(path), "--prompt", "The cats see the [MASK].", "--jsonl"]) == 0
        (candidates,) = json.loads(capsys.readouterr().out.splitlines()[-1])["masks"]
        fill = transformers.pipeline("fill-mask", theirs, tokenizer=tokenizer)
        rows = fill("The cats see the <mask>.")
        assert [row["token_str"] for row in rows] == [text for text, _ in candidates]


def test_long_texts_are_truncated_as_by_transformers(tmp_path: Path):
    publish_bert(tmp_path / "model")
    text, texts = "the cat sees the dog . " * 3, ["x\ty\n", "the dog\tz\n"]
    (tmp_path / "x.train.tsv").write_text("".join([f"{text}\ty\n", *texts]))
    (tmp_path / "x.val.tsv").write_text(f"{text}\ty\n")
    model = ClassifierConfig(len(WORDS), 7, 8, n_heads=2, d_ff=(12,), n_blocks=1)
    tokenizer = Tokenizer.load(tmp_path / "model" / "tokenizer.json")
    (batch,) = LabelledTextConfig(str(tmp_path / "x")).load(model, 2, 0, tokenizer).val_batches(1)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    expected = theirs(text, truncation=True, max_length=7)["input_ids"]
    assert batch.inputs[0][0].tolist() == expected == [2, 5, 6, 9, 8, 5, 3]


SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
COSINES = [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]]
"""Published with the model, in the documentation of sentence-transformers."""


def test_vectors_of_minilm_equal_those_of_transformers_and_have_the_published_cosines(tmp_path: Path, capsys: Any):
    source = installed_model("minilm")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModel.from_pretrained(source, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
    path = import_run(source, tmp_path / "minilm")[0]
    run, prose = load_run(path), (ROOT / "docs/extending.md").read_text()
    lines = [line for line in prose.splitlines() if line.strip()][:6]
    texts = [*SENTENCES, "x", "Ça va, naïve Ærø? 日本語 🙂 \n don't", "word " * 400, *lines]
    rows = [tokenize_text(text, run.tokenizer) for text in texts]
    assert rows == [tokenizer(text)["input_ids"] for text in texts]
    assert run.text_model()[0].context_length == 256  # of 512 positions
    rows = [tokenize_text(text, run.tokenizer, 256) for text in texts]
    assert rows == [tokenizer(text, truncation=True, max_length=256)["input_ids"] for text in texts]
    vectors_ND = embed(run.model, run.params, rows)
    for text, ours_D in zip(texts, vectors_ND, strict=True):
        with torch.no_grad():
            tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
            x_D = theirs(**tokens).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(ours_D, (x_D / x_D.norm()).numpy(), rtol=0, atol=1e-5)
    assert main(["sample", "--run", str(path), "--prompt", *SENTENCES]) == 0
    printed = [[float(x) for x in line.split()[:3]] for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(printed, COSINES, rtol=0, atol=6e-4)
