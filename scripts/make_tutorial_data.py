"""Write the questions of docs/start/tutorial.md: python scripts/make_tutorial_data.py questions.jsonl

400 lines with the columns `question` and `answer`, in the form of GSM8K: the reasoning, then `#### ` and the number.
The file is not replaced if it exists. No package is needed.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

NUM_ROWS = 400
NAMES = ("Ann", "Ben", "Cleo", "Dan")


def rows(seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield the questions, alike for equal seeds."""
    draw = random.Random(seed)
    for _ in range(NUM_ROWS):
        first, second = draw.randrange(10), draw.randrange(10)
        total = first + second
        yield {
            "question": f"{draw.choice(NAMES)} has {first} apples and buys {second}. How many?",
            "answer": f"{first} + {second} = {total}\n#### {total}",
        }


def main() -> None:
    """Write the file that the command line names."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "questions.jsonl")
    try:
        with path.open("x") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows())
    except FileExistsError:
        sys.exit(f"{path} exists; name another file")
    print(f"{path}: {NUM_ROWS} questions")


if __name__ == "__main__":
    main()
