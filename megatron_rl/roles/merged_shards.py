"""Weights with adapters merged in, as generation or a weight transfer reads them: each rank merges its own shards.

The trainer's tensors are read and never written. Every merge begins with the base, so nothing adds up over steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_rl.checkpoint.adapter_weights import MergedParameters
from megatron_rl.hybrid_engine.allgather_pp import FlatParameters
from megatron_rl.hybrid_engine.layout import Slot
from megatron_rl.hybrid_engine.plan import aligned
from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer
from megatron_rl.parallel.sharding import Place
from megatron_rl.roles.flat_parameters import flat_parameters
from megatron_rl.roles.model_source import named_parameters

if TYPE_CHECKING:
    from megatron_rl.roles.role import TrainedRole

MERGED_POOL = "megatron_rl own merged weights"
"""The tag of the buffer in vLLM's CUDA allocator."""


def merged_parameters(role: TrainedRole) -> MergedParameters:
    """A rank's parameters as the merged model of a role has them."""
    source = role.source
    parameters = named_parameters(role.trainable.models)
    return MergedParameters(parameters, dict(role.base.specs), source.adapter_specs, source.place, source.lora.scale)


class MergedShards:
    """A rank's weights that have adapters, merged, in a buffer that can be released. Allocated at first."""

    label = "own merged"

    def __init__(self, role: TrainedRole, without: Collection[str] = ()) -> None:
        """without: tensors that something else makes of `merged_parameters`, by their names in generation."""
        base = role.base
        self._merged = merged_parameters(role)
        self._starts: dict[str, int] = {}
        stop = 0
        named = [name for name in base.parameters if name in self._merged.pairs]
        for name in (name for name in named if base.specs[name].tensor.name not in without):
            self._starts[name] = aligned(stop)
            stop = self._starts[name] + base.parameters[name].numel()
        self._role = role
        like = next(iter(base.parameters.values()))
        self.buffer = MemoryBuffer(stop, like.dtype, like.device, MERGED_POOL)

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated now."""
        return self.buffer.num_bytes if self.buffer.is_allocated else 0

    def flat(self, held: Place, wanted: Place | None, node: int) -> FlatParameters:
        """The base's buffers and this one; weights with adapters have their slots in this one. Arguments: see
        `flat_parameters`.
        """
        base = self._role.base
        whole = flat_parameters(base, self._role.trainable.groups, held, wanted, node)
        number = len(whole.buffers)
        starts = {base.specs[name].tensor.name: start for name, start in self._starts.items()}
        slots = [
            Slot(slot.name, number, starts[slot.name], slot.shard) if slot.name in starts else slot
            for slot in whole.member.held
        ]
        ordered = tuple(sorted(slots, key=lambda slot: (slot.buffer, slot.offset)))
        return FlatParameters((*whole.buffers, self.buffer.data), replace(whole.member, held=ordered))

    def merging(self, shards: Mapping[str, torch.Tensor]) -> Callable[[str], torch.Tensor]:
        """Return a function of a tensor's name in generation: its shard of the base with adapters merged in, made when
        it is asked for, or one of `shards` that has none.
        """
        base, merged = self._role.base, self._merged
        adapted = {base.specs[name].tensor.name: name for name in base.parameters if name in merged.pairs}
        return lambda name: merged.write(adapted[name]) if name in adapted else shards[name]

    @torch.no_grad()
    def renew(self) -> None:
        """Merge the current adapters."""
        self.buffer.allocate()
        for name, start in self._starts.items():
            self._merged.write(name, self.buffer.view(start, tuple(self._role.base.parameters[name].shape)))

    def release(self) -> None:
        """Release the memory; the address stays."""
        self.buffer.release()
