"""An answer without a token goes through every role and changes no gradient; a mini-batch of such makes no update."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny_models import random_batch, run_config, save_qwen2

from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE, SCORING
from megatron_rl.records import Batch, ragged, ragged_from_lengths, single_turn

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

FIELDS = ("rollout_log_probs", "old_values", "advantages", "returns")


def with_empty_rows(experience: Batch, at: int) -> Batch:
    """The same rows, and from row `at` on two of a prompt without an answer, of 3 tokens and of one."""
    prompts = [torch.tensor([7, 8, 9]), torch.tensor([5])]
    rows, lengths = list(experience["input_ids"].unbind()), experience.num_sampled.tolist()
    lengths = torch.tensor([*lengths[:at], 0, 0, *lengths[at:]])
    fields = {name: ragged_from_lengths(experience.flat(name), lengths) for name in FIELDS}
    input_ids = ragged([*rows[:at], *prompts, *rows[at:]])
    return single_turn(input_ids, lengths, **fields)


def go_through_all_roles(config, experience: Batch) -> dict:
    """Scores of each role, and what an update of actor and critic measured and changed, on this DP rank's share."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    for role in ("actor", "reference", "critic"):
        worker.build(role)
    where = worker.coordinates()
    mine = experience[torch.arange(len(experience)).tensor_split(where.dp_size)[where.dp_rank]]
    roles = worker.roles
    scorers = {"old": roles["actor"].log_probs, "ref": roles["reference"].log_probs, "values": roles["critic"].values}
    scores = {name: scorer(mine.read_by(SCORING)) for name, scorer in scorers.items()}
    logits = worker.roles["actor"].sampled_logits(mine.read_by(SCORING))
    mine.add(old_log_probs=mine["rollout_log_probs"])
    weights = [
        buffer.param_data
        for role in (worker.roles["actor"], worker.roles["critic"])
        for buffer in role.trainable.param_buffers
    ]
    before = [tensor.clone() for tensor in weights]
    metrics = worker.roles["actor"].update(mine.read_by(ACTOR_UPDATE)) | worker.roles["critic"].update(
        mine.read_by(CRITIC_UPDATE)
    )
    unchanged = all(torch.equal(old, new) for old, new in zip(before, weights, strict=True))
    if scores["old"] is not None:
        assert len(logits) == int(mine.num_sampled.sum())
        for found in scores.values():
            assert found[found.names[0]].offsets().diff().tolist() == mine.num_sampled.tolist()
    values = {name: None if found is None else found.flat(found.names[0]) for name, found in scores.items()}
    collects = where.dp_rank if where.dp_collector else None
    return {"dp_rank": collects, "scores": values, "metrics": metrics, "unchanged": unchanged}


def reported(results: list[dict]) -> list[dict]:
    """In the order of data-parallel ranks."""
    return sorted((r for r in results if r["dp_rank"] is not None), key=lambda r: r["dp_rank"])


@pytest.mark.parametrize(
    ("pp_size", "at"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.exhaustive)], ids=["DP2", "PP2"]
)
def test_empty_rows_change_nothing(pp_size: int, at: int, tmp_path) -> None:
    """4 rows and 2 empty ones against the 4 alone on one process, 1e-5; micro-batches of 2, so one is empty.

    Would not catch a baseline that forgets the empty answer's score; `tests/losses` does.
    """
    path, keys = save_qwen2(tmp_path), {"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2}
    whole = random_batch(4)
    [expected] = run_ranks(1, go_through_all_roles, run_config(path, 1, 1, **keys), whole)
    config = run_config(path, 1, pp_size, **keys)
    found = reported(run_ranks(2, go_through_all_roles, config, with_empty_rows(whole, at)))
    for name, scores in expected["scores"].items():
        assert (torch.cat([rank["scores"][name] for rank in found]) - scores).abs().max() < 1e-5
    assert expected["metrics"]["actor/grad_norm"] > 0 and not expected["unchanged"]
    for rank in found:
        assert rank["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)


def test_nothing_but_empty_rows(tmp_path) -> None:
    """DP2: no update, no schedule, no NaN. Would not catch a step that counts it as skipped, which could end a run."""
    rows = with_empty_rows(random_batch(2), 0)[:2]
    config = run_config(save_qwen2(tmp_path), 1, 1)
    for rank in run_ranks(2, go_through_all_roles, config, rows):
        assert rank["unchanged"]
        for role in ("actor", "critic"):
            assert rank["metrics"][f"{role}/empty_updates"] == 1 and rank["metrics"][f"{role}/skipped_updates"] == 0
        assert all(value == value for value in rank["metrics"].values())
