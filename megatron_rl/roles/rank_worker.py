"""One rank of the job: every role fused into one process, every verb the controller may call.

Engines are imported where they are built, so that the controller can name this class without loading them.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from transformers import AutoConfig, GenerationConfig

from megatron_rl.checkpoint.hf_folder import MAX_SHARD_BYTES
from megatron_rl.checkpoint.manifest import FileRecord
from megatron_rl.config.megatron import OverrideTransformerConfig
from megatron_rl.config.schema import ActorConfig, CriticConfig, RunConfig
from megatron_rl.device import Device
from megatron_rl.dispatch import Coordinates, Dispatch, register
from megatron_rl.experience.batches import num_optimizer_steps
from megatron_rl.model.families import VOCAB_PADDING, ParamSpec, full_attention
from megatron_rl.observe.memory import MemoryLedger, PhaseMemory, storage_bytes
from megatron_rl.parallel.mpu import initialize_mpu
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.records import (
    ActorBatch,
    CriticBatch,
    Generations,
    Prompts,
    RoleState,
    Sampling,
    Sequences,
    SequenceScores,
    TokenScores,
)
from megatron_rl.roles.cuts import Cuts
from megatron_rl.roles.environment import RankEnvironment
from megatron_rl.roles.rendezvous import open_store
from third_party_patches import apply_patches

if TYPE_CHECKING:
    from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel
    from megatron_rl.hybrid_engine.engine import HybridEngine, TransitionReport
    from megatron_rl.hybrid_engine.offload import Resting
    from megatron_rl.roles.critic import Critic
    from megatron_rl.roles.model_source import ModelSource
    from megatron_rl.roles.policy import Actor, TokenScorer
    from megatron_rl.roles.reward_model import RewardModel
    from megatron_rl.roles.role_checkpoint import RoleCheckpoint
    from megatron_rl.roles.saving import UnfinishedSave
    from megatron_rl.roles.training import TrainableModel
    from megatron_rl.rollout.engine import RolloutEngine


class RankWorker:
    """The SPMD side of actor, rollout, reference, critic and reward model on one rank.

    Constructing it joins the process group and creates Megatron's groups; `build_*` make the roles, in any order
    except that the rollout is built on the actor's memory. Unless a verb says otherwise all ranks must be called.
    """

    actor: Actor
    reference: TokenScorer
    critic: Critic
    reward_model: RewardModel
    rollout: RolloutEngine
    weights: AllGatherPPModel
    engine: HybridEngine

    def __init__(self, config: RunConfig, collective_timeout: timedelta = default_pg_timeout) -> None:
        environment = RankEnvironment.read()
        megatron = config.actor_rollout_ref.actor.megatron
        self.config = config
        self.node = environment.node
        self.device = Device(config.trainer.device, environment.local_rank)
        self.device.activate()
        apply_patches(self.device.kind)
        environment.choose_interfaces()
        dist.init_process_group(
            self.device.backend,
            timeout=collective_timeout,
            store=open_store(environment, collective_timeout),
            rank=environment.rank,
            world_size=environment.world_size,
        )
        grid = TrainGrid(
            environment.world_size,
            tp_size=megatron.tensor_model_parallel_size,
            pp_size=megatron.pipeline_model_parallel_size,
            ep_size=megatron.expert_model_parallel_size,
            etp_size=megatron.expert_tensor_parallel_size,
        )
        self.rollout_grid = RolloutGrid(grid, config.actor_rollout_ref.rollout.tensor_model_parallel_size)
        vpp_size = megatron.virtual_pipeline_model_parallel_size or 1
        self.groups = initialize_mpu(grid, config.trainer.seed, vpp_size, collective_timeout)
        self.cuts = Cuts.configured(config)
        self.resting: list[Resting] = []
        self.ledger = MemoryLedger(self.owned_memory, self.device.reset_peak_memory, self.device.peak_memory_bytes)
        self.checkpoints: dict[str, RoleCheckpoint] = {}
        self.unfinished: UnfinishedSave | None = None

    @register(Dispatch.ONE_TO_ALL, role="worker")
    def coordinates(self) -> Coordinates:
        """Where this rank stands, for the controller's dispatch."""
        rank = self.groups.rank
        return Coordinates(
            rank=rank,
            dp_rank=self.groups.dp_rank,
            dp_size=self.groups.grid.dp_size,
            dp_collector=self.groups.is_dp_collector,
            replica=self.rollout_grid.replica(rank),
            num_replicas=self.rollout_grid.num_replicas,
            replica_collector=self.rollout_grid.tp_rank(rank) == 0,
        )

    # Memory

    def owned_memory(self) -> dict[str, int]:
        """Bytes of the tensors that this rank keeps now, under the names of the memory plan."""
        built, found = vars(self), {}
        for role in ("actor", "critic"):
            if role in built:
                found |= {f"{role} {name}": size for name, size in built[role].trainable.memory().items()}
        if "reference" in built:
            found["reference parameters"] = storage_bytes(self.reference.pipeline.parameters())
        if "reward_model" in built:
            found["reward model parameters"] = storage_bytes(self.reward_model.pipeline.parameters())
        if "weights" in built:
            found["foreign stages"] = storage_bytes([self.weights.foreign.data])
        if "rollout" in built:
            found["KV cache"] = self.rollout.kv_cache.num_bytes
        return found

    @register(Dispatch.ONE_TO_ALL, role="worker")
    def take_memory(self) -> dict[str, PhaseMemory]:
        """What this rank held in every phase since the last call."""
        return self.ledger.take()

    # Building the roles

    def _source(self, path: str, override: OverrideTransformerConfig | None = None) -> ModelSource:
        """The layout is the same for all roles; `override` is that of a trained one."""
        from megatron_rl.roles.model_source import ModelSource

        shared = self.config.actor_rollout_ref.actor.megatron
        megatron = replace(shared, override_transformer_config=override or OverrideTransformerConfig())
        return ModelSource.open(path, self.groups, self.device, megatron)

    def _num_run_steps(self, role: ActorConfig | CriticConfig) -> int:
        steps, batch_size = self.config.trainer.total_training_steps, self.config.data.train_batch_size
        return num_optimizer_steps(steps, batch_size, role.ppo_mini_batch_size, role.ppo_epochs)

    def _loss_scale(self, role: ActorConfig | CriticConfig) -> int:
        return role.loss_scale_factor or self.config.data.max_response_length

    @register(Dispatch.ONE_TO_ALL, role="actor")
    def build_actor(self) -> None:
        """Load the policy, with DDP, optimizer and schedule."""
        from megatron_rl.roles.policy import Actor
        from megatron_rl.roles.role_checkpoint import RoleCheckpoint

        shared = self.config.actor_rollout_ref
        source = self._source(shared.model.path, shared.actor.megatron.override_transformer_config)
        num_run_steps = self._num_run_steps(shared.actor)
        self.actor = Actor(
            source,
            shared.actor,
            self.cuts.update_actor,
            num_run_steps,
            shared.rollout.temperature,
            self._loss_scale(shared.actor),
        )
        self.checkpoints["actor"] = RoleCheckpoint(self.actor.trainable, source.specs, source.place)
        self.resting += self.actor.trainable.resting(shared.actor.megatron)

    @register(Dispatch.ONE_TO_ALL, role="ref")
    def build_reference(self) -> None:
        """Load the frozen reference policy."""
        from megatron_rl.hybrid_engine.offload import HostCopy
        from megatron_rl.roles.policy import build_reference

        shared = self.config.actor_rollout_ref
        self.reference = build_reference(self._source(shared.model.path), shared.rollout.temperature)
        if shared.ref.megatron.param_offload:
            self.resting.append(HostCopy(self.reference.pipeline.parameters))

    @register(Dispatch.ONE_TO_ALL, role="critic")
    def build_critic(self) -> None:
        """Load the critic's trunk, and load or draw its value head."""
        from megatron_rl.roles.critic import Critic
        from megatron_rl.roles.role_checkpoint import RoleCheckpoint

        critic = self.config.critic
        source = self._source(critic.model.path, critic.megatron.override_transformer_config)
        num_run_steps = self._num_run_steps(critic)
        self.critic = Critic(
            source, critic, self.cuts.update_critic, num_run_steps, self.config.trainer.seed, self._loss_scale(critic)
        )
        self.checkpoints["critic"] = RoleCheckpoint(self.critic.trainable, source.value_specs, source.place)
        self.resting += self.critic.trainable.resting(critic.megatron)

    @register(Dispatch.ONE_TO_ALL, role="reward_model")
    def build_reward_model(self) -> None:
        """Load the frozen reward model."""
        from megatron_rl.hybrid_engine.offload import HostCopy
        from megatron_rl.roles.reward_model import RewardModel

        config = self.config.reward_model
        self.reward_model = RewardModel(self._source(config.model.path))
        if config.megatron.param_offload:
            self.resting.append(HostCopy(self.reward_model.pipeline.parameters))

    @register(Dispatch.ONE_TO_ALL, role="rollout")
    def build_rollout(self) -> None:
        """Build vLLM on the actor's memory; ends in train mode: foreign stages and KV cache released."""
        from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel
        from megatron_rl.hybrid_engine.engine import HybridEngine
        from megatron_rl.hybrid_engine.exchange import Transport
        from megatron_rl.hybrid_engine.rng import swap
        from megatron_rl.roles.flat_parameters import flat_parameters
        from megatron_rl.rollout.engine import RolloutEngine

        shared, data = self.config.actor_rollout_ref, self.config.data
        source = self._source(shared.model.path)
        wanted = self.rollout_grid.place(self.groups.rank, VOCAB_PADDING)
        self.weights = weights = AllGatherPPModel(
            flat_parameters(self.actor.trainable, source.specs, source.place, wanted, self.node),
            {spec.tensor.name: spec.tensor for spec in source.specs.values()},
            Transport(self.groups.exchange_group),
            bucket_bytes=shared.rollout.update_weights_bucket_megabytes << 20,
            drop_train_weights=shared.rollout.drop_train_weights,
        )
        # vLLM reseeds the process's generators while it starts.
        train_rng = swap(None)
        weights.gather()
        self.rollout = RolloutEngine(
            model_path=shared.model.path,
            architecture=source.hf_config.architectures[0],
            eos_token_ids=eos_token_ids(shared.model.path),
            config=shared.rollout,
            max_model_len=data.max_prompt_length + data.max_response_length,
            dtype=shared.actor.megatron.dtype,
            grid=self.rollout_grid,
            tensors=weights.tensors,
            seed=self.config.trainer.seed,
            # Preflight lets a window pass that cuts nothing off; vLLM cannot build one in some layers only.
            hf_overrides=full_attention(source.family, source.hf_config.to_dict()),
        )
        self.ledger.note("init")
        self.rollout.sleep()
        weights.release()
        swap(train_rng)
        self.engine = HybridEngine(weights, self.rollout, self.resting, shared.rollout.verify_weights_every)

    # Generation

    @register(Dispatch.ONE_TO_ALL, role="rollout")
    def enter_rollout(self) -> TransitionReport:
        """Train mode -> rollout mode: the current weights of all stages and the KV cache are present."""
        with self.ledger.phase("reshard"):
            return self.engine.enter()

    @register(Dispatch.ONE_TO_ALL, role="rollout")
    def exit_rollout(self) -> None:
        """Rollout mode -> train mode."""
        self.engine.exit()

    @register(Dispatch.ROLLOUT_DP, role="rollout")
    def generate(self, prompts: Prompts, sampling: Sampling) -> Generations:
        """One response per row of this replica's prompts; rollout mode only."""
        with self.ledger.phase("generation"):
            return self.rollout.generate(prompts, sampling)

    # Scoring

    @register(Dispatch.DP, role="actor", balanced=True)
    def compute_log_probs(self, sequences: Sequences) -> TokenScores | None:
        """Log-prob of each response token under the actor, as the trainer computes it."""
        with self.ledger.phase("old_log_prob"):
            return self.actor.scorer.score(sequences, self.cuts.log_probs)

    @register(Dispatch.DP, role="ref", balanced=True)
    def compute_ref_log_probs(self, sequences: Sequences) -> TokenScores | None:
        """Log-prob of each response token under the reference."""
        with self.ledger.phase("ref"):
            return self.reference.score(sequences, self.cuts.ref_log_probs)

    @register(Dispatch.DP, role="critic", balanced=True)
    def compute_values(self, sequences: Sequences) -> TokenScores | None:
        """Value before each response token."""
        with self.ledger.phase("values"):
            return self.critic.score(sequences, self.cuts.values)

    @register(Dispatch.DP, role="reward_model", balanced=True)
    def compute_rm_scores(self, sequences: Sequences) -> SequenceScores | None:
        """The reward model's score of each whole sequence; train mode only, as the model may rest while generating."""
        with self.ledger.phase("rm_scores"):
            return self.reward_model.score(sequences, self.cuts.rm_scores)

    # Training

    @register(Dispatch.DP, role="actor", balanced=True)
    def update_actor(self, batch: ActorBatch) -> dict[str, float]:
        """One optimizer step of the policy."""
        with self.ledger.phase("update_actor"):
            return self.actor.update(batch)

    @register(Dispatch.DP, role="critic", balanced=True)
    def update_critic(self, batch: CriticBatch) -> dict[str, float]:
        """One optimizer step of the critic."""
        with self.ledger.phase("update_critic"):
            return self.critic.update(batch)

    # Checkpoints

    @register(Dispatch.ONE_TO_ALL, role="checkpoint")
    def begin_save(self, folder: Path) -> dict[str, RoleState]:
        """Write every trained role that was built to its empty folder in `folder`; train mode only.

        Complete when `finish_save` says so, before which no other save may begin. Returns role -> its numbers.
        """
        from megatron_rl.roles.saving import begin_save

        if self.unfinished is not None:
            raise RuntimeError("a save is under way: finish_save() comes first")
        beside = {
            "actor": self.config.actor_rollout_ref.actor.checkpoint.async_save,
            "critic": self.config.critic.checkpoint.async_save,
        }
        with self.ledger.phase("save"):
            self.unfinished = begin_save(
                folder, self.checkpoints, beside, self.groups, self.engine.rollout_rng, self.device.torch_device
            )
        return {name: checkpoint.state for name, checkpoint in self.checkpoints.items()}

    @register(Dispatch.ONE_TO_ALL, role="checkpoint")
    def finish_save(self, wait: bool) -> dict[str, FileRecord] | None:
        """The files that this rank wrote since `begin_save`, by their path in its folder; None while some are not.

        wait: until all ranks are done. Only when the last rank's are there is the folder complete.
        """
        files = self.unfinished.finish(wait)
        if files is not None:
            self.unfinished = None
        return files

    @register(Dispatch.ONE_TO_ALL, role="checkpoint")
    def load_checkpoint(self, folder: Path, states: dict[str, RoleState]) -> bool:
        """Take all trained roles, and this rank's random state, from a complete checkpoint of any layout.

        states: what `begin_save` returned. Returns whether there was a random state for this layout.
        """
        from megatron_rl.roles.rank_state import load_rank_state

        for name, checkpoint in self.checkpoints.items():
            checkpoint.load(folder / name, states[name])
        same_layout, self.engine.rollout_rng = load_rank_state(folder, self.groups)
        return same_layout

    # Weights out

    @register(Dispatch.DP, role="actor")
    def response_logits(self, sequences: Sequences):
        """Float32 logits [response tokens, vocab_size] of the actor, for parity checks."""
        return self.actor.scorer.logits(sequences, self.cuts.log_probs)

    @register(Dispatch.ONE_TO_ALL, role="actor")
    def export_hf(self, target: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write the actor as a Hugging Face folder, in files of at most `max_shard_bytes`.

        Raises StorageError when a file of this rank could not be written.
        """
        source = self._source(self.config.actor_rollout_ref.model.path)
        self._export(self.actor.trainable, source, source.specs, source.family.architecture, target, max_shard_bytes)

    @register(Dispatch.ONE_TO_ALL, role="critic")
    def export_critic_hf(self, target: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write the critic as a Hugging Face folder of a classifier with one label, which a critic can start from."""
        source = self._source(self.config.critic.model.path)
        architecture = source.family.reward_architecture
        self._export(self.critic.trainable, source, source.value_specs, architecture, target, max_shard_bytes)

    def _export(
        self,
        trainable: TrainableModel,
        source: ModelSource,
        specs: dict[str, ParamSpec],
        architecture: str,
        target: Path,
        max_shard_bytes: int,
    ) -> None:
        from megatron_rl.checkpoint.hf_export import export_hf
        from megatron_rl.checkpoint.storage import writing
        from megatron_rl.roles.model_source import named_parameters

        parameters, grid = named_parameters(trainable.models), self.groups.grid
        with writing():
            export_hf(
                parameters, specs, source.path, target, grid, source.vocab_multiple, architecture, max_shard_bytes
            )


def eos_token_ids(model_path: str) -> list[int]:
    """The tokens that end a response: generation_config.json's where there is one, else config.json's."""
    if (Path(model_path) / "generation_config.json").exists():
        declared = GenerationConfig.from_pretrained(model_path).eos_token_id
    else:
        declared = AutoConfig.from_pretrained(model_path).eos_token_id
    return [declared] if isinstance(declared, int) else list(declared)
