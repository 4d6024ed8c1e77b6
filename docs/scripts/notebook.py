"""Run notebooks from top to bottom, each in a folder of its own, and write them with their outputs.

    python -m docs.scripts.notebook FOLDER [NAME ...]
    python -m docs.scripts.notebook --as-shown FOLDER [CHAPTER ...]

The names are `tour`, docs/examples/tour.ipynb, and the chapters of docs/story, which are notebooks as well: each block
of Python is a cell, and before the folded answer to an exercise there is an empty one for your own, whose last line
checks it. By default, all are run. A cell that fails is an error, except where your answer is missing. With
`--as-shown`, the chapters are not run: their outputs are those of the page.
"""

import argparse
import base64
import os
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from docs.scripts.story import BLOCK, ROOT, STORY

TOUR = ROOT / "docs/examples/tour.ipynb"
CHAPTERS = {path.stem: path for path in sorted(STORY.glob("*.md")) if path.stem != "index"}
SECONDS_PER_CELL = 600
INSTALLED = "*The cells need jaxformer: `pip install -e .` in a clone of it.*"
ANSWER = re.compile(r"^<details markdown=\"1\">.*?^(print\(check_(\w+)\(.*?\)\n)```\n.*?^</details>\n", re.M | re.S)
PICTURE = re.compile(r"(?<=\]\()\w+\.svg(?=\))")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!http)[^)\s]*\.(?:md|ipynb)[^)\s]*\)|<a href=[^>]*>([^<]*)</a>")
NEIGHBOURS = re.compile(r"^(?:Before|Next): .*\n\Z", re.M)
MARK = re.compile(r"^<!--[^>]*-->\n|<!--.*?-->", re.M)


def chapter_notebook(page: str) -> nbformat.NotebookNode:
    """Return a chapter as a notebook with the outputs that the page shows."""
    page, cells, end = NEIGHBOURS.sub("", page), [], 0
    answers = {match.start(): match for match in ANSWER.finditer(page)}
    blocks = {match.start(): match for match in BLOCK.finditer(page)}
    for start, match in sorted((blocks | answers).items()):
        if start < end:  # part of an answer
            continue
        cells += prose_cells(page[end:start])
        if start in answers:
            tags = {"tags": ["raises-exception"]}  # so that what follows is run without an answer, too
            cells.append(new_code_cell(f"# Your {match[2]}:\n\n\n{match[1].strip()}", metadata=tags))
            cells += prose_cells(match[0])
        else:
            cells.append(new_code_cell(match[2].strip()))
            if shown := match[0][len(match[1]) :].strip():
                text = shown.removeprefix("```text\n").removesuffix("```")
                cells[-1].outputs.append(new_output("stream", name="stdout", text=text))
        end = match.end()
    cells += prose_cells(page[end:])
    cells[0].source = cells[0].source.replace("\n", f"\n\n{INSTALLED}\n", 1)
    for i, cell in enumerate(cells):
        cell.id = str(i)  # not random: the same page is the same file
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def prose_cells(text: str) -> list[nbformat.NotebookNode]:
    """Return text as a cell that holds its pictures, or none if it is blank; links to other pages are their words."""
    text = LINK.sub(r"\1\2", MARK.sub("", text)).replace('<details markdown="1">', "<details>").strip()
    pictures = {
        name: {"image/svg+xml": base64.b64encode((STORY / name).read_bytes()).decode()}
        for name in PICTURE.findall(text)
    }
    cell = new_markdown_cell(PICTURE.sub(lambda name: f"attachment:{name[0]}", text))
    if pictures:
        cell.attachments = pictures
    return [cell] if text else []


def run(notebook: nbformat.NotebookNode) -> None:
    """Run the cells. Raises `CellExecutionError` if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=SECONDS_PER_CELL, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the time of this run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m docs.scripts.notebook")
    parser.add_argument("--as-shown", action="store_true")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)  # before minutes of running
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for name in options.names or [*([] if options.as_shown else ["tour"]), *CHAPTERS]:
        is_tour = name == "tour"
        notebook = nbformat.read(TOUR, as_version=4) if is_tour else chapter_notebook(CHAPTERS[name].read_text("utf-8"))
        if not options.as_shown:
            run(notebook)
        nbformat.write(notebook, options.folder / f"{name}.ipynb")
