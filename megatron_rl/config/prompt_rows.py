"""Keys of `data` that choose rows of files, and columns of flat files that do not have verl's schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from megatron_rl.config.constraints import OURS, Or

GROUND_TRUTH = "reward_model.ground_truth"
"""The field of verl's schema that has the expected answer."""

MostRows = Annotated[int, Or(-1, "all rows"), Ge(1), Le(10**12)]


@dataclass
class PromptRowsConfig:
    """Keys of `data` in addition to those of tasks."""

    ground_truth_key: Annotated[str | None, OURS] = GROUND_TRUTH
    """Column with the expected answer, such as answer; a field of a struct is named with a dot. null: rows have none,
    and the reward function gets None."""
    default_data_source: Annotated[str | None, OURS] = None
    """Data source of rows that have none in column reward_fn_key, such as openai/gsm8k; null: every row must have its
    own where a reward function scores it, and the file's name is taken where none does."""
    train_max_samples: MostRows = -1
    """Rows of train_files to use, in all; -1: all. With data.shuffle they are chosen at random by data.seed, as in
    verl; without, the first ones are used."""
    val_max_samples: MostRows = -1
    """Rows of val_files to use, chosen as with train_max_samples; -1: all."""
