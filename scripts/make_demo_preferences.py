"""Make what the demo of all stages learns from: a noisy teacher's answers, and pairs labelled by the demo's rule.

    python scripts/make_demo_preferences.py --output assets/demo_stages --seed 0

    answers_train.parquet, answers_test.parquet  prompt and response: the teacher forgets the carry in 55% of them
    pairs_train.parquet, pairs_test.parquet      prompt, chosen, rejected: of two answers the one that the rule prefers
    questions_train.parquet                      prompts for PPO, without ground truths
    questions_test.parquet                       the held-out ones, with ground truths
    untrained/                                   Hugging Face folder: the demo's tokenizer and model, untrained
    stages.json                                  seed, format version, counts; written last: it marks a finished folder

Questions are those of scripts/make_demo_assets.py under the same seed, and the held-out ones are held out here, too.
The rule (scripts/demo_reward.py) is asked here and never again: who learns from the pairs sees which answer is better,
not why. Answers of pairs are drawn from a teacher that is right half of the time and else makes mistakes of many kinds,
so that a reward model cannot go by one of them. Draws on which the rule has no preference are drawn anew.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from demo_reward import compute_score
from make_demo_assets import (
    DATA_SOURCE,
    Pair,
    answer,
    answer_rows,
    answer_without_carry,
    finished,
    question,
    replace_folder,
    rows,
    save_untrained,
    split_questions,
    write_parquet,
)

FORMAT_VERSION = 2
MARKER = "stages.json"
ANSWERS_PER_QUESTION = 8
PAIRS_PER_QUESTION = 4
RIGHT = 0.5
"""How often an answer of a pair is meant to be right; another is a mistake of one of `MISTAKES`, each as likely."""

Rule = Callable[[str, str, str], float]


def _other_digit(text: str, draw: random.Random) -> str:
    place = draw.randrange(len(text))
    digit = draw.choice([digit for digit in "0123456789" if digit != text[place]])
    return text[:place] + digit + text[place + 1 :]


MISTAKES: dict[str, Callable[[int, int, random.Random], str]] = {
    "forgets the carry": lambda a, b, draw: answer_without_carry(a, b),
    "a digit is another": lambda a, b, draw: _other_digit(answer(a, b), draw),
    "near": lambda a, b, draw: f"{max(a + b + draw.choice([-10, -2, -1, 1, 2, 10]), 0):03d}",
    "any number": lambda a, b, draw: f"{draw.randrange(200):03d}",
    "stops too early": lambda a, b, draw: answer(a, b)[: draw.randrange(1, 3)],
    "does not stop": lambda a, b, draw: answer(a, b) + "".join(draw.choices("0123456789", k=draw.randrange(1, 4))),
}


def drawn_answer(a: int, b: int, draw: random.Random) -> str:
    """An answer of a pair: right with `RIGHT`, else a mistake, which may come out right."""
    if draw.random() < RIGHT:
        return answer(a, b)
    return draw.choice(list(MISTAKES.values()))(a, b, draw)


def pair_rows(questions: list[Pair], per_question: int, seed: int, rule: Rule) -> list[dict]:
    """Pairs of answers on which `rule` has a preference, every question `per_question` times, drawn from `seed`.

    prompt: messages, as in the demo's prompts; chosen, rejected: text.
    """
    draw = random.Random(f"pairs,{seed}")
    pairs = []
    for _ in range(per_question):
        for a, b in questions:
            chosen, rejected = _preferred(a, b, draw, rule)
            pairs.append(
                {
                    "prompt": [{"role": "user", "content": question(a, b)}],
                    "chosen": chosen,
                    "rejected": rejected,
                }
            )
    return pairs


def _preferred(a: int, b: int, draw: random.Random, rule: Rule) -> tuple[str, str]:
    while True:
        one, other = drawn_answer(a, b, draw), drawn_answer(a, b, draw)
        scores = [rule(DATA_SOURCE, text, answer(a, b)) for text in (one, other)]
        if scores[0] != scores[1]:
            return (one, other) if scores[0] > scores[1] else (other, one)


def without_ground_truth(row: dict) -> dict:
    """A row of prompts as PPO gets it where a reward model judges."""
    return {name: value for name, value in row.items() if name != "reward_model"}


def build(folder: Path, seed: int) -> dict:
    """Fill `folder` with all files and return what `stages.json` says."""
    train, held_out = split_questions(seed)
    tables = {
        "answers_train": answer_rows(train, ANSWERS_PER_QUESTION, seed),
        "answers_test": answer_rows(held_out, 1, seed + 1),
        "pairs_train": pair_rows(train, PAIRS_PER_QUESTION, seed, compute_score),
        "pairs_test": pair_rows(held_out, 1, seed + 1, compute_score),
        "questions_train": [without_ground_truth(row) for row in rows(train, "train")],
        "questions_test": rows(held_out, "test"),
    }
    for name, table in tables.items():
        write_parquet(table, folder / f"{name}.parquet")
    save_untrained(folder / "untrained", seed)
    facts = {"format_version": FORMAT_VERSION, "seed": seed} | {name: len(table) for name, table in tables.items()}
    (folder / MARKER).write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main(arguments: list[str] | None = None) -> None:
    """Command line: make the files unless they are there. Exits with 2 rather than replace a folder not its own."""
    parser = argparse.ArgumentParser(description="Make the answers and pairs of the demo's stages before PPO.")
    parser.add_argument("--output", type=Path, default=Path("assets/demo_stages"), help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the questions' split and of all draws")
    args = parser.parse_args(arguments)

    facts = finished(args.output, MARKER, args.seed, FORMAT_VERSION)
    if facts is None:
        try:
            facts = replace_folder(args.output, MARKER, lambda folder: build(folder, args.seed))
        except FileExistsError as error:
            parser.error(str(error))
    print(
        f"{args.output}: {facts['answers_train']} + {facts['answers_test']} answers of a noisy teacher, "
        f"{facts['pairs_train']} + {facts['pairs_test']} pairs, seed {facts['seed']}"
    )


if __name__ == "__main__":
    main()
