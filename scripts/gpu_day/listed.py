"""Which packages a lent GPU machine has, which are carried there, and how to run as if there were no others."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

FOLDER = Path(__file__).parent
MACHINE, CARRIED, ONLY_LISTED = FOLDER / "machine.txt", FOLDER / "carried.txt", FOLDER / "only_listed"
PROJECT = "megatron-rl"
VENDORED = "_vendor"


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def listed(*files: Path) -> dict[str, str]:
    """The packages of files, one a line, with or without ==version; name -> version or "". # begins a comment."""
    lines = (line.strip() for file in files for line in file.read_text().splitlines())
    pairs = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {normal(name): version for name, _, version in pairs}


def absent(present: Iterable[str]) -> dict[str, list[str]]:
    """What is installed here and is none of these packages: its names, and its top-level modules.

    What a package carries inside itself, as setuptools does, is not installed.
    """
    there, names, owners = {*map(normal, present), PROJECT}, set[str](), defaultdict[str, set[str]](set)
    for one in distributions():
        if VENDORED in str(one.locate_file("")):
            continue
        name = one.metadata["Name"]
        names.add(name)
        for file in one.files or ():
            if file.suffix in (".py", ".so"):
                owners[file.parts[0].partition(".")[0]].add(normal(name))
    modules = [module for module, by in owners.items() if by.isdisjoint(there)]
    return {"names": sorted(name for name in names if normal(name) not in there), "modules": sorted(modules)}


def as_on_the_machine(scratch: Path, *files: Path) -> dict[str, str]:
    """Variables with which a process finds the packages of these lists alone. scratch: where a file is written."""
    file = scratch / "absent.json"
    file.write_text(json.dumps(absent(listed(*(files or (MACHINE, CARRIED))))))
    path = [str(ONLY_LISTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"GPU_DAY_ABSENT": str(file), "PYTHONPATH": os.pathsep.join(path)}
