"""Batches on one pool of several replicas: who draws what, with which weights, and what a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from test_samplers import Counting, Pairs, run_config

from megatron_rl.dispatch import Future
from megatron_rl.rollout.slices import Drawn, Slice, SliceReport
from megatron_rl.sampling.pool_sampler import PoolSampler
from megatron_rl.sampling.response_history import EARLIER_FILE, ResponseHistory
from megatron_rl.sampling.sampler import Schedule, Sources
from megatron_rl.sampling.schedule_types import ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler

NUM_REPLICAS = 4


class Replicas:
    """A rollout of four replicas, in rollout mode or not; an answer is the last token of its prompt, twice."""

    def __init__(self) -> None:
        self.calls: list[dict[int, Slice]] = []
        self.in_rollout = False

    def enter(self) -> Future:
        assert not self.in_rollout
        self.in_rollout = True
        return Future.done(["moved"])

    def exit(self) -> Future:
        self.in_rollout = False
        return Future.done([])

    def advance(self, slices: dict[int, Slice]) -> Future:
        assert self.in_rollout
        self.calls.append(slices)
        reports = []
        for replica in range(NUM_REPLICAS):
            starts = slices[replica].starts if replica in slices else ()
            drawn = {start.request: Drawn((start.token_ids[-1],) * 2, (0.0, -1.0), "stop") for start in starts}
            reports.append(SliceReport(replica, 0, 2, drawn))
        return Future.done(reports)


def sampler_of(estimator: str, earlier: ResponseHistory | None = None) -> tuple[PoolSampler, Replicas, list[list]]:
    """A sampler of two prompts, each twice; its rollout; and the transitions it reports."""
    config, rollout, moved = run_config(), Replicas(), list[list]()
    config.algorithm.adv_estimator, config.algorithm.filter_groups.enable = estimator, False
    rows = 6 if estimator == "remax" else 4
    rules = ScheduleConfig(rows, num_steps_total=3, ahead=0, first_step=1, slice_steps=None)
    schedule = Schedule(rules, Scheduler(rules, NUM_REPLICAS), None, NUM_REPLICAS, 0, None, None, earlier)
    sources = Sources(config, Pairs(), Counting(), None, SimpleNamespace(note_transition=moved.append))
    return PoolSampler(schedule, sources, rollout), rollout, moved


def shares(call: dict[int, Slice]) -> dict[int, tuple[int, ...]]:
    return {replica: tuple(start.request for start in order.starts) for replica, order in call.items()}


def test_a_batch_is_one_round_of_contiguous_shares(tmp_path: Path) -> None:
    """Greedy answers are the last rows; one call a step, with the weights before it, and one transition.

    Would not catch replicas that get the right requests with other prompts: their answers are compared below.
    """
    sampler, rollout, moved = sampler_of("remax")
    for step in (1, 2):
        batch, first = sampler.next(step), 6 * (step - 1)
        assert shares(rollout.calls[-1]) == {
            0: (first, first + 1),
            1: (first + 2, first + 3),
            2: (first + 4,),
            3: (first + 5,),
        }
        assert {(order.version, order.num_steps) for order in rollout.calls[-1].values()} == {(step - 1, None)}
        assert [start.sampling.temperature for start in rollout.calls[-1][2].starts] == [0.0]
        assert batch.rows["index"].tolist() == [2 * step - 2] * 2 + [2 * step - 1] * 2
        answers = [[number] * 2 for number in batch.rows["index"].tolist()]
        assert [row.tolist() for row in batch.rows.sampled_ids.unbind()] == answers
        assert "versions" not in batch.rows and "routed_experts" not in batch.rows
        assert batch.greedy is not None and len(batch.greedy) == 2
        assert sampler.cursor.next == 2 * step and not rollout.in_rollout
        with sampler.saving(step):
            assert sampler.write(tmp_path, step) == [] and not list(tmp_path.iterdir())
        sampler.load_weights(step)
    assert len(rollout.calls) == 2 and moved == [["moved"]] * 2


def test_prompts_beside_the_schedule_leave_it_alone() -> None:
    """Three rows on four replicas, with the newest weights, between two steps; a replica without rows is not asked.

    Would not catch other seeds, which whole runs compare.
    """
    sampler, rollout, _ = sampler_of("grpo")
    sampler.next(1)
    sampler.load_weights(1)
    prompts = sampler.next_prompts(Counting())[:3]
    answers = sampler.answer(prompts, sampler.greedy())
    assert shares(rollout.calls[-1]) == {0: (-1,), 1: (-2,), 2: (-3,)}
    assert {order.version for order in rollout.calls[-1].values()} == {1}
    assert [row.tolist() for row in answers.sampled_ids.unbind()] == [[0, 0], [0, 0], [1, 1]]
    assert torch.equal(answers.flat("rollout_log_probs"), torch.tensor([0.0, -1.0] * 3))
    assert sampler.next(2).rows["index"].tolist() == [2, 2, 3, 3]


class Same(Counting):
    """A cursor: prompts 0 and 1, again and again."""

    def next_indices(self) -> torch.Tensor:
        return torch.tensor([0, 1])


def named(call: dict[int, Slice]) -> dict[int, list[list[int]]]:
    """Request -> the earlier answers that it names."""
    starts = [start for order in call.values() for start in order.starts]
    return {s.request: [np.frombuffer(text, dtype=np.int32).tolist() for text in s.earlier] for s in starts}


def test_requests_name_answers_of_former_epochs(tmp_path: Path) -> None:
    """None in the first step; later what was drawn for their prompt, behind its last tokens; greedy ones too. They are
    a part of a checkpoint. A validation, whose prompts have numbers of their own, names none.

    Would not catch a resumed run that does not read them: whole runs show it.
    """
    sampler, rollout, _ = sampler_of("remax", ResponseHistory(num_kept=4, num_context=1, ahead=0))
    sampler.cursor = sampler._cursor_ahead = Same()
    sampler.next(1)
    assert named(rollout.calls[-1]) == {request: [] for request in range(6)}
    with sampler.saving(1):
        assert sampler.write(tmp_path, 1) == [EARLIER_FILE] and (tmp_path / EARLIER_FILE).exists()
    sampler.load_weights(1)
    sampler.next(2)
    zero, one = [[0, 0, 0]], [[1, 1, 1]]
    assert named(rollout.calls[-1]) == {6: zero, 7: zero, 8: one, 9: one, 10: zero, 11: one}
    sampler.load_weights(2)
    sampler.answer(sampler.next_prompts(Same()), sampler.val_sampling())
    assert named(rollout.calls[-1]) == {-1: [], -2: [], -3: [], -4: []}
