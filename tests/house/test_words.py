"""Words of our own that a reader from the field does not know: how often they stand where may only fall.

Read are the texts that users see (`messages`: strings with a space that are no docstrings, and the texts of the run
viewer and of config/foreign), docstrings and comments (`code`), and pages for users (`docs`: prose of README,
CONTRIBUTING and docs/, without code blocks, `code`, docs/internals and generated pages). A name in backquotes counts
nowhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
WHERE = ("messages", "code", "docs")

WORDS: dict[str, tuple[str, str, tuple[int, int, int]]] = {
    "answer": (
        r"\b[Aa]nswer(?:s|ed|ing)?\b",
        "response (of the policy), reply (of a process or server)",
        (22, 148, 14),
    ),
    "rule": (r"\b[Rr]ules?\b", "reward function, or check (of the configuration)", (3, 183, 8)),
    "draw": (r"\b(?:draw|draws|drawn|drew|drawing)\b", "sample or generate", (0, 25, 5)),
    "anew": (r"\banew\b", "again", (0, 0, 0)),
    "beside": (r"\b[Bb]esides?\b", "next to, in addition to, or compared with", (3, 9, 4)),
    "lack": (r"\black(?:s|ed|ing)?\b", "is missing, or does not have", (0, 6, 4)),
    "go on": (r"\b(?:go|goes|went|going|gone) on\b", "continue or resume", (1, 4, 0)),
    "is not here": (
        r"\b(?:is|are) (?:not )?(?:here|there)\b|\bthere is none\b",
        "is not supported, exists or does not exist",
        (0, 69, 1),
    ),
    "nearest:": (r"\bnearest:", "try: (a change) or did you mean: (a name)", (0, 4, 0)),
    "guess": (r"\bguess(?:es|ed|ing)?\b|\bdrafts\b(?! tokens?)", "speculative decoding, draft tokens", (0, 10, 4)),
    "so many": (r"\bso many\b", "N: every N steps", (0, 0, 1)),
    "transition": (r"\b[Tt]ransitions?\b", "resharding", (1, 4, 1)),
    "held columns": (r"\bheld (?:columns?|bytes|files?)\b", "remote columns", (0, 3, 0)),
    "8 bits": (r"\b8 bits\b|\beight bits\b", "FP8", (0, 0, 1)),
    "ahead of training": (r"\bahead of training\b|\bruns? ahead\b", "asynchronous (off-policy)", (0, 7, 1)),
    "in turns": (r"\bin turns\b", "synchronous, or interleaved", (0, 0, 0)),
    "bridge": (r"(?<!Megatron-)\b[Bb]ridges?\b", "weight transfer", (0, 0, 0)),
    "carried": (r"\bcarried\b", "pass-through (tensors)", (0, 5, 0)),
    "foreign": (r"\b[Ff]oreign\b", "verl's (keys), received (shards), untrusted (code)", (0, 0, 1)),
    "headless note": (
        r"(?m)(?:^|[.:;|] )[Oo]f (?:a|an|the|all|each|every|its|this|that|those)\b",
        "a noun: name: field name, used in the error",
        (9, 264, 10),
    ),
    "say": (r"\b(?:says?|said|knows?|knew|tells?|told)\b", "contains, specifies, returns or reports", (8, 233, 55)),
    "lie": (r"\b(?:lie|lies|lay|laid)\b", "is stored at, is packed, is in", (1, 35, 8)),
    "what it": (r"\bwhat (?:it|its|a|an|the|they)\b", "the noun: missing shards, settings, result", (4, 239, 53)),
    "otherwise than": (r"\b(?:otherwise than|other than)\b", "differently from, different from", (1, 15, 6)),
    "nobody": (r"\b(?:nobody|somebody|whoever)\b", "no process, no rank, a user", (1, 32, 2)),
    "struck": (r"\b(?:struck|mend(?:s|ed|ing)?)\b", "killed, fixed or corrected", (0, 2, 2)),
}
"""Word -> (what it is found by, what to write instead, most in messages, code and docs)."""
PATTERNS = {word: re.compile(pattern) for word, (pattern, _, _) in WORDS.items()}

COMMENT = re.compile(r"(?:^|\s)#\s(.*)$", re.MULTILINE)
QUOTED = re.compile(r"`[^`\n]*`")
FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2[^\n]*$|<!--.*?-->", re.MULTILINE | re.DOTALL)
MADE = "<!-- Made by "


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_used_no_more_than_it_was(word: str) -> None:
    """Would not catch another word of our own, or one with another ending."""
    _, instead, most = WORDS[word]
    found = [sum(counts(place)[word].values()) for place in WHERE]
    for place, number, limit in zip(WHERE, found, most, strict=True):
        files = sorted(counts(place)[word].items(), key=lambda item: -item[1])[:8]
        assert number <= limit, (
            f"{word!r} stands {number} times in {place}, at most {limit}: write {instead}. In {files}"
        )


def test_what_is_read() -> None:
    """By hand: strings with a space and docstrings, no names in backquotes, prose outside of code blocks."""
    source = '"""Head of `answer`."""\nx = f"no {y} answer" # an answer\nz = {"answer": "answer"}\n'
    messages, code = texts(source)
    assert messages == ["no {} answer"] and [text.split() for text in code] == [["Head", "of", "."], ["an", "answer"]]
    page = "An answer.\n```bash\nanswer\n```\n<!-- answer\n-->`answer` and\n    answer in a block\n"
    assert prose(page).split() == ["An", "answer.", "and"]


@cache
def counts(place: str) -> dict[str, dict[str, int]]:
    """Return word -> file -> how often it stands there; files without it are left out."""
    found: dict[str, dict[str, int]] = {word: {} for word in WORDS}
    for file, text in _read(place):
        for word, pattern in PATTERNS.items():
            if number := len(pattern.findall(text)):
                found[word][file] = found[word].get(file, 0) + number
    return found


def _read(place: str) -> Iterator[tuple[str, str]]:
    if place == "docs":
        pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")]
        for page in sorted(pages):
            text = page.read_text(encoding="utf-8")
            if "internals" not in page.parts and MADE not in text[:500]:
                yield str(page.relative_to(REPOSITORY)), prose(text)
        return
    for file in sorted((REPOSITORY / "megatron_rl").rglob("*.py")):
        messages, code = _texts_of(file)
        yield str(file.relative_to(REPOSITORY)), "\n".join(messages if place == "messages" else code)
    if place == "messages":
        for file in sorted((REPOSITORY / "megatron_rl/config").rglob("*.yaml")):
            rows = re.findall(r"^ +(?:why|feature|instead|here): (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            yield str(file.relative_to(REPOSITORY)), "\n".join(rows)


@cache
def _texts_of(file: Path) -> tuple[list[str], list[str]]:
    return texts(file.read_text(encoding="utf-8"))


def texts(source: str) -> tuple[list[str], list[str]]:
    """Return (strings with a space, with {} for what is put in; docstrings, texts under fields and comments)."""
    messages, code, inside = [], [QUOTED.sub("", text) for text in COMMENT.findall(source)], set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            inside.add(id(node.value))
            code.insert(0, QUOTED.sub("", node.value.value))
        elif isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            messages.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            messages.append(node.value)
    return [QUOTED.sub("", text) for text in messages if " " in text.strip()], code


def prose(page: str) -> str:
    """Return a page without code blocks, comments and names in backquotes."""
    lines = FENCED.sub("", page).splitlines()
    return QUOTED.sub("", "\n".join(line for line in lines if not line.startswith("    ")))
