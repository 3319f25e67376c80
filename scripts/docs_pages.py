"""What mkdocs does with the repository's pages before it makes the site: `make docs` calls it by mkdocs.yml.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages of the site, and links between pages lead to its pages. A link
to a file that is no page becomes the file's path as code: the site has no sources. A link to nothing stays as it is,
and mkdocs refuses it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File of the repository -> page of the site, besides those of docs/."""
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")
IMAGE = re.compile(r"!\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s#]+)(?P<anchor>)\)")


def in_site(file: Path) -> str | None:
    """The place in the site of a file of the repository; None: it has none."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    return PAGES.get(file.relative_to(REPOSITORY).as_posix()) if file.is_relative_to(REPOSITORY) else None


def for_site(markdown: str, folder: Path) -> str:
    """A page's text with the links of the site. folder: where the page is, to which its links are relative."""

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match["text"], match["target"], match["anchor"] or ""
        file = (folder / target).resolve()
        if ":" in target or not file.exists():
            return match[0]
        if place := in_site(file):
            return f"{'!' if match[0].startswith('!') else ''}[{text}]({place}{anchor})"
        path = file.relative_to(REPOSITORY).as_posix()
        return text if file.name in text else f"{text} (`{path}`)"

    return LINK.sub(replaced, IMAGE.sub(replaced, markdown))


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Called by mkdocs: adds the pages that are not in docs/."""
    for file, page in PAGES.items():
        files.append(File.generated(config, page, content=(REPOSITORY / file).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with each page's text."""
    is_of_docs = page.file.src_uri not in PAGES.values()
    return for_site(markdown, DOCS if is_of_docs else REPOSITORY)
