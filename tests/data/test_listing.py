"""Listing of the files of folders and globs."""

import os
from pathlib import Path

import pytest

from jaxformer.data.listing import Listing, list_files
from jaxformer.errors import UserError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)


def listed(location: str) -> Listing:
    return list_files(Path(location), lambda path: path.suffix == ".txt")


def names(location: str) -> list[str]:
    return [path.as_posix() for path in listed(location).files]


def test_folders_and_globs_leave_out_what_is_hidden(here: Path) -> None:
    write("d/a.txt", "d/deep/b.txt", "d/._a.txt", "d/.git/c.txt", "d/deep/.ipynb_checkpoints/b.txt")
    for location in ("d", str(here / "d"), "d/**/*.txt", "d/**", "*/**/*.txt"):
        assert [path.name for path in listed(location).files] == ["a.txt", "b.txt"]
    assert names("d/*.txt") == ["d/a.txt"] and listed("d").notes("d") == ()
    assert names("d/.git") == names("d/.git/*.txt") == names("d/.g*/*.txt") == ["d/.git/c.txt"]  # spelled


def test_files_are_sorted_by_the_names_of_their_folders(here: Path) -> None:
    write("d/b.txt", "d/a/z.txt", "d/a.txt", "d/a-b/y.txt", "d/B/x.txt", "d/10.txt", "d/9.txt")
    assert names("d") == [path.as_posix() for path in sorted(Path("d").rglob("*.txt"))]
    assert names("d/**/*.txt") == names("d")
    assert listed("d").notes("d") == ()


def test_links_are_followed_and_nothing_is_read_twice(here: Path) -> None:
    write("d/a.txt", "d/deep/b.txt", "elsewhere/more/c.txt", "elsewhere/d.txt")
    Path("d/a-link.txt").symlink_to("a.txt")  # of two names, the first
    Path("d/0").symlink_to(here / "elsewhere")
    Path("d/1").symlink_to(here / "elsewhere/more")
    Path("d/2").symlink_to("deep")
    Path("d/deep/loop").symlink_to(here / "d")
    Path("elsewhere/more/back").symlink_to(here)
    expected = ["d/0/d.txt", "d/0/more/c.txt", "d/a-link.txt", "d/deep/b.txt"]
    for location in ("d", "d/**/*.txt"):
        assert names(location) == expected
        assert listed(location).left_out == {"repeated by a link": 1}  # a.txt; folders are not entered again
    assert names("d/*/*.txt") == ["d/0/d.txt", "d/1/c.txt", "d/2/b.txt"]


def test_what_exists_is_taken_literally(here: Path) -> None:
    write("data [v2]*?/a[1].txt", "data [v2]*?/a1.txt", "data [v2]*?/deep/b.txt", "data v/a1.txt", "data v/b.txt")
    folder = "data [v2]*?"
    assert names(folder) == [f"{folder}/{name}" for name in ("a1.txt", "a[1].txt", "deep/b.txt")]
    assert names(f"{folder}/a[1].txt") == [f"{folder}/a[1].txt"]
    assert names(f"{folder}/a[12].txt") == [f"{folder}/a1.txt"]
    assert names(f"{folder}/**/b.*") == [f"{folder}/deep/b.txt"]
    assert names("data [uvw]/?1.txt") == ["data v/a1.txt"]
    assert names("*/deep/b.txt") == [f"{folder}/deep/b.txt"]
    assert names("nowhere.txt") == names("*/nowhere.txt") == names("data v/a1.txt/*") == []


def test_a_link_that_may_have_led_to_a_folder_is_refused_if_it_leads_nowhere(here: Path) -> None:
    write("d/a.txt")
    Path("d/part2").symlink_to("/nowhere/books")
    for location in ("d", "d/*"):
        with pytest.raises(UserError, match="d/part2, a link to /nowhere/books, leads nowhere"):
            listed(location)


def test_other_kinds_and_folders_are_counted(here: Path) -> None:
    write("d/a.txt", "d/b.md", "d/c.md", "d/README", "d/deep/e.PDF")
    assert names("d") == ["d/a.txt"]
    assert listed("d").left_out == {".md": 2, "without a suffix": 1, ".pdf": 1}
    assert names("d/*.md") == ["d/b.md", "d/c.md"]  # as a glob names them
    assert listed("d/*").left_out == {"folder(s), which ** would search": 1}


@pytest.mark.parametrize("location", ["d", "d/*.txt", "d/**/*.txt"])
def test_link_that_leads_nowhere_is_refused(here: Path, location: str) -> None:
    write("d/a.txt")
    Path("d/note.md").symlink_to("nothing.md")
    assert names(location) == ["d/a.txt"]
    Path("d/b.txt").symlink_to("../lost.txt")
    message = r"d/b\.txt, a link to \.\./lost\.txt, leads nowhere; restore it, remove the link, or name what"
    with pytest.raises(UserError, match=message):
        names(location)


@pytest.mark.parametrize("location", ["d", "d/**/*.txt"])
def test_folder_that_cannot_be_listed_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch, location: str) -> None:
    """Check a failure of the system, as permissions do not restrain the superuser."""
    write("d/a.txt", "d/closed/b.txt")
    scandir = os.scandir

    def refuse(folder: Path) -> object:
        if Path(folder).name == "closed":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="Permission denied: 'd/closed'"):  # the commands print the path
        names(location)
    assert names("d/*.txt") == ["d/a.txt"]
