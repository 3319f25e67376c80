"""Teachers: models whose distributions the actor learns from. What a loss needs of one is a method here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from megatron_rl.columns import SCORING
from megatron_rl.config.algorithms import STUDENTS_TOP
from megatron_rl.config.roles import RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.experience.micro_batches import MicroBatching
from megatron_rl.records import Batch
from megatron_rl.roles.policy_followers import FollowingScorer
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import Role, TrainedRole

if TYPE_CHECKING:
    from megatron_rl.roles.token_scorer import TokenScorer


def compared_tokens(rank: Rank, vocab_size: int) -> int:
    """Tokens over which student and teacher are compared: those that both have, that is the tokenizer's, without the
    padding of either vocabulary. vocab_size: of the teacher's config.json.
    """
    policy = rank.folders[rank.config.actor_rollout_ref.model.path]
    return min(vocab_size, policy.num_sampled_tokens(rank.config))


def num_compared(config: RunConfig, vocab_size: int) -> int:
    """The likeliest tokens that a loss over the top-k compares. vocab_size: of the model that is asked for them."""
    return min(config.distillation.distillation_loss.topk, vocab_size)


def distillation_temperature(config: RunConfig) -> float:
    """What logits are divided by in the comparison of the whole distributions."""
    own = config.distillation.distillation_loss.temperature
    return config.temperature if own is None else own


class TeachingRole(Role):
    """The methods of every teacher. A subclass sets what they read with: `scorer` and `cut`."""

    scorer: TokenScorer
    cut: MicroBatching
    num_top: int

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs(self, batch: Batch) -> Batch | None:
        """`teacher_log_probs`, the log-prob of each sampled token; None before the last stage."""
        return self.scorer.score("teacher_log_probs", batch, self.cut)

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def top_k(self, batch: Batch) -> Batch | None:
        """`teacher_top_ids` and `teacher_top_log_probs` of the `topk` likeliest tokens; None before the last stage."""
        best = self.scorer.top_k(batch.read_by(SCORING), self.cut, self.num_top)
        if best is None:
            return None
        ids, log_probs = (batch.per_sampled_token(values) for values in best)
        return Batch(teacher_top_ids=ids, teacher_top_log_probs=log_probs)

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs_at(self, batch: Batch) -> Batch | None:
        """`teacher_log_probs_at`, the log-probs of the tokens in `student_top_ids`; None before the last stage."""
        values = self.scorer.log_probs_at(batch, self.cut, STUDENTS_TOP)
        return None if values is None else Batch(teacher_log_probs_at=batch.per_sampled_token(values))

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def hidden_states(self, batch: Batch) -> Batch | None:
        """`teacher_hidden`, what the teacher's head reads of each sampled token; None before the last stage."""
        values = self.scorer.hidden_states(batch.read_by(SCORING), self.cut)
        return None if values is None else Batch(teacher_hidden=batch.per_sampled_token(values))


class Teacher(FollowingScorer, TeachingRole):
    """A frozen language model in a folder of its own, or the actor as it is in this step, in another pool."""

    def __init__(self, spec: RoleSpec, rank: Rank) -> None:
        from megatron_rl.roles.token_scorer import TokenScorer

        source = rank.source(spec)
        super().__init__(spec, rank, source)
        settings, config = source.hf_config.to_dict(), rank.config
        settings["vocab_size"] = compared_tokens(rank, settings["vocab_size"])
        self.scorer = TokenScorer(self.pipeline, self.pipeline.chunks, settings, config.temperature)
        self.num_top = num_compared(config, settings["vocab_size"])


class SelfTeacher(TeachingRole):
    """The actor as it is in this step, in the actor's own memory; it reads other prompts."""

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> None:
        """neighbours: the roles of this rank, with the actor."""
        from megatron_rl.roles.pipeline import Pipeline
        from megatron_rl.roles.token_scorer import TokenScorer

        super().__init__(spec)
        assert spec.model_of is not None
        actor = cast(TrainedRole, neighbours[spec.model_of])
        trainable, settings = actor.trainable, actor.source.hf_config.to_dict()
        settings["vocab_size"] = compared_tokens(rank, settings["vocab_size"])
        # One without the actor's choices of experts, which are for other prompts.
        pipeline = Pipeline(list(trainable.chunks), rank.groups, rank.device.torch_device)
        self.cut = rank.micro_batching(spec.score)
        self.scorer = TokenScorer(pipeline, trainable.models, settings, rank.config.temperature)
        self.num_top = num_compared(rank.config, settings["vocab_size"])
