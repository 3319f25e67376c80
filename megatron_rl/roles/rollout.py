"""The rollout: vLLM, on the actor's memory where they share a pool, or on weights that come over a bridge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, GenerationConfig

from megatron_rl.config.roles import ACTOR, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.dispatch import Dispatch, Stop, verb
from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel, Bytes
from megatron_rl.hybrid_engine.engine import HybridEngine, TransitionReport
from megatron_rl.hybrid_engine.rng import swap
from megatron_rl.model.families import VOCAB_PADDING, full_attention
from megatron_rl.observe.memory import storage_bytes
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.records import Generations, Prompts, Sampling
from megatron_rl.roles.bridge_address import BridgeAddress, join_bridge
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import Role

if TYPE_CHECKING:
    from megatron_rl.hybrid_engine.bridge import BridgeReceiver
    from megatron_rl.roles.actor import Actor
    from megatron_rl.roles.model_source import ModelSource


class Rollout(Role):
    """Generation. Building it ends in train mode: what it does not share with training is released."""

    def __init__(
        self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role], bridge: BridgeAddress | None = None
    ) -> None:
        """neighbours: the other roles of this rank. bridge: where to meet the actor's pool; None: the actor is one of
        the neighbours. With a bridge building it is collective over both pools.
        """
        from megatron_rl.rollout.engine import RolloutEngine

        super().__init__(spec)
        source = rank.source(spec)
        grid = RolloutGrid(rank.groups.grid, spec.settings.tensor_model_parallel_size)
        self.weights: AllGatherPPModel | ReceivedWeights
        if bridge is None:
            self.weights = shared_weights(cast("Actor", neighbours[ACTOR]), spec, rank, source, grid)
        else:
            self.weights = received_weights(bridge, spec, rank, source, grid)
        data = rank.config.data
        # vLLM reseeds the process's generators while it starts.
        train_rng = swap(None)
        if bridge is None:
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
            hf_overrides=full_attention(source.family, source.hf_config.to_dict()) | told(rank.config),
        )
        rank.ledger.note("init", self.memory())  # this role is not among the host's yet
        self.generator.sleep()
        self.weights.release()
        swap(train_rng)
        resting = [one for role in neighbours.values() for one in role.resting()]
        self.engine = HybridEngine(self.weights, self.generator, resting, spec.settings.verify_weights_every)

    def memory(self) -> dict[str, int]:
        """Weights beside training's own, and the KV cache."""
        return self.weights.memory() | {"KV cache": self.generator.kv_cache.num_bytes}

    @verb(Dispatch.ONE_TO_ALL, phase="reshard", stop=Stop.BEFORE)
    def enter(self) -> TransitionReport:
        """Train mode -> rollout mode: the current weights of all stages and the KV cache are present."""
        return self.engine.enter()

    @verb(Dispatch.ONE_TO_ALL, phase="reshard")
    def exit(self) -> None:
        """Rollout mode -> train mode."""
        self.engine.exit()

    @verb(Dispatch.ONE_TO_ALL, phase="reshard")
    def receive_weights(self) -> TransitionReport:
        """Take the weights that the actor sends over the bridge, with its `send_weights`; train mode only."""
        if not isinstance(self.weights, ReceivedWeights):
            raise RuntimeError("this rollout reads the actor's own memory: there is no bridge")
        return self.weights.receive()

    @verb(Dispatch.ROLLOUT_DP, phase="gen")
    def generate(self, prompts: Prompts, sampling: Sampling) -> Generations:
        """One response per row of this replica's prompts; rollout mode only."""
        return self.generator.generate(prompts, sampling)


def told(config: RunConfig) -> dict[str, Any]:
    """Settings of config.json that the run's configuration replaces."""
    longest = config.actor_rollout_ref.model.override_config.max_position_embeddings
    return {} if longest is None else {"max_position_embeddings": longest}


class ReceivedWeights:
    """A rollout shard that comes over a bridge, as `HybridEngine` wants weights: entering rollout mode moves nothing.

    Raises RuntimeError on entering before any weights came.
    """

    lower_bound = Bytes(0, 0)

    def __init__(self, receiver: BridgeReceiver) -> None:
        self.receiver = receiver
        self.tensors = receiver.tensors
        for tensor in self.tensors.values():
            tensor.zero_()  # vLLM runs once while it is built, before the first weights come

    def receive(self) -> TransitionReport:
        """Take what training sends."""
        report = self.receiver.receive()
        return TransitionReport(
            report.bytes_received,
            report.lower_bound_bytes,
            report.network_bytes,
            report.network_bound_bytes,
            seconds=report.exchange_seconds + report.verify_seconds,
            exchange_seconds=report.exchange_seconds,
            verify_seconds=report.verify_seconds,
        )

    def memory(self) -> dict[str, int]:
        """The shard."""
        return {"rollout weights": storage_bytes(list(self.tensors.values()))}

    def gather(self) -> Bytes:
        """Nothing: they are here."""
        if self.receiver.version is None:
            raise RuntimeError("no weights have come over the bridge yet: receive_weights() comes first")
        return Bytes(0, 0)

    def verify(self) -> None:
        """Nothing: they were compared when they came."""

    def drop_training(self) -> None:
        """Nothing: training is elsewhere."""

    def restore_training(self) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing: they stay where they are."""


def received_weights(
    bridge: BridgeAddress, spec: RoleSpec, rank: Rank, source: ModelSource, grid: RolloutGrid
) -> ReceivedWeights:
    """The rollout shard that will come over a bridge; collective over both pools."""
    from megatron_rl.hybrid_engine.bridge import BridgeReceiver
    from megatron_rl.hybrid_engine.plan import Member

    number, settings = rank.groups.rank, spec.settings
    tp_rank, wanted = grid.tp_rank(number), grid.place(number, VOCAB_PADDING)
    receiver = BridgeReceiver(
        Member(rank=number, node=rank.node, tp_rank=tp_rank, held=(), wanted=wanted),
        {one.tensor.name: one.tensor for one in source.specs.values()},
        torch_dtype(spec.megatron.dtype),
        rank.device.torch_device,
        join_bridge(bridge, bridge.num_senders + number, rank),
        bucket_bytes=settings.update_weights_bucket_megabytes << 20,
        verify_every=settings.verify_weights_every,
    )
    return ReceivedWeights(receiver)


def torch_dtype(name: str) -> torch.dtype:
    """float32, bfloat16 or float16, by its name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def shared_weights(
    actor: Actor, spec: RoleSpec, rank: Rank, source: ModelSource, grid: RolloutGrid
) -> AllGatherPPModel:
    """The rollout shard on the actor's own memory; collective over each exchange group."""
    from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel
    from megatron_rl.hybrid_engine.transport import Transport
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
