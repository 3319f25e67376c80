"""Keys of TRL, OpenRLHF, prime-rl and slime with the key here, as tables of docs/start/coming_from_trl.md.

With --check it only says whether the page has these tables.
"""

from __future__ import annotations

from pathlib import Path

from marked_tables import write_or_check

from megatron_rl.config.synonyms import OPENRLHF, OTHER_WORDS, PRIME_RL, SLIME, TRL, OtherWord

PAGE = Path(__file__).resolve().parents[1] / "docs/start/coming_from_trl.md"
OTHERS = (OPENRLHF, PRIME_RL, SLIME)


def code(words: tuple[str, ...]) -> str:
    """Return names as code."""
    return ", ".join(f"`{word}`" for word in words)


def here(row: OtherWord) -> str:
    """Return the key here, with what differs."""
    key = "-" if row.key is None else f"`{row.key}`"
    return " | ".join((key, row.note))


def tables() -> dict[str, str]:
    """Return the title of each table -> its lines."""
    trl = [f"| {code(row.words[TRL])} | {here(row)} |" for row in OTHER_WORDS if TRL in row.words]
    others = [
        f"| {' | '.join(code(row.words.get(program, ())) for program in OTHERS)} | {here(row)} |"
        for row in OTHER_WORDS
        if row.words.keys() & set(OTHERS)
    ]
    head = ["| TRL | here | what differs |", "| --- | --- | --- |"]
    other_head = [f"| {' | '.join(OTHERS)} | here | what differs |", "| --- | --- | --- | --- | --- |"]
    return {
        "the arguments of TRL": "\n".join([*head, *trl]),
        "the arguments of others": "\n".join([*other_head, *others]),
    }


if __name__ == "__main__":
    write_or_check(PAGE, tables(), Path(__file__).name)
