"""The public API is listed on one page, which changes with it."""

import importlib
import pkgutil
import re
from types import ModuleType

import pytest

import jaxformer
from tests.helpers import ROOT
from tests.public_api import PACKAGES, PATH, public_api_page


def test_page_lists_the_public_api():
    wrong = "the public API is not that of docs/api.md; python -m tests.public_api writes it: note it in CHANGELOG.md"
    assert PATH.read_text() == public_api_page(), wrong


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_resolves_from_its_package_and_has_a_docstring(name):
    package = importlib.import_module(name)
    for public in package.__all__:
        value = getattr(package, public)
        assert not public.startswith("_")
        assert public in dir(package)
        assert value.__doc__
    assert len({*package.__all__}) == len(package.__all__)


@pytest.mark.parametrize(
    "name", [module.name for module in pkgutil.walk_packages(jaxformer.__path__, "jaxformer.") if module.ispkg]
)
def test_no_name_of_a_package_hides_one_of_its_modules_unless_the_package_says_so(name):
    """As `import jaxformer.inspect.verify as V` would give the function, not the module."""
    package = importlib.import_module(name)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    hidden = {x for x in modules & vars(package).keys() if not isinstance(vars(package)[x], ModuleType)}
    hidden |= modules & {*getattr(package, "__all__", ())} - vars(package).keys()
    said = {x for x in hidden if f"`{name}.{x}`" in (package.__doc__ or "")}
    assert hidden == said
    assert hidden <= {"attention", "linear_cross_entropy"}  # of `jaxformer.ops`


def test_version_is_that_of_the_citation_which_the_readme_shows():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {jaxformer.__version__}\n" in citation
    for field, value in re.findall(r"^  (\w+) = \{+(.*?)\}+,$", (ROOT / "README.md").read_text(), re.MULTILINE):
        name = "  - name" if field == "author" else field
        assert f"\n{name}: {value}\n" in citation, field
