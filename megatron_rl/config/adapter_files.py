"""Names of the adapters to environments of other packages: `adapter:NAME` in place of a user's file."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.problems import nearest_name, refused
from megatron_rl.errors import Violation

ADAPTERS = Path(__file__).parents[1] / "agents" / "adapters"
PREFIX = "adapter:"
WITHOUT_PACKAGE = ("harbor",)
"""Adapters that the run's own interpreter runs."""


def adapter_names() -> list[str]:
    """Return the names of the adapters that the package has."""
    return sorted(file.stem for file in ADAPTERS.glob("*.py"))


def file_of(path: str, key: str) -> str:
    """Return the file of a path, which may be `adapter:NAME`. key: the path's. Raises ConfigError for another name."""
    if not path.startswith(PREFIX):
        return path
    name, names = path.removeprefix(PREFIX), adapter_names()
    if name not in names:
        near = {key: PREFIX + nearest_name(name, names)}
        raise refused(Violation({key: path}, f"must name one of {', '.join(names)}", near, wrong_name=True))
    return str(ADAPTERS / f"{name}.py")


def interpreter_problem(path: str, key: str) -> Violation | None:
    """Return the violation of an interpreter that does not exist. key: the path's."""
    if Path(path).expanduser().is_file():
        return None
    hint = "make one: python -m venv FOLDER, and install the packages with FOLDER/bin/python -m pip install"
    return Violation({key: path}, "must be a Python interpreter, and does not exist", hint=hint)
