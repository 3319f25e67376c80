"""A recorded step, made by hand: two prompts, two answers to each; of the first one a number of the tokens by heart."""

from __future__ import annotations

import numpy as np

from megatron_rl.observe.sample_files import RecordedStep

TOKENS = [["1", "+", "1", "=", "2", "<eos>"], ["1", "+", "1", "=", "3"], ["</script>", "7"], ["[/b]", "<b>8</b>"]]
SAMPLED = [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 1], [0, 1]]
ENGINE = [[-0.5, -0.25], [-1.5], [-2.0], [-0.125]]
TRAINER = [[-0.25, -0.25], [-2.0], [-2.0], [-0.125]]
ADVANTAGES = [[1.0, 0.5], [-1.0], [0.0], [2.0]]
TERMS = [[-0.25, -0.125], [0.25], [0.0], [-0.5]]
VERSIONS = [[4, 5], [5], [5], [5]]
SCORES = [1.0, 0.0, 0.5, 0.25]


def ragged(rows, dtype):
    return np.array([value for row in rows for value in row], dtype), np.array([len(row) for row in rows])


def recorded(step: int = 6, num_rows: int = 6) -> RecordedStep:
    """Four of `num_rows` samples; the third was cut off, the episode of the fourth failed."""
    columns, lengths = {}, {}
    for name, rows, dtype in (
        ("input_ids", [[ord(text[0]) for text in row] for row in TOKENS], np.int64),
        ("sampled", SAMPLED, np.bool_),
        ("rollout_log_probs", ENGINE, np.float32),
        ("old_log_probs", TRAINER, np.float32),
        ("advantages", ADVANTAGES, np.float32),
        ("loss_terms", TERMS, np.float32),
        ("versions", VERSIONS, np.int64),
    ):
        columns[name], lengths[name] = ragged(rows, dtype)
    columns["groups"] = np.array([0, 0, 1, 1])
    columns["scores"] = np.array(SCORES, np.float32)
    columns["truncated"] = np.array([False, False, True, False])
    columns["failed"] = np.array([False, False, False, True])
    rows = [
        {"input": "1+1=", "output": text, "gts": "2", "score": score, "step": step, "data_source": "sums"}
        | {"failure": "", "acc": score, "index": 40 + number // 2, "sample": number % 2, "tokens": tokens}
        for number, (text, score, tokens) in enumerate(zip("2378", SCORES, TOKENS, strict=True))
    ]
    return RecordedStep(step, num_rows, columns, lengths, rows, {"loss": -0.625, "loss_magnitude": 2.5})
