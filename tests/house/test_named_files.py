"""Every file that README, CONTRIBUTING and docs name exists, and so do their links and the rooms of the picture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "megatron_rl"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
ROOTS = (REPOSITORY, PACKAGE, REPOSITORY / "docs")
KEPT_HERE = {".git", ".venv", "assets", "outputs", "mine"}
FILE = re.compile(r"[\w./*-]+\.(?:py|pyi|sh|md|yaml|toml)|(?:[\w-]+/)+")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)")
USERS_FILES = {"FILE.yaml", "SCRIPT.sh", "my.yaml", "run.sh"}
WRITTEN = {"hf_model/", "adapter/", "global_step_N/", "val_generations/", "ablation.md", "report.md"}
NOT_KEPT_HERE = USERS_FILES | WRITTEN | {"val-aux/"}
"""Names that stand for a user's file, that a command writes, or that are metrics."""


def named(page: Path) -> Iterator[str]:
    """Files, folders and modules that a page names between backticks."""
    for text in re.findall(r"`([^`\n]+)`", page.read_text()):
        for word in text.split():
            if FILE.fullmatch(word):
                yield word
            elif re.fullmatch(r"megatron_rl(\.\w+)+", word):
                yield word.replace(".", "/") + ".py"


def exists(name: str) -> bool:
    """Whether a name, which may be a pattern, is one of a file or folder of the repository or of the package."""
    if name in NOT_KEPT_HERE or name.split("/")[0] in KEPT_HERE:
        return True
    bare = name.strip("/")
    folders = (PACKAGE, *(REPOSITORY / folder for folder in ("tests", "scripts", "configs")))
    anywhere = folders if "/" not in name else ()
    return any(any(root.glob(bare)) for root in ROOTS) or any(any(root.rglob(bare)) for root in anywhere)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    """Files in backticks, and relative links. Would not catch a file that has another content than the page says."""
    missing = [name for name in named(page) if not exists(name)]
    assert not missing
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]


def test_a_name_that_is_nowhere_is_found():
    """Would not catch a name in plain text."""
    assert not exists("losses/no_such_file.py") and not exists("no_such_room/")
    assert exists("errors.py") and exists("config/verl_compat/*.yaml") and exists("losses/")
