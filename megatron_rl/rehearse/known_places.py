"""Host waits and groups of collectives by the function that has them, next to a list that was accepted before.

A plain file, one place a line: how often for each micro-batch, the phase, and the place without its number of line, so
that edits elsewhere change nothing. Places that a run does not reach are no fault: a list may be of all ranks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.config.file_kinds import read_whole
from megatron_rl.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
LARGEST_LIST = 1 << 22
Places = dict[str, int]
"""Place -> how often for each micro-batch at most."""


def found_places(reports: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, str]]:
    """Return the places of all ranks, each with its number and an example with its line."""
    places: dict[str, tuple[int, str]] = {}
    for report in reports:
        for place, number, example in _places_of(report):
            if number >= places.get(place, (-1, ""))[0]:
                places[place] = number, example
    return places


def _places_of(report: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
    for phase, waits in report["waits"].items():
        num_blocks = report["num_blocks"].get(phase, 0)
        together: dict[str, tuple[int, str]] = {}  # several lines of one function
        for text, count in waits.items():
            what, line = text.rsplit(" at ", 1)
            place = f"{phase}: {what} at {function_of(line)}"
            number = together.get(place, (0, ""))[0] + (count // num_blocks if num_blocks else 0)
            together[place] = number, f"{phase}: {text}"
        yield from ((place, number, example) for place, (number, example) in together.items())
    for call in report["calls"]:
        if call["purpose"]:
            text = f"{call['phase']}: {call['name']} over {call['purpose']} at "
            yield f"{text}{function_of(call['line'])}", 0, f"{text}{call['line']}"


def function_of(line: str) -> str:
    """Return "file function" for "file:number" of this package; "megatron" for its files, which versions move."""
    file, _, number = line.partition(":")
    if not number or not (PACKAGE / file).is_file():
        return file.split("/")[0]
    inside = [name for first, last, name in _functions(file) if first <= int(number) <= last]
    return f"{file} {inside[-1]}" if inside else file


@cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    """Return first line, last line and name of a file's functions, outer ones first."""
    tree = ast.parse((PACKAGE / file).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return sorted((node.lineno, node.end_lineno or node.lineno, node.name) for node in found)


def new_places(found: Mapping[str, tuple[int, str]], known: Places, file: Path) -> list[str]:
    """Return a sentence for each place that the list does not have, or has less often."""
    sentences = []
    for place, (number, example) in found.items():
        if place not in known:
            sentences.append(f"{example} is not in {file}: remove it, or accept it with --accept")
        elif number > known[place]:
            often = f"comes {number} times for each micro-batch, and {known[place]} times in {file}"
            sentences.append(f"{example} {often}: make it less, or accept it with --accept")
    return sentences


def read_places(file: Path) -> Places:
    """Return an accepted list. Raises ConfigError if the file is missing, or if a line has another form."""
    if not file.is_file():
        raise ConfigError(f"--known {file} is no file; write it with --accept")
    places: Places = {}
    for row, line in enumerate(read_whole(file, LARGEST_LIST).decode(errors="replace").splitlines(), 1):
        number, _, place = line.partition(" ")
        if not (number.isdecimal() and ": " in place):
            raise ConfigError(
                f"--known {file}, line {row}: {line!r:.200} must be NUMBER PHASE: PLACE; write the file with --accept"
            )
        places[place] = int(number)
    return places


def text_of(known: Places, found: Mapping[str, tuple[int, str]]) -> str:
    """Return the content of a list with what was known and what was found."""
    numbers = dict(known)
    for place, (number, _) in found.items():
        numbers[place] = max(number, numbers.get(place, 0))
    return "".join(f"{numbers[place]} {place}\n" for place in sorted(numbers))
