"""The rollout's FP8 weights: every owner quantizes what it trains, and FP8 values and scales are sent.

Training's weights are read and never written. Codes and scales of this rank's training shards are in two buffers of
their own. What it does not have of its rollout shard is in receive buffers, as for weights that are served as they are
trained. All of them exist during generation alone, each time at the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.hybrid_engine.adapter_slots import AdapterSlots
from megatron_rl.hybrid_engine.block_codes import CODE, E4M3, SCALE, quantize
from megatron_rl.hybrid_engine.composed_weights import ComposedPart, ComposedWeights, OwnMemory
from megatron_rl.hybrid_engine.eight_bit_members import own_numel
from megatron_rl.hybrid_engine.layout import Slot
from megatron_rl.hybrid_engine.plan import Member
from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.hybrid_engine.verify import WeightMismatchError

OWN_CODES_POOL, OWN_SCALES_POOL = "megatron_rl own codes", "megatron_rl own scales"
"""Tags of the buffers in vLLM's CUDA allocator."""


class QuantizedWeight(NamedTuple):
    """Codes (bytes, [R, C]) and scales (float32, [R / block, C / block]) of a training shard [R, C]; the rows of
    stacked experts are one below the other.
    """

    name: str
    codes: Tensor
    scales: Tensor


class OwnCodes:
    """Codes and scales of one rank's training shards, in memory that can be released. Allocated at first.

    trained: name -> the training shard as generation is to read it, such as with adapters merged in; asked for one at a
    time. codes, scales: the members of both exchanges, whose slots name the places. stays: the shards do not change, so
    they are quantized once, and codes and scales stay on the device.
    """

    label = "own codes"

    def __init__(
        self,
        trained: Callable[[str], Tensor],
        codes: Member,
        scales: Member,
        block: int,
        device: torch.device,
        stays: bool = False,
    ) -> None:
        self.block, self.stays, self._trained = block, stays, trained
        self.is_made = False
        self.codes = MemoryBuffer(own_numel(codes), CODE, device, OWN_CODES_POOL)
        self.scales = MemoryBuffer(own_numel(scales), SCALE, device, OWN_SCALES_POOL)
        self.weights = [
            QuantizedWeight(slot.name, _view(self.codes, slot), _view(self.scales, its_scales))
            for slot, its_scales in zip(codes.held, scales.held, strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated now."""
        return sum(buffer.num_bytes for buffer in (self.codes, self.scales) if buffer.is_allocated)

    @torch.no_grad()
    def renew(self) -> None:
        """Quantize the current weights, unless their codes stayed."""
        if self.is_made:
            return
        self.codes.allocate()
        self.scales.allocate()
        for weight in self.weights:
            quantize(self._now(weight), self.block, weight.codes, weight.scales)
        self.is_made = self.stays

    @torch.no_grad()
    def stale(self) -> list[str]:
        """Names of the weights that have changed since they were quantized."""
        return [weight.name for weight in self.weights if not self._is_current(weight)]

    def _is_current(self, weight: QuantizedWeight) -> bool:
        codes, scales = torch.empty_like(weight.codes), torch.empty_like(weight.scales)
        quantize(self._now(weight), self.block, codes, scales)
        return torch.equal(codes, weight.codes) and torch.equal(scales, weight.scales)

    def _now(self, weight: QuantizedWeight) -> Tensor:
        return self._trained(weight.name).flatten(0, -2)

    def release(self) -> None:
        """Release the memory, unless codes stay; the addresses stay."""
        if not self.stays:
            self.codes.release()
            self.scales.release()


class QuantizedWeights(ComposedWeights):
    """A rollout shard of codes, of scales, and of other parts; as `HybridEngine` expects it.

    own: what the exchanges of codes and scales read. codes, scales: the parts of these exchanges. others, made, slots:
    all other parts, what is made, and adapters, see `ComposedWeights`. transport: of the exchange group. tensors: codes
    are e4m3, and scales have the names of vLLM's.
    """

    def __init__(
        self,
        own: OwnCodes,
        codes: ComposedPart,
        scales: ComposedPart,
        others: Sequence[ComposedPart],
        made: Sequence[OwnMemory],
        transport: Transport,
        slots: AdapterSlots | None = None,
    ) -> None:
        super().__init__([codes, scales, *others], [*made, own], slots)
        self.own, self._transport = own, transport
        self._codes = {name: tensor.view(E4M3) for name, tensor in codes.exchange.tensors.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The rollout shard, by name."""
        return super().tensors | self._codes

    def verify(self) -> None:
        """Compare checksums of what moved, and the codes with the weights that they stand for.

        Raises WeightMismatchError on every rank of the group.
        """
        super().verify()
        stale = self.own.stale()
        counts = [int(count) for count in self._transport.all_gather(torch.tensor([len(stale)]))]
        if any(counts):
            number = self._transport.number
            here = f"{stale[0]} and {len(stale) - 1} more here" if stale else "none here"
            raise WeightMismatchError(
                f"FP8 weights differ from the trained weights: {here}; stale weights of the ranks of the "
                f"group, of which this is number {number}: {counts}"
            )


def trained_shards(buffers: Sequence[Tensor], member: Member, names: set[str]) -> dict[str, Tensor]:
    """Name -> view of each training shard with one of the names."""
    return {
        slot.name: buffers[slot.buffer][slot.offset : slot.stop].view(slot.shard.shape)
        for slot in member.held
        if slot.name in names
    }


def _view(buffer: MemoryBuffer, slot: Slot) -> Tensor:
    return buffer.view(slot.offset, slot.shard.shape).flatten(0, -2)
