"""Keys of adapters (LoRA: Hu et al., "Low-Rank Adaptation of Large Language Models", arXiv:2106.09685). No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le

from megatron_rl.config.constraints import OURS, AtMost, FilePath, NotNegative, OneOf

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's names of the linears that adapters are for, and verl's default targets."""
RESIDENT, HOST, REFETCH = "resident", "host", "refetch"
"""Where foreign stages of the base are between generations: they stay, they are on the host, or they are brought each
time.
"""


@dataclass
class LoraConfig:
    """The group `lora` of a role's model: W + (alpha / rank) B A, of which A and B are trained and W is frozen."""

    rank: Annotated[int, Ge(0), AtMost(512)] = 0
    """Rows of A and columns of B; 0: no adapters, the whole model is trained."""
    alpha: NotNegative = 32.0
    """The adapter's product is multiplied by alpha / rank."""
    dropout: Annotated[float, Ge(0), Le(0)] = 0.0
    """0 alone: with dropout an update would compute other log-probs than those that it compares them with."""
    type: Annotated[str, OneOf(("canonical_lora",))] = "canonical_lora"
    """canonical_lora: one A and one B for each of q, k, v, o, gate, up and down, as PEFT has them."""
    target_modules: list[str] = field(default_factory=lambda: list(LINEARS))
    """linear_qkv | linear_proj | linear_fc1 | linear_fc2, q_proj and so on, all-linear, or full names with wildcards:
    *.layers.0.*.linear_qkv."""
    exclude_modules: list[str] = field(default_factory=list)
    """Names as in target_modules that get no adapter."""
    adapter_path: FilePath | None = None
    """PEFT folder to start from: adapter_config.json and safetensors."""
    merge: bool = False
    """false: generation reads adapters where they are trained, and adds their products | true: each rank merges them
    into a copy of its weights before every generation, and whole weights cross."""
    lora_A_init_method: Annotated[str, OneOf(("xavier", "kaiming", "normal"))] = "xavier"  # noqa: N815  verl's name
    """How A is drawn; B starts at 0. normal: with a standard deviation of 1 / rank, as PEFT's gaussian."""
    base: Annotated[str, OneOf((RESIDENT, HOST, REFETCH)), OURS] = RESIDENT
    """The frozen weights of other stages, which generation needs: resident: brought once, and kept on the device |
    host: brought once, kept in host memory, and copied to the device for each generation | refetch: brought for each
    generation."""

    @property
    def is_merged(self) -> bool:
        """Whether generation reads weights with the adapters merged in."""
        return self.rank > 0 and self.merge

    @property
    def crosses_alone(self) -> bool:
        """Whether generation reads the adapters beside a base, so that they alone cross in every step."""
        return self.rank > 0 and not self.merge

    @property
    def keeps_base(self) -> bool:
        """Whether the base crosses once, and is kept on the device or on its host."""
        return self.crosses_alone and self.base != REFETCH

    @property
    def base_stays(self) -> bool:
        """Whether the base stays where generation reads it."""
        return self.crosses_alone and self.base == RESIDENT

    @property
    def base_on_host(self) -> bool:
        """Whether the base is copied from host memory for each generation."""
        return self.crosses_alone and self.base == HOST

    @property
    def scale(self) -> float:
        """alpha / rank: the factor of the product."""
        return self.alpha / max(1, self.rank)
