"""Hooks of MkDocs: files of the repository's top level as pages, the pages that run models, and links from the public
names to their reference."""

import os
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path
from urllib.parse import urljoin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FRONT = "<!-- front -->"
"""Place on the site's first page of docs/scripts/front.html, which opens the pages that run models."""
PICTURE = "laboratory.webp"
"""Picture of the site beside links to it."""
BOOSTS = {"story": 4, "sources": 0.5, "reference": 0.5}
"""Factors on the score of the pages of a folder in the search."""
LINK = re.compile(r"(?<=\]\()(\.\./)?([\w./-]+)")
PACKAGE_OR_NAME = re.compile(r"^## (.+)|^\| (`(\w+).*?`)", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, the laboratory, the chapters as notebooks, and the file that the README links to."""
    front = (ROOT / "docs/scripts/front.html").read_text(encoding="utf-8")
    for name, page in TOP_LEVEL.items():
        content = (ROOT / name).read_text(encoding="utf-8").replace(FRONT, front)
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, "CITATION.cff", abs_src_path=str(ROOT / "CITATION.cff")))
    laboratory = build_laboratory().read_text(encoding="utf-8")
    in_site = laboratory.replace("<html", "<html data-site", 1)  # where its links lead to chapters
    files.append(File.generated(config, "lab.html", content=with_icon(with_preview(in_site, config, "lab.html"))))
    live = ROOT / "build/live.html"
    run([sys.executable, "-m", "docs.scripts.front", str(live)], ROOT)
    content = with_preview(live.read_text(encoding="utf-8"), config, "live.html")
    files.append(File.generated(config, "live.html", content=with_icon(content)))
    notebooks = ROOT / "build/notebooks"
    shutil.rmtree(notebooks, ignore_errors=True)  # of chapters that are no more
    notebooks.mkdir()
    run([sys.executable, "-m", "docs.scripts.notebook", "--as-shown", str(notebooks)], ROOT)
    for path in sorted(notebooks.glob("*.ipynb")):
        files.append(File.generated(config, f"story/{path.name}", abs_src_path=str(path)))
    return files


def with_preview(html: str, config: MkDocsConfig, path: str) -> str:
    """Return a page with what others show of a link to it, once `site_url` in mkdocs.yml is the site's address."""
    if not config.site_url:
        return html
    title = re.search("<title>(.*?)</title>", html, re.DOTALL)
    assert title, f"{path} has no title"
    shown = {"type": "website", "url": urljoin(config.site_url, path), "image": urljoin(config.site_url, PICTURE)}
    shown |= {"title": unescape(title[1]), "description": config.site_description or ""}
    tags = "".join(f'<meta property="og:{name}" content="{escape(value)}">\n' for name, value in shown.items())
    return html.replace("</head>", f"{tags}</head>", 1)


def with_icon(html: str) -> str:
    """Return a page that is one file with the site's logo as its icon."""
    logo = b64encode((ROOT / "docs/logo.svg").read_bytes()).decode()
    return html.replace("</head>", f'<link rel="icon" href="data:image/svg+xml;base64,{logo}">\n</head>', 1)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Return a page with what others show of a link to it."""
    return with_preview(output, config, page.url)


def build_laboratory() -> Path:
    """Return the page that docs/lab builds. Raises `PluginError` without npm, or if the build fails."""
    npm, folder = shutil.which("npm"), ROOT / "docs/lab"
    if npm is None:
        raise PluginError("npm, which builds the laboratory, is not installed; install Node.js 18 or newer.")
    for arguments in (("ci",), ("run", "check"), ("run", "build")):
        run([npm, *arguments], folder)
    return folder / "build/lab.html"


def run(command: Sequence[str], folder: Path) -> None:
    """Run a command in a folder. Raises `PluginError` if it fails."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise PluginError(f"{' '.join(command)} failed in {folder}:\n{done.stdout}{done.stderr}")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return a page whose links to the top level and to docs/ lead to pages of the site, chapters with a link to their
    notebook; pages that explain come first in the search."""
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri.partition("/")[0], 1)}
    if page.file.src_uri.startswith("story/") and page.file.name != "index":
        page.meta["hide"] = ["footer"]  # links to the neighbours in a part; those by number are a chapter's last line
    notebook = (
        f"## Exercises\n\nIn [the chapter as a notebook]({page.file.name}.ipynb), a cell waits for each answer.\n"
    )
    markdown = markdown.replace("## Exercises\n", notebook)
    markdown = LINK.sub(lambda link: TOP_LEVEL.get(link[2], link[0].removeprefix("docs/")), markdown)
    return link_names(markdown) if page.file.src_uri == "api.md" else markdown


def link_names(markdown: str) -> str:
    """Return the list of public names with a link from each to its reference; one without is a warning."""
    package = ""

    def link(match: re.Match[str]) -> str:
        nonlocal package
        if match[1]:
            package = match[1]
            return match[0]
        if match[3] == "name":  # the head of a table
            return match[0]
        # A function with the name of its file hides the module, which the reference finds in its place.
        is_hidden = "(" in match[2] and (ROOT / package.replace(".", "/") / f"{match[3]}.py").exists()
        return f"| [{match[2]}][{package}.{match[3]}{'.' + match[3] if is_hidden else ''}]"

    return PACKAGE_OR_NAME.sub(link, markdown)
