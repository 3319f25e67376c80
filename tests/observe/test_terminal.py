"""What the texts of others may do to a terminal: nothing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.progress import Progress

from megatron_rl.observe.summary import plain_table
from megatron_rl.observe.terminal import Terminal, terminal_text

PACKAGE = Path(__file__).parents[2] / "megatron_rl"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31m\x07\x9b1m\r", "a\\x1b[31m\\x07\\x9b1m\\r"),
        ("\u202e\u2066\u200f\u2028\ufeff\U000e0041", "\\u202e\\u2066\\u200f\\u2028\\ufeff\\U000e0041"),
        ("half \ud83d of a pair", "half \\ud83d of a pair"),
        ("tab\t, line\n, ü, 中, 👩\u200d🔬", "tab\t, line\n, ü, 中, 👩\u200d🔬"),
    ],
)
def test_characters_that_steer_are_written_as_escapes(text: str, shown: str) -> None:
    assert terminal_text(text) == shown


def test_a_terminal_has_its_own_colours_and_nobody_elses() -> None:
    """In lines and in cells of a table; a progress bar still moves the cursor. Would not catch another console."""
    console = Terminal(file=io.StringIO(), force_terminal=True, width=60)
    console.print("a\x1b[31m\u202eb", style="bold", markup=False, highlight=False)
    console.print(plain_table("t", ["name", "value"], [("\x9b5m", "[/b]\x1b")]), markup=False)
    printed = console.file.getvalue()
    assert "\x1b[1ma\\x1b[31m\\u202eb\x1b[0m" in printed and "\\x9b5m" in printed and "[/b]\\x1b" in printed
    assert not {"\x9b", "\u202e"} & set(printed)
    with Progress(console=console):
        pass
    assert "\x1b[?25l" in console.file.getvalue()


def test_every_command_prints_to_it() -> None:
    """Would not catch rich's own print, nor sys.stdout, to which JSON and YAML go."""
    others = [path.name for path in PACKAGE.rglob("*.py") if "rich.console import Console\n" in path.read_text()]
    assert others == []
