"""Every command and snippet of the README and of docs/ works."""

import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxformer.cli import (
    diff,
    export,
    film,
    import_model,
    influence,
    inspect,
    ladder,
    merge,
    sample,
    tokens,
    train,
    verify,
    verify_resume,
)
from jaxformer.cli import eval as evaluate
from jaxformer.cli.arguments import load_config
from jaxformer.cli.options import option_groups
from jaxformer.config.files import load_module
from jaxformer.interop.export import export_run
from jaxformer.interop.packages import PACKAGES
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.runs.run import create_run, load_run
from tests.arrays import random_params
from tests.helpers import ROOT, changed, run, slow, tiny, write_books
from tests.interop.published import installed_model

PAGES = {
    path.relative_to(ROOT): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "node_modules" not in path.parts
}
BLOCKS = [
    (kind, text) for page in PAGES.values() for kind, text in re.findall(r"^```(\w+)\n(.*?)^```", page, re.M | re.S)
]
SNIPPETS = {
    path: "".join(text for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if not text.startswith("# "))
    for path, page in PAGES.items()
    if path.parent.name != "story"
}
"""Python of each page, which is read from top to bottom; docs/extending.md and docs/story have tests of their own."""
LINES = "".join(text for kind, text in BLOCKS if kind == "bash").replace("\\\n", "").splitlines()
COMMANDS = list(dict.fromkeys(line for line in LINES if line))
INLINE = sorted({code for page in PAGES.values() for code in re.findall(r"`([^`\n]+)`", page)})
MAX_README_WORDS = 700
ON_ALL_DEVICES = ("--train.batch-size", f"{jax.device_count()}")
NOT_OF_AN_MLP = {"--model.n-blocks", "--model.n-heads"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def create_untrained_run(folder: Path, spec: str, model: dict, data: dict) -> None:
    """Save random parameters of a small model in a run of their own."""
    config = load_config(f"{ROOT}/configs/{spec}")
    config = replace(config, model=replace(config.model, d_model=8, **model), data=replace(config.data, **data))
    run_folder = create_run(
        folder / "runs" / config.name,
        config,
        config.data.load(config.model, 4, config.seed).tokenizer,
        allow_suffix=False,
    )
    with CheckpointManager(run_folder) as checkpoints:
        params = random_params(config.model.build(), *config.model.example())
        checkpoints.save(0, params, {"none": jnp.zeros(1)}, {"step": 0}, None)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Return a folder as a reader has it after the first command, with a smaller model."""
    folder = tmp_path_factory.mktemp("reader")
    write_books(folder / "books")
    create_untrained_run(folder, "dates.py:bahdanau", {}, {"n_pairs": 64, "n_held_out": 8})
    create_untrained_run(folder, "mlm.py", {"vocab_size": 281, "n_blocks": 1}, {"path": str(folder / "books")})
    small = {"vocab_size": 280, "context_length": 256, "n_blocks": 1, "n_heads": 2, "d_ff": (32,)}
    create_untrained_run(folder, "quick.py:llama", small, {"path": str(folder / "books"), "val_path": None})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = tiny(folder / "books", 2, "--config", str(ROOT / "configs/quick.py:modern"), *ON_ALL_DEVICES)
        assert train.main(options) == 0  # the newest run is the default of --run
    (folder / "prompts.jsonl").write_text('{"prompt": "The war", "seed": 3, "id": "a"}\n')
    example, template = (
        re.search(rf"^```{kind}\n(.*?)^```", PAGES[Path("docs/finetuning.md")], re.M | re.S)[1]
        for kind in ("text", "jinja")
    )
    (folder / "chats.jsonl").write_text("".join(example.replace("sea", f"{i}") for i in range(20)))
    (folder / "chat.jinja").write_text(template)
    for split in ("train", "val"):
        (folder / f"reviews.{split}.tsv").write_text("Good.\tpositive\nBad.\tnegative\n" * 10)
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


def test_pages_hold_commands_and_snippets():
    assert len(list(filter(None, SNIPPETS.values()))) >= 3 and len(COMMANDS) >= 20


def test_the_readme_is_short():
    shown = re.sub("<!--.*?-->", "", PAGES[Path("README.md")])
    assert len(shown.split()) <= MAX_README_WORDS


@pytest.mark.parametrize("page", [*PAGES, *map(Path, ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md"))], ids=str)
def test_links_lead_to_files_and_headings(page):
    for link, anchor in re.findall(r"\]\((?!http)([^)#]+)#?([^)]*)\)", (ROOT / page).read_text()):
        file = ROOT / page.parent / link
        assert file.exists(), link
        headings = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE) if anchor else [""]
        slugs = {
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
        }  # as MkDocs and GitHub
        assert anchor in slugs, anchor


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_named_files_exist(page):
    own = set(re.findall(r"^# (\w+\.py)$", PAGES[page], re.MULTILINE))
    for file in set(re.findall(r"`([\w/.]+\.py)\b", PAGES[page])) - own:
        assert any((ROOT / folder / file).exists() for folder in ("", "jaxformer", "configs", page.parent)), file


@pytest.mark.slow
def test_inline_options_exist():
    defaults = [
        train.Arguments(load_config(f"{ROOT}/configs/{spec}")) for spec in ("quick.py", "vision.py:vit", "clip.py")
    ]
    defaults += [
        sample.Arguments(),
        tokens.Arguments(),
        export.Arguments(),
        import_model.Arguments(),
        evaluate.Arguments(),
        inspect.Arguments(),
        influence.Arguments(),
        verify_resume.Arguments(load_config(f"{ROOT}/configs/quick.py")),
    ]
    known = {flag for d in defaults for group in option_groups(d) for o in group.options for flag in o.flags}
    known |= {"--help", "--smoke", "--smooth", "--subsets", "--logdir"}
    known |= {"--topology", "--folder", "--rungs", "--size", "--long", "--no-deps"}
    for code in INLINE:
        assert set(re.findall(r"(?<!\S)--[\w.-]+", code)) <= known, code


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, text in SNIPPETS.items() if text], ids=str)
def test_snippets_run(here, monkeypatch, capsys, page):
    # The reader's text is longer than the small model's context.
    snippet = SNIPPETS[page].replace("The state of the Union is strong.", "The cat sees.").replace(" of the world", "")
    monkeypatch.chdir(here)
    exec(snippet, {})
    assert bool(capsys.readouterr().out) == ("print" in snippet)


TESTED_ELSEWHERE = (
    "--mesh fsdp=2 --compute",
    "--model.n-blocks 6",
    "log-to tensorboard",
    "jaxformer inspect runs/modern",
    "jaxformer ladder",
    "jaxformer verify ",
    "train.py --resume",
    "minilm",
    "runs/reviews",
)
"""Parts of commands that take seconds and are run by another test, too."""


PRINTED = {
    "diff": (diff.main, "(the same.*){3}"),
    "eval": (evaluate.main, "bpb="),
    "influence": (influence.main, "influence.html|without the batch"),  # of the same run
    "film": (film.main, "film.html: "),  # of the run of the command before
    "merge": (merge.main, "adapters merged"),  # of the run of the command before
    "tokens": (tokens.main, "bytes per token"),
    "verify": (verify.main, r"all invariants hold\n$"),
}
"""Commands that run as they are, and what they print."""


@pytest.mark.slow
@pytest.mark.parametrize("command", [slow(c) if any(x in c for x in TESTED_ELSEWHERE) else c for c in COMMANDS])
def test_commands_run(here, monkeypatch, capsys, command):
    """Commands run in this process, but for those that set up devices of their own."""
    if "chat" in command:
        pytest.importorskip("jinja2")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "stdin", io.StringIO("The war\n"))  # for a conversation
    for part in command.split("#")[0].split("&&"):
        words = shlex.split(part)
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        elif words[:3] == ["pip", "install", "-e"]:
            extras = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", words[3])
            assert extras and set((extras[1] or "test").split(",")) <= set(EXTRAS)
        elif "s3://" in part:  # as in tests/runs/test_storage.py
            assert {word for word in words if word.startswith("--")} <= {"--run", "--resume", "--data.path"}
        elif words == ["pytest"]:
            assert "pytest" in " ".join(EXTRAS["test"])
        elif words[:4] == ["python", "-m", "jaxformer", "plan"]:
            if "--topology" not in words:  # minutes of compiling, and a compiler that may be missing
                env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
                command = [sys.executable, *words[1:]]
                env |= {"PYTHONPATH": str(ROOT)}
                result = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
                assert result.returncode == 0, result.stderr
                assert result.stdout.splitlines()[-1].startswith("fits: ")
        elif words[:3] == ["python", "-m", "jaxformer"] and words[3] in PRINTED:
            main, printed = PRINTED[words[3]]
            assert main(words[4:]) == 0
            assert re.search(printed, capsys.readouterr().out, re.DOTALL)
        elif words[:4] == ["python", "-m", "jaxformer", "ladder"]:
            monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
            monkeypatch.setenv("PYTHONPATH", str(ROOT))
            small = tiny(here / "books", steps=2)[4:]  # without a config and a path
            options = [word for i, word in enumerate(small) if not {small[i - 1], word} & NOT_OF_AN_MLP]
            options += ["--data.path", str(here / "books"), "--data.val-path", "none"]
            assert ladder.main(["--rungs", "mlp_rowwise", *changed(words[4:], *options)]) == 0
            folder = words[words.index("--folder") + 1] if "--folder" in words else "runs/ladder"
            assert (here / folder / "ladder.html").exists()
        elif words[:4] == ["python", "-m", "jaxformer", "inspect"]:
            prompt = ["--prompt", "The people"] if "--prompt" in words else []  # the small model's context is short
            assert inspect.main([*words[4:5], *prompt]) == 0
            assert (here / words[4] / "inspect.html").exists()
        elif words[:3] == ["pip", "install", "--no-deps"]:
            assert words[3:] in [[f"{package.name}=={package.version}"] for package in PACKAGES.values()]
        elif words == ["python", "-m", "jaxformer", "import", "smollm2"]:
            pytest.importorskip("gguf")
            llama = load_run(here / "runs/llama")
            chat = llama.tokenizer.with_chat_template((here / "chat.jinja").read_text())
            export_run(replace(llama, tokenizer=chat), "gguf", here / "smollm2.gguf")
            monkeypatch.setattr("jaxformer.interop.packages.find_model", lambda _: here / "smollm2.gguf")
            assert import_model.main(words[4:]) == 0
            assert capsys.readouterr().out.startswith("run runs/smollm2: ")
        elif words[:5] == ["python", "-m", "jaxformer", "import", "minilm"]:
            installed_model("minilm")  # or skip
            assert import_model.main(words[4:]) == 0
        elif words[:4] == ["python", "-m", "jaxformer", "import"]:
            pytest.importorskip("safetensors")
            export_run(load_run(here / "runs/llama"), "hf", here / words[4])
            assert import_model.main(words[4:]) == 0
            assert capsys.readouterr().out.startswith("run runs/smol: ")
        elif words[:4] == ["python", "-m", "jaxformer", "export"]:
            pytest.importorskip({"gguf": "gguf", "stablehlo": "flatbuffers"}.get(words[-1], "safetensors"))
            assert export.main(words[4:]) == 0
            assert capsys.readouterr().out.startswith("run runs/")
        elif words[:2] == ["python", "-m"] and words[2].startswith(("benchmarks", "studies")):
            script = (ROOT / words[2].replace(".", "/")).with_suffix(".py").read_text()
            assert all(f'"{word}"' in script for word in words if word.startswith("--"))
        elif words[:2] == ["python", "sample.py"]:
            assert sample.main(words[2:]) == 0
            assert capsys.readouterr().out
        elif words == ["python", "train.py", "--config", "quick:modern"]:
            assert (here / "runs/modern/samples.txt").exists()  # that is how the folder was made
        elif words[:2] == ["python", "train.py"] and "--resume" not in words:
            small = tiny(here / "books", steps=2)
            if "chat" in words:  # conversations
                del small[2:4]
            if {"runs/smollm2", "runs/minilm"} & {*words}:  # whose stand-in has another shape than what `here` trains
                del small[2:]
            is_whole = "--config" in words or "runs/minilm" in words
            options = changed(words[2:], *small[2:]) if is_whole else tiny(here / "books", 2, *words[2:])
            options = changed(options, "--steps", "2", "--train.report-every", "0")  # `here` has samples and plots
            if "--mesh" in words:
                result = run("train.py", *options, cwd=here)
                assert result.returncode == 0, result.stderr
            else:
                assert train.main(changed(options, *ON_ALL_DEVICES)) == 0
        else:
            assert words[:2] == ["python", "train.py"]
            result = run(words[1], *words[2:], cwd=here)
            assert result.returncode == 0, result.stderr
            assert result.stdout


@pytest.mark.slow
def test_named_configs_and_rungs_exist():
    training = PAGES[Path("docs/training.md")]
    rungs = re.findall(r"`(\w+)`", training.split("The ladder is")[1].split(".")[0])
    assert rungs == list(load_module("ladder").REPORTED)
    specs = set(re.findall(r"configs/\w+\.py(?::\w+)?", "".join(PAGES.values())))
    assert len(specs) >= 12
    for spec in {spec for spec in specs if ":" in spec}:
        assert load_config(str(ROOT / spec)).steps > 0


def test_hooks_run_what_ci_runs():
    ci, hooks = ((ROOT / name).read_text() for name in (".ci/run", ".pre-commit-config.yaml"))
    hooks = hooks.replace(" --force-exclude", "")
    for command in ("ruff check", "ruff format --check", "mypy", "pytest"):
        assert f"entry: {command}\n" in hooks
        assert f"\n  {command}" in ci or (command == "pytest" and "&& pytest$" in ci)
