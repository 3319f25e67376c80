"""Which TP group of a replica gets which request."""

from __future__ import annotations

from megatron_rl.records import Sampling
from megatron_rl.rollout.replica_groups import share_out
from megatron_rl.rollout.slices import Start

SAMPLING = Sampling(1.0, 1.0, -1, 8, 0)


def starts(*prompts: int) -> list[Start]:
    """One request for each prompt, numbered from 10."""
    return [Start(10 + number, (prompt,), 0, 8, SAMPLING) for number, prompt in enumerate(prompts)]


def test_a_prompt_stays_together_and_the_emptiest_group_is_next():
    """By hand; would not catch engines that run other requests than they were given."""
    assert share_out(starts(1, 1, 1, 2, 3), {}, 2) == {10: 0, 11: 0, 12: 0, 13: 1, 14: 1}
    assert share_out(starts(1, 2, 1), {5: 0, 6: 0}, 2) == {10: 1, 12: 1, 11: 0}
    assert share_out(starts(4, 5), {5: 0}, 3) == {10: 1, 11: 2}
    assert share_out(starts(4, 5), {}, 1) == {10: 0, 11: 0}
