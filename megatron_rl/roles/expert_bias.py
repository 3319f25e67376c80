"""Biases by which experts are chosen, moved against their load: balance without a loss (Wang et al., arXiv:2408.15664).

After every update each expert's bias goes up by the rate where it was sent fewer tokens than the mean of its layer's,
down where more, and stays where it was sent as many. Tokens are those of `expert_load`: of all rows with a response, on
all ranks. Every rank moves the biases of its own layers, by the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.checkpoint.saved_tensors import BIAS, checkpoint_key
from megatron_rl.checkpoint.sharded_state import FlatRun
from megatron_rl.model.families import CORRECTION, Constant, ParamSpec
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.parallel.sharding import LogicalTensor, Segment


def moved(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """bias float32 [E] after an update in which its experts were sent `counts` tokens, int64 [E]."""
    return bias + rate * (counts.sum() - counts * len(counts)).sign()


def biases_of(constants: Mapping[str, Constant]) -> dict[str, Constant]:
    """The biases of experts among a model's constants, by global Megatron names."""
    return {name: constant for name, constant in constants.items() if name.endswith(CORRECTION)}


def described_biases(constants: Mapping[str, Constant]) -> dict[str, LogicalTensor]:
    """Biases by the folder's names, as every rank has them: whole."""
    segments = {bias.name: Segment("all", bias.shape, 1) for bias in constants.values()}
    return {name: LogicalTensor(name, (segment,), None) for name, segment in segments.items()}


class ExpertBias:
    """The biases of this rank's layers. All ranks must build it, and call `whole` together.

    buffers: of this rank's chunks. constants: the folder's biases of all layers, in their order. Both by global
    Megatron names. kind: the tensors' kind in a checkpoint. described: `described_biases`. has_moved: the biases differ
    from the folder's.
    """

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        constants: Mapping[str, Constant],
        groups: TrainGroups,
        device: torch.device,
        kind: str = BIAS,
    ) -> None:
        self._own = {name: buffers[name] for name in constants if name in buffers}
        self.described = described_biases(constants)
        self._constants, self._groups, self._device, self._kind = constants, groups, device, kind
        self.has_moved = False

    @property
    def names(self) -> list[str]:
        """Global Megatron names of the biases of this rank's layers."""
        return list(self._own)

    @torch.no_grad()
    def move(self, counts: Tensor, rate: float) -> None:
        """Move the biases after an update. counts: int64 [L, E], tokens of each expert; equal on all ranks."""
        self.has_moved = True
        for name, of_layer in zip(self._constants, counts, strict=True):
            if name in self._own:
                bias = self._own[name]
                bias.copy_(moved(bias, of_layer.to(bias.device), rate))

    def of_copy(self, buffers: Mapping[str, Tensor], kind: str) -> ExpertBias:
        """The biases of another copy of the model, cut in the same way. buffers, kind: as in the constructor."""
        return ExpertBias(buffers, self._constants, self._groups, self._device, kind)

    @torch.no_grad()
    def follow(self, leader: ExpertBias, alpha: float) -> None:
        """Become alpha * leader + (1 - alpha) * these biases. leader: biases of the same layers."""
        self.has_moved = self.has_moved or leader.has_moved
        for name, bias in self._own.items():
            bias.lerp_(leader._own[name], alpha)

    def whole(self) -> dict[str, Tensor]:
        """Biases of every layer, float32 [E], by the folder's names, on this rank's device."""
        zeros = (torch.zeros(constant.shape, device=self._device) for constant in self._constants.values())
        rows = [self._own.get(name, zero) for name, zero in zip(self._constants, zeros, strict=True)]
        table = torch.stack(rows)
        dist.all_reduce(table, group=self._groups.pp_group)
        return {constant.name: row for constant, row in zip(self._constants.values(), table, strict=True)}

    # In a checkpoint

    @property
    def specs(self) -> dict[str, ParamSpec]:
        """Specs of the saved biases: one whole tensor each."""
        named = {name: bias.name for name, bias in self._constants.items()}
        return {name: ParamSpec(self.described[bias], (bias,)) for name, bias in named.items()}

    def runs(self) -> Iterator[FlatRun]:
        """Runs of this rank's layers."""
        for name, bias in self._own.items():
            yield FlatRun(name, self._kind, 0, bias)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the biases of its layers."""
        groups = self._groups
        return groups.tp_rank == groups.dp_rank == groups.cp_rank == 0

    def is_in(self, names: Collection[str]) -> bool:
        """Whether a checkpoint with tensors of these names holds the biases."""
        return all(checkpoint_key(spec, 0, self._kind) in names for spec in self.specs.values())
