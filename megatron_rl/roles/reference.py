"""The reference: the frozen policy in the KL penalty."""

from __future__ import annotations

from megatron_rl.config.roles import RoleSpec
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.records import Batch
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import FrozenRole


class Reference(FrozenRole):
    """Scores tokens as the policy did before training."""

    def __init__(self, spec: RoleSpec, rank: Rank) -> None:
        from megatron_rl.roles.token_scorer import TokenScorer

        if spec.makes is None:
            raise ValueError(f"the row of role {spec.name} does not say which column it makes")
        self.column, source = spec.makes.column, rank.source(spec)
        super().__init__(spec, rank, source.language_model())
        self.scorer = TokenScorer(
            self.pipeline, self.pipeline.chunks, source.hf_config.to_dict(), rank.config.temperature
        )

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs(self, batch: Batch) -> Batch | None:
        """The log-prob of each sampled token, in the column of the role's row; None before the last stage."""
        return self.scorer.score(self.column, batch, self.cut)
