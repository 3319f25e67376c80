"""Ways to get weights from a training pool to replicas on other ranks, as arms of the transition benchmark.

Both pools are one torch.distributed world here, so that every arm can use its collectives. A broadcast is counted as
leaving training once, whatever tree the library makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transition_job import VOCAB_MULTIPLE, Layout, ModelJob

from megatron_rl.hybrid_engine.allgather_pp import FlatParameters
from megatron_rl.hybrid_engine.plan import ALIGNMENT, Member
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.hybrid_engine.weight_transfer import WeightReceiver, WeightSender
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.sharding import LogicalTensor, shard_of


@dataclass(frozen=True)
class SplitLayout(Layout):
    """`world_size` ranks train; as many TP groups as num_replicas generate on others, which come after them."""

    num_replicas: int = 1

    @property
    def num_ranks(self) -> int:
        return self.world_size + self.rollout_tp_size * self.num_replicas

    @property
    def rollout_ranks(self) -> list[int]:
        return list(range(self.world_size, self.num_ranks))


class SplitJob(ModelJob):
    """This rank's memory and groups where some ranks train and the others generate. Every rank must construct it.

    fan_out: training rank -> the group of it and all rollout ranks, None on other training ranks.
    """

    def __init__(self, layout: SplitLayout, tensors: dict[str, LogicalTensor]) -> None:
        super().__init__(layout, tensors)
        self.split = layout
        self.trains = self.rank < layout.world_size
        self.tp_group, _ = dist.new_subgroups_by_enumeration(self.grid.train.tp_groups())
        self.fan_out = {rank: dist.new_group([rank, *layout.rollout_ranks]) for rank in range(layout.world_size)}
        self.transport = Transport(dist.group.WORLD)
        if self.trains:
            self.hold()
            self.member = Member(self.rank, 0, self.grid.train.tp_rank(self.rank), tuple(self.slots.values()))
        else:
            number, size = self.rank - layout.world_size, layout.rollout_tp_size
            grid = RolloutGrid(TrainGrid(size * layout.num_replicas, size, 1), size)
            self.wanted = grid.place(number, VOCAB_MULTIPLE)
            self.member = Member(number, 1, self.wanted.tp_rank, wanted=self.wanted)

    def holders(self, name: str) -> list[int]:
        """The training ranks that hold a tensor's shards, in TP order."""
        train = self.grid.train
        return [train.rank(tp_rank, 0, self.stage_of[name]) for tp_rank in range(train.tp_size)]

    def held_shape(self, name: str, tp_rank: int) -> tuple[int, ...]:
        """Shape of a training shard."""
        return shard_of(self.tensors[name], self.grid.train.place(tp_rank, VOCAB_MULTIPLE)).shape

    def buckets(self, bucket_bytes: int) -> Iterator[list[str]]:
        """Names of consecutive tensors of one stage, of at most so many bytes in all if there are several."""
        bucket: list[str] = []
        for name in self.tensors:
            numel = sum(self.tensors[other].numel for other in (*bucket, name))
            if bucket and (4 * numel > bucket_bytes or self.stage_of[name] != self.stage_of[bucket[0]]):
                yield bucket
                bucket = []
            bucket.append(name)
        yield bucket

    def whole(self, name: str, tp_shards: list[Tensor]) -> Tensor:
        """The whole tensor from its training shards."""
        segments = self.merge(name, tp_shards)
        return segments[0] if len(segments) == 1 else torch.cat(segments, self.tensors[name].tp_dim)

    def segments(self, name: str, whole: Tensor) -> list[Tensor]:
        """The inverse of `whole`: a tensor's segments as views."""
        tensor = self.tensors[name]
        if len(tensor.segments) == 1:
            return [whole]
        return list(whole.split([segment.shape[tensor.tp_dim] for segment in tensor.segments], tensor.tp_dim))

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor, its segments stacked."""
        tensor = self.tensors[name]
        shape = list(tensor.segments[0].shape)
        if tensor.tp_dim is not None:
            shape[tensor.tp_dim] = sum(segment.shape[tensor.tp_dim] for segment in tensor.segments)
        return tuple(shape)


class SplitOurs:
    """The project's own: a plan made once, each byte out of training once, replicas complete their shards together."""

    def __init__(self, job: SplitJob, bucket_bytes: int, verify_every: int = 0) -> None:
        options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "verify_every": verify_every}
        self._end: Any
        self.received_bytes = self.sent_bytes = 0
        if job.trains:
            own = FlatParameters((job.flat,), job.member)
            self._end = WeightSender(own, job.tensors, job.transport, **options)
            self._shards = {}
        else:
            place = (job.member.wanted, job.tensors, torch.float32, torch.device("cpu"))
            self._end = WeightReceiver(*place, **options)
            self._end.join(job.member, job.transport)
            self._shards = self._end.tensors

    @property
    def lower_bound_bytes(self) -> int:
        """0 on a training rank."""
        return self.report.lower_bound_bytes if self._shards else 0

    @property
    def need_bytes(self) -> int:
        """What the peak may be: the weights themselves are there already."""
        return self._end.scratch.num_bytes

    def run(self) -> None:
        if self._shards:
            self.report = self._end.receive()
            self.received_bytes = self.report.bytes_received
        else:
            self.sent_bytes = self._end.send(version=0).bytes_sent

    def shards(self) -> dict[str, Tensor]:
        return self._shards

    def release(self) -> None:
        """Nothing is kept beside the weights."""


class SplitArm:
    """What the other ways have in common: rollout shards that stay, and counts of what they send and receive."""

    def __init__(self, job: SplitJob, bucket_bytes: int) -> None:
        self.job = job
        self.received_bytes = self.sent_bytes = 0
        self._buckets = list(job.buckets(bucket_bytes))
        self._shards = {} if job.trains else job.empty_rollout_shards()

    def shards(self) -> dict[str, Tensor]:
        return self._shards

    def release(self) -> None:
        """Nothing is kept beside the weights."""

    def run(self) -> None:
        self.received_bytes = self.sent_bytes = 0
        self.move()

    def move(self) -> None:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        """Begin to give a tensor of a training rank to all rollout ranks."""
        num_bytes = tensor.numel() * tensor.element_size()
        if self.job.rank == source:
            self.sent_bytes += num_bytes
        else:
            self.received_bytes += num_bytes
        return dist.broadcast(tensor, source, group=self.job.fan_out[source], async_op=True)

    def load(self, name: str, whole: Tensor) -> None:
        """Copy this rank's rollout shard out of a whole tensor."""
        self.job.load(self._shards, name, self.job.segments(name, whole))


class GatherThenBroadcast(SplitArm):
    """Whole tensors are gathered on training rank 0 and broadcast bucket by bucket, as verl does it.

    Rank 0 gathers the next bucket while one is being broadcast; each holder's part of a bucket is one message.
    """

    def move(self) -> None:
        under_way: Callable[[], None] | None = None
        for names in self._buckets:
            bucket = self._gathered(names)
            if under_way is not None:
                under_way()
                under_way = None
            if bucket is not None:
                under_way = self._begin(names, bucket)
        if under_way is not None:
            under_way()

    def _begin(self, names: list[str], bucket: Tensor) -> Callable[[], None]:
        """Broadcast a bucket; what is returned waits for it, and unpacks it on rollout ranks."""
        work = self.broadcast(bucket, 0)

        def finish() -> None:
            work.wait()
            if not self.job.trains:
                parts = bucket.split([self.job.tensors[name].numel for name in names])
                for name, part in zip(names, parts, strict=True):
                    self.load(name, part.view(self.job.whole_shape(name)))

        return finish

    def _gathered(self, names: list[str]) -> Tensor | None:
        """The bucket: filled on rank 0, empty on rollout ranks, None on other training ranks, which send their part."""
        job = self.job
        numel = sum(job.tensors[name].numel for name in names)
        if not job.trains:
            return torch.empty(numel)
        holders = job.holders(names[0])
        mine = job.flat[job.slots[names[0]].offset : job.slots[names[-1]].stop] if names[0] in job.slots else None
        if job.rank != 0:
            if mine is not None:
                dist.send(mine, 0)
            return None
        lengths = [self._lengths(names, tp_rank) for tp_rank in range(len(holders))]
        flats = [mine if rank == 0 else torch.empty(sum(lengths[i])) for i, rank in enumerate(holders)]
        works = [dist.irecv(flat, rank) for flat, rank in zip(flats, holders, strict=True) if rank != 0]
        for work in works:
            work.wait()
        shards = [flat.split(lengths[i]) for i, flat in enumerate(flats)]
        bucket = torch.empty(numel)
        for number, (name, part) in enumerate(
            zip(names, bucket.split([job.tensors[name].numel for name in names]), strict=True)
        ):
            held = [
                shards[i][number][: torch.Size(job.held_shape(name, i)).numel()].view(job.held_shape(name, i))
                for i in range(len(holders))
            ]
            part.view(job.whole_shape(name)).copy_(job.whole(name, held))
        return bucket

    def _lengths(self, names: list[str], tp_rank: int) -> list[int]:
        """Elements from the start of one shard to that of the next in a holder's memory; the last is not padded."""
        numels = [torch.Size(self.job.held_shape(name, tp_rank)).numel() for name in names]
        return [-(-numel // ALIGNMENT) * ALIGNMENT for numel in numels[:-1]] + numels[-1:]


class PerTensorBroadcast(SplitArm):
    """Tensor by tensor: all-gather over training's TP group, broadcast by its first rank, as slime and OpenRLHF do it.

    The tensors of a bucket are under way at the same time.
    """

    def move(self) -> None:
        job = self.job
        for names in self._buckets:
            holders = job.holders(names[0])
            if job.trains and job.rank not in holders:
                continue
            if job.trains:
                gathered = {name: self._all_gather(name) for name in names}
                wholes = {}
                for name, (shards, work) in gathered.items():
                    if work is not None:
                        work.wait()
                    if job.rank == holders[0]:
                        wholes[name] = job.whole(name, shards).contiguous()
            else:
                wholes = {name: torch.empty(job.whole_shape(name)) for name in names}
            works = {name: self.broadcast(whole, holders[0]) for name, whole in wholes.items()}
            for name, work in works.items():
                work.wait()
                if not job.trains:
                    self.load(name, wholes[name])

    def _all_gather(self, name: str) -> tuple[list[Tensor], dist.Work | None]:
        mine = self.job.held(name)
        if self.job.tensors[name].tp_dim is None:
            return [mine], None
        shards = [torch.empty_like(mine) for _ in range(self.job.tp_group.size())]
        return shards, dist.all_gather(shards, mine, group=self.job.tp_group, async_op=True)


class ShardToShard(SplitArm):
    """Plain tensors from shard to shard, to each replica; stacked ones whole to every rank, as vLLM's m2n and NeMo-RL.

    Written for equal TP sizes on both sides, where a plain tensor needs no packing. The tensors of a bucket are under
    way at the same time.
    """

    def move(self) -> None:
        for names in self._buckets:
            works: list[dist.Work] = []
            wholes: dict[str, list[Tensor]] = {}
            for name in names:
                if len(self.job.tensors[name].segments) > 1:
                    works += self._spread(name, wholes)
                else:
                    works += self._direct(name)
            for work in works:
                work.wait()
            for name, shards in wholes.items():
                if not self.job.trains:
                    self.load(name, self.job.whole(name, shards))

    def _spread(self, name: str, wholes: dict[str, list[Tensor]]) -> list[dist.Work]:
        """Every holder's shard to every rollout rank."""
        job, holders = self.job, self.job.holders(name)
        if job.trains:
            return [self.broadcast(job.held(name), job.rank)] if job.rank in holders else []
        wholes[name] = [torch.empty(job.held_shape(name, i)) for i in range(len(holders))]
        return [self.broadcast(shard, rank) for shard, rank in zip(wholes[name], holders, strict=True)]

    def _direct(self, name: str) -> list[dist.Work]:
        """A holder's shard to the ranks at its TP coordinate; what is not cut, from the first holder to all."""
        job, holders = self.job, self.job.holders(name)
        is_cut = job.tensors[name].tp_dim is not None
        if job.trains:
            if job.rank not in holders or not (is_cut or job.rank == holders[0]):
                return []
            shard, first = job.held(name), job.split.world_size
            takers = [
                rank
                for rank in job.split.rollout_ranks
                if not is_cut or (rank - first) % job.split.rollout_tp_size == holders.index(job.rank)
            ]
            self.sent_bytes += len(takers) * shard.numel() * shard.element_size()
            return [dist.isend(shard, taker) for taker in takers]
        shard = self._shards[name]
        self.received_bytes += shard.numel() * shard.element_size()
        return [dist.irecv(shard, holders[job.wanted.tp_rank] if is_cut else holders[0])]
