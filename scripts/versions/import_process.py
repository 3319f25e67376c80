"""What a process with a library's unpacked wheel in front can import: run by `imports.py`, prints one line of JSON.

Patches of that library come first, without their guards, because others' imports rest on some of them.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Failures = dict[str, tuple[str, str]]


class StandIn(ModuleType):
    """A module of which every name is there, and decorates nothing; so that what comes after it is seen too."""

    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __call__(self, *given: Any, **options: Any) -> Any:
        return given[0] if given and callable(given[0]) else lambda function: function


def stand_in(library: str, names: Sequence[str]) -> None:
    """Give the library alone, where it imports one of these, a `StandIn`: others go by what is missing."""
    original = builtins.__import__

    def importing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        asks = str((globals or {}).get("__name__", "")).partition(".")[0]
        if level == 0 and asks == library and name.partition(".")[0] in names:
            return StandIn(name if fromlist else name.partition(".")[0])
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = importing


def tried(name: str, act: Callable[[], object], failed: Failures) -> None:
    """Do it; an exception becomes (its type, its words and where it was raised) of this name."""
    try:
        act()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next(
            (one for one in reversed(frames) if not one.filename.startswith(("<frozen", __file__))), frames[-1]
        )
        place = f"{frame.filename}:{frame.lineno}"
        failed[name] = (str(getattr(error, "name", "") or ""), f"{type(error).__name__}: {error} ({place})")


def served(library: str) -> dict[str, bool]:
    """Loaded modules of the library that have a `torch` -> whether it is a stand-in that a patch gave them."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == library]
    known = {name: vars(module)["torch"] for name, module in modules if "torch" in vars(module)}
    return {name: type(seen).__name__ == "ModuleProxy" for name, seen in sorted(known.items())}


def main(asked: dict[str, list[str]]) -> dict[str, object]:
    """asked: "patches", their modules; "modules" of the library; "served", modules that are so in another version.

    "stand_ins": what is known to be missing.
    """
    library = asked["modules"][0].partition(".")[0]
    if asked["stand_ins"]:
        stand_in(library, [name.partition(".")[0] for name in asked["stand_ins"]])
    failed, patch_failed = Failures(), Failures()

    def apply(name: str) -> None:
        from third_party_patches.guard import is_needed

        patch = importlib.import_module(name).PATCH
        if is_needed(patch):
            patch.apply()

    for name in asked["patches"]:
        tried(name, lambda name=name: apply(name), patch_failed)
    for name in asked["modules"]:
        tried(name, lambda name=name: importlib.import_module(name), failed)
    for name in asked["served"]:
        tried(name, lambda name=name: importlib.import_module(name), {})
    return {"failed": failed, "patches": patch_failed, "served": served(library)}


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print while they are imported
    answer = json.dumps(main(json.loads(sys.argv[1])))
    os.write(out, answer.encode())
