"""What mkdocs does with the repository's pages before it makes the site: `make docs` calls it by mkdocs.yml.

README.md, CONTRIBUTING.md, CHANGELOG.md and the index docs/README.md become pages of the site, and links between pages
lead to its pages. A link to a file that is no page becomes the file's path as code: the site has no sources. A link to
nothing stays as it is, and mkdocs refuses it. The navigation is the index: its headings, and the links below them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
INDEX = "docs/README.md"
PAGES = {
    "README.md": "index.md",
    INDEX: "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""File of the repository -> page of the site, besides those of docs/."""
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")
IMAGE = re.compile(r"!\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s#]+)(?P<anchor>)\)")
HEADING_OR_ENTRY = re.compile(r"^(?:## (?P<heading>.+)|- \[(?P<title>[^\]]+)\]\((?P<target>[^()\s#]+)\).*)$", re.M)


def in_site(file: Path) -> str | None:
    """Return the path in the site of a file of the repository; None: it has none."""
    if not file.is_relative_to(REPOSITORY):
        return None
    if page := PAGES.get(file.relative_to(REPOSITORY).as_posix()):
        return page
    return file.relative_to(DOCS).as_posix() if file.is_relative_to(DOCS) else None


def for_site(markdown: str, file: Path) -> str:
    """Return a page's text with the links of the site. file: the page in the repository."""
    from_folder = Path("/", in_site(file) or "").parent

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match["text"], match["target"], match["anchor"] or ""
        linked = (file.parent / target).resolve()
        if ":" in target or not linked.exists():
            return match[0]
        if place := in_site(linked):
            link = os.path.relpath(Path("/", place), from_folder)
            return f"{'!' if match[0].startswith('!') else ''}[{text}]({link}{anchor})"
        path = linked.relative_to(REPOSITORY).as_posix()
        return text if linked.name in text else f"{text} (`{path}`)"

    return LINK.sub(replaced, IMAGE.sub(replaced, markdown))


def navigation(index: str) -> list[dict[str, Any]]:
    """Return mkdocs' `nav` of the index's text: the overview, the index, then a section for each of its headings."""
    sections: list[dict[str, Any]] = []
    for found in HEADING_OR_ENTRY.finditer(index):
        if found["heading"]:
            sections.append({found["heading"]: []})
        elif sections and (page := in_site((DOCS / found["target"]).resolve())):
            [pages] = sections[-1].values()
            pages.append({found["title"]: page})
    return [{"Overview": "index.md"}, {"All pages": PAGES[INDEX]}, *sections]


def on_config(config: Any, **_: Any) -> Any:
    """Called by mkdocs first: takes the navigation from the index."""
    config.nav = navigation((REPOSITORY / INDEX).read_text())
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Called by mkdocs: adds the pages that are not in docs/, and the index under a name of its own."""
    if index := files.get_file_from_path("README.md"):
        files.remove(index)
    for file, page in PAGES.items():
        files.append(File.generated(config, page, content=(REPOSITORY / file).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with each page's text."""
    of_repository = {page: REPOSITORY / file for file, page in PAGES.items()}
    return for_site(markdown, of_repository.get(page.file.src_uri, DOCS / page.file.src_uri))
