"""Sampling settings of published models are read as transformers and llama.cpp read them, and are used."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from jaxformer.__main__ import main
from jaxformer.cli import sample
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.text import OF_CHATS, default_settings
from jaxformer.errors import UserError
from jaxformer.interop.sampling import as_generation_config, as_gguf, from_generation_config, from_gguf, lost
from jaxformer.runs.run import SAMPLING, Run, load_run, read_sampling
from tests.interop.test_import import write

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3, 4]}
LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
CHOICES: dict[str, list[Any]] = {
    "do_sample": [True, False, None], "temperature": [0.2, 1.0, 1.5], "top_k": [0, 1, 20, 50], "top_p": [0.5, 0.9, 1.0],
    "min_p": [0.0, 0.1], "typical_p": [0.3, 1.0], "repetition_penalty": [1.0, 1.2],
}  # fmt: skip


def draws(n: int) -> list[dict[str, Any]]:
    """Return random contents of a generation_config.json."""
    rng = random.Random(0)
    return [
        {name: rng.choice(values) for name, values in CHOICES.items() if rng.random() < 0.6 or name == "do_sample"}
        for _ in range(n)
    ]


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        (LLAMA, {"temperature": 0.6, "top_k": 50, "top_p": 0.9}),  # 50 is transformers' default
        ({"do_sample": True, "top_k": 0}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0}),
        ({"temperature": 0.7, "top_k": None}, {"temperature": 0.7, "top_k": 50}),
        ({"repetition_penalty": 1.1}, {"temperature": 0, "repetition_penalty": 1.1}),
        ({"eos_token_id": 2, "use_cache": True, "transformers_version": "5.0.0"}, {}),
    ],
)
def test_settings_are_those_of_a_generation_config(values: dict[str, Any], settings: dict[str, float]) -> None:
    assert from_generation_config(values, "it") == settings


@pytest.mark.slow
def test_settings_equal_those_that_transformers_samples_with() -> None:
    """Of random configs, those that say whether to sample."""
    transformers = pytest.importorskip("transformers")
    for values in draws(200):
        if values["do_sample"] is None:
            continue
        theirs = transformers.GenerationConfig(**values)
        theirs.update(**theirs._get_default_generation_params(), defaults_only=True)
        expected = {name: getattr(theirs, name) for name in CHOICES}
        if not expected.pop("do_sample"):
            expected = {"temperature": 0, "repetition_penalty": expected["repetition_penalty"]}
        neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
        kept = {name: x for name, x in expected.items() if x is not None and x != neutral.get(name)}
        ours = Sampling(**from_generation_config(values, "it"))
        assert ours == Sampling(**kept), values


def test_settings_survive_both_formats_or_are_named() -> None:
    for values in draws(100):
        settings = from_generation_config(values, "it")
        assert from_generation_config(as_generation_config(settings), "it") == settings
        within = {name: x for name, x in settings.items() if name != "typical_p"}  # for which GGUF has no key
        assert lost(settings, from_gguf(as_gguf(settings), "it")).keys() == settings.keys() - within.keys()
        again = Sampling(**from_gguf(as_gguf(within), "it"))
        expected = Sampling(**within)
        assert again == expected if expected.temperature else again.temperature == 0


def test_absent_keys_of_gguf_have_the_defaults_of_llama_cpp() -> None:
    assert from_gguf({"general.name": "x"}, "it") == {}
    settings = from_gguf({"general.sampling.temp": 0.5, "general.sampling.top_k": -1}, "it")
    assert settings == {"temperature": 0.5, "top_p": 0.95, "min_p": 0.05}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"temperature": "hot"}, "temperature in x.json is 'hot'; it must be a number"),
        ({"temperature": True}, "temperature in x.json is True; it must be a number"),
        ({"do_sample": True, "top_k": 2.5}, "top_k in x.json is 2.5; it must be a number"),
        ({"top_p": 1.5}, "x.json cannot be used: top_p is 1.5; it must be above 0 and at most 1"),
        ({"temperature": float("nan")}, "x.json cannot be used: temperature is nan"),
        ({"temperature": -1}, "x.json cannot be used: temperature is -1; it must be at least 0"),
    ],
)
def test_settings_that_cannot_be_used_are_one_sentence(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        from_generation_config(values, "x.json")


def test_settings_without_equivalent_are_named(caplog: pytest.LogCaptureFixture) -> None:
    from_generation_config({**QWEN, "num_beams": 4, "no_repeat_ngram_size": 3, "epsilon_cutoff": 0.0}, "x.json")
    from_gguf({"general.sampling.mirostat": 2, "general.sampling.temp": 1.0}, "x.gguf")
    assert [record.message for record in caplog.records] == [
        "x.json sets num_beams, no_repeat_ngram_size, which sampling here does not use.",
        "x.gguf sets general.sampling.mirostat, which sampling here does not use.",
    ]


def test_imported_settings_are_the_defaults_and_options_win(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({**QWEN, "eos_token_id": 1}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert main(["import", "model", "--run", "runs/a"]) == 0
    run = load_run("runs/a")
    assert run.sampling == json.loads((tmp_path / "runs/a" / SAMPLING).read_text())
    assert run.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}

    used: list[Sampling] = []
    monkeypatch.setattr(sample, "Completer", lambda run, options, sampling, *rest: used.append(sampling) or 1 / 0)

    def sampling_of(*options: str) -> tuple[Sampling, str]:
        capsys.readouterr()
        with pytest.raises(ZeroDivisionError):
            sample.make_completer(sample.CommandLine(["--run", "runs/a", *options]).parse(sample.Arguments(), "", ""))
        return used[-1], capsys.readouterr().err

    sampling, said = sampling_of("--chat")
    assert sampling == sample.SamplingOptions(0.6, top_k=20, top_p=0.95, min_p=None)
    assert said == "sampling: temperature 0.6, top-k 20, top-p 0.95 (published with the model)\n"
    assert sampling_of()[0] == sampling  # of texts, too
    sampling, said = sampling_of("--temperature", "0.8", "--top-k", "none")
    assert sampling == sample.SamplingOptions(0.8, top_p=0.95, min_p=None)
    assert said == "sampling: temperature 0.8, top-p 0.95 (where not given, published with the model)\n"

    (tmp_path / "runs/a" / SAMPLING).unlink()
    sampling, said = sampling_of("--chat")
    assert (sampling.temperature, sampling.top_p) == (0.2, 0.9) == tuple(OF_CHATS.values())
    assert said == "sampling: temperature 0.2, top-p 0.9 (the defaults of chats)\n"
    assert sampling_of("--chat", "--temperature", "0.8", "--top-p", "1")[0].temperature == 0.8
    assert sampling_of() == (sample.SamplingOptions(), "")
    assert sample.SamplingOptions() == sample.SamplingOptions(0.8, min_p=0.05)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[0.6]", "cannot be read as sampling settings .it is not an object of numbers.; mend it"),
        ('{"temperature": "0.6"}', "it is not an object of numbers"),
        ('{"temperature"', "cannot be read as sampling settings"),
        ('{"temprature": 0.6}', "cannot be used: temprature is unknown; the known ones are temperature, top_k"),
        ('{"top_p": 2}', "cannot be used: top_p is 2; it must be above 0"),
        ('{"top_k": 50.0}', "cannot be used: top_k is 50.0; it must be a whole number"),
    ],
)
def test_settings_of_a_run_that_cannot_be_used_are_one_sentence(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / SAMPLING).write_text(text)
    with pytest.raises(UserError, match=problem):
        default_settings(Run(tmp_path, None, None, {}, None, 0, sampling=read_sampling(tmp_path)))
