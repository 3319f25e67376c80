"""Ways to get from training shards to rollout shards, all on torch.distributed over the same groups.

Each arm is made once, then run many times. `release` gives back what an arm would not keep while training.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from transition_job import Job, Wire

from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel, FlatParameters
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.parallel.sharding import shard_of


class Arm(Protocol):
    """One way. received_bytes: of tensors, in the last run; shards: this rank's rollout shards after it."""

    @property
    def received_bytes(self) -> int: ...

    def run(self) -> None: ...

    def shards(self) -> dict[str, torch.Tensor]: ...

    def release(self) -> None: ...


class Ours:
    """The project's own: a plan made once, flat messages, straight into the foreign buffer."""

    def __init__(self, job: Job, bucket_bytes: int) -> None:
        own = FlatParameters((job.flat,), job.member)
        self.model = AllGatherPPModel(own, job.tensors, Transport(job.exchange_group), bucket_bytes=bucket_bytes)
        self.received_bytes = 0

    @property
    def lower_bound_bytes(self) -> int:
        return self.model.lower_bound.total

    @property
    def need_bytes(self) -> int:
        """The foreign buffer plus scratch: what the peak may be."""
        return self.model.foreign.num_bytes + self.model.scratch.num_bytes

    def run(self) -> None:
        self.received_bytes = self.model.gather().total

    def shards(self) -> dict[str, torch.Tensor]:
        return self.model.tensors

    def release(self) -> None:
        self.model.release()


class OursVerified(Ours):
    """The transition with checksums of everything that moved."""

    def run(self) -> None:
        super().run()
        self.model.verify()


class FullGather:
    """Every rank sends its whole flat buffer to every other; each then slices its shards out of the whole model."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.received_bytes = 0
        members: list = [None] * job.exchange_group.size()
        dist.all_gather_object(members, (job.rank, job.slots, job.flat.numel()), group=job.exchange_group)
        self._members = members

    def run(self) -> None:
        job, self.received_bytes = self.job, 0
        self._shards = job.empty_rollout_shards()
        flats = {rank: job.flat if rank == job.rank else torch.empty(numel) for rank, _, numel in self._members}
        operations = []
        for rank, flat in flats.items():
            if rank != job.rank:
                operations.append(dist.P2POp(dist.isend, job.flat, rank, group=job.exchange_group))
                operations.append(dist.P2POp(dist.irecv, flat, rank, group=job.exchange_group))
                self.received_bytes += flat.numel() * flat.element_size()
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for name in job.tensors:
            held = [
                flats[rank][slots[name].offset : slots[name].stop].view(slots[name].shard.shape)
                for rank, slots, _ in self._members
                if name in slots
            ]
            job.load(self._shards, name, job.merge(name, held[: job.num_shards(name)]))

    def shards(self) -> dict[str, torch.Tensor]:
        return self._shards

    def release(self) -> None:
        self._shards = {}


class PerTensor:
    """Tensor by tensor, as an export to full tensors does it: who has it (objects over PP), its shard (broadcast over
    PP), the whole (all-gather over TP), and the rollout shard out of that. `cached`: who has it is known.
    """

    def __init__(self, job: Job, cached: bool) -> None:
        self.job = job
        self.cached = cached
        self.received_bytes = 0
        self._pp_ranks = dist.get_process_group_ranks(job.pp_group)

    def run(self) -> None:
        job, wire = self.job, Wire()
        self._shards = job.empty_rollout_shards()
        for name in job.tensors:
            owner, shape = self._whereabouts(name)
            shard = job.held(name) if owner == job.pp_rank else torch.empty(shape)
            if len(self._pp_ranks) > 1:
                wire.broadcast(shard, self._pp_ranks[owner], job.pp_group)
            shards = [shard]
            if job.num_shards(name) > 1:
                shards = [torch.empty_like(shard) for _ in range(job.num_shards(name))]
                wire.all_gather(shards, shard, job.group_of(name))
            job.load(self._shards, name, job.merge(name, shards))
        self.received_bytes = wire.bytes_received

    def _whereabouts(self, name: str) -> tuple[int, tuple[int, ...]]:
        """(owning stage, shape of a training shard)."""
        job = self.job
        if self.cached:
            return job.stage_of[name], shard_of(job.tensors[name], job.place).shape
        found: list = [None] * len(self._pp_ranks)
        mine = job.slots.get(name)
        spec = None if mine is None else (tuple(mine.shard.shape), torch.float32)
        dist.all_gather_object(found, spec, group=job.pp_group)
        owner = next(stage for stage, spec in enumerate(found) if spec is not None)
        return owner, found[owner][0]

    def shards(self) -> dict[str, torch.Tensor]:
        return self._shards

    def release(self) -> None:
        self._shards = {}
