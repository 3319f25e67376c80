"""A reward for `step.py`: the share of digits among an answer's characters."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Equal to `share_of_digits` of `step_trl.py`."""
    return sum(map(str.isdigit, solution_str)) / max(len(solution_str), 1)
