"""The models and grids of a run as the planner sees them: shapes, weights and places, from config.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.config.algorithms import uses_critic, uses_reference
from megatron_rl.config.schema import RunConfig
from megatron_rl.hybrid_engine.plan import ExchangePlan, plan_memory
from megatron_rl.hybrid_engine.schedule import make_schedule
from megatron_rl.model.families import (
    VOCAB_PADDING,
    Family,
    ModelShape,
    ParamSpec,
    Routing,
    family_of,
    param_map,
    value_param_map,
)
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.sharding import vocab_multiple
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planner.weights import TrainedWeights, tensors_of

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
NUM_SCRATCH = 4
"""Messages under way of a transition, as in `hybrid_engine.exchange`."""


@dataclass(frozen=True)
class PlannedModel:
    """One model: its family, its sizes and, with experts, its routing."""

    family: Family
    shape: ModelShape
    routing: Routing | None

    @classmethod
    def read(cls, path: str) -> PlannedModel:
        """From a folder's config.json, which preflight has accepted; settings it leaves out have their defaults."""
        settings: Mapping[str, Any] = json.loads((Path(path).expanduser() / "config.json").read_text())
        settings = {"tie_word_embeddings": False} | dict(settings)
        family = family_of(settings["architectures"])
        routing = Routing.from_hf(family, settings) if family.is_moe else None
        return cls(family, ModelShape.from_hf(settings), routing)

    @cached_property
    def specs(self) -> dict[str, ParamSpec]:
        """The language model's parameters."""
        return param_map(self.family, self.shape)

    @cached_property
    def value_specs(self) -> dict[str, ParamSpec]:
        """The value model's parameters."""
        return value_param_map(self.family, self.shape)

    @property
    def num_params(self) -> int:
        """Parameters of the language model, a tied matrix once and without padding."""
        return sum(tensor.numel for tensor in tensors_of(self.specs).values())

    @property
    def num_active_params(self) -> int:
        """Parameters that one token passes through: of experts only those it is sent to."""
        experts = sum(tensor.numel for tensor in tensors_of(self.specs).values() if tensor.is_expert)
        if self.routing is None:
            return self.num_params
        return self.num_params - experts + experts * self.routing.experts_per_token // self.routing.num_experts


class RunModels:
    """The actor, and critic, reference and reward model where the run has them, on the configured grids.

    The configuration must have passed preflight.
    """

    def __init__(self, config: RunConfig, alike: RunModels | None = None) -> None:
        """alike: of a configuration with the same models and layouts, whose exchange plan is taken over."""
        shared = config.actor_rollout_ref
        megatron = shared.actor.megatron
        self.config = config
        self.megatron = megatron
        self.element = ELEMENT_BYTES[megatron.dtype]
        self.grid = TrainGrid(
            config.trainer.nnodes * config.trainer.n_gpus_per_node,
            megatron.tensor_model_parallel_size,
            megatron.pipeline_model_parallel_size,
            megatron.expert_model_parallel_size,
            megatron.expert_tensor_parallel_size,
        )
        self.rollout = RolloutGrid(self.grid, shared.rollout.tensor_model_parallel_size)
        self.actor = PlannedModel.read(shared.model.path)
        self.critic = PlannedModel.read(config.critic.model.path) if uses_critic(config) else None
        reward = config.reward_model
        self.reward = PlannedModel.read(reward.model.path) if reward.enable and reward.model.path is not None else None
        self.has_reference = uses_reference(config)
        self.vocab_multiple = vocab_multiple(megatron.make_vocab_size_divisible_by, self.grid.tp_size)
        self.vpp_size = megatron.virtual_pipeline_model_parallel_size or 1
        self._scratch: dict[tuple[int, int], int] = {}
        if alike is not None:
            self.exchange, self._scratch = alike.exchange, alike._scratch

    def stages(self, model: PlannedModel) -> StagePlan:
        """How the layers of a model are shared out."""
        return StagePlan.from_config(model.shape.num_layers, self.megatron)

    @cached_property
    def actor_weights(self) -> TrainedWeights:
        """The policy's parameters; the reference holds the same."""
        return TrainedWeights(self.actor.specs, self.stages(self.actor), self.grid, self.vocab_multiple)

    @cached_property
    def critic_weights(self) -> TrainedWeights | None:
        """The critic's parameters."""
        return self._value_weights(self.critic)

    @cached_property
    def reward_weights(self) -> TrainedWeights | None:
        """The reward model's, a frozen model of the critic's kind."""
        return self._value_weights(self.reward)

    def _value_weights(self, model: PlannedModel | None) -> TrainedWeights | None:
        if model is None:
            return None
        return TrainedWeights(model.value_specs, self.stages(model), self.grid, self.vocab_multiple)

    def members_of_stage(self, pp_rank: int) -> list[int]:
        """Numbers of a stage's ranks in the exchange group."""
        members = self.exchange.members
        return [i for i, member in enumerate(members) if self.grid.pp_rank(member.rank) == pp_rank]

    def foreign_bytes(self, pp_rank: int) -> int:
        """The largest foreign buffer of a stage's ranks."""
        plans = self.exchange.plans
        return max(plans[i].foreign_numel for i in self.members_of_stage(pp_rank)) * self.element

    def scratch_bytes(self, pp_rank: int) -> int:
        """Room for packed messages of a transition; what lies as it travels needs none."""
        bucket = self.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes << 20
        if (pp_rank, bucket) not in self._scratch:
            message_numel = max(1, bucket // self.element // NUM_SCRATCH)
            steps = make_schedule(self.exchange, self.members_of_stage(pp_rank)[0], message_numel)
            packed = [leg.numel for step in steps for leg in (step.send, step.receive) if leg and not leg.is_direct]
            self._scratch[pp_rank, bucket] = NUM_SCRATCH * max(packed, default=0) * self.element
        return self._scratch[pp_rank, bucket]

    @cached_property
    def exchange(self) -> ExchangePlan:
        """The transition of the first exchange group, as the hybrid engine plans it; all groups' are alike."""
        group = self.grid.exchange_group(0)
        per_node = self.config.trainer.n_gpus_per_node
        members = self.actor_weights.members(group, self.rollout, per_node, VOCAB_PADDING)
        drop = self.config.actor_rollout_ref.rollout.drop_train_weights
        return plan_memory(tensors_of(self.actor.specs), members, 0, drop)[0]
