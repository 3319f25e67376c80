"""The demo's reward by comparison: a response is scored by its rank among the responses to its question."""

from __future__ import annotations


def compute_group_scores(rows: list[dict]) -> list[dict]:
    """Score each response by the share of the others that are further from the right sum, ties counting half.

    A response is never compared with the right answer alone: with equal responses all scores are 0.5. "acc" is 1 where
    the response is right, for validation.
    """
    distances = [_distance(row["solution_str"], row["ground_truth"]) for row in rows]
    scores = []
    for row, distance in zip(rows, distances, strict=True):
        worse, equal = sum(other > distance for other in distances), distances.count(distance) - 1
        rank = (worse + 0.5 * equal) / max(len(rows) - 1, 1) if len(rows) > 1 else 0.5
        scores.append({"score": rank, "acc": float(row["solution_str"] == row["ground_truth"])})
    return scores


def _distance(text: str, truth: str) -> int:
    """Return the number of characters in which a response differs from the right one."""
    return sum(a != b for a, b in zip(text, truth, strict=False)) + abs(len(text) - len(truth))
