"""What of a record is trained again, and records that are refused before a process starts."""

from __future__ import annotations

import numpy as np
import pytest
from hand_made import recorded

from megatron_rl.errors import ConfigError
from megatron_rl.observe.sample_files import write_step
from megatron_rl.sampling.recorded_sampler import check_record, rows_of_record


def test_only_what_generation_makes_is_taken():
    """Rewards, log-probs of the trainer and advantages are computed anew. Would not catch a new column that no pass
    makes again.
    """
    step = recorded()
    columns = dict(step.columns) | {"greedy/input_ids": np.array([9]), "of a user's scorer": np.zeros(4)}
    columns["kept"], columns["rollout_weights"] = np.ones(5, np.float32), np.ones(5, np.float32)
    lengths = dict(step.lengths) | {"greedy/input_ids": np.array([1])}
    rows = rows_of_record(type(step)(6, 6, columns, lengths, step.rows))
    assert set(rows.names) == {"input_ids", "sampled", "rollout_log_probs", "versions", "truncated", "failed"}
    assert rows["rollout_log_probs"].unbind()[0].tolist() == [-0.5, -0.25] and rows["failed"].tolist()[3] is True


@pytest.mark.parametrize(
    ("steps", "last", "number", "message"),
    [
        ([], 1, 4, "has no recorded samples; try: a run with trainer.recorded_prompts=-1"),
        ([1, 2], 3, 4, "has no samples of step 3; try: trainer.total_training_steps=2"),
        ([1, 2], 2, 8, "has 4 samples of step 1, and this run takes 8"),
    ],
)
def test_a_record_that_does_not_suffice_is_refused(tmp_path, steps, last, number, message):
    for step in steps:
        write_step(tmp_path / "samples", recorded(step))
    with pytest.raises(ConfigError, match=message):
        check_record(tmp_path, 1, last, number)
    check_record(tmp_path, 1, len(steps), 4) if steps else None
