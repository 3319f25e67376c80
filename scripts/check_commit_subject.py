"""Check a commit's message: `area: imperative`, a subject of at most 72 characters, and a body.

    python scripts/check_commit_subject.py FILE      # FILE has the message: the hook of .pre-commit-config.yaml

Exit code 1 with a sentence for each rule that the message breaks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LONGEST = 72
COMMANDS = ("plan", "map", "eval", "generate", "doctor", "init", "export", "average", "ablate", "nightly", "explain")
FURTHER_AREAS = ("ci", "patches", "readme", *COMMANDS)
NOT_KEPT = frozenset({"build", "outputs"})
SUBJECT = re.compile(r"(?P<area>[a-z0-9_]+): (?P<first>[a-z]+)\b.*[^.\s]")
NO_VERBS = re.compile(r".*(?:ing|ed)")
VERBS = frozenset({"bring", "embed", "exceed", "feed", "need", "proceed", "ring", "seed", "shed", "speed", "string"})
"""Imperatives that end as participles do."""
LEFT_ALONE = ("Merge ", "Revert ", "fixup! ", "squash! ")


def areas() -> set[str]:
    """Return the areas: packages and modules of megatron_rl, folders of the repository, commands, and a few more."""
    package = {path.stem for path in (REPOSITORY / "megatron_rl").iterdir() if not path.name.startswith(("_", "."))}
    folders = {path.name for path in REPOSITORY.iterdir() if path.is_dir() and not path.name.startswith(".")}
    return (package | folders | set(FURTHER_AREAS)) - NOT_KEPT


def problems(message: str) -> list[str]:
    """Return a sentence for each rule that a message breaks. Lines that begin with # do not count."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(LEFT_ALONE):
        return []
    found = []
    form = SUBJECT.fullmatch(subject)
    if form is None:
        found.append(
            f"the subject is not `area: imperative` without a full stop: {subject!r}; try: losses: merge equal rows"
        )
    elif form["area"] not in areas():
        found.append(f"area {form['area']} is none of {', '.join(sorted(areas()))}")
    elif NO_VERBS.fullmatch(form["first"]) and form["first"] not in VERBS:
        found.append(f"{form['first']!r} is no imperative; try: add, fix, move, remove, test")
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters, and at most {LONGEST} are shown")
    if len(lines) > 1 and lines[1]:
        found.append("the second line must be empty")
    if not any(line.strip() for line in lines[2:]):
        found.append("there is no body: say why, with the numbers that were measured")
    return found


def main() -> None:
    """Check the message in the file that is named."""
    if found := problems(Path(sys.argv[1]).read_text()):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
