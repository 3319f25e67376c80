"""What a part of a layer states: parameters, bytes kept for backward, FLOPs, cache, and what implements it.

A new kind of attention or MLP is one subclass of `LayerPart` and a function that puts its module into a Megatron layer.
`plan`, `map`, import, export and the builder ask the part and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_rl.model.parts.param_spec import Constant, ParamSpec

FP32 = 4


@dataclass(frozen=True)
class LayerBlock:
    """A micro-batch on one rank.

    tokens: packed or padded. slots: tokens in attention, which pads where no kernel takes segments of any length.
    response_tokens: scored tokens, whose logits are needed. longest: tokens of the longest segment. num_sharing: ranks
    that share its sequences (context parallelism).
    """

    tokens: int
    slots: int
    response_tokens: int
    is_packed: bool
    longest: int = 0
    num_sharing: int = 1


@dataclass(frozen=True)
class Cut:
    """How ranks share a layer. element: bytes of a parameter and of an activation. ep_size: ranks that share experts.

    sequence_parallel: activations between the TP regions are split over the TP ranks.
    """

    tp_size: int = 1
    expert_tp_size: int = 1
    sequence_parallel: bool = False
    element: int = FP32
    ep_size: int = 1

    @property
    def sequence_share(self) -> float:
        """Share of a micro-batch's tokens that a rank holds between the TP regions."""
        return 1 / self.tp_size if self.sequence_parallel and self.tp_size > 1 else 1.0

    def copies(self, block: LayerBlock) -> bool:
        """Whether attention works on padded copies of the rows."""
        return block.is_packed and self.element == FP32


class LayerPart(ABC):
    """One part of a layer. Bytes and elements are those of one rank and one micro-batch unless said otherwise.

    `model.layer_specs.put_part` has the module that implements it. recomputed_as: its name in Megatron's
    `recompute_modules`.
    """

    recomputed_as: ClassVar[str]

    @abstractmethod
    def params(self, mega: str, hf: str) -> dict[str, ParamSpec]:
        """Megatron name -> spec. mega, hf: prefixes of the layer's names there and in a Hugging Face folder."""

    def constants(self, mega: str, hf: str) -> dict[str, Constant]:
        """Megatron name -> tensor that training reads and no update changes."""
        return {}

    @property
    @abstractmethod
    def token_elements(self) -> int:
        """Elements of the matrices that one token passes, over all ranks."""

    @abstractmethod
    def kept_bytes(self, block: LayerBlock, cut: Cut) -> float:
        """Bytes kept between forward and backward, in addition to the layer's residuals."""

    def again_bytes(self, block: LayerBlock, cut: Cut, module: str) -> float:
        """How many of `kept_bytes` are not kept where `module` is recomputed."""
        return self.kept_bytes(block, cut) if module == self.recomputed_as else 0.0

    @abstractmethod
    def widest_elements(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        """Elements that the widest step holds for a moment."""

    def products_bytes(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        """Bytes of products of queries and keys where no fused kernel runs; backward adds their gradients."""
        return 0.0

    @abstractmethod
    def columns(self, cut: Cut) -> float:
        """Columns of the matrices that a token passes on a rank: the part's share of a layer's matrix products."""

    @abstractmethod
    def engine_elements(self, tp_size: int) -> int:
        """Elements per token that vLLM holds while the part runs at rollout TP `tp_size`; an estimate."""


class AttentionPart(LayerPart):
    """A part that mixes the tokens of a sequence, with what generation caches of it.

    block_sizes: device -> tokens of one block of vLLM's cache, before states enlarge it. engine_arguments and
    cpu_engine_arguments: arguments of `vllm.LLM` that the part needs, anywhere and on CPU. unreplayable: device -> why
    vLLM hands out no experts of the tokens of such a model. undrafted: the name of this kind of attention, if vLLM
    cannot take back what it has read of a wrong draft; "" if it can. whole_prompts: devices on which vLLM reads every
    prompt in one step. fused_package: the module that `attention_kernels=fused` computes it with, if torch has none.
    """

    recomputed_as = "core_attn"
    block_sizes: ClassVar[Mapping[str, int]]
    engine_arguments: ClassVar[Mapping[str, object]] = {}
    cpu_engine_arguments: ClassVar[Mapping[str, object]] = {}
    unreplayable: ClassVar[Mapping[str, str]] = {}
    undrafted: ClassVar[str] = ""
    whole_prompts: ClassVar[frozenset[str]] = frozenset()
    fused_package: ClassVar[str] = ""

    has_kernel: ClassVar[bool] = True
    soft_cap: float | None = None

    @property
    def in_tiles(self) -> bool:
        """Whether flash attention does not have it, so that its products are written out in tiles."""
        return not self.has_kernel or self.soft_cap is not None

    @property
    @abstractmethod
    def query_columns(self) -> int:
        """Columns of all heads' queries. One token's products with L keys take 2 * L * query_columns FLOPs forward."""

    @property
    def num_seen(self) -> int | None:
        """Positions that a token sees, its own included; None: all before it."""
        return None

    @abstractmethod
    def cached_elements(self, tp_size: int) -> int:
        """Elements of one token in the rollout engine's cache, on one of `tp_size` ranks."""

    def state_bytes(self, tp_size: int, element: int) -> int:
        """Bytes that the rollout engine caches of one request, however long, on one of `tp_size` ranks. element: of a
        parameter.
        """
        return 0

    @property
    def tp_divides(self) -> dict[str, int]:
        """Name in config.json -> further numbers that TP must divide."""
        return {}

    @property
    def cp_divides(self) -> dict[str, int]:
        """Name in config.json -> numbers of heads that TP x CP must divide, whatever `cp_comm_type` is."""
        return {}

    def exchanged_bytes(self, block: LayerBlock, cut: Cut, num_ranks: int, *, backward: bool) -> float:
        """Bytes of `num_ranks` context-parallel ranks' keys and values while a layer attends to them."""
        return 0.0

    def copied_dtypes(self, device: str) -> tuple[str, ...]:
        """Types of weights of which vLLM on a device would keep copies, which updates do not reach."""
        return ()

    def engine_problem(self, device: str) -> tuple[str, str] | None:
        """Why vLLM has no kernel on a device: (the sizes, the rule that they break); None if it has one."""
        return None

    def megatron_settings(self) -> dict[str, object]:
        """Settings of Megatron's TransformerConfig that the part decides."""
        return {}
