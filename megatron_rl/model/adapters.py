"""Adapters on Megatron's linears: out + scale B (A x), in every layout.

Legend: T tokens of this rank, I inputs and O outputs of a linear on this rank, r rows of A.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_rl.config.lora import LoraConfig
from megatron_rl.model.families import ParamSpec
from megatron_rl.model.families.adapter_params import LORA_B
from megatron_rl.parallel.sharding import Place, box_index, shard_of


class Adapter(torch.nn.Module):
    """A [r, I] and B [O, r] of one matrix."""

    def __init__(self, lora_a: Tensor, lora_b: Tensor) -> None:
        super().__init__()
        self.lora_A = torch.nn.Parameter(lora_a)
        self.lora_B = torch.nn.Parameter(lora_b)


class AddedProducts(torch.autograd.Function):
    """out [..., O] + scale * B x of each projection, in a new tensor and without one of the products.

    down [..., n r]: x of all projections, side by side. starts: the first column of each in out. ups: their B.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, down: Tensor, starts: Sequence[int], scale: float, *ups: Tensor) -> Tensor:
        ctx.starts, ctx.scale = starts, scale
        ctx.save_for_backward(down, *ups)
        result = out.clone(memory_format=torch.contiguous_format)
        rows = result.view(-1, result.shape[-1])
        for start, part, up in zip(starts, parts_of(down, ups), ups, strict=True):
            rows[:, start : start + len(up)].addmm_(part, up.t(), alpha=scale)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        down, *ups = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grads = [rows[:, start : start + len(up)] for start, up in zip(ctx.starts, ups, strict=True)]
        of_down = torch.cat([each @ up for each, up in zip(grads, ups, strict=True)], -1).mul_(ctx.scale)
        of_ups = [(each.t() @ part).mul_(ctx.scale) for each, part in zip(grads, parts_of(down, ups), strict=True)]
        return grad, of_down.view(down.shape), None, None, *of_ups


def parts_of(down: Tensor, ups: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The columns of each B's input in `down`, as matrices [T, r]."""
    parts: tuple[Tensor, ...] = down.reshape(-1, down.shape[-1]).split([up.shape[1] for up in ups], -1)
    return parts


class LinearAdapters(torch.nn.ModuleDict):
    """The adapters of one linear, by the name of the projection; it adds their products to the linear's output.

    A linear cut by outputs may stack several projections, whose first rows are `starts`; its A is whole on every TP
    rank, and what comes back to it is summed over them. Of one cut by inputs A's product is summed, and B is whole.
    """

    def __init__(self, linear: Any, adapters: Mapping[str, Adapter], starts: Sequence[int], scale: float) -> None:
        super().__init__(dict(adapters))
        self.starts, self.scale, self.is_on = tuple(starts), scale, True
        self.cuts_inputs = hasattr(linear, "input_is_parallel")
        self.tp_group, self.sequence_parallel = linear.tp_group, bool(linear.sequence_parallel)
        linear.register_forward_hook(self._add)

    def _add(self, linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        if not self.is_on:
            return None
        x, out = inputs[0], output[0]
        pairs = [cast(Adapter, pair) for pair in self.values()]
        down = self._summed(torch.nn.functional.linear(x, torch.cat([pair.lora_A for pair in pairs])))
        ups = [pair.lora_B for pair in pairs]
        return AddedProducts.apply(out, down, self.starts, self.scale, *ups), output[1]

    def _summed(self, down: Tensor) -> Tensor:
        """A's products [T, r] where B can take them: see the class. The backward pass has the transposed sum."""
        if self.cuts_inputs:
            if self.sequence_parallel:
                scattered: Tensor = reduce_scatter_to_sequence_parallel_region(down, group=self.tp_group)
                return scattered
            summed: Tensor = reduce_from_tensor_model_parallel_region(down, group=self.tp_group)
            return summed
        if self.sequence_parallel:
            gathered: Tensor = gather_from_sequence_parallel_region(down, group=self.tp_group)
            return gathered
        copied: Tensor = copy_to_tensor_model_parallel_region(down, group=self.tp_group)
        return copied


@dataclass(frozen=True)
class AdapterSet:
    """The adapters of a rank's model. base: global name -> spec of the model's parameters; specs: of the adapters'.

    seed: of the values that are drawn.
    """

    lora: LoraConfig
    base: Mapping[str, ParamSpec]
    specs: Mapping[str, ParamSpec]
    place: Place
    seed: int

    def attach(self, chunks: Sequence[GPTModel]) -> None:
        """Give the chunks' linears their adapters, and freeze all other parameters.

        Values do not depend on the layout: A is drawn whole from the seed and its name, B is 0.
        """
        by_linear: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in self.specs:
            linear, _, rest = name.partition(".adapters.")
            by_linear[linear][rest.partition(".")[0]].append(name)
        for chunk in chunks:
            chunk.requires_grad_(False)
            for layer in chunk.decoder.layers:
                for own, module in list(layer.named_modules()):
                    linear = f"decoder.layers.{layer.layer_number - 1}.{own}"
                    if linear in by_linear:
                        self._attach(module, linear, by_linear[linear])
            _carry_gradients(chunk)

    def _attach(self, linear: Any, name: str, projections: Mapping[str, list[str]]) -> None:
        weight, adapters, starts = linear.weight, {}, []
        for projection, (name_a, name_b) in projections.items():
            spec_a, spec_b = self.specs[name_a], self.specs[name_b]
            drawn = shard(drawn_a(spec_a, self.lora, self.seed), spec_a, self.place)
            lora_b = torch.zeros(shard_of(spec_b.tensor, self.place).shape)
            adapters[projection] = Adapter(*(part.to(weight.device, weight.dtype) for part in (drawn, lora_b)))
            starts.append(self._first_row(name, spec_b))
        linear.adapters = LinearAdapters(linear, adapters, starts, self.lora.scale)
        if linear.adapters.sequence_parallel:
            # Each rank sees its own tokens here; Megatron sums what is marked so.
            for adapter in adapters.values():
                part: Any = adapter.lora_B if linear.adapters.cuts_inputs else adapter.lora_A
                part.sequence_parallel = True

    def _first_row(self, linear: str, spec: ParamSpec) -> int:
        """The first row of a projection in the output of its linear on this rank."""
        base = self.base[f"{linear}.weight"]
        if base.tensor.tp_dim != 0:
            return 0
        names = [name.removesuffix(".weight") for name in base.hf_names]
        number = names.index(spec.tensor.name.removesuffix(f".{LORA_B}"))
        return shard_of(base.tensor, self.place).parts[number].at[0]


def _carry_gradients(chunk: Any) -> None:
    """Let the first layer's input carry gradients: recomputed layers have none where no input of theirs does."""
    if chunk.pre_process and chunk.config.recompute_granularity is not None:
        chunk.embedding.register_forward_hook(lambda module, inputs, out: out.requires_grad_())


def drawn_a(spec: ParamSpec, lora: LoraConfig, seed: int) -> Tensor:
    """The whole A [held rank, in] of one adapter, float32, with zeros below the rank that was asked for."""
    (segment,) = spec.tensor.segments
    columns = segment.shape[1]
    digest = hashlib.sha256(f"{seed} {spec.tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    own = torch.empty(lora.rank, columns)
    match lora.lora_A_init_method:
        case "xavier":
            torch.nn.init.xavier_normal_(own, generator=generator)
        case "kaiming":
            torch.nn.init.kaiming_uniform_(own, a=math.sqrt(5), generator=generator)
        case _:
            own.normal_(std=1 / lora.rank, generator=generator)
    return torch.nn.functional.pad(own, (0, 0, 0, segment.shape[0] - lora.rank))


def shard(whole: Tensor, spec: ParamSpec, place: Place) -> Tensor:
    """This rank's part of a tensor of one segment."""
    part = shard_of(spec.tensor, place)
    out = whole.new_zeros(part.shape)
    for each in part.parts:
        out[each.index] = whole[box_index(each.box)]
    return out


@contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let the chunks compute as the base does, without their adapters."""
    held = [module for chunk in chunks for module in chunk.modules() if isinstance(module, LinearAdapters)]
    for module in held:
        module.is_on = False
    try:
        yield
    finally:
        for module in held:
            module.is_on = True
