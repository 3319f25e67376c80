"""megatron-core's own resharding as an arm of the transition benchmark, over a copy service that counts bytes.

It needs two modules and their groups; tensors are copied into the second one, nothing is shared.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transition_job import Job


class CoreResharding:
    """`megatron.core.resharding` with its plan cached, as it is between iterations."""

    def __init__(self, job: Job) -> None:
        from megatron.core.resharding.copy_services.base import CopyService

        class CountingService(CopyService):
            """Plain batched P2P on the CPU: what megatron-core's gloo service does, without its CUDA stream."""

            def __init__(self) -> None:
                self.bytes_received = 0
                self.operations: list = []
                self.local: dict = {}

            def submit_send(self, src_tensor, dest_rank) -> None:
                raise NotImplementedError("sends carry a task id")

            submit_recv = submit_send

            def submit_send_with_id(self, task_id, src_tensor, dest_rank) -> None:
                if dest_rank == dist.get_rank():
                    self.local.setdefault(task_id, [None, None])[0] = src_tensor
                else:
                    self.operations.append(dist.P2POp(dist.isend, src_tensor, dest_rank))

            def submit_recv_with_id(self, task_id, dest_tensor, src_rank) -> None:
                if src_rank == dist.get_rank():
                    self.local.setdefault(task_id, [None, None])[1] = dest_tensor
                else:
                    self.operations.append(dist.P2POp(dist.irecv, dest_tensor, src_rank))
                    self.bytes_received += dest_tensor.numel() * dest_tensor.element_size()

            def run(self) -> None:
                for source, dest in self.local.values():
                    dest.copy_(source)
                for work in dist.batch_isend_irecv(self.operations) if self.operations else ():
                    work.wait()
                self.operations, self.local = [], {}

        self.job = job
        self._service = CountingService()
        singles, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(dist.get_world_size())])
        self._source = self._module(
            {name: job.held(name) for name in job.slots},
            SimpleNamespace(tp=job.tp_group, pp=job.pp_group, dp=singles, ep=singles, expt_tp=None),
        )
        self._groups = SimpleNamespace(tp=job.rollout_group, pp=singles, dp=singles, ep=singles, expt_tp=None)
        self._target = self._module(job.empty_rollout_shards(), self._groups)
        storages = [parameter.untyped_storage() for parameter in self._target.parameters()]
        self._storages = [(storage, storage.nbytes()) for storage in storages]

    @property
    def received_bytes(self) -> int:
        return self._received

    def _module(self, tensors: dict[str, torch.Tensor], groups: SimpleNamespace) -> torch.nn.Module:
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            parameter: Any = torch.nn.Parameter(tensor, requires_grad=False)
            logical = self.job.tensors[name]
            if logical.tp_dim is not None:
                parameter.tensor_model_parallel = True
                parameter.partition_dim = logical.tp_dim
                parameter.partition_stride = len(logical.segments)
            module.register_parameter(name.replace(".", "_"), parameter)
        module.pg_collection = groups
        module.config = SimpleNamespace(num_moe_experts=None)
        return module

    def run(self) -> None:
        from megatron.core.resharding.refit import reshard_model_weights

        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)
        before = self._service.bytes_received
        reshard_model_weights(self._source, self._target, self._service)
        self._received = self._service.bytes_received - before

    def shards(self) -> dict[str, torch.Tensor]:
        parameters = dict(self._target.named_parameters())
        return {name: parameters[name.replace(".", "_")].data for name in self.job.tensors}

    def release(self) -> None:
        """Its target's memory; the parameters stay, as its plan knows them."""
        for storage, _ in self._storages:
            storage.resize_(0)
