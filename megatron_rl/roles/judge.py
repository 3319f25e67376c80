"""A judge: a frozen language model with an engine of its own, which writes verdicts on responses.

Its weights are cut by Megatron's grid, as a reference's are, and its engine reads them in place; those of other stages
are gathered for each call. So it may have ranks of its own, or share those of roles that train.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from megatron_rl.config.judge_engine import judge_engine_keys, judge_tp_size
from megatron_rl.config.roles import RoleSpec
from megatron_rl.device import release_cached
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel
from megatron_rl.hybrid_engine.hybrid_engine import HybridEngine
from megatron_rl.hybrid_engine.offload import HostBuffer, Offloadable, offloaded
from megatron_rl.hybrid_engine.rng import swap
from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer
from megatron_rl.hybrid_engine.storages import as_bytes
from megatron_rl.model.families import VOCAB_PADDING, placed_settings, rollout_settings, tensors_of
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import Role
from megatron_rl.roles.rollout import all_offloadable
from megatron_rl.rollout.slices import Slice, SliceReport

if TYPE_CHECKING:
    from megatron_rl.roles.model_source import ModelSource


class Judge(Role):
    """Frozen weights and an engine that reads them. The constructor ends in train mode."""

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> None:
        """Read the weights and build the engine. neighbours: the roles of this rank, some of which leave the device
        while this one generates.
        """
        from megatron_rl.checkpoint.constants import read_constants
        from megatron_rl.rollout.engine import RolloutEngine

        super().__init__(spec)
        self._rank, source, keys = rank, rank.source(spec), spec.settings.judge
        grid = RolloutGrid(rank.groups.grid, judge_tp_size(rank.config, spec))
        self.replica = grid.replica(rank.groups.rank)
        config = judge_engine_keys(rank.config, spec)
        read = read_constants(source.model.constants.values(), source.path, rank.device.torch_device)
        settings = rollout_settings(source.model.family, source.hf_config.to_dict())
        offloadable = all_offloadable(neighbours)
        train_rng = swap(None)  # vLLM reseeds the process's generators while it starts
        with offloaded(offloadable):
            release_cached(rank.device.torch_device)
            self.weights = self._frozen(source, grid, config.update_weights_bucket_megabytes << 20)
            self.weights.gather()
            self.generator = RolloutEngine(
                model_path=spec.model_path,
                architecture=source.hf_config.architectures[0],
                eos_token_ids=source.folder.end_tokens.ids,
                num_tokens=source.folder.num_sampled_tokens(rank.config),
                config=config,
                max_model_len=keys.max_prompt_length + keys.max_response_length,
                dtype=spec.megatron.dtype,
                grid=grid,
                tensors=self.weights.tensors | read,
                seed=rank.config.trainer.seed,
                hf_overrides=placed_settings(source.model.family, settings),
                text_only=source.model.family.inside is not None,
                device=rank.device,
                attention=source.model.attention,
                cache_pool=f"megatron_rl KV cache of {spec.name}",
            )
            rank.ledger.note("init", self.memory())
            self.generator.sleep()
            self.weights.release()
        swap(train_rng)
        # No weight of it ever changes, so one comparison is enough.
        self.engine = HybridEngine(self.weights, self.generator, rank.device, offloadable, verify_every=0)
        self._stays = rank.pool.roles == (spec,)

    def _frozen(self, source: ModelSource, grid: RolloutGrid, bucket_bytes: int) -> AllGatherPPModel:
        """Read this rank's shards of training's layout into memory that stays, and join the exchange."""
        from megatron_rl.hybrid_engine.transport import Transport
        from megatron_rl.roles.flat_parameters import FrozenBuffer, WeightView, flat_parameters
        from megatron_rl.roles.model_source import named_parameters

        model, rank, name = source.language_model(), self._rank, self.spec.name
        parameters = named_parameters(model.chunks).values()
        for parameter in parameters:
            parameter.requires_grad_(False)
        frozen = FrozenBuffer(parameters, f"megatron_rl weights of {name}")
        model.load()
        assert frozen.memory is not None  # it has a memory pool
        self._own = HostPlace(frozen.memory)
        view = WeightView.of(model.chunks, model.specs, [frozen])
        wanted = grid.place(rank.groups.rank, VOCAB_PADDING)
        return AllGatherPPModel(
            flat_parameters(view, rank.groups, source.place, wanted, rank.node),
            tensors_of(view.specs),
            Transport(rank.groups.exchange_group),
            bucket_bytes=bucket_bytes,
            memory_pool=f"megatron_rl gathered weights of {name}",
        )

    def memory(self) -> dict[str, int]:
        """Bytes of its own weights, of those that it has gathered, and of the KV cache."""
        name, gathered = self.spec.name, self.weights.foreign
        return {
            f"{name} parameters": self._own.num_bytes,
            f"{name} gathered": gathered.num_bytes if gathered.is_allocated else 0,
            f"{name} KV cache": self.generator.kv_cache.num_bytes if hasattr(self, "generator") else 0,
        }

    def offloadable(self) -> list[Offloadable]:
        """Its weights, with `megatron.param_offload`."""
        return [self._own] if self.spec.megatron.param_offload else []

    @remote_method(Dispatch.REPLICAS, phase="judge", stop=Stop.BEFORE)
    def judge(self, slices: dict[int, Slice]) -> SliceReport:
        """Generate for the questions of each replica that has some, to the end; train mode only.

        All ranks must be called: they gather weights together. Raises RuntimeError as `RolloutEngine.advance`.
        """
        start = time.time()
        if not self.engine.in_rollout:
            self.engine.enter()
        try:
            drawn, num_steps = self.generator.advance(slices[self.replica]) if self.replica in slices else ({}, 0)
        finally:
            if not self._stays:
                self.engine.exit()
        return SliceReport(self.replica, 0, num_steps, drawn, start, time.time())


class HostPlace:
    """Offload a buffer of frozen weights to host memory: its address stays, which the engine reads."""

    def __init__(self, memory: MemoryBuffer) -> None:
        self._memory, self._copy = memory, HostBuffer(memory.data.is_cuda)

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take on the device, or on a CPU in their copy."""
        away = 0 if self._memory.data.is_cuda else self._copy.num_bytes
        return self._memory.num_bytes if self._memory.is_allocated else away

    def offload(self) -> None:
        """Copy the weights to the host, and release the memory."""
        self._copy.keep(self._bytes)
        self._memory.release()

    def reload(self) -> None:
        """Take the memory again with its content; a copy that a GPU's weights have left stays for the next time."""
        if self._memory.is_allocated:
            return
        self._memory.allocate()
        self._copy.give(self._bytes)
        if not self._copy.pinned:
            self._copy.drop()

    @property
    def _bytes(self) -> torch.Tensor:
        content: torch.Tensor = as_bytes(self._memory.data.untyped_storage())
        return content[: self._memory.num_bytes]
