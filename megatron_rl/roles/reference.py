"""The reference: the frozen policy in the KL penalty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from megatron_rl.config.roles import RoleSpec
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.records import Batch
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import FrozenRole, Role, TrainedRole


def made_column(spec: RoleSpec) -> str:
    """The column of a reference's log-probs. Raises ValueError if the role's row names none."""
    if spec.makes is None:
        raise ValueError(f"the row of role {spec.name} does not say which column it makes")
    return spec.makes.column


class Reference(FrozenRole):
    """Scores tokens as the policy did before training."""

    def __init__(self, spec: RoleSpec, rank: Rank) -> None:
        from megatron_rl.roles.token_scorer import TokenScorer

        self.column, source = made_column(spec), rank.source(spec)
        super().__init__(spec, rank, source.language_model())
        self.scorer = TokenScorer(
            self.pipeline, self.pipeline.chunks, source.hf_config.to_dict(), rank.config.temperature
        )

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs(self, batch: Batch) -> Batch | None:
        """The log-prob of each sampled token, in the column of the role's row; None before the last stage."""
        return self.scorer.score(self.column, batch, self.cut)


class BaseReference(Role):
    """The reference of a policy that trains adapters: the policy without them, in the policy's own memory."""

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> None:
        """neighbours: the roles of this rank, with the policy."""
        from megatron_rl.roles.token_scorer import TokenScorer

        super().__init__(spec)
        assert spec.base_of is not None
        self.column, self.cut = made_column(spec), rank.micro_batching(spec.score)
        self.policy = cast(TrainedRole, neighbours[spec.base_of])
        trainable, settings = self.policy.trainable, self.policy.source.hf_config.to_dict()
        self.scorer = TokenScorer(trainable.pipeline, trainable.models, settings, rank.config.temperature)

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs(self, batch: Batch) -> Batch | None:
        """The log-prob of each sampled token, in the column of the role's row; None before the last stage."""
        from megatron_rl.model.adapters import adapters_off

        pipeline, routing = self.scorer.pipeline, self.scorer.pipeline.routing
        pipeline.routing = None  # the policy's choices of experts are not this model's
        try:
            with adapters_off(self.policy.trainable.models):
                return self.scorer.score(self.column, batch, self.cut)
        finally:
            pipeline.routing = routing
