"""Roles that only sleep, on pools of their own, under the real loop: a step takes no longer than its slowest chain.

Real roles would share this machine's two cores; sleeping ones show what a core, or a GPU, for each rank would.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from launchers import reserved
from sleepers import SleepingActor, SleepingCritic, SleepingHost, SleepingReference

from megatron_rl.cluster.failures import FailureDomain
from megatron_rl.cluster.launcher import Launcher
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.columns import SCORING
from megatron_rl.config.schema import RunConfig
from megatron_rl.dispatch import CallInterval, NullObserver
from megatron_rl.records import Batch, ragged, single_turn
from megatron_rl.scoring.batch_scorers import RoleScorer, score
from megatron_rl.scoring.sampled_batch import SampledBatch
from megatron_rl.train import update

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

NUM_STEPS = 3
# Scoring: log-probs 0.4 s, then the reference's 0.5 s, on one pool; values 0.7 s on another; the rule 0.3 s here.
# Updates, two mini-batches each: 2 x 0.6 s and 2 x 0.4 s.
SLOWEST_CHAIN_S = max(0.4 + 0.5, 0.7, 0.3) + max(2 * 0.6, 2 * 0.4)
SUM_S = 0.4 + 0.5 + 0.7 + 0.3 + 2 * 0.6 + 2 * 0.4


class Intervals(NullObserver):
    """Keeps what ran."""

    def __init__(self) -> None:
        self.all: list[CallInterval] = []

    def ran(self, interval: CallInterval) -> None:
        self.all.append(interval)


def sequences() -> Batch:
    return single_turn(ragged([torch.arange(3), torch.arange(3)]), torch.ones(2, dtype=torch.int64))


class SleepingRule:
    """A scorer that works in this process."""

    def start(self, batch: SampledBatch) -> None:
        pass

    def take(self) -> Batch:
        time.sleep(0.3)
        return Batch(scores=torch.zeros(2))


def overlap(first: CallInterval, second: CallInterval) -> float:
    return min(first.stop, second.stop) - max(first.start, second.start)


def test_a_step_takes_as_long_as_its_slowest_chain(launcher: Launcher) -> None:
    """At most a tenth more, and intervals of different pools overlap. Would not catch two roles of one pool that could
    run at once, which cannot.
    """
    heard = Intervals()
    kinds = {"train": {"actor": SleepingActor, "reference": SleepingReference}, "critic": {"critic": SleepingCritic}}
    failure_domain, options = FailureDomain(), PoolOptions(observer=heard)
    with (
        reserved(launcher, 1) as first,
        reserved(launcher, 1) as second,
        ProcessPool(
            "train", first, SleepingHost, roles=kinds["train"], options=options, failure_domain=failure_domain
        ) as train,
        ProcessPool(
            "critic", second, SleepingHost, roles=kinds["critic"], options=options, failure_domain=failure_domain
        ) as critic,
    ):
        roles = SimpleNamespace(
            actor=train.handle("actor", SleepingActor),
            reference=train.handle("reference", SleepingReference),
            critic=critic.handle("critic", SleepingCritic),
        )
        algorithm = SimpleNamespace(
            actor_batches=lambda experience, step: [sequences()] * 2,
            critic_batches=lambda experience, step: [sequences()] * 2,
        )
        logger = SimpleNamespace(update_metrics=lambda role, updates: {role: [one.get() for one in updates]})
        parts = {"roles": roles, "algorithm": algorithm, "logger": logger}
        passes = (roles.actor.log_probs, roles.reference.log_probs, roles.critic.values)
        scorers = [*(RoleScorer(call, (SCORING,)) for call in passes), SleepingRule()]
        run = SimpleNamespace(config=RunConfig(), pretraining=SimpleNamespace(next=lambda: None), **parts)
        seconds = []
        for step in range(NUM_STEPS):
            start = time.monotonic()
            rows = sequences()
            rows.add(uid=torch.arange(len(rows)))
            batch = SampledBatch(step, rows)
            score(scorers, batch)
            update(run, batch.rows, step)
            seconds.append(time.monotonic() - start)
    print(f"steps of {[round(one, 3) for one in seconds]} s; slowest chain {SLOWEST_CHAIN_S} s, sum {SUM_S} s")
    assert SLOWEST_CHAIN_S <= min(seconds) <= 1.10 * SLOWEST_CHAIN_S < SUM_S
    by_method = {(one.role, one.remote_method): one for one in heard.all}
    assert overlap(by_method["actor", "log_probs"], by_method["critic", "values"]) > 0.2
    assert overlap(by_method["reference", "log_probs"], by_method["critic", "values"]) > 0.1
    assert overlap(by_method["actor", "update"], by_method["critic", "update"]) > 0.1
