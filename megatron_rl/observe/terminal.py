"""Text on a terminal: nothing that a file, a model or a user's code wrote steers it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Control characters (C0 without tab and line feed, DEL, C1), what turns the direction of text or breaks its lines,
what is not seen, and halves of surrogate pairs. What joins letters and emoji (U+200C, U+200D) is left alone.
"""


def terminal_text(text: str) -> str:
    """Return a text with every character that steers a terminal, or hides text, written as an escape."""
    return _STEERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Terminal(Console):
    """The console of all commands: its own colours and tables, and texts as `terminal_text` has them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of something to print; those that are no text of ours or others' are control segments."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=terminal_text(segment.text))


class Announcer:
    """Prints what people are to read: lines, warnings and titles."""

    def __init__(self, console: Terminal) -> None:
        self.console = console

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line without markup, because names and values may contain brackets."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def title(self, text: str) -> None:
        """Print the title of what comes next."""
        self.console.rule(Text(terminal_text(text), style="bold"), align="left", style="dim")

    def warn(self, text: str) -> None:
        """Print a line in yellow."""
        self.say(text, style="yellow")


def warn(text: str) -> None:
    """Print a line in yellow, where no logger is open."""
    Terminal().print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
