"""Runs that begin long requests first, over several epochs of the same prompts: the same samples, also when resumed."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest
from safetensors.torch import load_file
from short_runs import LOCAL, SHORT
from test_over_sampling import numbers, weights_equal

from megatron_rl.sampling.response_history import LENGTHS_FILE

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

NUM_PROMPTS = 16
FEW_PLACES = ("actor_rollout_ref.rollout.max_num_seqs=8", "trainer.save_freq=3")
LONGEST = "actor_rollout_ref.rollout.longest_first=true"


def test_samples_do_not_depend_on_the_order(command_line, tmp_path: Path, few_prompts: Path) -> None:
    """Eight prompts of sixteen in a step, 64 requests for 8 places: metrics and weights are those of the order by
    number. A run that goes on after step 3 has those of the one that was not interrupted, and the lengths.

    Would not catch an order that is the same: `tests/sampling/test_length_history.py` has it, and the bench its effect.
    """
    file = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(few_prompts / "train.parquet")[:NUM_PROMPTS], file)
    settings = (*SHORT, *LOCAL, *FEW_PLACES, f"data.train_files={file}")
    plain = command_line(*settings)
    assert plain.wait() == 0, plain.text()
    ordered = command_line(*settings, LONGEST)
    assert ordered.wait() == 0, ordered.text()
    assert numbers(ordered) == numbers(plain) and weights_equal(ordered, plain)
    saved = ordered.run / "global_step_3"
    lengths = load_file(saved / LENGTHS_FILE)["lengths"]
    assert len(lengths[:, 0].unique()) == NUM_PROMPTS and set(lengths[:, 1].tolist()) <= {1, 2, 3}
    by_path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    resumed = command_line(*settings, LONGEST, *by_path)
    assert resumed.wait() == 0, resumed.text()
    assert numbers(resumed) == numbers(ordered)[-2:] and weights_equal(resumed, ordered)
    kept = [load_file(run.run / "global_step_5" / LENGTHS_FILE)["lengths"].tolist() for run in (resumed, ordered)]
    assert sorted(kept[0]) == sorted(kept[1])
