"""Keys of prefix sharing, and of over-sampling and request order, which keep long responses from delaying a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from megatron_rl.config.constraints import OURS, AtMost, Or


@dataclass
class LastTokens:
    """Part of the group `rollout`."""

    over_sample_rate: Annotated[float, Ge(0), Le(0.5)] = 0.0
    """Over-sampling: train_batch_size / (1 - rate) groups are generated at a time, and a step takes the first
    train_batch_size groups that finish; the others continue in the next step and keep their tokens (verl drops them).
    Needs trainer.rollout_ahead >= 1, the number of steps that a group may be late; on a rollout pool of its own one
    more. async_training.straggler_policy acts on groups that may not be late any more."""
    longest_first: Annotated[bool, OURS] = False
    """Start requests whose prompt had the longest response in the last epoch first, so that no long response starts
    late. Useful where an engine has more requests than max_num_seqs, from the second epoch on. Samples do not depend on
    it."""
    prefix_match_unit: Annotated[int | None, Or(None, "whole blocks"), Ge(1), AtMost(2**10), OURS] = None
    """Prefix sharing: samples of a prompt share its KV cache up to a multiple of this number of tokens, which must
    divide the tokens of a KV cache block. Smaller shares more and costs more look-ups. null: whole blocks, so a prompt
    shorter than a block is computed for every sample. vLLM's name; CPUs only."""


def extra_groups(num_groups: int, over_sample_rate: float) -> int:
    """Return the groups to generate beyond a batch, which a step leaves unfinished: at least one, unless the rate is
    0."""
    return max(1, round(num_groups * over_sample_rate / (1 - over_sample_rate))) if over_sample_rate else 0
