"""A reward model in training: a critic's architecture whose value at the last token is the score."""

from __future__ import annotations

from megatron_rl.config.roles import CRITIC, RoleSpec
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.losses.objectives import reward_objective
from megatron_rl.losses.rows import last_of_rows
from megatron_rl.records import Batch
from megatron_rl.roles.critic import values_before
from megatron_rl.roles.image_tower import RoleWithTower
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import TrainedRole


class TrainableRewardModel(RoleWithTower, TrainedRole):
    """Learns which answers are better; saved and exported as a critic, which is a reward model's folder."""

    def __init__(self, spec: RoleSpec, rank: Rank) -> None:
        from megatron_rl.roles.preference_training import PreferenceTrainer

        source = rank.source(spec)
        super().__init__(spec, rank, source, source.value_model(head_seed=rank.config.trainer.seed))
        self.take_tower(rank, source)
        objective = reward_objective(rank.config.reward_training)
        self.learner = PreferenceTrainer(self.trainable, values_before, objective, last_of_rows)

    @remote_method(Dispatch.DP, phase="update", balanced=True, stop=Stop.NEVER_AFTER)
    def update(self, batch: Batch, num_prompts: int) -> dict[str, float]:
        """One optimizer step on the loss of `reward_training.loss`, as the mean over the `num_prompts` of the batch.

        A row's last scored token is one after the answer: the value before it is the score. Metrics (complete on the
        last stage).
        """
        metrics = self.learner.compute_gradients(batch, self.cut, num_prompts, 0.0, CRITIC)
        return metrics | self.trainable.step().metrics(CRITIC)

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def scores(self, batch: Batch) -> Batch | None:
        """`answer_scores`: the score of each response; on the last stage, None before."""
        return self.learner.scores(batch, self.score_cut)
