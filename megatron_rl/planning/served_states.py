"""States of a service's models (`megatron-rl serve`) in host memory, where they wait while others train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.config.megatron import MUON
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.model.parts import FP32
from megatron_rl.planning.memory_report import amount
from megatron_rl.planning.role_ledger import RoleLedger, offloaded_share
from megatron_rl.planning.run_models import RunModels

NUM_WEIGHTS = 2
"""Copies of weights alone, next to the models' states: those at the start, and those that sampling has replaced."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one model's state on a rank. weights: trained ones, which may be adapters, with masters of 16-bit ones.
    gradients: sums of passes since the last step.
    """

    weights: int
    moments: int
    gradients: int

    @property
    def total(self) -> int:
        """All of them together."""
        return self.weights + self.moments + self.gradients

    def on_host(self, num_models: int) -> int:
        """Return the bytes of the states of several models, at most."""
        return num_models * self.total + NUM_WEIGHTS * self.weights


def state_bytes(ledger: RoleLedger, pp_rank: int) -> StateBytes:
    """Return one model's state on the rank of a stage that has most of the optimizer's.

    Weights and gradients are whole buffers, padding included; moments and masters are of the parameters in a rank's
    share of them.
    """
    weights, largest = ledger.weights, 0
    for is_expert, size in weights.shares.items():
        buffers = [one for one in weights.moving_buffers(pp_rank) if one.is_expert is is_expert]
        of_ranks = zip(*(one.numels_of_ranks(size) for one in buffers), strict=True)
        largest += max(map(sum, of_ranks), default=0)
    masters = 0 if ledger.element == FP32 else FP32
    copied = int(offloaded_share(ledger.role) * largest) * FP32  # gradients, where Adam updates on the host
    numel = weights.moving_numel(pp_rank)
    return StateBytes(numel * ledger.element + largest * masters, largest * 2 * FP32 + copied, numel * FP32)


def largest_state(models: RunModels) -> StateBytes:
    """Return one model's state on the rank that has most of it. Raises ConfigError as `check_served` does."""
    check_served(models.config)
    ledger = models.training.ledger(models.actor_role)
    return max((state_bytes(ledger, stage) for stage in range(models.grid.pp_size)), key=lambda one: one.total)


def served_as_json(models: RunModels, num_models: int) -> dict[str, Any]:
    """Return bytes on the rank that has most: of one model's state by parts, and of all models on the host."""
    state = largest_state(models)
    parts = {"weights": state.weights, "moments": state.moments, "gradients": state.gradients}
    return {"num_models": num_models, "model_bytes": parts, "host_bytes": state.on_host(num_models)}


def served_note(models: RunModels, num_models: int) -> str:
    """Return a sentence about host memory for the states of a service's models."""
    state, num_ranks = largest_state(models), models.training.spec.size.num_ranks_per_node
    kept = state.on_host(num_models)
    kind = f"adapters of rank {models.actor_role.lora.rank}" if models.actor_role.lora.rank else "all weights"
    parts = f"{amount(state.weights)} weights, {amount(state.moments)} moments, {amount(state.gradients)} gradients"
    return (
        f"serve: a model, {kind}, is {amount(state.total)} of host memory on a rank ({parts}); {num_models}, and "
        f"{NUM_WEIGHTS} copies of weights, are {amount(kept)} on a rank, {amount(kept * num_ranks)} a node"
    )


def check_served(config: RunConfig) -> None:
    """Raise ConfigError for a configuration whose roles a service cannot drive."""
    placement, megatron = Placement.of(config), config.actor_rollout_ref.actor.megatron
    if len(placement.roles) > 2:
        rule = f"serve has an actor and a rollout, and this configuration has {', '.join(sorted(placement.roles))}"
        raise ConfigError(
            f"{rule}; try: algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=false "
            "actor_rollout_ref.actor.use_kl_loss=false"
        )
    if not placement.is_colocated:
        raise ConfigError("serve needs actor and rollout in one pool; try: without actor_rollout_ref.rollout.pool")
    if config.actor_rollout_ref.actor.optim.optimizer == MUON:
        rule = "serve steps with Adam, and actor_rollout_ref.actor.optim.optimizer=muon"
        raise ConfigError(f"{rule}; try: actor_rollout_ref.actor.optim.optimizer=adam")
    if megatron.override_ddp_config.overlap_grad_reduce:
        key = "actor_rollout_ref.actor.megatron.override_ddp_config.overlap_grad_reduce"
        raise ConfigError(
            f"serve reduces gradients once, at a step, and {key}=true does after each pass; try: {key}=false"
        )
    is_offloaded = config.actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload
    if is_offloaded and megatron.dtype != "float32" and config.trainer.device == "cuda":
        key = "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload"
        raise ConfigError(
            f"serve moves a model's masters with it, and {key}=true keeps those of {megatron.dtype} in host memory; "
            f"try: {key}=false"
        )
