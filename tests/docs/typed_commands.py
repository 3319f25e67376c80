"""The commands in the ```bash blocks of README.md and docs/*.md, one by one, as a shell would split them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
BLOCK = re.compile(r"(?:^<!-- not executed: (?P<reason>[^\n]+) -->\n)?^```bash\n(?P<text>.*?)^```$", re.M | re.S)
VARIABLE = re.compile(r"\w+=")
OURS = {".venv/bin/megatron-rl": "megatron-rl", ".venv/bin/python": "python", "python3.11": "python"}


@dataclass(frozen=True)
class Typed:
    """A command: page and line for people, variables before it, its words without `.venv/bin/`.

    reason: why the docs say that no test executes it, "" where they do not say so.
    """

    page: str
    line: int
    variables: tuple[str, ...]
    words: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def text(self) -> str:
        """The command in one line, variables too, with single spaces."""
        return " ".join((*self.variables, *self.words))


def commands_of(text: str, page: str) -> Iterator[Typed]:
    """The commands of a page's text, in their order. A variable on a line of its own is put into those below it."""
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start("text")) + 1
        named: dict[str, str] = {}
        for number, line in whole_lines(block["text"], first):
            for part in parts_of(line):
                words = [with_values(word, named) for word in part]
                ahead = next((at for at, word in enumerate(words) if not VARIABLE.match(word)), len(words))
                if ahead == len(words):
                    named |= dict(word.split("=", 1) for word in words)
                    continue
                program = OURS.get(words[ahead], words[ahead])
                rest = words[ahead + 1 :]
                if program == "python" and rest[:2] == ["-m", "megatron_rl"]:
                    program, rest = "megatron-rl", rest[2:]
                yield Typed(page, number, tuple(words[:ahead]), (program, *rest), block["reason"] or "")


def whole_lines(text: str, first: int) -> Iterator[tuple[int, str]]:
    """(number, line) of each line that is not empty, with the lines that it goes on in. first: the first number."""
    held, begun = "", first
    for number, line in enumerate(text.splitlines(), first):
        begun = begun if held else number
        held += line.removesuffix("\\")
        if not line.endswith("\\"):
            if held.strip():
                yield begun, held
            held = ""


def parts_of(line: str) -> Iterator[list[str]]:
    """The words of each command of a line, between `&&`; without comments, quotes taken away."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    for word in lexer:
        if word.startswith("#"):  # a comment; `#` within a word is none
            break
        if word == "&&":
            yield words
            words = []
        else:
            words.append(word)
    if words:
        yield words


def with_values(word: str, named: dict[str, str]) -> str:
    """A word with the variables of its block; others stay as they are."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: named.get(found[1], found[0]), word)


def all_commands() -> list[Typed]:
    """The commands of all pages. A command that two pages have is there twice."""
    return [typed for page in PAGES for typed in commands_of(page.read_text(), page.relative_to(REPOSITORY).as_posix())]


def rows_of_agents() -> list[list[str]]:
    """Cells of the table with which the page on agents begins: what a reader has, what to do, and keys."""
    lines = (REPOSITORY / "docs/train/agents.md").read_text().partition("| I have |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[2:]]
