"""Random rules, lengths, costs and failures, and what must hold of every simulated run."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from megatron_rl.sampling.engine_model import Costs
from megatron_rl.sampling.schedule_types import ScheduleConfig
from megatron_rl.sampling.simulate import Failure, SimulatedRun, Turns


@dataclass(frozen=True)
class Scene:
    """All that a simulated run depends on."""

    rules: ScheduleConfig
    num_replicas: int
    seed: int
    longest: int

    def lengths(self, request: int, attempt: int) -> int:
        """Mostly short, one in eight long; another attempt has another length."""
        mixed = (self.seed + 7919 * request + 104_729 * attempt) * 2_654_435_761 % 2**32 >> 8
        return (1 + mixed % self.longest) * (8 if mixed // self.longest % 8 == 0 else 1)

    def costs(self, seed: int) -> Costs:
        """Seconds that have nothing to do with the rules: another seed means another arrival of all facts."""
        rng = random.Random(f"{self.seed} {seed}")
        fixed, each, transfer = rng.uniform(0.1, 2), rng.uniform(0, 0.3), rng.choice([0.0, rng.uniform(0, 30)])
        return Costs(
            step_seconds=lambda running: fixed + each * running,
            train_seconds=rng.uniform(0, 60),
            transfer_seconds=transfer,
            exposed_seconds=rng.uniform(0, transfer),
            swap_seconds=rng.uniform(0, 1),
        )

    def turns(self, seed: int) -> Turns:
        """Of one to six tokens; most answers come at once, some late. Another seed means another arrival."""

        def of(request: int) -> tuple[int, float]:
            tokens = 1 + random.Random(f"{self.seed} tokens {request}").randrange(6)
            late = random.Random(f"{self.seed} {seed} {request}")
            return tokens, late.choice([0.0, late.uniform(0, 3), late.uniform(0, 60)])

        return of

    def failures(self, seed: int) -> list[Failure]:
        """Up to six; replica 0 always comes back, so that the run can end."""
        rng = random.Random(f"{self.seed} failures {seed}")
        found = []
        for _ in range(rng.randint(0, 6)):
            replica = rng.randrange(self.num_replicas)
            down = None if replica and rng.random() < 0.3 else rng.uniform(0, 40)
            found.append(Failure(replica, rng.uniform(0, 120), down))
        return found

    def saves(self) -> set[int]:
        """Steps after which a checkpoint is written."""
        rng = random.Random(f"{self.seed} saves")
        return {step for step in range(1, self.rules.num_steps_total) if rng.random() < 0.4}


def random_scene(seed: int, **fixed: object) -> Scene:
    """One of all modes. fixed: rules that are not left to chance."""
    rng = random.Random(seed)
    sync_every = rng.randint(1, 3)
    chosen = {
        "batch_rows": rng.randint(1, 9),
        "num_steps_total": rng.randint(1, 7),
        "sync_every": sync_every,
        "ahead": rng.randint(sync_every - 1, 4),
        "slice_steps": rng.randint(1, 7),
        "max_running": rng.randint(1, 6),
        "max_queued": rng.choice([0, 0, 2]),
        "partial": rng.random() < 0.6,
        "recompute_kv": rng.random() < 0.5,
        "deterministic": rng.random() < 0.5,
        "straggler_policy": rng.choice(["wait", "truncate", "resample"]),
        "straggler_slices": rng.randint(1, 3),
        "straggler_attempts": rng.randint(0, 2),
        "awaits_turns": rng.random() < 0.5,
    }
    if rng.random() < 0.15:
        chosen |= {"colocated": True, "partial": True, "deterministic": True, "sync_every": 1}
    rules = with_late_groups(ScheduleConfig(**(chosen | fixed)), random.Random(f"{seed} groups"))
    return Scene(rules, rng.randint(1, 4), seed, rng.randint(1, 12))


def with_late_groups(rules: ScheduleConfig, rng: random.Random) -> ScheduleConfig:
    """Every second schedule that may over-sample does, in groups of one to three; one that takes verdicts may not."""
    if rules.filtered or rules.deterministic or rules.ahead <= rules.sync_every or rng.random() < 0.5:
        return rules
    size = rng.choice([size for size in (1, 2, 3) if rules.batch_rows % size == 0])
    return replace(rules, group_size=size, extra_groups=rng.randint(1, rules.batch_rows // size))


def check(scene: Scene, outcome: SimulatedRun) -> None:
    """Every request is answered once and in full, no token is too old, and without partial rollouts none is mixed."""
    rules = scene.rules
    assert len(outcome.steps) == rules.num_steps_total
    assert sorted(outcome.answers) == list(range(rules.num_steps_total * rules.batch_rows))
    assert max(outcome.staleness) <= rules.ahead and min(outcome.staleness) >= 0
    trained = sum(num for runs in outcome.answers.values() for _, num in runs)
    assert sum(outcome.staleness.values()) == trained
    check_batches(rules, outcome)
    for request, runs in outcome.answers.items():
        if not rules.partial:
            assert len({version for version, _ in runs}) == 1
        num_tokens = sum(num for _, num in runs)
        if rules.straggler_policy == "wait":
            assert num_tokens == scene.lengths(request, 0)
        else:
            most = max(scene.lengths(request, attempt) for attempt in range(rules.straggler_attempts + 1))
            assert 1 <= num_tokens <= most


def check_batches(rules: ScheduleConfig, outcome: SimulatedRun) -> None:
    """Every step of this process trains as many requests, of whole groups and none too old; a group is late by steps at
    which the schedule allows it.
    """
    trained = [request for requests in outcome.batches.values() for request in requests]
    assert len(set(trained)) == len(trained)
    for step, requests in outcome.batches.items():
        assert len(requests) == rules.batch_rows
        groups = {request // rules.group_size for request in requests}
        assert len(groups) == rules.num_groups
        late = [group for group in groups if group < (step - 1) * rules.num_groups]
        assert len(late) <= rules.extra_groups
        versions = [version for request in requests for version, _ in outcome.answers[request]]
        assert all(0 <= step - 1 - version <= rules.ahead for version in versions)
