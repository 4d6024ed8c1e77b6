"""Docstrings and names keep to the field's words."""

import ast
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "jaxformer").rglob("*.py"), *(ROOT / "configs").glob("*.py"), *ROOT.glob("*.py")])
NO_FIRST_WORDS = {"What", "Whether", "How", "Which", "Where", "Who", "Whom", "Whose", "When", "Why", "That", "If"}
NO_VERBS = {
    "The", "A", "An", "All", "Any", "As", "At", "By", "Each", "Every", "For", "From", "In", "It", "Its", "No", "None",
    "Of", "On", "One", "Other", "Over", "Some", "Such", "Their", "They", "This", "Those", "To", "Two", "With",
    "Without",
}  # fmt: skip
"""First words of a noun phrase, which a function's docstring does not begin with: it begins with a verb."""
BANNED_WORDS = {
    "along", "apart", "asked", "damage", "damaged", "few", "found", "gaze", "gazes", "gone", "here", "kept", "made",
    "many", "place", "places", "seen", "takes", "there", "told", "wanted", "whole",
}  # fmt: skip
"""Words of no name; a standard term says more."""
BANNED_NAMES = {
    "at_first", "can_continue", "damage", "everywhere", "from_all", "from_first", "goes_on",
    "is_largest", "make_way", "of_each_target", "on_one", "one_of_its_choices", "only_one", "reach",
    "relying_on_others", "smoothing_cost", "wait_for_all",
}  # fmt: skip
"""Names that the glossary replaces by a term of the field."""
FILE_NAMES = {"seeing", "filling", "opening", "answers", "see", "texts", "names", "stream", "fill", "fit", "stills"}
"""Names of files that do not say their content."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yield public classes and functions, and the public methods of public classes, with their dotted names."""
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, Definition) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


TREES = {path: ast.parse(path.read_text()) for path in FILES}
DOCUMENTED_METHODS = {
    name.rpartition(".")[2]
    for tree in TREES.values() for name, node in public_definitions(tree) if "." in name and ast.get_docstring(node)
}  # fmt: skip
"""Methods with a docstring, which overriding ones inherit; `setup` is Flax's."""


def decorators(node: Definition) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def docstring_faults(name: str, node: Definition | ast.Module) -> Iterator[str]:
    text = ast.get_docstring(node)
    if text is None:
        if name.rpartition(".")[2] not in {*DOCUMENTED_METHODS, "setup"} or "." not in name:
            yield f"{name} has no docstring"
        return
    first = re.match(r"[\w-]*", text.lstrip("`"))[0]
    if first in NO_FIRST_WORDS:
        yield f"the docstring of {name} begins with {first}"
    if isinstance(node, ast.FunctionDef) and not decorators(node) & {"property", "cached_property"}:
        if first in NO_VERBS or (first.endswith("s") and not first.endswith("ss")):
            yield f"the docstring of {name} begins with {first}, not with a verb in the imperative"
        arguments = node.args
        known = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        known |= {a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None}
        for argument in documented_arguments(text):
            if argument not in known:
                yield f"Args of {name} names {argument}, which is no parameter"


def documented_arguments(docstring: str) -> list[str]:
    """Return the names that the Args section of a docstring lists."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", docstring, re.MULTILINE)
    entries = [] if section is None else textwrap.dedent(section[1]).splitlines()
    names = [
        entry.partition(":")[0] for entry in entries if re.match(r"[\w*, ]+:", entry) and not entry.startswith(" ")
    ]
    return [name.strip("* ") for entry in names for name in entry.split(",")]


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, parameters, variables and fields that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def field_faults(tree: ast.Module) -> Iterator[str]:
    """Yield the texts below fields and constants that begin with a word like What."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
        for field, text in pairwise(body):
            if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(text, ast.Expr):
                value = text.value.value if isinstance(text.value, ast.Constant) else None
                if isinstance(value, str) and (first := re.match(r"\w*", value)[0]) in NO_FIRST_WORDS:
                    yield f"the text of line {text.lineno} begins with {first}"


def faults(path: Path) -> list[str]:
    tree = TREES[path]
    listed = list(docstring_faults("the module", tree))
    public = dict(public_definitions(tree))
    for name, node in public.items():
        listed += docstring_faults(name, node)
    for node in ast.walk(tree):  # others need no docstring, but a good one if they have one
        if isinstance(node, Definition) and node not in public.values() and ast.get_docstring(node):
            listed += docstring_faults(node.name, node)
    listed += field_faults(tree)
    for name in sorted(set(defined_names(tree))):
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
        if name.strip("_") in BANNED_NAMES or BANNED_WORDS & {*words}:
            listed.append(f"{name} is no name: see the banned words and names")
    if path.stem in FILE_NAMES:
        listed.append("the file's name does not say its content")
    return listed


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_and_docstrings_keep_to_the_words(path):
    listed = faults(path)
    assert not listed, "\n".join(listed)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('"""M."""\ndef f(x):\n    """Whether x."""', "begins with Whether"),
        ('"""M."""\ndef f(x):\n    """The x."""', "not with a verb"),
        ('"""M."""\ndef f(x):\n    """Returns x."""', "not with a verb"),
        ('"""M."""\ndef f(x):\n    """Return x.\n\n    Args:\n      y: no.\n    """', "names y, which is no parameter"),
        ('"""M."""\ndef f(x):\n    return x', "f has no docstring"),
        ('"""How."""', "begins with How"),
        ('"""M."""\nA = 1\n"""What."""', "begins with What"),
        ('"""M."""\nasked_size = 1', "asked_size is no name"),
        ('"""M."""\ndef f(AtFirst):\n    """Do."""', None),
    ],
)
def test_faults_are_noticed(source, fault, monkeypatch):
    path = Path("example.py")
    monkeypatch.setitem(TREES, path, ast.parse(source))
    listed = faults(path)
    assert not listed if fault is None else len(listed) == 1 and fault in listed[0]
