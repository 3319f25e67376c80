"""Imports of an unpacked wheel in a process of its own: what the library itself asks for, as no name of ours shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from versions.relied_on import REPOSITORY

LIMIT_S = 600


class Imported(NamedTuple):
    """Answer of `import_process.py`: what failed -> (name of what is missing, the words).

    served: modules that have a `torch` -> whether a patch has replaced it.
    """

    failed: dict[str, tuple[str, str]]
    patches: dict[str, tuple[str, str]]
    served: dict[str, bool]


class Tried(NamedTuple):
    """broken: would break. untried: cannot be said on this machine."""

    broken: list[str]
    untried: list[str]


def unpack(wheel: Path, folder: Path) -> Path:
    """Its files, with what names its version, in `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def import_all(folder: Path | None, asked: dict[str, Sequence[str]]) -> Imported:
    """Apply and import in a process with `folder` in front of what is installed. Raises SystemExit where it dies."""
    places = [str(folder)] * (folder is not None) + [str(REPOSITORY)]
    process = Path(__file__).with_name("import_process.py")
    done = subprocess.run(
        [sys.executable, "-P", str(process), json.dumps(asked)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"imports from {folder} end their process with {done.returncode}: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    failed, patches = ({name: (one[0], one[1]) for name, one in answer[kind].items()} for kind in ("failed", "patches"))
    return Imported(failed, patches, answer["served"])


def requirements(folder: Path) -> list[Requirement]:
    """What the wheel's metadata asks for here, without extras."""
    found: Iterable[Distribution] = distributions(path=[str(folder)])
    every = [Requirement(text) for one in found for text in one.requires or ()]
    return [one for one in every if one.marker is None or one.marker.evaluate({"extra": ""})]


def unmet(asked: Iterable[Requirement]) -> list[str]:
    """Requirements that this environment does not meet, with the installed versions."""
    lines = []
    for one in asked:
        try:
            installed = version(one.name)
        except PackageNotFoundError:
            lines.append(f"{one.name}{one.specifier} (not installed)")
            continue
        if not one.specifier.contains(installed, prereleases=True):
            lines.append(f"{one.name}{one.specifier} (installed: {installed})")
    return lines


def try_imports(folder: Path, patches: Sequence[str], modules: Sequence[str], proven: Path | None = None) -> Tried:
    """Import `modules` of the wheel in `folder`, after `patches`.

    Only what works with the version that is proven counts: one in a folder, or what is installed.
    """
    asked: dict[str, Sequence[str]] = {"patches": patches, "modules": modules, "served": (), "stand_ins": ()}
    before = import_all(proven, asked)
    served = [name for name, is_served in before.served.items() if is_served]
    rounds, stand_ins = list[Imported](), list[str]()
    while True:
        rounds.append(after := import_all(folder, {**asked, "served": served, "stand_ins": stand_ins}))
        lacking = {lacks for lacks, words in after.failed.values() if words.startswith("ModuleNotFoundError")}
        new = sorted(
            lacking - {*stand_ins, ""} - {one for one in lacking if one.startswith(modules[0].partition(".")[0])}
        )
        if not new:
            break
        stand_ins += new
    requires = requirements(folder)
    missing, declared = unmet(requires), {canonicalize_name(one.name) for one in requires}
    broken, untried = dict[str, list[str]](), dict[str, list[str]]()
    for one in rounds:
        known = before.failed.keys() | before.patches.keys()
        for name, (lacks, words) in {**one.failed, **one.patches}.items():
            if name not in known:
                elsewhere = missing or ".so" in words or canonicalize_name(lacks.partition(".")[0]) in declared
                names = (untried if elsewhere else broken).setdefault(shortened(words, folder), [])
                names += [name] * (name not in names)
    lines, others = ([named(names, words) for words, names in some.items()] for some in (broken, untried))
    if not missing:
        left = [name for name, is_served in after.served.items() if not is_served and before.served.get(name)]
        lines += [f"{name} sees torch itself, not the stand-in that a patch gives it" for name in left]
    elif others:
        others.append(f"for which this environment lacks: {', '.join(missing)}")
    return Tried(lines, others)


def shortened(words: str, folder: Path) -> str:
    """An error's words with paths as below the wheel, on one line."""
    return re.sub(r"\s+", " ", words.replace(f"{folder}/", ""))


def named(names: Sequence[str], words: str) -> str:
    """One line for all that fails in one way."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"import of {names[0]}{more}: {words}"
