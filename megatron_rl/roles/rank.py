"""One rank, for the roles on it: the run's configuration, the pool's groups, the device, the node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_rl.checkpoint.model_folder import ModelFolder, ModelFolders
from megatron_rl.config.megatron import FORWARD_OPTIONS, OptimConfig, OverrideTransformerConfig
from megatron_rl.config.roles import PassSpec, Placement, PoolSpec, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.device import Device
from megatron_rl.experience.block_layout import round_up
from megatron_rl.experience.micro_batches import MicroBatching
from megatron_rl.model.families import image_form
from megatron_rl.observe.memory_ledger import MemoryLedger
from megatron_rl.parallel.balance import SequenceWork
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.parallel.zigzag import segment_multiple
from megatron_rl.roles.environment import RankEnvironment

if TYPE_CHECKING:
    from megatron_rl.roles.model_source import ModelSource


def sequence_work(folder: ModelFolder) -> SequenceWork:
    """Cost of a sequence under the model in a Hugging Face folder."""
    return SequenceWork(folder.model.attention_parity)


def in_optimizer_steps(optim: OptimConfig, num_steps: int, num_optimizer_steps: int) -> OptimConfig:
    """Warm-up and decay, configured in training steps, in optimizer steps; a share of the run as that many.

    num_steps, num_optimizer_steps: of the whole run.
    """
    per_step = num_optimizer_steps // num_steps
    warmup = optim.lr_warmup_steps or int(optim.lr_warmup_steps_ratio * num_steps)
    return replace(
        optim,
        lr_warmup_steps=warmup * per_step,
        lr_decay_steps=optim.lr_decay_steps * per_step,
        lr_wsd_decay_steps=optim.lr_wsd_decay_steps * per_step,
    )


@dataclass(frozen=True)
class Rank:
    """Everything a role needs to be built on this rank. timeout: of every collective. folders: that roles start from,
    by path."""

    config: RunConfig
    placement: Placement
    pool: PoolSpec
    groups: TrainGroups
    device: Device
    environment: RankEnvironment
    timeout: timedelta
    ledger: MemoryLedger
    folders: ModelFolders

    @property
    def node(self) -> int:
        """The number of this rank's node in the cluster."""
        return self.environment.node

    @property
    def reads_images(self) -> bool:
        """Whether rows have images."""
        return self.config.data.image_key is not None

    @cached_property
    def unsampled(self) -> tuple[int, ...]:
        """Ids that no policy samples: those that stand for images, where the run reads images."""
        if not self.reads_images:
            return ()
        form = image_form(self.folders[self.placement.leader.model_path].settings)
        return () if form is None else form.unsampled

    def source(self, spec: RoleSpec) -> ModelSource:
        """The folder that a role starts from. The pool has one layout; what is made again is the role's own."""
        from megatron_rl.roles.model_source import ModelSource

        override = spec.megatron.override_transformer_config
        if not spec.is_trained:  # nothing is kept for a backward pass, and nothing made again
            kept = {name: getattr(override, name) for name in FORWARD_OPTIONS}
            override = OverrideTransformerConfig(**kept)
        layout = self.pool.layout if self.pool.megatron_roles else spec.megatron
        megatron = replace(
            layout,
            override_transformer_config=override,
            fp8_emulate=spec.megatron.fp8_emulate,
            attention_kernels=spec.megatron.attention_kernels,
        )
        seed, folder = self.config.trainer.seed, self.folders[spec.model_path]
        trains_tower = spec.trains_tower and self.reads_images
        return ModelSource(folder, self.groups, self.device, megatron, spec.lora, seed, spec.mtp, trains_tower)

    def micro_batching(self, spec: PassSpec | None) -> MicroBatching:
        """Micro-batching of a pass. The actor's model estimates the work, so that all roles cut alike.

        The token limit is that of all context-parallel ranks together, or of one rank if passes choose how many ranks
        share them. Raises ValueError if the role has no such pass.
        """
        if spec is None:
            raise ValueError("this role has no such pass")
        cp_size = 1 if self.groups.grid.most_sharing else self.groups.grid.cp_size
        max_tokens = spec.max_tokens and round_up(spec.max_tokens * cp_size, segment_multiple(cp_size))
        return MicroBatching(spec.num_rows, max_tokens, spec.remove_padding, spec.as_tree, self._work)

    @cached_property
    def _work(self) -> SequenceWork:
        return sequence_work(self.folders[self.placement.leader.model_path])

    def num_run_steps(self, spec: RoleSpec) -> int:
        """Optimizer steps of a trained role in the whole run."""
        return self.config.trainer.num_steps * self.config.batch_sizes.num_optimizer_steps(spec.settings)

    def optim(self, spec: RoleSpec) -> OptimConfig:
        """Optimizer settings of a trained role, with warm-up and decay in optimizer steps."""
        return in_optimizer_steps(spec.settings.optim, self.config.trainer.num_steps, self.num_run_steps(spec))

    def loss_scale(self, spec: RoleSpec) -> int:
        """Divisor of `loss_agg_mode=seq-mean-token-sum-norm`."""
        return spec.settings.loss_scale_factor or self.config.longest_response
