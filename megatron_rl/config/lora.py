"""Keys of adapters (LoRA: Hu et al., "Low-Rank Adaptation of Large Language Models", arXiv:2106.09685). No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le

from megatron_rl.config.constraints import OURS, AtMost, FilePath, NotNegative, OneOf

INPUTS = "linear_qkv"
"""The linear of queries, keys and values. In attention with other linears it stands for all that make them."""
LINEARS = (INPUTS, "linear_proj", "linear_fc1", "linear_fc2")
"""verl's default targets: Megatron's names of the linears of usual attention and MLPs."""
RESIDENT, HOST, REFETCH = "resident", "host", "refetch"
"""Where received base weights of other pipeline stages are between rollouts: on the device, in host memory, or nowhere
(received again each time).
"""


@dataclass
class LoraConfig:
    """The group `lora` of a role's model: W + (alpha / rank) B A, of which A and B are trained and W is frozen."""

    rank: Annotated[int, Ge(0), AtMost(512)] = 0
    """Rank of the LoRA adapters; 0: no adapters, the whole model is trained."""
    alpha: NotNegative = 32.0
    """LoRA alpha: the adapter's output is multiplied by alpha / rank."""
    dropout: Annotated[float, Ge(0), Le(0)] = 0.0
    """LoRA dropout; only 0 is supported, as dropout would change the log-probs that an update compares."""
    type: Annotated[str, OneOf(("canonical_lora",))] = "canonical_lora"
    """canonical_lora: one A and one B for each of q, k, v, o, gate, up and down, as in PEFT."""
    target_modules: list[str] = field(default_factory=lambda: list(LINEARS))
    """Linears with an adapter: linear_qkv | linear_proj | linear_fc1 | linear_fc2, q_proj and so on, all-linear, or
    full names with wildcards such as *.layers.0.*.linear_qkv."""
    exclude_modules: list[str] = field(default_factory=list)
    """Linears without an adapter, named as in target_modules."""
    adapter_path: FilePath | None = None
    """PEFT folder with adapters to start from: adapter_config.json and safetensors; null: new adapters."""
    merge: bool = False
    """false: generation applies the adapters next to the base weights, and only adapters are transferred | true: each
    rank merges them into a copy of its weights before every rollout, and whole weights are transferred. Left out, it is
    true where generation has no other way."""
    lora_A_init_method: Annotated[str, OneOf(("xavier", "kaiming", "normal"))] = "xavier"  # noqa: N815  verl's name
    """Initialisation of A; B starts at 0. normal: standard deviation 1 / rank, as PEFT's gaussian."""
    base: Annotated[str, OneOf((RESIDENT, HOST, REFETCH)), OURS] = RESIDENT
    """Frozen base weights of other pipeline stages, which generation needs. resident: received once and kept on the
    device | host: received once, kept in host memory, copied to the device for each rollout | refetch: received for
    each rollout."""

    @property
    def is_merged(self) -> bool:
        """Whether generation reads weights with the adapters merged in."""
        return self.rank > 0 and self.merge

    @property
    def crosses_alone(self) -> bool:
        """Whether generation applies adapters next to the base, so that only they are transferred in every step."""
        return self.rank > 0 and not self.merge

    @property
    def keeps_base(self) -> bool:
        """Whether the base is transferred once, and kept on the device or in host memory."""
        return self.crosses_alone and self.base != REFETCH

    @property
    def base_stays(self) -> bool:
        """Whether the base stays on the device."""
        return self.crosses_alone and self.base == RESIDENT

    @property
    def base_on_host(self) -> bool:
        """Whether the base is copied from host memory for each generation."""
        return self.crosses_alone and self.base == HOST

    @property
    def scale(self) -> float:
        """alpha / rank: the factor of the adapter's output."""
        return self.alpha / max(1, self.rank)
