"""Copy the ladder's books from a clone of the corpora that contain them, and verify each.

    git clone https://github.com/birmingham-ccr/corpora
    git -C corpora checkout ae1e53df4df9a20cccda548a6fd655188e89da21
    python -m studies.books corpora books

`books.tsv` lists the file, size and SHA-256 of each book, 50 for training and 3 held out: English novels of the 19th
century, from Project Gutenberg, in the public domain in the USA. The exit status is 2 if a book is missing or differs.
"""

import argparse
import csv
import hashlib
import sys
from pathlib import Path

LIST = Path(__file__).with_name("books.tsv")


def copy_books(corpora: Path, folder: Path) -> None:
    """Copy the listed books from a clone to `folder/train` and `folder/val`, after verifying all of them.

    Raises:
      ValueError: a book is missing, or differs from the listed one.
    """
    books = dict[Path, bytes]()
    with LIST.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            source = corpora / row["source_path"]
            if not source.is_file():
                raise ValueError(f"{source} is missing; name a clone of birmingham-ccr/corpora at the listed commit.")
            text = source.read_bytes()
            if hashlib.sha256(text).hexdigest() != row["sha256"]:
                remedy = "check out the listed commit, without converting line ends"
                raise ValueError(f"{source} has {len(text):,} bytes that are not those listed; {remedy}.")
            books[folder / row["split"] / row["source_path"].replace("/", "-")] = text
    for path, text in books.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    print(f"{len(books)} books, {sum(map(len, books.values())):,} bytes, in {folder}")


def main() -> int:
    """Copy the books; return the exit status."""
    parser = argparse.ArgumentParser(description="Copy the books of the ladder.", allow_abbrev=False)
    parser.add_argument("corpora", type=Path, help="a clone of github.com/birmingham-ccr/corpora")
    parser.add_argument("folder", type=Path, help="where to, such as books")
    own = parser.parse_args()
    try:
        copy_books(own.corpora, own.folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
