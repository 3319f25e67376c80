"""The reference: the frozen policy in the KL penalty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from megatron_rl.config.roles import ACTOR, RoleSpec
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.hybrid_engine.offload import HostCopy, Offloadable
from megatron_rl.observe.memory_ledger import storage_bytes
from megatron_rl.records import Batch
from megatron_rl.roles.policy_followers import FollowingScorer, without_mtp
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import Role, TrainedRole


def made_column(spec: RoleSpec) -> str:
    """The column of a reference's log-probs. Raises ValueError if the role's row names none."""
    if spec.score is None or spec.score.call.makes is None:
        raise ValueError(f"the row of role {spec.name} does not name the column that it fills")
    return spec.score.call.makes


class Reference(FollowingScorer):
    """Scores tokens as the policy did before training, or when this reference last moved to it."""

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> None:
        """neighbours: the roles of this rank, with the policy if the reference may move to it."""
        from megatron_rl.roles.token_scorer import TokenScorer

        self.column, source = made_column(spec), rank.source(spec)
        super().__init__(spec, rank, source)
        settings = source.hf_config.to_dict()
        settings["vocab_size"] = source.folder.num_sampled_tokens(rank.config)
        self.scorer = TokenScorer(self.pipeline, self.pipeline.chunks, settings, rank.config.temperature)
        if spec.settings.sync_ref_model and spec.follows is None:
            self._follow(cast(TrainedRole, neighbours[ACTOR]))

    def _follow(self, policy: TrainedRole) -> None:
        """Become part of the policy's checkpoint, and able to move to the policy."""
        from megatron_rl.checkpoint.saved_tensors import REFERENCE_BIAS
        from megatron_rl.roles.model_source import named_buffers, named_parameters
        from megatron_rl.roles.reference_refresh import ReferenceRefresh

        ours = named_parameters(self.pipeline.chunks)
        theirs = without_mtp(named_parameters(policy.trainable.models))
        biases, leader = None, policy.checkpoint.bias
        if leader is not None:
            buffers = named_buffers(self.pipeline.chunks)
            biases = leader.of_copy(buffers, REFERENCE_BIAS), leader
        self.following = ReferenceRefresh(ours, theirs, self.spec.settings.ref_model_mixup_alpha, biases)
        policy.checkpoint.reference = self.following

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs(self, batch: Batch) -> Batch | None:
        """The log-prob of each sampled token, in the column of the role's row; None before the last stage."""
        return self.scorer.score(self.column, batch, self.cut)

    @remote_method(Dispatch.ONE_TO_ALL, stop=Stop.NEVER_AFTER)
    def refresh(self) -> None:
        """Move to the policy on the same ranks by `ref_model_mixup_alpha`; only with `sync_ref_model`."""
        self.following.refresh()


class InitialReference(Role):
    """The reference of a policy that trains adapters: the policy with the adapters of `adapter_path`, or without any.

    It computes in the policy's own memory, and holds A and B as the policy read or made them, or, where it follows the
    policy, as they were at the last refresh.
    """

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> None:
        """neighbours: the roles of this rank, with the policy, which has read no checkpoint yet."""
        from megatron_rl.model.adapters import keep_initial
        from megatron_rl.roles.pipeline import Pipeline
        from megatron_rl.roles.reference_refresh import ReferenceRefresh
        from megatron_rl.roles.token_scorer import TokenScorer

        super().__init__(spec)
        assert spec.model_of is not None
        self.column, self.cut = made_column(spec), rank.micro_batching(spec.score)
        self.policy = cast(TrainedRole, neighbours[spec.model_of])
        trainable, source = self.policy.trainable, self.policy.source
        settings = source.hf_config.to_dict()
        settings["vocab_size"] = source.folder.num_sampled_tokens(rank.config)
        kept = keep_initial(trainable.models) if spec.lora.rank else []
        self.held = [copy for _, copy in kept]
        if spec.settings.sync_ref_model:
            names = {parameter: name for name, parameter in self.policy.trained.parameters.items()}
            held = {names[parameter]: copy for parameter, copy in kept}
            alpha = spec.settings.ref_model_mixup_alpha
            self.following = ReferenceRefresh(held, self.policy.trained.parameters, alpha)
            self.policy.checkpoint.reference = self.following
        # Without routing: the policy's choices of experts are not this model's.
        pipeline = Pipeline(list(trainable.chunks), rank.groups, rank.device.torch_device)
        self.scorer = TokenScorer(pipeline, trainable.models, settings, rank.config.temperature)

    def memory(self) -> dict[str, int]:
        """Bytes of the adapters that it holds."""
        return {f"{self.spec.name} parameters": storage_bytes(self.held)} if self.held else {}

    def offloadable(self) -> list[Offloadable]:
        """The adapters that it holds, if the offload key says so."""
        return [HostCopy(lambda: self.held)] if self.spec.megatron.param_offload else []

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs(self, batch: Batch) -> Batch | None:
        """The log-prob of each sampled token, in the column of the role's row; None before the last stage."""
        from megatron_rl.model.adapters import initial_adapters

        with initial_adapters(self.policy.trainable.models):
            return self.scorer.score(self.column, batch, self.cut)

    @remote_method(Dispatch.ONE_TO_ALL, stop=Stop.NEVER_AFTER)
    def refresh(self) -> None:
        """Take the policy's adapters; only with `sync_ref_model`."""
        self.following.refresh()
