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

from docs_pages import DOCS, PAGES, for_site, navigation  # noqa: E402 (it imports mkdocs)

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
    own = {page.relative_to(DOCS).as_posix() for page in DOCS.glob("*/*.md")}
    expected = {page.removesuffix(".md") for page in own | set(PAGES.values())} | {"404"}
    assert {page.relative_to(site).as_posix().removesuffix(".html") for page in site.rglob("*.html")} == expected


def test_pages_load_nothing_from_the_network(site):
    """Scripts, styles, fonts, pictures. Would not catch what a script would load later."""
    pages = {page.name: LOADED.findall(page.read_text()) for page in site.rglob("*.html")}
    loaded = {name: [link for link in links if "//" in link] for name, links in pages.items()}
    assert not {name: links for name, links in loaded.items() if links} and all(pages.values())


def test_lists_and_tables_are_what_github_shows(site):
    """Python-Markdown reads a list without a blank line above as text, GitHub as a list. Would not catch other tags."""
    texts = {
        page.name: re.findall(r"<(?:p|td)\b[^>]*>(.*?)</(?:p|td)>", page.read_text(), re.S)
        for page in site.rglob("*.html")
    }
    unread = re.compile(r"^(?:- |\d+\. |\| |```|#+ )|\]\(", re.M)
    assert not {
        name: found for name, all_of in texts.items() if (found := [text for text in all_of if unread.search(text)])
    }


def test_dead_links_end_the_build(tmp_path):
    """To a page, an anchor and a file of the repository, and a page that the navigation lacks; else it is built."""
    copied = ("mkdocs.yml", "scripts/docs_pages.py", "docs/README.md")
    pages = {page.relative_to(REPOSITORY).as_posix() for page in DOCS.glob("*/*.md")} | PAGES.keys()
    for name in (*copied, *sorted(pages - set(copied))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name in copied:
            shutil.copy(REPOSITORY / name, tmp_path / name)
        else:
            (tmp_path / name).write_text("# Page\n")
    assert built(tmp_path, tmp_path / "site").returncode == 0
    dead = ("no_such_page.md", "../plan/run_viewer.md#no-such-heading", "../../no_such_file.py")
    (tmp_path / "docs/internals/speed.md").write_text("# Page\n\n" + "".join(f"[a]({link})\n" for link in dead))
    (tmp_path / "docs/train/new_page.md").write_text("# Page\n")
    done = built(tmp_path, tmp_path / "site")
    assert done.returncode and all(f"'{link}'" in done.stderr for link in dead), done.stderr
    assert "new_page.md" in done.stderr


def test_links_of_the_site():
    """By hand: to a page, from each folder; to a file of the sources; to a picture; to the network."""
    text = "[a](run_viewer.md#b) [c](../../README.md#d) [`losses/`](../../megatron_rl/losses) "
    text += "[e](../../megatron_rl/train.py)"
    expected = "[a](run_viewer.md#b) [c](../index.md#d) `losses/` e (`megatron_rl/train.py`)"
    assert for_site(text, DOCS / "plan/layout_search.md") == expected
    text = "![f](docs/pictures/map.png) [g](docs/plan/layout_search.md) [h](docs/README.md) [i](https://j.k/l)"
    expected = "![f](pictures/map.png) [g](plan/layout_search.md) [h](pages.md) [i](https://j.k/l)"
    assert for_site(text, REPOSITORY / "README.md") == expected


def test_navigation_is_the_index():
    """By hand: a heading without pages is one, text between is none; links lead to the site's pages."""
    index = "# Docs\n\n## Start\n\nText.\n- [A](start/coming_from_verl.md): one\n- [B](../CHANGELOG.md): two\n## Next\n"
    start = [{"A": "start/coming_from_verl.md"}, {"B": "changelog.md"}]
    assert navigation(index)[2:] == [{"Start": start}, {"Next": []}]
