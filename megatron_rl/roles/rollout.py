"""The rollout: vLLM, on the actor's memory where they share a pool, or on weights that come over a bridge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from transformers import AutoConfig, GenerationConfig

from megatron_rl.config.roles import ACTOR, RoleSpec
from megatron_rl.dispatch import Dispatch, Stop, verb
from megatron_rl.model.families import VOCAB_PADDING, full_attention
from megatron_rl.observe.memory import storage_bytes
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.records import Generations, Prompts, Sampling
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import Role

if TYPE_CHECKING:
    from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel
    from megatron_rl.hybrid_engine.engine import TransitionReport
    from megatron_rl.roles.actor import Actor
    from megatron_rl.roles.model_source import ModelSource


class Rollout(Role):
    """Generation. Building it ends in train mode: what it does not share with training is released."""

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> None:
        """neighbours: the other roles of this rank, of which the actor is one."""
        from megatron_rl.hybrid_engine.engine import HybridEngine
        from megatron_rl.hybrid_engine.rng import swap
        from megatron_rl.rollout.engine import RolloutEngine

        super().__init__(spec)
        source = rank.source(spec)
        grid = RolloutGrid(rank.groups.grid, spec.settings.tensor_model_parallel_size)
        self.weights = shared_weights(cast("Actor", neighbours[ACTOR]), spec, rank, source, grid)
        data = rank.config.data
        # vLLM reseeds the process's generators while it starts.
        train_rng = swap(None)
        self.weights.gather()
        self.generator = RolloutEngine(
            model_path=spec.model_path,
            architecture=source.hf_config.architectures[0],
            eos_token_ids=eos_token_ids(spec.model_path),
            config=spec.settings,
            max_model_len=data.max_prompt_length + data.max_response_length,
            dtype=spec.megatron.dtype,
            grid=grid,
            tensors=self.weights.tensors,
            seed=rank.config.trainer.seed,
            # Preflight lets a window pass that cuts nothing off; vLLM cannot build one in some layers only.
            hf_overrides=full_attention(source.family, source.hf_config.to_dict()),
        )
        rank.ledger.note("init")
        self.generator.sleep()
        self.weights.release()
        swap(train_rng)
        resting = [one for role in neighbours.values() for one in role.resting()]
        self.engine = HybridEngine(self.weights, self.generator, resting, spec.settings.verify_weights_every)

    def memory(self) -> dict[str, int]:
        """Stages of other ranks, and the KV cache."""
        foreign = storage_bytes([self.weights.foreign.data])
        return {"foreign stages": foreign, "KV cache": self.generator.kv_cache.num_bytes}

    @verb(Dispatch.ONE_TO_ALL, phase="reshard", stop=Stop.BEFORE)
    def enter(self) -> TransitionReport:
        """Train mode -> rollout mode: the current weights of all stages and the KV cache are present."""
        return self.engine.enter()

    @verb(Dispatch.ONE_TO_ALL, phase="reshard")
    def exit(self) -> None:
        """Rollout mode -> train mode."""
        self.engine.exit()

    @verb(Dispatch.ROLLOUT_DP, phase="gen")
    def generate(self, prompts: Prompts, sampling: Sampling) -> Generations:
        """One response per row of this replica's prompts; rollout mode only."""
        return self.generator.generate(prompts, sampling)


def shared_weights(
    actor: Actor, spec: RoleSpec, rank: Rank, source: ModelSource, grid: RolloutGrid
) -> AllGatherPPModel:
    """The rollout shard on the actor's own memory; collective over each exchange group."""
    from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel
    from megatron_rl.hybrid_engine.exchange import Transport
    from megatron_rl.roles.flat_parameters import flat_parameters

    wanted = grid.place(rank.groups.rank, VOCAB_PADDING)
    return AllGatherPPModel(
        flat_parameters(actor.trainable, source.specs, source.place, wanted, rank.node),
        {one.tensor.name: one.tensor for one in source.specs.values()},
        Transport(rank.groups.exchange_group),
        bucket_bytes=spec.settings.update_weights_bucket_megabytes << 20,
        drop_train_weights=spec.settings.drop_train_weights,
    )


def eos_token_ids(model_path: str) -> list[int]:
    """The tokens that end a response: generation_config.json's where there is one, else config.json's."""
    if (Path(model_path) / "generation_config.json").exists():
        declared = GenerationConfig.from_pretrained(model_path).eos_token_id
    else:
        declared = AutoConfig.from_pretrained(model_path).eos_token_id
    return [declared] if isinstance(declared, int) else list(declared)
