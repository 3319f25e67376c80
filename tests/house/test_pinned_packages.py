"""Pinned packages take every Python that the project takes: some of their newer versions need a later patch of it."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

REPOSITORY = Path(__file__).parents[2]


def test_every_installed_package_takes_the_oldest_python():
    """The first patch of the oldest Python, by what packages say of themselves; Debian 12 has the third. Would not
    catch pins for GPUs alone, which are not installed here. A later Python may have later ones, where a marker says so.
    """
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    needs = {each.metadata["Name"]: each.metadata["Requires-Python"] or "" for each in distributions()}
    assert len(needs) > 100
    is_oldest = sys.version_info[:2] == tuple(map(int, oldest.split(".")[:2]))
    later = set() if is_oldest else {one.name for one in map(Requirement, project["dependencies"]) if one.marker}
    assert [name for name, python in needs.items() if oldest not in SpecifierSet(python) and name not in later] == []
