"""Files: the home folder and the cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxformer
from jaxformer.data.image_folder import open_image_folder
from jaxformer.data.pairs import find_splits
from jaxformer.data.text import find_files
from jaxformer.errors import UserError
from jaxformer.files import cache_root, expand_home, write_atomically


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without a passwd entry, and no HOME."""
    pwd = pytest.importorskip("pwd")

    def missing(_: int) -> Any:
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", missing)
    for name in ("HOME", "JAXFORMER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_the_error_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no home folder; set JAXFORMER_CACHE"):
        cache_root()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "jaxformer"
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("read", [expand_home, find_files, open_image_folder, lambda path: find_splits(path, None)])
def test_data_in_an_unknown_home_folder_is_refused(read: Callable[[str], Any]) -> None:
    with pytest.raises(UserError, match=r"'~/data' is not a readable path .*home"):
        read("~/data")


def test_a_file_that_cannot_be_written_is_named_itself(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for file in (tmp_path / "none" / "x.html", tmp_path / "file" / "x.html"):
        with pytest.raises(OSError, match=r"x\.html'$"):
            write_atomically(file, "")


def test_no_other_module_asks_for_the_home_folder_or_the_users_name() -> None:
    package = Path(jaxformer.__file__).parent
    asking = {
        f.relative_to(package)
        for f in package.rglob("*.py")
        if re.search(r"expanduser|Path\.home|getuser", f.read_text())
    }
    assert asking == {Path("files.py")}
