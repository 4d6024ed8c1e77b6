"""Folders of runs: errors; success is tested end to end."""

import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from jaxformer.config import Config, ModelConfig
from jaxformer.config.files import load_module
from jaxformer.data.dates import DatesConfig
from jaxformer.data.masked import MaskedTextConfig
from jaxformer.data.prefix import PrefixTextConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.models.encoder import EncoderConfig
from jaxformer.models.recurrent import RecurrentConfig
from jaxformer.models.vit import ViTConfig
from jaxformer.runs.run import (
    Run,
    check_can_create,
    create_run,
    latest_run,
    load_data,
    load_run,
    read_config,
    read_tokenizer,
    write_config,
)
from tests.arrays import apply, plain_decoder
from tests.data.test_tokenizer import byte_level, publish
from tests.helpers import small_run
from tests.runs.random_runs import random_run


@pytest.mark.parametrize("model", [plain_decoder(d_ff=(3,)), MLPConfig(mixing="concatenate")])
def test_config_round_trips(tmp_path, model):
    config = Config("x", model, data=TextConfig(), steps=7)
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config


def test_missing_run_lists_existing_runs(tmp_path):
    (tmp_path / "quick").mkdir()
    write_config(tmp_path / "quick", Config("x", plain_decoder(), data=TextConfig(), steps=1))
    with pytest.raises(UserError, match=r"quik does not exist; runs there: .*quick"):
        load_run(tmp_path / "quik")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty is not a run: it has no config\.json"):
        load_run(tmp_path / "empty")
    with pytest.raises(UserError, match="has no complete checkpoint yet"):
        load_run(tmp_path / "quick")
    with pytest.raises(UserError, match="no run below"):
        latest_run(tmp_path / "empty")


def test_incomplete_run_is_ignored(tmp_path):
    for name in ("quick", ".new-abc"):  # the second is what create_run renames at its end
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, Config("x", plain_decoder(), data=TextConfig(), steps=1))
    os.utime(tmp_path / "quick/config.json", (0, 0))  # the older one
    assert latest_run(tmp_path) == tmp_path / "quick"


@pytest.mark.parametrize(
    "kind", ["os.system", "decoder.Decoder", "decoder.Anything", "../decoder.DecoderConfig", "", None, 3]
)
def test_config_kind_is_a_class_of_this_package(tmp_path, kind):
    write_config(tmp_path, Config("x", plain_decoder(), data=TextConfig(), steps=1))
    values = json.loads((tmp_path / "config.json").read_text())
    values["model"]["kind"] = kind
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(tmp_path)


OWN_MODEL = """
from dataclasses import dataclass

from jaxformer.config import TokenModelConfig

@dataclass(frozen=True)
class OwnConfig(TokenModelConfig):
    width: int = 4
"""


def test_a_model_of_ones_own_file_is_imported_from_there_after_a_note(tmp_path, capsys):
    file, run = tmp_path / "own_model.py", tmp_path / "run"
    file.write_text(OWN_MODEL)
    run.mkdir()
    config = Config("x", load_module(str(file)).OwnConfig(width=7), data=TextConfig(), steps=1)
    write_config(run, config)
    stored = json.loads((run / "config.json").read_text())
    assert stored["model"]["kind"] == f"{file}:OwnConfig"
    assert read_config(run) == config
    assert capsys.readouterr().err == ""  # imported already
    file.rename(file.with_name("renamed_model.py"))
    stored["model"]["kind"] = f"{file.with_name('renamed_model.py')}:OwnConfig"
    (run / "config.json").write_text(json.dumps(stored))
    assert vars(read_config(run).model)["width"] == 7
    assert (
        capsys.readouterr().err
        == f"importing OwnConfig from {tmp_path}/renamed_model.py, with which {run} was trained\n"
    )


def test_a_class_of_the_program_itself_is_stored_with_its_file(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(OWN_MODEL)
    own = load_module(str(tmp_path / "program.py")).OwnConfig
    with monkeypatch.context() as program:
        program.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "program.py"), raising=False)
        program.setattr(own, "__module__", "__main__")
        run = create_run(tmp_path / "run", Config("x", own(width=5), TextConfig(), 1), None, False)
    assert json.loads((run / "config.json").read_text())["model"]["kind"] == f"{tmp_path}/program.py:OwnConfig"
    assert vars(read_config(run).model)["width"] == 5


def test_files_of_one_name_in_two_folders_stay_apart(tmp_path, monkeypatch, capsys):
    runs = [tmp_path / "a.b", tmp_path / "c"]
    configs = []
    for i, run in enumerate(runs):
        run.mkdir()
        (run.with_suffix(".code")).mkdir()
        file = run.with_suffix(".code") / "v1.2.py"
        file.write_text(OWN_MODEL + f"    folder = {i}\n")
        configs.append(Config("x", load_module(str(file)).OwnConfig(width=i + 1), data=TextConfig(), steps=1))
        write_config(run, configs[-1])
    assert [read_config(run) for run in runs] == configs
    assert [vars(type(read_config(run).model))["folder"] for run in runs] == [0, 1]
    assert capsys.readouterr().err == ""  # imported already
    for file in tmp_path.glob("*.code/v1.2.py"):
        file.unlink()
    assert vars(type(read_config(runs[0]).model))["folder"] == 0  # still imported


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("run/inside.py:OwnConfig", r"in its own folder, .*inside\.py, which is not executed; put it elsewhere\.$"),
        ("absent.py:OwnConfig", r"OwnConfig of .*absent\.py, which does not exist; restore it, or"),
        ("other.py:Text", r"there is no ModelConfig '.*other\.py:Text'"),
    ],
)
def test_no_other_code_is_imported_for_a_run(tmp_path, kind, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/inside.py").write_text("raise SystemExit('executed')")
    (tmp_path / "other.py").write_text("Text = str")
    write_config(tmp_path / "run", Config("x", plain_decoder(), data=TextConfig(), steps=1))
    values = json.loads((tmp_path / "run/config.json").read_text())
    values["model"] = {"kind": f"{tmp_path}/{kind}"}
    (tmp_path / "run/config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        read_config(tmp_path / "run")


@pytest.mark.parametrize("kind", ["no_such_module:X", "..json:X", ":X", "json:loads", "json:"])
def test_a_module_that_cannot_be_imported_is_one_sentence(tmp_path, kind):
    write_config(tmp_path, Config("x", plain_decoder(), data=TextConfig(), steps=1))
    values = json.loads((tmp_path / "config.json").read_text())
    values["model"] = {"kind": kind}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"cannot be (imported|read)"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": 3}', '{"a":' * 100_000, "[" * 100_000])
def test_invalid_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_config_of_a_published_tokenizer_is_stored_and_verified(tmp_path):
    (tmp_path / "published").mkdir()
    config = {"eos_token": "<|begin_of_text|>", "chat_template": "{{ messages }}"}
    published = Tokenizer.load(publish(tmp_path / "published", byte_level, config))
    run = create_run(tmp_path / "run", Config("x", plain_decoder(), data=TextConfig(), steps=1), published, False)
    stored = read_tokenizer(run)
    assert stored.files("t") == published.files("t") and stored.config == config
    file = run / "tokenizer_config.json"
    file.write_text(file.read_text().replace("begin", "end"))
    with pytest.raises(
        UserError, match=r"tokenizer_config\.json is missing, is not the one that this run was trained with"
    ):
        read_tokenizer(run)
    file.unlink()
    with pytest.raises(UserError, match=r"tokenizer_config\.json is missing, .*; restore both"):
        read_tokenizer(run)


def test_create_run_is_atomic_and_never_overwrites(tmp_path):
    tokenizer, config = Tokenizer.train(["a b"], 257), Config("x", plain_decoder(), data=TextConfig(), steps=1)
    places = [create_run(tmp_path / "runs/x", config, tokenizer, allow_suffix=True) for _ in range(3)]
    assert [p.name for p in places] == ["x", "x-2", "x-3"]
    for folder_path in places:
        assert read_config(folder_path) == config
        assert sorted(p.name for p in folder_path.iterdir()) == ["config.json", "sha256.json", "tokenizer.json"]
    with pytest.raises(UserError, match="x exists"):
        create_run(tmp_path / "runs/x", config, tokenizer, allow_suffix=False)
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_run_data_uses_its_own_tokenizer(tmp_path):
    data = DatesConfig(n_pairs=4, n_held_out=1)
    config = Config("x", RecurrentConfig(vocab_size=257, context_length=64), data, steps=1)
    config = replace(config, train=replace(config.train, batch_size=2))
    tokenizer = Tokenizer.train(["2023"] * 9, 259)  # two tokens more than the data itself would learn
    folder = create_run(tmp_path / "x", config, tokenizer, allow_suffix=False)
    actual = load_data(folder, config).tokenizer
    assert actual is not None and actual.as_json() == tokenizer.as_json()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing, .*; restore both, or train again\.$"):
        load_data(folder, config)


@pytest.mark.parametrize(
    ("data", "model", "least"),
    [
        (TextConfig, plain_decoder(vocab_size=5000, context_length=8), 258),
        (PrefixTextConfig, plain_decoder(vocab_size=5000, context_length=8), 258),
        (MaskedTextConfig, EncoderConfig(vocab_size=5000, context_length=8), 259),
    ],
)
def test_inferred_vocabulary_is_stable_on_resume(tmp_path, monkeypatch, data, model, least):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("The cat sat on the mat and the rat sat on it.\n" * 20)
    config = Config("x", model, data(path=str(tmp_path / "a.txt"), val_fraction=0.3), steps=1)
    config = replace(config, train=replace(config.train, batch_size=2))
    new: Any = load_data(None, config)
    assert new.model == replace(model, vocab_size=new.model.vocab_size) and least <= new.model.vocab_size < 400
    there = new.model.vocab_size - new.config.n_extra_tokens
    assert new.tokenizer.vocab_size == there
    assert f"supports {there} tokens: model.vocab_size {new.model.vocab_size} (not 5000)" in new.notes[0]
    config = replace(config, model=new.model)
    again = load_data(create_run(tmp_path / "x", config, new.tokenizer, allow_suffix=False), config)
    assert (again.model, again.fingerprint, again.notes) == (new.model, new.fingerprint, ())
    for one, other in zip(new.batch(3).inputs, again.batch(3).inputs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_tokenizer_of_another_run_is_refused(tmp_path):
    """Check one of equal vocabulary size, with which every shape fits."""
    words = [" ".join(f"{a}{b}{c}" for a in "xyz" for b in "abc" for c in "klm")] * 2
    one = small_run(tmp_path / "one", words)
    Tokenizer.train([words[0][::-1]] * 2, 280).save(one / "tokenizer.json")
    refusal = r"tokenizer\.json is missing, is not the one that this run was .*; restore both, or train again\.$"
    with pytest.raises(UserError, match=refusal):
        load_run(one)
    with pytest.raises(UserError, match=refusal):
        load_data(one, read_config(one))


@pytest.mark.parametrize("sums", [None, "[]", "{}", "[" * 100_000, '{"other": 3}'])
def test_tokenizer_without_checksum_is_refused(tmp_path, sums):
    config = Config("x", plain_decoder(), TextConfig(), steps=1)
    folder = create_run(tmp_path / "x", config, Tokenizer.train(["a b"], 257), allow_suffix=False)
    (folder / "sha256.json").unlink()
    if sums is not None:
        (folder / "sha256.json").write_text(sums)
    with pytest.raises(UserError, match=r"or has no checksum in sha256\.json; restore both, or train again"):
        load_data(folder, config)


def test_unwritable_parent_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run cannot be created: .*file is not writable \(Not a directory\); choose"):
        check_can_create(tmp_path / "file/a/run")
    check_can_create(tmp_path / "a/run")
    assert [folder_path.name for folder_path in tmp_path.iterdir()] == ["file"]


def test_a_run_is_shown_on_one_line():
    tokenizer = Tokenizer.train(["a"], 257)
    config = Config("mine", EncoderConfig(9, 8, 4, n_heads=1, n_blocks=1), TextConfig(), steps=1)
    params = {"W": np.zeros((10, 250)), "b": np.zeros(7)}
    run = Run(Path("runs/mine"), config, config.model.build(), params, tokenizer, step=1200)
    assert repr(run) == "<Run mine: MaskedLanguageModel with 2,507 parameters, at step 1,200, in runs/mine>"
    assert repr(tokenizer) == "<Tokenizer of 257 tokens>"


def test_text_model_refuses_other_models(tmp_path):
    config = Config("x", ViTConfig(), TextConfig(), steps=1)
    with pytest.raises(UserError, match=r"x holds a ViT, which does not generate text; name a run that does\.$"):
        Run(tmp_path / "x", config, config.model.build(), {}, None, step=1).text_model()


def test_loss_refuses_models_without_next_token_prediction(tmp_path):
    config = Config("x", EncoderConfig(9, 8, 4, n_heads=1, n_blocks=1), TextConfig(), steps=1)
    run = Run(tmp_path / "x", config, config.model.build(), {}, None, step=1)
    with pytest.raises(TypeError, match="MaskedLanguageModel predicts no next token"):
        run.loss({}, [1, 2, 3])
    with pytest.raises(TypeError, match="a MaskedLanguageModel does not read plain text; give the model's inputs"):
        run.logits("a")


def test_a_text_stands_for_its_tokens_after_the_token_that_begins_a_text(tmp_path):
    run = random_run(tmp_path / "x", ["The cat sees the sea."])
    content = tokenizers.Tokenizer.from_str(run.tokenizer.as_json())
    content.post_processor = TemplateProcessing(single="a $A", special_tokens=[("a", *run.tokenizer.encode("a"))])
    begins = Tokenizer(content, config={"bos_token": "a", "eos_token": "<|endoftext|>"})
    tokens = run.tokenizer.encode("The sea")
    assert run.tokens("The sea").tolist() == run.tokens(tokens).tolist() == tokens
    assert replace(run, tokenizer=begins).tokens("The sea").tolist() == [*run.tokenizer.encode("a"), *tokens]
    with pytest.raises(TypeError, match="expected one text or its tokens, got 2 texts; give one at a time"):
        run.logits(["The sea", "a"])
    with pytest.raises(ValueError, match="is not in the vocabulary"):
        run.logits([280])
    with pytest.raises(TypeError, match=r"got the text The sea; encode it: run\.tokens\(text\)"):
        run.model.apply({"params": run.params}, "The sea")


@pytest.mark.slow
def test_logits_and_loss_of_a_text_are_those_of_its_tokens(tmp_path):
    run = random_run(tmp_path / "x", ["The cat sees the sea."])
    tokens = run.tokens("The sea")
    logits_TV = run.logits("The sea")
    np.testing.assert_allclose(logits_TV, apply(run.model, run.params, tokens), rtol=1e-4, atol=1e-5)
    expected = -jax.nn.log_softmax(logits_TV)[jnp.arange(len(tokens) - 1), tokens[1:]].mean()
    np.testing.assert_allclose(jax.jit(run.loss, static_argnums=1)(run.params, "The sea"), expected, rtol=1e-5)


@dataclass(frozen=True)
class Elsewhere(ModelConfig):
    """A model config outside this package."""


def test_config_of_another_package_is_read_after_its_import(tmp_path):
    config = Config("x", Elsewhere(), data=TextConfig(), steps=1)
    run = create_run(tmp_path / "x", config, Tokenizer.train(["a"], 257), False)
    assert read_config(run) == config
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace("tests.runs.test_run:Elsewhere", "no_such_package:Elsewhere"))
    with pytest.raises(
        UserError, match=r"Elsewhere of the module 'no_such_package', .* install it, or add its folder to PYTHONPATH"
    ):
        read_config(run)


@pytest.mark.parametrize("module", ["runs.hostile.payload", "runs.hostile", "linked.payload", "payload"])
@pytest.mark.parametrize("part", ["", "base"])
def test_module_in_the_folder_of_a_run_is_not_imported(tmp_path, monkeypatch, module, part):
    config = Config("x", Elsewhere(), data=TextConfig(), steps=1)
    run = create_run(tmp_path / "runs/hostile", config, Tokenizer.train(["a"], 257), False)
    for name in ("__init__.py", "payload.py"):
        (run / name).write_text("raise SystemExit('executed')")
    (tmp_path / "linked").symlink_to(run)
    (run / "base").mkdir()
    text = (run / "config.json").read_text().replace("tests.runs.test_run:Elsewhere", f"{module}:Elsewhere_")
    (run / part / "config.json").write_text(text)
    monkeypatch.syspath_prepend(run if module == "payload" else tmp_path)
    with pytest.raises(UserError, match=rf"names code in its own folder, {module}, which is not executed"):
        read_config(run / part)


@dataclass(frozen=True)
class Lossy(ModelConfig):
    """A model whose config does not survive JSON."""

    sizes: dict[int, int] = field(default_factory=lambda: {1: 1})  # JSON's keys are strings


def test_config_that_does_not_survive_json_is_refused(tmp_path):
    with pytest.raises(TypeError, match="changes in a JSON round trip; use plain field types"):
        create_run(tmp_path / "x", Config("x", Lossy(), data=TextConfig(), steps=1), None, False)
    assert list(tmp_path.iterdir()) == []
