"""Options: words of a command line as typed values, and the text of --help."""

import contextlib
import dataclasses
import importlib
import json
import pkgutil
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import pytest

from jaxformer import __main__ as everything
from jaxformer import data, models
from jaxformer.__main__ import COMMANDS
from jaxformer.cli import eval as eval_command
from jaxformer.cli import sample, train
from jaxformer.cli.arguments import load_config
from jaxformer.cli.options import (
    HIDDEN,
    MERGED,
    POSITIONAL,
    CommandLine,
    as_words,
    help_text,
    option_groups,
    with_flags,
)
from jaxformer.config.fields import FieldDocs, field_docstrings, from_dict, to_dict, type_hints
from jaxformer.decode.completion import CompletionOptions
from jaxformer.decode.samplers import Sampling
from jaxformer.errors import UserError
from tests.helpers import ROOT


@pytest.mark.parametrize("again", ["--steps=4", "--no-resume --resume", "--train.batch_size 2 --train.batch-size 2"])
def test_a_repeated_option_is_refused(capsys, again):
    assert train.main(["--steps", "3", *again.split()]) == 2
    err = capsys.readouterr().err
    assert "is given twice; give it once" in err and err.count("\n") == 1


def test_help_lists_the_fields_of_the_model(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    assert not caught.value.code
    shown = capsys.readouterr().out
    for option in ("--config", "--resume", "--steps", "--model.n-heads", "--data.val-path", "--optimizer.momentum"):
        assert option in shown


@pytest.mark.parametrize(
    "command",
    [[], *([name, "--help"] for name in COMMANDS), ["train", "-h", "--config", f"{ROOT}/configs/clip.py"]],
)
def test_help_wraps_lines_once_and_breaks_no_flag(capsys, monkeypatch, command):
    monkeypatch.chdir(ROOT)
    columns = 50
    monkeypatch.setenv("COLUMNS", str(columns))
    with contextlib.suppress(SystemExit):
        everything.main(command)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 8 and all(len(line) <= columns or len(line.split()) == 1 for line in lines)
    assert not any(re.search(r"--[\w.-]*-$", line) for line in lines)
    for line, following in pairwise(lines):  # a text goes on where the line is full
        if line.startswith("      ") and following.startswith("      "):
            assert len(line) + 1 + len(following.split()[0]) > columns, line


def subclasses(cls):
    return {cls, *(deeper for below in cls.__subclasses__() for deeper in subclasses(below))}


def test_every_field_of_every_config_has_a_sentence_and_none_speaks_of_rungs():
    for info in [
        *pkgutil.iter_modules(models.__path__, "jaxformer.models."),
        *pkgutil.iter_modules(data.__path__, "jaxformer.data."),
    ]:
        importlib.import_module(info.name)
    importlib.import_module("jaxformer.ladder.forecasts")
    configs = {cls for base in (FieldDocs, CompletionOptions, Sampling) for cls in subclasses(base)} - {FieldDocs}
    configs = {cls for cls in configs if cls.__module__.startswith("jaxformer.")}
    assert len(configs) > 25
    for cls in configs:
        docs = field_docstrings(cls)
        assert "rung" not in f"{cls.__doc__} {docs}".lower().replace("rungdecoder", ""), cls
        for f in dataclasses.fields(cls):
            if HIDDEN not in getattr(type_hints(cls)[f.name], "__metadata__", ()):
                assert re.fullmatch(r"\W?[A-Zε].*\.", docs.get(f.name, ""), re.DOTALL), f"{cls.__name__}.{f.name}"


def test_help_shows_type_text_and_default_of_an_option():
    shown = help_text(sample.Arguments(), "sample.py", "Continue texts.")
    assert shown.startswith("usage: sample.py [OPTIONS] [RUN]\n\nContinue texts.\n\noptions:\n  -h, --help\n")
    assert "  [RUN], --run STR|none\n      Folder of the run" in shown
    assert "  --cache-dtype {float32,bfloat16,int8}\n" in shown and "  --explain, --no-explain\n" in shown
    assert "  --num-beams INT\n      Beams of a beam search" in shown and "(default: 1)" in shown
    assert "  --top-k INT|none\n      Number of most likely tokens to sample from.\n" in shown
    assert shown.count("--logit-bias") == 1  # what `Sampling` calls so is given as text


@dataclass(frozen=True)
class Inner:
    rate: float = 1.0
    layer_sizes: tuple[int, ...] = (1,)
    fast: bool = True
    resize: bool | None = None


@dataclass(frozen=True)
class Outer:
    run: Annotated[str | None, POSITIONAL] = None
    inner: Inner = Inner()
    merged: Annotated[Inner, MERGED] = Inner()
    stop: tuple[str, ...] = ()
    kind: Literal["none", "a", "b"] | None = "a"


@pytest.mark.parametrize(
    ("words", "parsed"),
    [
        ([], Outer()),
        (["--inner.rate", "-1e-3"], Outer(inner=Inner(rate=-1e-3))),
        (["--inner.rate=.5", "--rate=2"], Outer(inner=Inner(rate=0.5), merged=Inner(rate=2.0))),
        (["--inner.layer_sizes", "2", "3"], Outer(inner=Inner(layer_sizes=(2, 3)))),
        (["--inner.layer-sizes"], Outer(inner=Inner(layer_sizes=()))),
        (["--inner.no-fast", "runs/a"], Outer("runs/a", inner=Inner(fast=False))),
        (
            ["runs/a", "--fast", "--stop", "--", "-x", "--->", "- a --b"],
            Outer("runs/a", stop=("--", "-x", "--->", "- a --b")),
        ),
        (["--stop=--rate=3"], Outer(stop=("--rate=3",))),
        (["--resize", "--inner.no-resize"], Outer(inner=Inner(resize=False), merged=Inner(resize=True))),
        (["--kind", "b"], Outer(kind="b")),
    ],
)
def test_words_become_values_of_fields(words, parsed):
    assert CommandLine(words).parse(Outer(), "", "") == parsed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate"], "--rate has no value; give one."),
        (["--fast=1"], "--fast is '1', but it has no value; give --fast or --no-fast."),
        (
            ["a", "--inner.resize", "false"],
            "is 'false', but it has no value; give --inner.resize or --inner.no-resize.",
        ),
        (["a", "b"], "'b' belongs to no option"),
        (["--rate", "1", "2", "3"], "'3' belongs to no option"),
        (["--kind", "c"], "--kind is 'c'; it must be one of none, a, b."),
    ],
)
def test_words_that_fit_no_field_are_refused(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        CommandLine(words).parse(Outer(), "", "")


class Scaling:
    pass


@dataclass(frozen=True)
class ByPart(Scaling):
    """Factors by part.

    Attributes:
      factor, low: numbers of
        something.
    """

    factor: float
    low: float


@dataclass(frozen=True)
class Even(Scaling):
    factor: float
    high: float = 4.0


@dataclass(frozen=True)
class Rotation:
    base: float = 2.0
    scaling: float | Scaling = 1.0

    def __post_init__(self) -> None:
        if self.base < 1:
            raise ValueError(f"base is {self.base}; it must be at least 1")


@dataclass(frozen=True)
class Text(str):
    """A class of somebody else's, which extends a plain type."""

    name: str = ""


@dataclass(frozen=True)
class Kind:
    window: int | None = None
    rotation: Rotation | None = None
    fast: bool = True


@dataclass(frozen=True)
class Nested:
    on: Rotation | None = Rotation(3.0)
    off: Rotation | None = None
    kinds: tuple[Kind, ...] = (Kind(),)
    text: str | None = None


@pytest.mark.parametrize(
    ("words", "parsed"),
    [
        ("--on.scaling 2", Nested(on=Rotation(3.0, 2.0))),
        ("--on none", Nested(on=None)),
        ("--off.base 5", Nested(off=Rotation(5.0))),
        ("--off.scaling.factor 8 --off.scaling.low 1", Nested(off=Rotation(2.0, ByPart(8.0, 1.0)))),
        ("--off.scaling.factor 8", Nested(off=Rotation(2.0, Even(8.0)))),
        ("--kinds.window 8", Nested(kinds=(Kind(8),))),
        ("--kinds.1.window 8", Nested(kinds=(Kind(), Kind(8)))),
        ("--kinds.window 8 --kinds.2.window none", Nested(kinds=(Kind(8), Kind(8), Kind()))),
        ("--kinds.window 8 --kinds.2.no-fast", Nested(kinds=(Kind(8), Kind(8), Kind(8, fast=False)))),
        ("--kinds.1.no-fast --kinds.0.rotation.base 7", Nested(kinds=(Kind(rotation=Rotation(7.0)), Kind(fast=False)))),
    ],
)
def test_an_option_of_a_nested_part_switches_it_on(words, parsed):
    assert CommandLine(words.split()).parse(Nested(), "", "") == parsed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--on yes", "--on is 'yes'; it must be none, or have fields of its own, such as --on.base."),
        ("--on none --on.base 3", "--on is None, but its fields are set as well; omit one of them."),
        ("--on.bse 3", "unknown option --on.bse; did you mean --on.base?"),
        ("--on.base 0", "--on: base is 0.0; it must be at least 1."),
        ("--off.scaling.low 8", "--off.scaling is incomplete; add --off.scaling.factor."),
        ("--kinds none", "unknown option --kinds; did you mean --kinds.window?"),
        ("--on.scaling none", "--on.scaling is 'none'; it must be a number"),
        ("--on.1.base 3", "unknown option --on.1.base; did you mean --on.base?"),
        ("--kinds.9999.window 3", "--kinds.9999 is beyond the 1024 items that are possible; number from 0."),
    ],
)
def test_options_of_a_nested_part_that_do_not_fit_are_refused(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        CommandLine(words.split()).parse(Nested(), "", "")


def test_a_part_of_a_merged_dataclass_is_named_as_its_options_are():
    @dataclass(frozen=True)
    class Command:
        run_config: Annotated[Nested, MERGED] = Nested()

    with pytest.raises(UserError, match=re.escape("--off.scaling is incomplete; add --off.scaling.factor")):
        CommandLine(["--off.scaling.low", "8"]).parse(Command(), "", "")


def test_options_that_are_printed_for_a_nested_value_set_it():
    for value in (Nested(None, Rotation(4.0), (Kind(8, Rotation()), Kind(fast=False))), Nested(kinds=(Kind(3),))):
        words = " ".join(as_words(f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        assert CommandLine(words.split()).parse(Nested(), "", "") == value
    shown = help_text(Nested(), "", "")
    assert "  --on none\n" in shown and "  --off.scaling FLOAT\n" in shown and "  --off.scaling.low FLOAT\n" in shown
    assert "  --kinds.window INT|none\n" in shown and "FLOAT\n      Numbers of something.\n" in shown


def test_a_nested_part_of_several_classes_is_stored_with_the_name_of_its_class():
    for scaling in (2.0, ByPart(8.0, 1.0), Even(8.0)):
        value = Nested(on=Rotation(3.0, scaling), kinds=(Kind(rotation=Rotation(3.0, scaling)),))
        stored = json.loads(json.dumps(to_dict(value)))
        assert from_dict(Nested, stored) == value
    assert stored["on"]["scaling"]["kind"] == f"{__name__}:Even"
    del stored["on"]["scaling"]["kind"]  # all fields are those of one class
    assert from_dict(Nested, stored) == value


def test_options_of_evaluation_have_the_same_form_as_in_training():
    trained, evaluated = (
        {
            option.flag: option.usage().removesuffix("|none")
            for group in option_groups(options)
            for option in group.options
        }
        for options in (load_config("quick"), eval_command.Arguments())
    )
    shared = trained.keys() & evaluated.keys()
    assert shared >= {"--data.path", "--data.unwrap", "--data.column"}
    assert {flag: trained[flag] for flag in shared} == {flag: evaluated[flag] for flag in shared}


def test_options_are_read_before_all_are_known():
    line = CommandLine(["--size=a=b", "x", "--no-resume", "--layer_sizes", "1", "2"])
    assert line.given == {"--size", "--resume", "--layer-sizes"}
    assert line.value("--size", str) == "a=b" and line.value("--absent", int, 3) == 3
    assert line.value("--resume", bool, True) is False and line.value("--layer-sizes", tuple[int, ...]) == (1, 2)
    assert line.words(without={"--resume"}) == ["--size=a=b", "x", "--layer_sizes", "1", "2"]


@pytest.mark.parametrize(
    ("named", "shown"),
    [
        ("`train.batch_size` is 0; change `mesh`.", "--train.batch-size is 0; change --mesh."),
        ("set `mesh='fsdp=4'` or `model.bias=False`", "set --mesh fsdp=4 or --model.no-bias"),
        ("`resume=True` `run='my runs/a'`", "--resume --run 'my runs/a'"),
        (
            "`model.image_size=(64, 48)`, `optimizer.clip_norm=None`",
            "--model.image-size 64 48, --optimizer.clip-norm none",
        ),
        ("`x=y z`, `jaxformer train`, `--steps`, `W_Q` and `a", "`x=y z`, `jaxformer train`, `--steps`, `W_Q` and `a"),
        ("no data at runs/`a` or x`foo`.txt (see `data.path`)", "no data at runs/`a` or x`foo`.txt (see --data.path)"),
    ],
)
def test_fields_that_a_message_names_become_options(named, shown):
    assert with_flags(named) == shown


def test_only_the_command_line_spells_options():
    """Elsewhere, messages and docstrings name fields; see `UserError`."""
    of_other_programs = {"--no-deps", "--merge", "--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_autotune_level"}
    package = ROOT / "jaxformer"
    files = {*package.rglob("*.py")} - {*(package / "cli").rglob("*.py"), package / "__main__.py"}
    spelled = {word for file in files for word in re.findall(r"(?<![\w-])--[a-z{][\w.-]*", file.read_text("utf-8"))}
    assert len(files) > 150 and spelled == of_other_programs
