"""Rewards, advantages and weights of rows with tokens that were not drawn: those of the drawn tokens, spread back.

Would not catch a role that reads the mask wrongly: `tests/dist/test_sampled_holes.py` does.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.correction import RolloutCorrectionConfig
from megatron_rl.config.declarations import ESTIMATORS
from megatron_rl.experience.rewards_and_advantages import (
    add_advantages,
    add_rewards,
    add_rollout_correction,
    leave_out_truncated,
    observation_numbers,
)
from megatron_rl.experience.staleness import staleness_metrics
from megatron_rl.records import Batch, ragged, single_turn

modest = settings(max_examples=25, deadline=None)
masks = st.lists(st.lists(st.booleans(), max_size=8), min_size=2, max_size=6)
OF_TOKENS = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "old_values", "sum_pi_squared")
CORRECTION = RolloutCorrectionConfig(
    rollout_is="sequence",
    rollout_rs="token_k2,seq_mean_k3",
    rollout_rs_threshold="0.5,0.4",
    rollout_token_veto_threshold=0.05,
    rollout_is_batch_normalize=True,
)


def with_holes(rows: list[list[bool]], seed: int) -> Batch:
    """One prompt token and these masks; numbers at random, versions 0 to 2, rows in groups of two."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.tensor([False, *row]) for row in rows]
    batch = Batch(input_ids=ragged([torch.arange(len(mask)) for mask in masks]), sampled=ragged(masks))
    number, num_rows = int(batch.num_sampled.sum()), len(rows)

    def noise() -> torch.Tensor:
        return torch.rand(number, generator=generator)

    batch.add(**{name: batch.per_sampled_token(noise() - 1) for name in OF_TOKENS})
    batch.add(
        versions=batch.per_sampled_token(torch.randint(0, 3, (number,), generator=generator)),
        groups=torch.arange(num_rows) // 2,
        scores=torch.randn(num_rows, generator=generator),
        greedy_scores=torch.randn(num_rows, generator=generator),
        components=torch.randn(num_rows, 2, generator=generator),
        truncated=torch.rand(num_rows, generator=generator) < 0.3,
    )
    return batch


def drawn_alone(batch: Batch) -> Batch:
    """The same columns on rows of a prompt of one token and the drawn tokens, a single turn."""
    counts = batch.num_sampled
    rows = single_turn(ragged([torch.arange(int(count) + 1) for count in counts]), counts)
    rows.add(batch.without("input_ids", "sampled"))
    return rows


def estimated(batch: Batch, name: str) -> dict[str, float]:
    """Everything between scores and updates; metrics, with the KL."""
    config = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8, gdpo_reward_keys=["a", "b"])
    metrics = add_rollout_correction(batch, CORRECTION)
    kl = add_rewards(batch, kl_coef=0.1)
    add_advantages(batch, ESTIMATORS[name].function, config)
    leave_out_truncated(batch)
    return metrics | staleness_metrics(batch, step=3) | ({} if kl is None else {"kl": float(kl)})


ESTIMATORS_OF_TOKENS = {entry.names[0] for entry in ESTIMATORS.values() if "observations" not in entry.traits.reads}
"""Estimators for which turns do not count."""


@pytest.mark.parametrize("name", sorted(ESTIMATORS_OF_TOKENS))
@modest
@given(rows=masks, seed=st.integers(0, 99))
def test_every_estimator_sees_drawn_tokens_alone(name: str, rows, seed: int) -> None:
    """Columns and metrics are bit for bit those without the holes. Would not catch a formula that is wrong for both."""
    holes = with_holes(rows, seed)
    alone = drawn_alone(holes)
    metrics = estimated(holes, name)
    assert estimated(alone, name) == metrics
    for column in ("rewards", "advantages", "returns", "rollout_weights", "kept"):
        assert torch.equal(holes.flat(column), alone.flat(column)), column


def spread_back(batch: Batch, column: str) -> list[list[float | None]]:
    """A column of sampled tokens, one entry per token, None where it was not drawn."""
    values = iter(batch.flat(column).tolist())
    return [[next(values) if drawn else None for drawn in row.tolist()] for row in batch["sampled"].unbind()]


def three_drawn() -> Batch:
    """Tokens 1, 2 and 4 of a row are drawn, with values 1, 2 and 3; its score is 4. Of another row none is drawn."""
    batch = Batch(
        input_ids=ragged([torch.arange(6), torch.arange(3)]),
        sampled=ragged([torch.tensor([0, 1, 1, 0, 1, 0]).bool(), torch.tensor([0, 0, 0]).bool()]),
        scores=torch.tensor([4.0, 9.0]),
        groups=torch.tensor([0, 1]),
    )
    batch.add(old_values=batch.per_sampled_token(torch.tensor([1.0, 2.0, 3.0])))
    return batch


def test_gae_by_hand() -> None:
    """Tokens 1, 2 and 4 of a row are drawn, the score stands on token 4; gamma and lambda 0.5. The value after token 2
    is that of token 4, two places on. Would not catch whitening over tokens that were not drawn.
    """
    batch = three_drawn()
    assert add_rewards(batch, 0.0) is None
    assert spread_back(batch, "rewards") == [[None, 0.0, 0.0, None, 4.0, None], [None] * 3]
    add_advantages(batch, ESTIMATORS["gae"].function, AlgorithmConfig(gamma=0.5, lam=0.5))
    # Token 4: 4 - 3 = 1. Token 2: 0.5 * 3 - 2 + 0.25 * 1 = -0.25. Token 1: 0.5 * 2 - 1 + 0.25 * -0.25 = -0.0625.
    assert spread_back(batch, "returns") == [[None, 0.9375, 1.75, None, 4.0, None], [None] * 3]
    mean, std = 0.6875 / 3, torch.tensor([1.0, -0.25, -0.0625]).std().item()
    expected = [None, (-0.0625 - mean) / std, (-0.25 - mean) / std, None, (1 - mean) / std, None]
    found = spread_back(batch, "advantages")[0]
    assert [value and round(value, 5) for value in found] == [value and round(value, 5) for value in expected]


def test_turns_by_hand() -> None:
    """Tokens 1 and 2 are a turn that earned 1, token 4 one that earned the rest of 4; gamma and lambda 0.5. Values of
    turns are 1 and 3. Would not catch a reward of an observation, which has no token here.
    """
    batch = three_drawn()
    batch.add(turn_rewards=batch.per_sampled_token(torch.tensor([0.0, 1.0, 0.0])))
    add_rewards(batch, 0.0, by_turns=True)
    assert spread_back(batch, "rewards")[0] == [None, 0.0, 1.0, None, 3.0, None]
    add_advantages(batch, ESTIMATORS["gae"].function, AlgorithmConfig(gamma=0.5, lam=0.5, gae_timestep="turn"))
    # The last turn: 3 - 3 = 0. The first: 1 + 0.5 * 3 - 1 + 0.25 * 0 = 1.5.
    assert spread_back(batch, "returns") == [[None, 2.5, 2.5, None, 3.0, None], [None] * 3]
    advantages = torch.tensor([1.5, 1.5, 0.0])
    expected = (advantages - 1.0) / advantages.std()
    torch.testing.assert_close(batch.flat("advantages"), expected)
    add_rewards(batch, 0.0)
    assert spread_back(batch, "rewards")[0] == [None, 0.0, 0.0, None, 4.0, None]


def test_gigpo_by_hand() -> None:
    """Two episodes of one prompt and one of another, turns of one or two tokens; after the first turn all read 7. gamma
    0.5, no division. Would not catch states that differ where tokens do not.

    Totals of group 0: 4 and 2, so the episodes have 1 and -1. First turns read the prompt; rewards to go by turns:
    1 + 0.5 * 3 = 2.5 and 0 + 0.5 * 2 = 1, so 0.75 and -0.75. Second turns read 7: 3 and 2, so 0.5 and -0.5. The third
    episode is alone: its total 5, and nothing from turns.
    """
    batch = Batch(
        input_ids=ragged([torch.tensor(ids) for ids in ([1, 2, 5, 6, 7, 8], [1, 2, 9, 7, 8, 8], [1, 2, 5, 7, 5])]),
        sampled=ragged([torch.tensor(m).bool() for m in ([0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 1, 1], [0, 0, 1, 0, 1])]),
        scores=torch.tensor([4.0, 2.0, 5.0]),
        groups=torch.tensor([0, 0, 1]),
    )
    batch.add(turn_rewards=batch.per_sampled_token(torch.tensor([0.0, 1, 3, 0, 0, 2, 2, 3])))
    add_rewards(batch, 0.0, by_turns=True)
    config = AlgorithmConfig(
        adv_estimator="gigpo", gamma=0.5, norm_adv_by_std_in_grpo=False, gigpo_step_advantage_w=2.0
    )
    add_advantages(batch, ESTIMATORS["gigpo"].function, config)
    assert spread_back(batch, "advantages") == [
        [None, None, 2.5, 2.5, None, 2.0],
        [None, None, -2.5, None, -2.0, -2.0],
        [None, None, 5.0, None, 5.0],
    ]


def test_gigpo_of_equal_scores() -> None:
    """Two episodes with the score 1.1, of which their turns take other parts: neither the episodes nor their first
    turns, which both have all of it to go, differ. The second turns read other things.

    Would not catch a difference that is hidden: 0.9 to go and 0.3 are compared with nothing.
    """
    batch = Batch(
        input_ids=ragged([torch.tensor([1, 5, 7, 6]), torch.tensor([1, 5, 8, 6])]),
        sampled=ragged([torch.tensor([0, 1, 0, 1]).bool()] * 2),
        scores=torch.tensor([1.1, 1.1]),
        groups=torch.tensor([0, 0]),
    )
    batch.add(turn_rewards=batch.per_sampled_token(torch.tensor([0.7, 0.9, 0.1, 0.3])))
    add_rewards(batch, 0.0, by_turns=True)
    assert len({float(rewards.sum()) for rewards in batch["rewards"].unbind()}) == 2  # what rounding makes of 1.1
    add_advantages(batch, ESTIMATORS["gigpo"].function, AlgorithmConfig(adv_estimator="gigpo", gamma=1.0))
    assert batch.flat("advantages").tolist() == [0.0] * 4


def test_observations_have_numbers() -> None:
    """Rows of several turns and conversations: what a turn has read since the turn before decides, and where a
    conversation begins anew, that alone. Would not catch two rows that read the same in other groups.
    """
    masks = ([0, 1, 0, 1, 0, 1], [0, 1, 1, 0, 0, 1], [0])
    batch = Batch(
        input_ids=ragged([torch.tensor(ids) for ids in ([1, 5, 7, 5, 1, 5], [1, 6, 6, 9, 7, 3], [4])]),
        sampled=ragged([torch.tensor(mask).bool() for mask in masks]),
    )
    assert observation_numbers(batch).tolist() == [0, 1, 0, 0, 0, 2]
    anew = ([0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0])
    batch.add(conversation_starts=ragged([torch.tensor(starts).bool() for starts in anew]))
    assert observation_numbers(batch).tolist() == [0, 1, 0, 0, 0, 1]
