"""The site of the docs: built strictly, every page in it, and nothing that it loads from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
pytest.importorskip("material", reason="mkdocs-material is not installed: make install")

from docs_pages import DOCS, PAGES, for_site  # noqa: E402 (it imports mkdocs)

LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?([^\"\s>]+)")


def built(repository: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` does, for the pages of a repository."""
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(repository / "mkdocs.yml")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*command, "--site-dir", str(site)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = built(REPOSITORY, folder)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_in_the_site(site):
    """Would not catch a page under a heading that does not fit it."""
    pages = {page.stem for page in DOCS.glob("*.md")} | {Path(page).stem for page in PAGES.values()} | {"404"}
    assert {page.stem for page in site.glob("*.html")} == pages


def test_pages_load_nothing_from_the_network(site):
    """Scripts, styles, fonts, pictures. Would not catch what a script would load later."""
    pages = {page.name: LOADED.findall(page.read_text()) for page in site.glob("*.html")}
    loaded = {name: [link for link in links if "//" in link] for name, links in pages.items()}
    assert not {name: links for name, links in loaded.items() if links} and all(pages.values())


def test_lists_and_tables_are_what_github_shows(site):
    """Python-Markdown reads a list without a blank line above as text, GitHub as a list. Would not catch other tags."""
    texts = {
        page.name: re.findall(r"<(?:p|td)\b[^>]*>(.*?)</(?:p|td)>", page.read_text(), re.S)
        for page in site.glob("*.html")
    }
    unread = re.compile(r"^(?:- |\d+\. |\| |```|#+ )|\]\(", re.M)
    assert not {
        name: found for name, all_of in texts.items() if (found := [text for text in all_of if unread.search(text)])
    }


def test_dead_links_end_the_build(tmp_path):
    """To a page, an anchor and a file of the repository, and a page that the navigation lacks; else it is built."""
    for name in ("docs", "scripts"):
        (tmp_path / name).mkdir()
    for name in ("mkdocs.yml", "scripts/docs_pages.py"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for page in (*(page.relative_to(REPOSITORY) for page in DOCS.glob("*.md")), *PAGES):
        (tmp_path / page).write_text("# Page\n")
    assert built(tmp_path, tmp_path / "site").returncode == 0
    dead = ("no_such_page.md", "view.md#no-such-heading", "../no_such_file.py")
    (tmp_path / "docs/speed.md").write_text("# Page\n\n" + "".join(f"[a]({link})\n" for link in dead))
    (tmp_path / "docs/new_page.md").write_text("# Page\n")
    done = built(tmp_path, tmp_path / "site")
    assert done.returncode and all(f"'{link}'" in done.stderr for link in dead), done.stderr
    assert "new_page.md" in done.stderr


def test_links_of_the_site():
    """By hand: to a page, from each folder; to a file of the sources; to a picture; to the network."""
    text = "[a](view.md#what) [b](../README.md#c) [`losses/`](../megatron_rl/losses) [d](../megatron_rl/train.py)"
    expected = "[a](view.md#what) [b](index.md#c) `losses/` d (`megatron_rl/train.py`)"
    assert for_site(text, DOCS) == expected
    assert for_site("![e](docs/map.png) [f](docs/map.md) [g](https://h.i/j)", REPOSITORY) == (
        "![e](map.png) [f](map.md) [g](https://h.i/j)"
    )
