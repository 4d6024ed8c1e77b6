"""Commands, snippets, links and names in the README and in docs/ are those of the project."""

import ast
import base64
import importlib
import json
import os
import re
import shlex
import shutil
import tomllib
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import __main__ as everything
from jaxformer.__main__ import COMMANDS as COMMANDS_OF_PACKAGE
from jaxformer.cli import sample, train
from jaxformer.cli.arguments import load_config
from jaxformer.cli.options import INDEX, CommandLine, option_groups
from jaxformer.config.files import load_module
from jaxformer.interop.export import export_run
from jaxformer.interop.packages import PACKAGES
from jaxformer.runs.run import Run, load_run
from tests.arrays import random_params
from tests.helpers import ROOT, changed, tiny
from tests.public_api import PACKAGES as PACKAGES_OF_API
from tests.shared import trained

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
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Return a folder as a reader has it after the first command, with a smaller model."""
    folder = tmp_path_factory.mktemp("reader")
    made = trained(tmp_path_factory)
    (folder / "books").symlink_to(made / "books")
    shutil.copytree(made / "runs/quick", folder / "runs/modern")
    (folder / "prompts.jsonl").write_text('{"prompt": "The war", "seed": 3, "id": "a"}\n')
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


def test_pages_hold_commands_and_snippets():
    assert len(list(filter(None, SNIPPETS.values()))) >= 3 and len(COMMANDS) >= 20


def test_the_comparison_has_the_projects_that_readers_know():
    page = (ROOT / "docs/comparison.md").read_text()
    assert {"nanoGPT", "transformers", "Keras", "Penzai", "Bonsai", "Tunix", "nanochat"} <= {*re.findall(r"\w+", page)}


def test_the_readme_is_short():
    shown = re.sub("<!--.*?-->", "", PAGES[Path("README.md")])
    assert len(shown.split()) <= MAX_README_WORDS


def test_links_lead_to_files_and_headings():
    lost = []
    for page in (*PAGES, *map(Path, ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md"))):
        for link, anchor in re.findall(r"\]\((?!http)([^)#]+)#?([^)]*)\)", (ROOT / page).read_text()):
            file = ROOT / page.parent / link
            headings = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE) if anchor and file.exists() else [""]
            # as MkDocs and GitHub
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            if not file.exists() or anchor not in slugs:
                lost.append((str(page), link, anchor))
    assert not lost


def test_named_files_exist():
    lost = []
    for page, text in PAGES.items():
        own = set(re.findall(r"^# (\w+\.py)$", text, re.MULTILINE))
        for file in set(re.findall(r"`([\w/.]+\.py)\b", text)) - own:
            if not any((ROOT / folder / file).exists() for folder in ("", "jaxformer", "configs", page.parent)):
                lost.append((str(page), file))
    assert not lost


def arguments(command: str, *words: str) -> object:
    """Return the options of a command, with the defaults of the config that it names."""
    module = importlib.import_module(COMMANDS_OF_PACKAGE[command][0])
    checks = command == "export" and "--check" in words
    cls = module.CheckArguments if checks else module.Arguments
    if command not in ("train", "plan", "ladder", "verify-resume") and not checks:
        return cls()
    spec = CommandLine(words).value("--config", str, "quick")
    return cls(load_config(spec if "/" not in spec else f"{ROOT}/{spec}"))


def test_options_in_the_text_exist():
    defaults = [arguments(command) for command in COMMANDS_OF_PACKAGE]
    defaults += [arguments("train", "--config", spec) for spec in ("vision:vit", "clip")]
    known = {flag for d in defaults for group in option_groups(d) for o in group.options for flag in o.flags}
    known |= {"--help", "--smoke", "--smooth", "--subsets", "--config-draws", "--logdir", "--long", "--no-deps"}
    known |= {"--families-table", "--all-kinds"}
    named = {flag for code in INLINE for flag in re.findall(r"(?<!\S)--[\w.-]+", code)}
    assert {INDEX.sub("", flag) for flag in named} <= known


def parts() -> list[list[str]]:
    """Return the words of each command; a line may have several."""
    return [shlex.split(part) for line in COMMANDS for part in line.split("#")[0].split("&&")]


def test_commands_are_understood():
    """Each option of a command exists, and its values are of its type and in its range."""
    for words in parts():
        match words:
            case ["make", target]:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            case ["pip", "install", "-e", project]:
                extras = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", project)
                assert extras and set((extras[1] or "test").split(",")) <= set(EXTRAS)
            case ["pip", "install", "--no-deps", *packages]:
                assert packages in [[f"{package.name}=={package.version}"] for package in PACKAGES.values()]
            case ["pytest"]:
                assert "pytest" in " ".join(EXTRAS["test"])
            case ["python", "train.py" | "sample.py" as script, *options]:
                CommandLine(options).parse(arguments(script.removesuffix(".py"), *options), "", "")
            case ["python", "-m", "jaxformer", command, *options]:
                CommandLine(options).parse(arguments(command, *options), "", "")
            case ["python", "-m", module, *options] if module.startswith(("benchmarks", "studies")):
                script = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
                assert all(f'"{word}"' in script for word in options if word.startswith("--"))
            case _:
                pytest.fail(f"it is no command of this project: {words}")


OWN_COMMAND = {"jaxformer.cli.command", "jaxformer.cli.options", "jaxformer.terminal"}
"""Modules that a new command of this project itself imports, in docs/extending.md."""


def test_guides_and_examples_import_public_names():
    guides = [text for path, text in PAGES.items() if path.parent in (Path(), Path("docs"))]
    code = [text for page in guides for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)]
    code += [path.read_text() for path in (ROOT / "docs/examples").glob("*.py")]
    imports = {
        (node.module, name.name)
        for text in code
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxformer")
        for name in node.names
    }
    public = {(package, name) for package in PACKAGES_OF_API for name in importlib.import_module(package).__all__}
    assert len(imports) > 40 and not {x for x in imports - public if x[0] not in OWN_COMMAND}


def test_the_notebook_names_what_exists():
    cells = json.loads((ROOT / "docs/examples/tour.ipynb").read_text())["cells"]
    nodes = [*ast.walk(ast.parse("\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "code")))]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("jaxformer."):
            assert all(hasattr(importlib.import_module(node.module), x.name) for x in node.names), ast.unparse(node)
    package = "".join(path.read_text() for path in (ROOT / "jaxformer").rglob("*.py"))
    named = re.findall(r"^ *def (\w+)|^    (\w+): .*[^,\n]$|self\.(\w+)", package, re.MULTILINE)
    known = {"".join(groups) for groups in named} | {"imshow", "set", "show", "subplots"}  # of Matplotlib
    known |= {name for each in (jax, jnp, np, np.ndarray, str, dict, os, Path) for name in dir(each)}
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert "grad_norm" in used and used <= known


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, text in SNIPPETS.items() if text], ids=str)
def test_snippets_run(here, monkeypatch, capsys, page):
    # The reader's text is longer than the small model's context.
    snippet = SNIPPETS[page].replace("The state of the Union is strong.", "The cat sees.").replace(" of the world", "")
    monkeypatch.chdir(here)
    is_of_instruments = page.name == "inspecting.md"  # which work where users forbid implicit axes and dtypes
    with ExitStack() as stack:
        for switch in (jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")) * is_of_instruments:
            stack.enter_context(switch)
        exec(snippet, {})
    assert bool(capsys.readouterr().out) == ("print(" in snippet)


RUN = (
    'sample.py --prompt "We must"', "--run runs/smollm2 --chat --prompt", "--run runs/tuned",
    "runs/tuned --out",
)  # fmt: skip
"""Parts of commands that run, one after another: those that work on what others have made. Other commands run in their
own tests, below tests/cli and in tests/inspect/test_influence.py."""


@pytest.mark.slow
def test_commands_that_follow_each_other_run(here, monkeypatch, capsys):
    pytest.importorskip("jinja2")
    pytest.importorskip("gguf")
    monkeypatch.chdir(here)
    template = re.search(r"^```jinja\n(.*?)^```", PAGES[Path("docs/finetuning.md")], re.M | re.S)[1]
    # In place of the published model stands a small one that has learned nothing.
    config = load_config("quick:llama")
    model = replace(config.model, vocab_size=280, context_length=256, n_blocks=1, n_heads=2, d_ff=(32,), d_model=8)
    tokenizer = load_run("runs/modern").tokenizer.with_chat_template(template)
    params = random_params(model.build(), *model.example())
    llama = Run(Path("llama"), replace(config, model=model), model.build(), params, tokenizer, 0)
    export_run(llama, "gguf", here / "smollm2.gguf")
    with monkeypatch.context() as patch:
        patch.setattr("jaxformer.interop.packages.find_model", lambda _: here / "smollm2.gguf")
        assert everything.main(["import", "smollm2"]) == 0

    chosen = [line for line in COMMANDS if any(part in line for part in RUN)]
    assert all(any(part in line for line in chosen) for part in RUN)
    for words in map(shlex.split, chosen):
        match words:
            case ["python", "train.py", *options]:
                small = tiny(here / "books", 2, "--train.batch-size", str(jax.device_count()))[2:]
                assert train.main(changed(options, *small, "--steps", "2", "--train.report-every", "0")) == 0
            case ["python", "sample.py", *options]:
                assert sample.main(options) == 0
            case _:
                assert words[:3] == ["python", "-m", "jaxformer"]
                assert everything.main(words[3:]) == 0
        assert capsys.readouterr().out


def test_named_configs_and_rungs_exist():
    training = PAGES[Path("docs/training.md")]
    rungs = re.findall(r"`(\w+)`", training.split("The ladder is")[1].split(".")[0])
    assert rungs == list(load_module("ladder").REPORTED)
    specs = set(re.findall(r"configs/\w+\.py(?::\w+)?", "".join(PAGES.values())))
    assert len(specs) >= 12
    for spec in {spec for spec in specs if ":" in spec}:
        assert load_config(str(ROOT / spec)).steps > 0


@pytest.mark.slow
def test_pages_say_what_a_link_to_them_shows_once_the_site_has_an_address():
    hooks = pytest.importorskip("docs.scripts.hooks", reason="needs the extra docs")
    html = "<head><title>A &amp; B</title></head>"
    config = hooks.MkDocsConfig()
    config.site_description = 'says "what" it is'
    assert hooks.with_preview(html, config, "lab.html") == html
    config.site_url = "https://name.org/jaxformer/"
    tags = dict(re.findall('<meta property="og:(.*?)" content="(.*?)">', hooks.with_preview(html, config, "lab.html")))
    assert tags == {
        "type": "website", "title": "A &amp; B", "description": "says &quot;what&quot; it is",
        "url": "https://name.org/jaxformer/lab.html", "image": "https://name.org/jaxformer/laboratory.webp",
    }  # fmt: skip
    assert (ROOT / "docs" / hooks.PICTURE).is_file()
    [icon] = re.findall('<link rel="icon" href="data:image/svg.xml;base64,(.*?)">', hooks.with_icon(html))
    assert base64.b64decode(icon) == (ROOT / "docs/logo.svg").read_bytes()


def test_hooks_run_what_ci_runs():
    ci, hooks = ((ROOT / name).read_text() for name in (".ci/run", ".pre-commit-config.yaml"))
    hooks = hooks.replace(" --force-exclude", "")
    for command in ("ruff check", "ruff format --check", "mypy", "pytest"):
        assert f"entry: {command}\n" in hooks
        assert f"\n  {command}" in ci or (command == "pytest" and "&& pytest$" in ci)
