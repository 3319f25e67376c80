"""Adapters on linears and on stacked experts: out + scale B (A x), in every layout.

Legend: T tokens of this rank, I inputs and O outputs of a linear on this rank, r rows of A, E experts of this rank.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_rl.config.lora import LoraConfig
from megatron_rl.model.decoder import Chunk, embedding_of, layers_of
from megatron_rl.model.families import ParamSpec
from megatron_rl.model.families.adapter_params import STACKED, MergedRows, merged_rows
from megatron_rl.model.whole_linear import WholeLinear
from megatron_rl.parallel.sharding import Place, box_index, shard_of


class Adapter(torch.nn.Module):
    """A [r, I] and B [O, r] of one matrix, or A [E, r, I] and B [E, O, r] of a stack."""

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


class Pair(NamedTuple):
    """A and B as they were, which nothing trains. Fields as of `Adapter`."""

    lora_A: Tensor  # noqa: N815  PEFT's name
    lora_B: Tensor  # noqa: N815


class AdapterDict(torch.nn.ModuleDict):
    """Adapters by the name of their projection.

    initial: the adapters before training, if `keep_initial` copied them. reads_initial: whether products are those of
    `initial`, or none where nothing was copied.
    """

    def __init__(self, adapters: Mapping[str, Adapter], scale: float) -> None:
        super().__init__(dict(adapters))
        self.scale, self.reads_initial = scale, False
        self.initial: dict[str, Pair] = {}

    def pairs(self, projections: Iterable[str]) -> list[Adapter | Pair]:
        """Return A and B of each projection that products are made of; []: of none."""
        if self.reads_initial:
            return [self.initial[name] for name in projections if self.initial]
        return [cast(Adapter, self[name]) for name in projections]


class LinearAdapters(AdapterDict):
    """The adapters of one linear; it adds their products to the linear's output.

    A linear may stack several projections, whose first rows are `starts`. Of one cut by outputs A is whole on every TP
    rank, and what comes back to it is summed over them. Of one cut by inputs A's product is summed, and B is whole. One
    that is not cut has both whole, and nothing is summed but gradients of ranks that see different tokens.
    """

    def __init__(self, linear: Any, adapters: Mapping[str, Adapter], starts: Sequence[int], scale: float) -> None:
        super().__init__(adapters, scale)
        self.starts = tuple(starts)
        mode = getattr(linear, "parallel_mode", "")  # transformer-engine's; None: not cut, and without a group
        self.is_whole = isinstance(linear, WholeLinear) or mode is None
        self.cuts_inputs = hasattr(linear, "input_is_parallel") or mode == "row"
        sequence_parallel = linear.config.sequence_parallel if mode is None else linear.sequence_parallel
        self.tp_group, self.sequence_parallel = linear.tp_group, bool(sequence_parallel)
        linear.register_forward_hook(self._add)

    def _add(self, linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        if not (pairs := self.pairs(self)):
            return None
        x, out = inputs[0], output[0]
        down = self._summed(F.linear(x, torch.cat([pair.lora_A for pair in pairs])))
        ups = [pair.lora_B for pair in pairs]
        result = AddedProducts.apply(out, down, self.starts, self.scale, *ups)
        if exact := getattr(linear, "added_in_tiles", None):
            result = exact(result, out, x, self.starts, self.scale, [(pair.lora_A, pair.lora_B) for pair in pairs])
        return result, output[1]

    def shared(self, adapter: Adapter) -> list[torch.nn.Parameter]:
        """Return the matrices that TP ranks hold whole while they see different tokens: gradients are summed."""
        if not self.sequence_parallel:
            return []
        if self.is_whole:
            return [adapter.lora_A, adapter.lora_B]
        return [adapter.lora_B if self.cuts_inputs else adapter.lora_A]

    def _summed(self, down: Tensor) -> Tensor:
        """A's products [T, r] where B can take them: see the class. The backward pass has the transposed sum."""
        if self.is_whole:
            return down
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


class ExpertAdapters(AdapterDict):
    """The adapters of stacked experts: `w13` has those of gate and up, `w2` those of down.

    starts: of either stack, projection -> its first row there. Experts return partial sums, which are added up with
    their outputs. What all of `group`, the ranks that cut experts, hold whole has the sum of their gradients: A of gate
    and up, B of down.
    """

    def __init__(
        self, adapters: Mapping[str, Adapter], starts: Mapping[str, Mapping[str, int]], scale: float, group: Any
    ) -> None:
        super().__init__(adapters, scale)
        self.starts, self.group = starts, group
        for parameter in self.parameters():
            vars(parameter)["allreduce"] = False  # as the experts' own

    def linears(self, name: str, plain: Sequence[Callable[[Tensor], Tensor]]) -> Sequence[Callable[[Tensor], Tensor]]:
        """The product with each expert's matrix of the stack `name`, which has adapters or none: [T, I] -> [T, O].

        plain: the products without adapters.
        """
        starts = self.starts.get(name, {})
        if not (pairs := self.pairs(starts)):
            return plain
        downs, ups = [pair.lora_A for pair in pairs], [pair.lora_B for pair in pairs]
        if name == "w13":
            downs = [copy_to_tensor_model_parallel_region(down, group=self.group) for down in downs]
        else:
            ups = [copy_to_tensor_model_parallel_region(up, group=self.group) for up in ups]
        # Unbound at once: indexing a stack makes a gradient as large as the stack, for each expert.
        of_experts = zip(
            plain,
            zip(*(down.unbind() for down in downs), strict=True),
            zip(*(up.unbind() for up in ups), strict=True),
            strict=True,
        )
        return [partial(self._product, tuple(starts.values()), *matrices) for matrices in of_experts]

    def _product(
        self,
        starts: Sequence[int],
        plain: Callable[[Tensor], Tensor],
        downs: Sequence[Tensor],
        ups: Sequence[Tensor],
        x: Tensor,
    ) -> Tensor:
        products = torch.cat([F.linear(x, down) for down in downs], -1)
        out: Tensor = AddedProducts.apply(plain(x), products, starts, self.scale, *ups)
        return out


def plain_linears(stack: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """The product with each expert's matrix [O, I] of a stack."""
    # Unbound at once: indexing a stack makes a gradient as large as the stack, for each expert.
    return [partial(F.linear, weight=matrix) for matrix in stack.unbind()]


@dataclass(frozen=True)
class AdapterSet:
    """The adapters of a rank's model. base: global name -> spec of the model's parameters; specs: of the adapters'.

    seed: of the initial values.
    """

    lora: LoraConfig
    base: Mapping[str, ParamSpec]
    specs: Mapping[str, ParamSpec]
    place: Place
    seed: int

    def attach(self, chunks: Sequence[Chunk]) -> None:
        """Give the chunks' linears their adapters, and freeze all other parameters.

        Values do not depend on the layout: A is initialised whole from the seed and its name, B is 0.
        """
        by_module: dict[str, list[str]] = defaultdict(list)
        pairs = merged_rows(self.base, self.specs)
        for weight in pairs:
            by_module[weight.rpartition(".")[0]].append(weight)
        for chunk in chunks:
            chunk.requires_grad_(False)
            for number, layer in layers_of(chunk):
                for own, module in list(layer.named_modules()):
                    name = f"decoder.layers.{number}.{own}"
                    if name in by_module:
                        self._attach(module, {weight: pairs[weight] for weight in by_module[name]})
            _carry_gradients(chunk)

    def _attach(self, module: Any, weights: MergedRows) -> None:
        adapters: dict[str, Adapter] = {}
        starts: dict[str, dict[str, int]] = defaultdict(dict)
        for weight, projections in weights.items():
            own = weight.rpartition(".")[2]
            parameter, parts = getattr(module, own), shard_of(self.base[weight].tensor, self.place).parts
            for numbers, (name_a, name_b) in projections.items():
                projection = name_a.split(".")[-2]
                drawn = drawn_a(self.specs[name_a], self.lora, self.seed, self.place)
                lora_b = torch.zeros(shard_of(self.specs[name_b].tensor, self.place).shape)
                pair = (part.to(parameter.device, parameter.dtype) for part in (drawn, lora_b))
                adapters[projection] = Adapter(*pair)
                starts[own][projection] = parts[numbers[0]].at[-2]
        if starts.keys() <= STACKED.keys():
            module.adapters = ExpertAdapters(adapters, starts, self.lora.scale, module.tp_group)
            return
        module.adapters = LinearAdapters(module, adapters, tuple(starts["weight"].values()), self.lora.scale)
        for adapter in adapters.values():
            for part in module.adapters.shared(adapter):
                vars(part)["sequence_parallel"] = True  # Megatron sums what is marked so


def _carry_gradients(chunk: Chunk) -> None:
    """Let the first layer's input carry gradients: recomputed layers have none where no input of theirs does."""
    embedding = embedding_of(chunk)
    if embedding is not None and chunk.config.recompute_granularity is not None:
        embedding.register_forward_hook(lambda module, inputs, out: out.requires_grad_())


def drawn_a(spec: ParamSpec, lora: LoraConfig, seed: int, place: Place) -> Tensor:
    """This rank's part of A [held rank, in] or [E, held rank, in], float32: initialised whole from the seed and its
    name, one for each expert, with zeros below the rank that was asked for.
    """
    (part,) = shard_of(spec.tensor, place).parts
    rows, columns = spec.tensor.segments[0].shape[-2:]
    index, names = box_index(part.box), [spec.tensor.name]
    if spec.tensor.is_expert:
        names = [spec.tensor.name.format(expert=expert) for expert in range(*part.box[0])]
    drawn = []
    for name in names:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        own = _initial(torch.empty(lora.rank, columns), lora, generator)
        drawn.append(F.pad(own, (0, 0, 0, rows - lora.rank))[index[-2:]])
    return torch.stack(drawn) if spec.tensor.is_expert else drawn[0]


@torch.no_grad()
def begin_again(
    parameters: Mapping[str, Tensor], specs: Mapping[str, ParamSpec], lora: LoraConfig, seed: int, place: Place
) -> None:
    """Give this rank's adapters the initial values of another seed. parameters, specs: by global name."""
    for name, spec in specs.items():
        if name in parameters and name.split(".")[-1] == "lora_A":
            parameters[name].copy_(drawn_a(spec, lora, seed, place))
        elif name in parameters:
            parameters[name].zero_()


def _initial(own: Tensor, lora: LoraConfig, generator: torch.Generator) -> Tensor:
    match lora.lora_A_init_method:
        case "xavier":
            return torch.nn.init.xavier_normal_(own, generator=generator)
        case "kaiming":
            return torch.nn.init.kaiming_uniform_(own, a=math.sqrt(5), generator=generator)
        case _:
            return own.normal_(std=1 / lora.rank, generator=generator)


def keep_initial(chunks: Sequence[torch.nn.Module]) -> list[tuple[torch.nn.Parameter, Tensor]]:
    """Copy the chunks' adapters as they are now, for `initial_adapters`; return each A and B with its copy."""
    kept: list[tuple[torch.nn.Parameter, Tensor]] = []
    for module in adapters_of(chunks):
        for name in module:
            adapter = cast(Adapter, module[name])
            own = (adapter.lora_A, adapter.lora_B)
            module.initial[name] = Pair(*(each.detach().clone() for each in own))
            kept += zip(own, module.initial[name], strict=True)
    return kept


@contextmanager
def initial_adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let the chunks compute as before training: with the adapters of `keep_initial`, without any where none were kept.

    New adapters add nothing, as B is 0, so those need not be kept.
    """
    held = adapters_of(chunks)
    for module in held:
        module.reads_initial = True
    try:
        yield
    finally:
        for module in held:
            module.reads_initial = False


def adapters_of(chunks: Sequence[torch.nn.Module]) -> list[AdapterDict]:
    """Return the adapters of all linears and stacks of the chunks."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, AdapterDict)]
