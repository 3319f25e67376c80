"""Roles that take a known time and compute nothing."""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.records import Batch, ragged


def zeros(column: str, sequences: Batch) -> Batch:
    rows = [torch.zeros(int(length)) for length in sequences.num_sampled]
    return Batch(**{column: ragged(rows)})


class SleepingActor:
    @remote_method(Dispatch.DP, phase="old_log_prob")
    def log_probs(self, sequences: Batch) -> Batch:
        time.sleep(0.4)
        return zeros("old_log_probs", sequences)

    @remote_method(Dispatch.DP, phase="update_actor")
    def update(self, batch: Batch, pretraining: None = None) -> dict[str, float]:
        time.sleep(0.6)
        return {"actor/slept": 0.6}


class SleepingReference:
    @remote_method(Dispatch.DP, phase="ref")
    def log_probs(self, sequences: Batch) -> Batch:
        time.sleep(0.5)
        return zeros("ref_log_probs", sequences)


class SleepingCritic:
    @remote_method(Dispatch.DP, phase="values")
    def values(self, sequences: Batch) -> Batch:
        time.sleep(0.7)
        return zeros("old_values", sequences)

    @remote_method(Dispatch.DP, phase="update_critic")
    def update(self, batch: Batch) -> dict[str, float]:
        time.sleep(0.4)
        return {"critic/slept": 0.4}


class SleepingHost:
    """One rank that is alone in its world."""

    def __init__(self) -> None:
        kinds = {"actor": SleepingActor, "reference": SleepingReference, "critic": SleepingCritic}
        self.roles = {name: kind() for name, kind in kinds.items()}

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        return Coordinates(0, 0, 1, True, 0, 1, True)

    def run(self, role: str, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        return getattr(self.roles[role], name)(*args, **kwargs)
