"""The messages that docs/start/faq.md explains are messages of the program."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/start/faq.md"
OF_THE_SHELL = ("command not found",)
VARIABLE = re.compile(r"\.\.\.|\b[A-Z_]{2,}\b|\b[A-Z]\b|\(\d+\)|\b\d+\b|=[A-Z]+")
"""What stands for a value in a message of the page."""


@cache
def texts() -> str:
    """Return the strings of the package and of its shell scripts, a line for each part between values."""
    parts = [script.read_text() for script in (REPOSITORY / "scripts").glob("*.sh")]
    for file in (REPOSITORY / "megatron_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(" ".join(node.value.split()))
    return "\n".join(parts)


def unknown(message: str) -> list[str]:
    """Return the parts of a message, between its values, that no string of the program has."""
    parts = (part.strip(" :;,.()=") for part in VARIABLE.split(message))
    return [part for part in parts if len(part) > 5 and part not in texts()]


def test_messages_are_the_programs():
    """Each message in the table, between its values. Would not catch parts that come from different messages."""
    messages = re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.M)
    assert len(messages) > 12
    missing = {message: found for message in messages if (found := unknown(message))}
    assert not {message for message in missing if not message.startswith(OF_THE_SHELL)}, missing


def test_a_message_that_is_nowhere_is_found():
    """By hand."""
    assert unknown("N prompts were eaten by ROLE") == ["prompts were eaten by"]
