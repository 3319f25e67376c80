"""Weights with their adapters merged in, W + scale B A: computed in float32, rounded once, one matrix at a time.

Legend: r rows of A, E experts of a stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.model.families import ParamSpec
from megatron_rl.model.families.adapter_params import merged_rows
from megatron_rl.parallel.sharding import Part, Place, shard_of

Rows = tuple[slice, ...]
"""Where a product goes in a weight."""


def merged(
    weight: Tensor, products: Iterable[tuple[Rows, Tensor, Tensor]], scale: float, out: Tensor | None = None
) -> Tensor:
    """A tensor like `weight` [out, in], which is not written: each product of B [o, r] and A [r, i] is added at its
    place, which is [o, i] large. All may be stacks [E, ...], of which one matrix at a time is in float32.

    out: where it goes; None: a new one.
    """
    out = torch.empty_like(weight) if out is None else out
    if weight.dim() == 3:
        products = list(products)
        for expert, matrix in enumerate(weight):
            own = [(rows[1:], lora_a[expert], lora_b[expert]) for rows, lora_a, lora_b in products]
            merged(matrix, own, scale, out[expert])
        return out
    whole = weight.detach().to(torch.float32, copy=True)
    for rows, lora_a, lora_b in products:
        whole[rows].addmm_(lora_b.detach().float(), lora_a.detach().float(), alpha=scale)
    return out.copy_(whole)


def _rows(parts: Sequence[Part], numbers: Sequence[int]) -> Rows:
    """The place of adjacent segments in a rank's weight."""
    first, last = parts[numbers[0]].index, parts[numbers[-1]].index
    return *first[:-2], slice(first[-2].start, last[-2].stop), first[-1]


class MergedParameters:
    """A rank's parameters as the merged model has them. Call it with the name of one; the last one is kept.

    An adapter is cut as its linear is: of a linear cut by outputs B is cut and A is whole, so B A is the rank's rows of
    the product; of one cut by inputs A is cut, so it is the rank's columns. No rank needs another's.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        specs: Mapping[str, ParamSpec],
        adapters: Iterable[str],
        place: Place,
        scale: float,
    ) -> None:
        """parameters: by global Megatron name, adapters too. specs: of the model. adapters: names of all A and B."""
        self.parameters, self.specs, self.place, self.scale = parameters, specs, place, scale
        self.pairs = merged_rows(specs, adapters)
        self._last: tuple[str, Tensor] | None = None

    def __call__(self, name: str) -> Tensor:
        """The parameter itself, or if it has adapters the merged one."""
        if name not in self.pairs:
            return self.parameters[name].detach()
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = (name, self.write(name))
        return self._last[1]

    def write(self, name: str, out: Tensor | None = None) -> Tensor:
        """Merge one that has adapters into `out`, or into a new tensor."""
        parts = shard_of(self.specs[name].tensor, self.place).parts
        products = [
            (_rows(parts, numbers), self.parameters[name_a], self.parameters[name_b])
            for numbers, (name_a, name_b) in self.pairs[name].items()
        ]
        return merged(self.parameters[name].detach(), products, self.scale, out)
