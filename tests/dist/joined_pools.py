"""Two torch.distributed worlds on one machine, joined by a group of their own; the ranks of `ranks.run_ranks`."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from layouts import members_of, tensors_of, training_buffers, transfer_ends
from ranks import common_store

from megatron_rl.device import Device
from megatron_rl.hybrid_engine.allgather_pp import FlatParameters
from megatron_rl.hybrid_engine.deltas import as_bits
from megatron_rl.hybrid_engine.plan import Member
from megatron_rl.hybrid_engine.transfer_plan import named
from megatron_rl.hybrid_engine.transport import Transport, open_joint_group
from megatron_rl.hybrid_engine.weight_transfer import WeightReceiver, WeightSender
from megatron_rl.model.families import FAMILIES, ModelShape, param_map
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.sharding import LogicalTensor, box_index, shard_of
from megatron_rl.parallel.stages import StagePlan

Model = dict[tuple[str, int], torch.Tensor]
"""(tensor, segment) -> its elements."""


@dataclass(frozen=True)
class Pools:
    """A model, a training pool and a rollout pool; options: keywords of `transfer_ends`.

    follower: the grid and stages of a pool in place of the rollout's, whose roles follow the policy.
    deltas: whether only what changed travels. drifts: the share of elements whose bits each update changes, NaN and
    negative zeros among them; (): every update draws all weights anew.
    """

    name: str
    train: TrainGrid
    stages: StagePlan
    rollout_tp: int
    num_replicas: int
    shape: ModelShape
    architecture: str = "LlamaForCausalLM"
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)
    deltas: bool = False
    drifts: tuple[float, ...] = ()
    follower: tuple[TrainGrid, StagePlan] | None = None

    @property
    def world_size(self) -> int:
        receiving = self.rollout_tp * self.num_replicas if self.follower is None else self.follower[0].world_size
        return self.train.world_size + receiving

    def members(self) -> tuple[list[Member], list[Member], dict[str, LogicalTensor]]:
        specs = param_map(FAMILIES[self.architecture], self.shape)
        senders, receivers = transfer_ends(
            self.train, specs, self.stages, self.rollout_tp, self.num_replicas, **self.options
        )
        if self.follower is not None:
            (grid, stages), nodes = self.follower, self.options.get("rollout_nodes", [0])
            held = members_of(list(range(grid.world_size)), RolloutGrid(grid, 1), specs, stages, train_multiple=8)
            receivers = [
                replace(
                    member,
                    node=nodes[member.rank % len(nodes)],
                    held=(),
                    wanted=grid.place(member.rank, 8),
                    names=tuple(dict.fromkeys(slot.name for slot in member.held)),
                )
                for member in held
            ]
        return senders, receivers, tensors_of(specs)

    def model(self, tensors: dict[str, LogicalTensor], seed: int) -> Model:
        """The whole model's weights after so many updates, the same on all ranks."""
        model = self._drawn(tensors, 0 if self.drifts else seed)
        generator = torch.Generator().manual_seed(1)
        for share in self.drifts[:seed]:
            for weights in map(as_bits, model.values()):
                changed = torch.rand(weights.shape, generator=generator) < share
                weights[changed] ^= torch.randint(1, 2**15, weights.shape, generator=generator).to(weights.dtype)[
                    changed
                ]
        return model

    def _drawn(self, tensors: dict[str, LogicalTensor], seed: int) -> Model:
        generator = torch.Generator().manual_seed(seed)
        return {
            (name, number): torch.randn(segment.shape, generator=generator).to(self.dtype)
            for name, tensor in tensors.items()
            for number, segment in enumerate(tensor.segments)
        }


def join(num_training: int, timeout_s: float, make_transport=Transport) -> Transport:
    """Called by every rank: make its pool's own world, then the joint group, on the store of all."""
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trains, store = number < num_training, common_store(timedelta(seconds=60))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("training" if trains else "rollout", store),
        rank=number if trains else number - num_training,
        world_size=num_training if trains else size - num_training,
    )
    joint, timeout = dist.PrefixStore("joint", store), timedelta(seconds=timeout_s)
    return make_transport(open_joint_group(joint, number, size, Device("cpu"), timeout))


def own_transport(group: dist.ProcessGroup) -> Transport:
    """As roles make it: a rank that fails leaves the group."""
    return Transport(group, is_own=True)


def killed_after(transport: Transport, num_messages: int) -> None:
    """This process ends by SIGKILL when it begins one message more."""
    start, left = transport.start, iter(range(num_messages))

    def start_until_killed(send, receive):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(send, receive)

    transport.start = start_until_killed


class TrainingRank:
    """A training rank of `pools` with real flat buffers."""

    def __init__(
        self, pools: Pools, transport: Transport, bucket_bytes: int, verify_every: int = 1, constants=None
    ) -> None:
        senders, _, self.tensors = pools.members()
        self.pools, self.member = pools, senders[transport.number]
        self.buffers = self._filled(seed=0)
        own = FlatParameters(tuple(self.buffers[number] for number in range(len(self.buffers))), self.member)
        options = {
            "bucket_bytes": bucket_bytes,
            "verify_every": verify_every,
            "deltas": pools.deltas,
            "constants": constants,
        }
        self.end = WeightSender(own, self.tensors, transport, **options)

    def update(self, seed: int) -> None:
        """New weights in the same memory."""
        for number, buffer in self._filled(seed).items():
            self.buffers[number].copy_(buffer)

    def _filled(self, seed: int) -> dict[int, torch.Tensor]:
        return training_buffers(self.member, self.pools.model(self.tensors, seed), self.pools.dtype)


class RolloutRank:
    """A rollout rank of `pools`."""

    def __init__(
        self,
        pools: Pools,
        transport: Transport,
        bucket_bytes: int,
        verify_every: int = 1,
        second_buffer: bool = False,
        constants=None,
    ) -> None:
        senders, receivers, self.tensors = pools.members()
        self.pools, self.member = pools, receivers[transport.number - len(senders)]
        self.end = WeightReceiver(
            *(self.member.wanted, self.tensors, pools.dtype, torch.device("cpu")),
            bucket_bytes=bucket_bytes,
            verify_every=verify_every,
            second_buffer=second_buffer,
            deltas=pools.deltas,
            constants=constants,
            names=self.member.names,
        )
        self.end.join(self.member, transport)

    def differing(self, seed: int) -> Sequence[str]:
        """Names of tensors that are not this rank's shard of the model, element by element; padding must be 0."""
        model = self.pools.model(self.tensors, seed)
        wrong = []
        for name, tensor in named(self.tensors, self.member.names).items():
            shard = shard_of(tensor, self.member.wanted)
            expected = torch.zeros(shard.shape, dtype=self.pools.dtype)
            for part in shard.parts:
                expected[part.index] = model[name, part.segment][box_index(part.box)]
            if not torch.equal(as_bits(self.end.tensors[name]), as_bits(expected)):
                wrong.append(name)
        return wrong
