"""The answers of batches that are not trained yet: numbers of requests, seeds, versions of tokens, and what a
checkpoint keeps.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from test_remote_columns import Shelf

from megatron_rl.agents.episode import EpisodeLimits, Reply
from megatron_rl.agents.observation import EpisodeFailure, Observation, Opening, Turn
from megatron_rl.errors import ConfigError
from megatron_rl.records import Batch, Sampling, ragged
from megatron_rl.remote_columns import ColumnPiece
from megatron_rl.rollout.slices import DraftCounts, Drawn
from megatron_rl.sampling.group_map import GroupMap
from megatron_rl.sampling.in_flight import InFlightBatches
from megatron_rl.sampling.rollout_checkpoint import read_answers, read_schedule, write_rollouts
from megatron_rl.sampling.sampler import draft_metrics

SAMPLING, GREEDILY = Sampling(1.0, 1.0, -1, 5, salt=7), Sampling(0.0, 1.0, -1, 5, salt=-1)


def prompts(*rows: list[int]) -> Batch:
    number = len(rows)
    return Batch(
        index=torch.arange(number) + 10,
        sample=torch.arange(number) % 2,
        input_ids=ragged([torch.tensor(row) for row in rows]),
        data_source=[""] * number,
        ground_truth=[""] * number,
        extra_info=[{}] * number,
        uid=torch.arange(number),
    )


def seed_of(*asked: int) -> int:
    """Tells what it was asked, each number in three digits of its own."""
    return int("".join(f"{number + 100:03}" for number in asked))


def two_batches() -> InFlightBatches:
    answers = InFlightBatches(batch_rows=3, seed_of=seed_of)
    for step in (1, 2):
        answers.add(step, prompts([1, 2], [3]), SAMPLING, prompts([1, 2])[:1], GREEDILY)
    return answers


def test_a_request_goes_on_with_the_tokens_that_it_has() -> None:
    """By hand: request 4 is row 1 of batch 2. Would not catch a seed that the engine does not use."""
    answers = two_batches()
    first = answers.start(4)
    assert (first.token_ids, first.max_tokens, first.sampling) == ((3,), 5, SAMPLING)
    assert first.seed == seed_of(7, 11, 1, 0, 0)
    answers.extend({4: Drawn((8, 9), (-0.5, -0.25))}, version=3)
    again = answers.start(4)
    assert (again.token_ids, again.max_tokens) == ((3, 8, 9), 3) and again.seed == seed_of(7, 11, 1, 0, 2)
    answers.episode(4).resample()
    anew = answers.start(4)
    assert (anew.token_ids, anew.max_tokens) == ((3,), 5) and anew.seed == seed_of(7, 11, 1, 1, 0)
    assert answers.start(5).sampling == GREEDILY


def test_requests_that_are_compared() -> None:
    """By hand: of 3 rows the third is greedy, and the third batch begins at 6. Would not catch samples of a prompt that
    are not one group.
    """
    answers, two = two_batches(), prompts([1, 2], [3])
    assert [answers.episode(request).group for request in range(6)] == [(request,) for request in range(6)]
    two["uid"][:] = 4
    answers.add(3, two, SAMPLING, two[:1], GREEDILY)
    assert [answers.episode(request).group for request in range(6, 9)] == [(6, 7), (6, 7), (8,)]


def test_a_complete_batch_says_which_weights_drew_each_token() -> None:
    """One of two versions, one that was cut off, one greedy. Would not catch rows in another order than asked."""
    answers = two_batches()
    answers.extend({0: Drawn((5, 6), (-1.0, -2.0)), 1: Drawn((7,), (-3.0,))}, version=0)
    answers.extend({0: Drawn((2,), (-0.5,), "stop"), 2: Drawn((2,), (0.0,), "stop")}, version=1)
    with pytest.raises(ValueError, match=r"rows \[1\] of batch 1"):
        answers.batch(1)
    answers.episode(1).truncate()
    found, greedy = answers.batch(1)
    assert [row.tolist() for row in found.sampled_ids.unbind()] == [[5, 6, 2], [7]]
    assert [row.tolist() for row in found["versions"].unbind()] == [[0, 0, 1], [0]]
    assert [row.tolist() for row in found["rollout_log_probs"].unbind()] == [[-1.0, -2.0, -0.5], [-3.0]]
    assert found["truncated"].tolist() == [False, True]
    assert greedy is not None and [row.tolist() for row in greedy.sampled_ids.unbind()] == [[2]]


def test_a_greedy_response_is_trained_with_its_group(tmp_path: Path) -> None:
    """By hand: groups of one sample and one greedy response, of which group 0 is late. Its greedy response keeps its
    number and its weights, and a run that continues has both. Would not catch a group of which only a part is moved.
    """
    runs = [InFlightBatches(4, seed_of, groups=GroupMap(2, 2)) for _ in range(2)]
    for each in runs:
        for step in (1, 2):
            each.add(step, prompts([1], [2]), SAMPLING, prompts([1], [2]), GREEDILY)
        each.groups.move(0, 2)
        each.groups.move(2, 1)
    answers, again = runs
    assert [answers.start(request).sampling for request in range(4)] == [SAMPLING, GREEDILY] * 2
    assert answers.requests_of(1) == ([2, 4], [3, 5]) and answers.requests_of(2) == ([0, 6], [1, 7])
    answers.extend({n: Drawn((n,), (-0.5,), "stop") for n in (1, 2, 3, 4, 5)}, version=0)
    rows, greedy = answers.batch(1)
    assert greedy is not None and [row.tolist() for row in greedy.sampled_ids.unbind()] == [[3], [5]]
    assert [row.tolist() for row in rows.sampled_ids.unbind()] == [[2], [4]] and rows["uid"].tolist() == [0, 1]
    write_rollouts(tmp_path, answers, {"taken": 1, "next_new": 8}, step=1)
    again.trained(1)
    rows = prompts([1], [1])
    read_answers(tmp_path, again, lambda indices: rows.add(index=torch.tensor(indices)) or rows)
    assert again.start(0) == answers.start(0) and again.start(1) == answers.start(1)
    again.extend({n: Drawn((n,), (-0.5,), "stop") for n in (0, 6, 7)}, version=1)
    greedy = again.batch(2)[1]
    assert greedy is not None and [row.tolist() for row in greedy.sampled_ids.unbind()] == [[1], [7]]
    assert [row.tolist() for row in greedy["versions"].unbind()] == [[0], [1]]


def test_a_checkpoint_keeps_what_is_drawn_after_its_step(tmp_path: Path) -> None:
    """Finished, unfinished and drawn again, and a batch that was taken but not trained; log-probs in float32.

    Would not catch prompts that are others when they are read again; the cursor refuses those.
    """
    answers = two_batches()
    answers.extend({0: Drawn((5,), (-1.0,), "stop"), 3: Drawn((6, 7), (-0.1, -0.2)), 5: Drawn((2,), (0.0,))}, version=4)
    answers.episode(5).resample()
    write_rollouts(tmp_path, answers, {"taken": 2, "next_new": 6}, step=1)
    assert read_schedule(tmp_path) == {"taken": 1, "next_new": 6}
    read = two_batches()
    read_answers(tmp_path, read)
    assert read.start(3) == answers.start(3) and read.start(5) == answers.start(5)
    assert read.start(0).token_ids == (1, 2)  # trained: not kept
    read.extend({3: Drawn((), (), "stop"), 4: Drawn((1,), (0.0,), "stop"), 5: Drawn((1,), (0.0,), "stop")}, version=9)
    found, _ = read.batch(2)
    assert found["rollout_log_probs"].unbind()[0].tolist() == torch.tensor([-0.1, -0.2]).tolist()
    assert [row.tolist() for row in found["versions"].unbind()] == [[4, 4], [9]]


def test_a_checkpoint_keeps_experts(tmp_path: Path) -> None:
    """Of an unfinished response in two pieces, one of which a rank holds, and of a finished one; a run goes on from
    there, and from a checkpoint without any, where the engine reads all tokens again. Would not catch a node that is
    lost.
    """
    experts = dataclasses.replace(SAMPLING, with_experts=True)
    runs = [InFlightBatches(batch_rows=3, seed_of=seed_of) for _ in range(3)]
    for each in runs:
        each.add(1, prompts([1, 2], [3], [4]), experts, None, GREEDILY)
    answers, again, without = runs
    numbers, shelf = torch.arange(24, dtype=torch.uint8).view(6, 2, 2), Shelf()
    first = ColumnPiece(shelf.put(numbers[:3]), 1, 2)
    answers.extend(
        {0: Drawn((5,), (-0.5,), "", first), 2: Drawn((6,), (-0.5,), "stop", ColumnPiece.whole(numbers[3:4]))}, 4
    )
    answers.extend({0: Drawn((7,), (-0.5,), "", ColumnPiece.whole(numbers[4:5]))}, 5)
    write_rollouts(tmp_path, answers, {"taken": 0, "next_new": 3}, step=0)
    read_answers(tmp_path, again)
    assert [again.start(request) for request in (0, 1)] == [answers.start(request) for request in (0, 1)]
    assert [again.start(request).experts_from for request in (0, 1)] == [3, 0]
    kept = [torch.cat([piece.part for piece in again.episode(request).experts]) for request in (0, 2)]
    assert torch.equal(kept[0], numbers[[1, 2, 4]]) and torch.equal(kept[1], numbers[3:4])
    tensors = answers.tensors(0)
    without.load_tensors({name: tensors[name] for name in tensors if "experts" not in name})
    assert without.start(0).experts_from == 0 and without.start(0).token_ids == answers.start(0).token_ids


def test_a_checkpoint_keeps_open_episodes(tmp_path: Path) -> None:
    """One with an answered turn and tokens of the next, one that waits for its answer, one that failed; two that their
    environment has begun, or could not, and that have no token. Would not catch an environment that has moved on: it is
    played again, and compared.
    """
    answers, again = (InFlightBatches(batch_rows=5, seed_of=seed_of, limits=EpisodeLimits(4)) for _ in range(2))
    for each in (answers, again):
        each.add(1, prompts([1, 2], [3], [4], [5], [6]), SAMPLING, None, GREEDILY)
    opening, failure = Opening(({"role": "user", "content": "?"},)), EpisodeFailure("raised", "why")
    answers.episode(3).begin(Reply(None, opening, (8, 9)))
    answers.episode(4).begin(Reply(None, failure))
    assert list(answers.unbegun) == [0, 1, 2]
    observed = Observation(({"role": "user", "content": "more"},), 0.25, counts={"tries": 1.0})
    away = answers.extend({n: Drawn((5, 6), (-0.5, -0.25), "stop") for n in range(3)}, version=2)
    assert away == [0, 1, 2]
    assert not answers.take(0, Reply(Turn("a"), observed, (7,)))
    assert answers.take(2, Reply(Turn("c"), EpisodeFailure("crashed", "why")))
    answers.extend({0: Drawn((8,), (-1.0,))}, version=3)
    write_rollouts(tmp_path, answers, {"taken": 0, "next_new": 3}, step=0)
    read_answers(tmp_path, again)
    assert again.episode(3).prompt_ids == (8, 9) and again.episode(3).opening == opening
    assert again.episode(4).opening == failure and again.unbegun == {}
    assert again.away == [1] and again.start(0) == answers.start(0)
    for number in range(2):
        ours, theirs = again.episode(number), answers.episode(number)
        assert (ours.played, ours.is_sampled, ours.versions) == (theirs.played, theirs.is_sampled, theirs.versions)
        assert ours.turn_ids == theirs.turn_ids and ours.reward == theirs.reward
    assert again.episode(2).finish == "failed" and again.episode(2).failure == EpisodeFailure("crashed", "why")


def test_a_damaged_file_is_a_sentence(tmp_path: Path) -> None:
    """Would not catch damage that leaves a readable file; the manifest's checksums do."""
    assert read_schedule(tmp_path) is None
    (tmp_path / "rollouts.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"rollouts.safetensors does not have the form that a run writes"):
        read_schedule(tmp_path)


def test_what_drafts_did_for_each_batch() -> None:
    """By hand: 5 tokens in 3 steps of which 4 were guessed, in two slices of batch 1; an engine without drafts counts
    nothing.

    Would not catch an engine that counts wrongly: `tests/dist/test_drafts.py` compares it with its steps.
    """
    answers = two_batches()
    answers.extend({0: Drawn((5, 6, 7), (-0.5,) * 3, "", None, DraftCounts(3, 2, 3))}, version=0)
    answers.extend({1: Drawn((5, 6), (-0.5,) * 2, "", None, DraftCounts(2, 1, 1)), 3: Drawn((5,), (-0.5,))}, version=0)
    assert answers.drafts(1) == DraftCounts(5, 3, 4)
    assert draft_metrics(answers.drafts(1)) == {
        "rollout/tokens_per_step": pytest.approx(5 / 3),
        "rollout/drafts_accepted": 0.5,
    }
    assert draft_metrics(answers.drafts(2)) == {}
    answers.trained(1)
    assert answers.drafts(1) == DraftCounts()
