"""Keys of a step's first and last tokens: prompts that are read once, long answers that do not hold a batch up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from megatron_rl.config.constraints import OURS, AtMost, Or


@dataclass
class LastTokens:
    """Part of the group `rollout`."""

    over_sample_rate: Annotated[float, Ge(0), Le(0.5)] = 0.0
    """Share of the open groups that a step leaves unfinished: train_batch_size / (1 - rate) are open, the step
    ends with the first train_batch_size that are complete, and the others go on in the next one, with their tokens.
    The name is verl's, which drops them. Needs trainer.rollout_ahead >= 1, the steps that a group may be late."""
    longest_first: Annotated[bool, OURS] = False
    """A replica begins its requests in the order of the longest answer that their prompt had last, the longest first,
    so that none of these is begun when places for it become free last. Of use where an engine has more requests than
    max_num_seqs, from the second epoch on. Samples do not depend on it."""
    prefix_match_unit: Annotated[int | None, Or(None, "whole blocks"), Ge(1), AtMost(2**10), OURS] = None
    """Samples of a prompt share what the engine has read of it up to a multiple of so many tokens; the name is vLLM's.
    null: whole blocks of the KV cache, so that a prompt shorter than a block is read once for every sample. The unit
    divides the tokens of a block; a small one shares more, and takes more work to look up. On CPUs alone."""


def extra_groups(num_groups: int, over_sample_rate: float) -> int:
    """Groups to begin beyond a batch, of which a step leaves as many unfinished: at least one, unless the rate is 0."""
    return max(1, round(num_groups * over_sample_rate / (1 - over_sample_rate))) if over_sample_rate else 0
