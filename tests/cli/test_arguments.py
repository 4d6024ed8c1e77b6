"""Arguments and their errors: one sentence, status 2, no traceback, nothing written."""

import fcntl
from dataclasses import replace
from itertools import pairwise

import pytest

from jaxformer import __main__ as everything
from jaxformer.cli import sample, train
from jaxformer.cli.arguments import load_config, with_fitting_patches
from jaxformer.cli.options import CommandLine
from jaxformer.config import Config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
from jaxformer.models.clip import CLIPConfig, ImageTowerConfig
from jaxformer.models.vit import ViTConfig
from jaxformer.runs.lock import LOCK
from jaxformer.runs.run import create_run
from tests.arrays import plain_decoder
from tests.helpers import ROOT, changed, tiny, write_books


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_books(tmp_path / "books")
    (tmp_path / "latin1.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("A few words, and a few more.\n" * 4)
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("not a folder")
    return tmp_path


TRAIN = [
    ("--stepz 4", "unknown option --stepz; did you mean --steps?"),
    ("--model.n-head 3", "unknown option --model.n-head; did you mean --model.n-heads?"),
    ("--optimiser.learning-rate=3", "did you mean --optimizer.learning-rate?"),
    ("--lr 3", "unknown option --lr; did you mean --optimizer.learning-rate?"),
    ("--batch-size 3", "did you mean --train.batch-size?"),
    ("--out-dir a", "did you mean --run?"),
    ("--learnig-rate 3", "did you mean --optimizer.learning-rate?"),
    ("--unheard-of 3", "unknown option --unheard-of; --help lists all options."),
    ("--optimizer.name adam", "--optimizer.name is 'adam'; it must be one of nesterov_sgd, adamw, muon, lion, "),
    ("--steps 1e3", "--steps is '1e3'; it must be a whole number, such as 1000."),
    ("--optimizer.learning-rate fast", "--optimizer.learning-rate is 'fast'; it must be a number, such as 0.5."),
    ("--run=", "--run is ''; it must be a local folder"),
    ("--steps 0", "--steps is 0; it must be at least 1"),
    ("--model.n-heads 0", "--model.n-heads is 0; it must be at least 1"),
    ("--model.n-heads 5", "--model.d-model 16 is not divisible by n_heads 5; use 4 heads"),
    ("--data.path nowhere", "no data at nowhere"),
    ("--data.path taken", "holds no file of .txt"),
    ("--data.path empty.txt", "hold no text"),
    ("--data.path latin1.txt", "latin1.txt is not UTF-8: byte 0xe9 at offset 3"),
    (
        "--data.path short.txt --model.vocab-size 257",
        "fewer than --train.batch-size 8; set it to at most 6, or give more",
    ),
    (
        "--data.path short.txt --model.vocab-size 257 --model.context-length 200",
        "has 0 window(s) of --model.context-length + 1 = 201 tokens",
    ),
    ("--data.path=", "the path of the data is ''; give a file"),
    ("--data.val-path=", "the path of the data is ''; give a file"),
    ("--model.vocab-size 20", "at least 257"),
    ("--train.batch-size 4", "--train.batch-size 4 does not split over 8 devices"),
    ("--run taken", "taken exists; choose another folder, or continue a training there with --resume --run taken"),
    ("--run file", "--run is 'file'; it must be a local folder, such as runs/mine."),
    ("--data.path nowhere --run file/run", "file is not writable (Not a directory); choose another --run"),
    ("--run taken --resume", "taken is not a run"),
    ("--run nowhere --resume", "nowhere does not exist"),
    ("--resume", "no run below runs"),
    ("--resume=1", "--resume"),
    ("--allow-changed-data", "--allow-changed-data needs --resume"),
    ("--model.d-model 1048576", "parameters; with their gradients they need"),
    ("--config nowhere.py", "no config file nowhere.py; there are "),
    ("--config quikc", "no config file quikc; did you mean quick?"),
    ("--config quick:modren", "quick has no config 'modren'; did you mean quick:modern?"),
    ("--config configs/quick.py:modern", "no config file configs/quick.py; did you mean quick?"),
    ("--config C:\\own\\quick.py:modern", "no config file C:\\own\\quick.py"),
    ("--config short.txt", "short.txt"),
    (f"--config {ROOT}/configs/ladder.py", "it has mlp_rowwise"),
]


def test_wrong_training_options_are_one_sentence(here, capsys):
    before = sorted(p.name for p in here.iterdir())
    for options, message in TRAIN:
        given = options.split()
        base = [] if "--config" in given else tiny(here / "books", 20, "--train.batch-size", "8")
        assert train.main(changed(base, *given)) == 2, options
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and message in err, options
        assert sorted(p.name for p in here.iterdir()) == before, options


def test_a_run_is_named_with_or_without_the_flag(here, capsys):
    """In each command that reads one run."""
    others = {"export": ["--format", "gguf"], "merge": ["--out", "merged"], "tokens": ["a text"]}
    for name in ("inspect", "verify", "export", "eval", "sample", "tokens", "merge"):
        messages = []
        for given in (["file"], ["--run", "file"], ["file", "--run", "file"], ["--run", "taken", "file"]):
            assert everything.main([name, *others.get(name, []), *given]) == 2
            messages.append(capsys.readouterr().err.splitlines()[-1])
        assert messages[:2] == ["error: --run is 'file'; it must be a local folder, such as runs/mine."] * 2, name
        assert messages[2:] == ["error: --run is given twice, with and without its flag; give it once."] * 2, name


def test_a_value_of_a_flag_is_not_taken_for_the_run(here, capsys):
    assert everything.main(["eval", "--data.path", "a", "--data.unwrap", "false"]) == 2
    assert "give --data.unwrap or --data.no-unwrap" in capsys.readouterr().err


SAMPLE = [
    ("--temp 1", "unknown option --temp; did you mean --temperature?"),
    ("--temprature 1", "unknown option --temprature; did you mean --temperature?"),
    ("--temperature -0.1", "--temperature is -0.1"),
    ("--temperature warm", "--temperature"),
    ("--temperature nan", "temperature is nan"),
    ("--top-p 0", "--top-p is 0.0"),
    ("--top-p 1.5", "--top-p is 1.5"),
    ("--top-k 0", "--top-k is 0"),
    ("--max-new-tokens 0", "--max-new-tokens is 0"),
    ("--num-samples 0", "--num-samples is 0"),
    ("--seed -1", "--seed is -1"),
    ("--seed 4294967296", "--seed is 4294967296; it must be at most 4294967295"),
    ("--prefill-chunk 3000000000", "--prefill-chunk is 3000000000; it must be at most 2147483647"),
    ("--draft lookup --draft-tokens 0", "--draft-tokens is 0; it must be at least 1 and at most 64"),
    ("--draft lookup --prefill-chunk 8", "omit --prefill-chunk, or --draft"),
    ("--weights int8 --mesh data=2", "int8 weights cannot be sharded with --mesh; omit it"),
    ("--num-beams 2 --length-penalty -200", "--length-penalty is -200.0; it must be at least -10"),
    ("--batch-size 0", "--batch-size is 0"),
    ("--prefill-chunk 0", "--prefill-chunk is 0"),
    ("--min-p 2", "--min-p is 2.0"),
    ("--repetition-penalty 0", "--repetition-penalty is 0.0"),
    ("--min-new-tokens -1", "--min-new-tokens is -1"),
    ("--cache-dtype int4", "--cache-dtype is 'int4'; it must be one of "),
    ("--num-beams 0", "--num-beams is 0"),
    ("--length-penalty 2", "--length-penalty has no effect without beam search"),
    ("--num-beams 2 --temperature 0.8", "--temperature has no effect on beam search; omit it"),
    ("--num-beams 2 --bad-words a", "--bad-words has no effect on beam search"),
    ("--num-beams 2 --num-samples 3", "--num-samples is 3; it must be at most --num-beams, 2"),
    ("--prompt a --prompt b", "--prompt is given twice; give it once, with all values"),
    ("--stop=a --stop b", "--stop is given twice"),
    ("--bad_words a --bad-words b", "--bad-words is given twice"),
    ("--prompt a --prompts-file b", "--prompt and --prompts-file exclude each other; give one of them"),
    ("--prompts-file b --interactive", "--prompts-file and --interactive exclude each other"),
    ("--system brief", "--system has no effect without a chat; omit it, or give --chat"),
    ("--prompts-file nowhere", "nowhere cannot be read: No such file or directory"),
    ("--prompt", "the prompt is empty"),
    ("--run nowhere", "nowhere does not exist"),
    ("", "no run below runs"),
]


def test_wrong_sampling_options_are_one_sentence(here, capsys):
    for options, message in SAMPLE:
        assert sample.main(options.split()) == 2, options
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and message in err, options


def test_an_empty_stop_string_is_refused(here, capsys):
    assert sample.main(["--stop", "x", ""]) == 2
    assert "a stop string is empty; omit it" in capsys.readouterr().err


@pytest.mark.parametrize(("prompt", "message"), [("", "the prompt is empty"), ("a\udcff", "not UTF-8, at character 1")])
def test_an_empty_or_undecodable_prompt_is_refused(here, capsys, prompt, message):
    assert sample.main(["--prompt", prompt]) == 2
    assert message in capsys.readouterr().err


def test_a_locked_run_is_refused_before_its_data_is_read(here, capsys):
    config = Config("x", plain_decoder(), TextConfig(path="nowhere"), steps=1)
    run = create_run(here / "run", config, Tokenizer.train([], 257), allow_suffix=False)
    with (run / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("7")
        lock.flush()
        assert train.main(["--resume", "--run", "run"]) == 2
    assert capsys.readouterr().err.startswith("error: process 7 is training in run; wait for it or stop it, or choose")


def test_configs_have_names_everywhere_and_files_of_ones_own_have_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quick", "quick:modern"):
        assert load_config(name) == load_config(f"{ROOT}/configs/quick.py:{name.partition(':')[2] or name}")
    quick = (ROOT / "configs/quick.py").read_text().replace("steps=1200", "steps=7")
    (tmp_path / "quick.py").write_text(quick)
    (tmp_path / "quick").write_text(quick)  # no .py: a name is one of this project's
    assert (load_config("quick.py:modern").steps, load_config("quick").steps) == (7, 1200)


def test_a_misspelled_name_of_a_file_beside_is_answered_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    with pytest.raises(UserError, match=r"no config file mine; did you mean mine\.py\?"):
        load_config("mine")


def test_a_config_file_that_fails_is_answered_with_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import math\n\nmath.log(0)\n")
    for name in ("mine.py", str(tmp_path / "mine.py")):
        with pytest.raises(UserError, match=r"mine\.py, line 3, failed: ValueError: math domain error\.$"):
            load_config(name)


def test_each_rung_changes_only_the_named_fields_of_the_one_before():
    from jaxformer.config.fields import differences

    names = ["mlp_rowwise", "mlp_concat", "mix_static", "mix_dynamic", "mix_gram", "mix_qkv", "mix_unmasked"]
    rungs = [load_config(f"{ROOT}/configs/ladder.py:{name}") for name in names]
    for before, after in pairwise(rungs):
        field = "model.causal" if after.name == "mix_unmasked" else "model.mixing"
        assert {name for name, _, _ in differences(before, after)} == {field, "name"}

    names = ["attention_unscaled", "attention_scaled", "residual", "multihead_full", "multihead", "two_blocks",
             "four_blocks", "rmsnorm", "head_scale"]  # fmt: skip
    changes = [
        {"model.scaled", "model.projection_std"},
        {"model.residual", "model.mlp_logits"},
        {"model.n_heads", "model.head_dim", "model.output_projection", "model.scaled_by_model"},
        {"model.head_dim"},
        {"model.n_blocks"},
        {"model.n_blocks"},
        {"model.norm"},
        {"model.scaled_by_model"},
    ]
    rungs = [load_config(f"{ROOT}/configs/ladder.py:{name}") for name in names]
    for before, after, fields in zip(rungs, rungs[1:], changes, strict=False):
        assert {field for field, _, _ in differences(before, after)} == fields | {"name"}


@pytest.mark.parametrize(
    ("options", "size", "patch"),
    [
        ("--model.image-size 40", (40, 40), (10, 10)),
        ("--model.image-size 40 21", (40, 21), (10, 7)),
        ("--model.image_size=40", (40, 40), (10, 10)),
        ("--model.image-size 40 --model.patch-size 8", (28, 28), (7, 7)),  # to be parsed as it is
        ("--model.patch-size 8", (32, 32), (8, 8)),
        ("--model.patch-size 8 14", (32, 28), (8, 14)),
        ("--model.patch-size 0", (28, 28), (7, 7)),  # to be refused
        ("--steps 3", (28, 28), (7, 7)),
    ],
)
def test_patches_divide_images_where_one_of_their_sizes_is_given(options, size, patch):
    vit = ViTConfig(image_size=(28,), patch_size=(7,))
    fitted = with_fitting_patches(vit, CommandLine(options.split()))
    assert fitted == replace(vit, image_size=size, patch_size=patch)
    clip = CLIPConfig(ImageTowerConfig(image_size=(28,), patch_size=(7,)))
    fitted = with_fitting_patches(clip, CommandLine(options.replace("model.", "model.vision.").split()))
    assert fitted == replace(clip, vision=replace(clip.vision, image_size=size, patch_size=patch))
