"""The rule of the real model's demo: one word is asked for; a sentence that has it gets a part of the score."""

from __future__ import annotations

LABELS = {"positive", "negative"}
IN_A_SENTENCE = 0.3
"""The score of an answer that names the right label and not the other; without it most early answers would tie."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    """score: 1.0 for the right word alone, IN_A_SENTENCE for it among others, else 0.0. acc: whether it is alone."""
    answer = solution_str.strip().lower().rstrip(".!")
    named = {label for label in LABELS if label in answer}
    alone = float(answer == ground_truth)
    return {"score": alone or IN_A_SENTENCE * (named == {ground_truth}), "acc": alone, "pred": answer}
