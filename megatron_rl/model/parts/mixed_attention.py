"""The attention of a model whose layers have several kinds of it, as rules and engines ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_rl.model.parts.part import AttentionPart


@dataclass(frozen=True)
class MixedAttention:
    """Kinds of attention together: what one of them needs the model needs. Names are those of `AttentionPart`.

    kinds: the different parts, in the order of the layers; of a setting that several have, the first's counts.
    """

    kinds: tuple[AttentionPart, ...]

    @property
    def block_sizes(self) -> dict[str, int]:
        """The largest of each device that all kinds know."""
        devices = set.intersection(*(set(part.block_sizes) for part in self.kinds))
        return {device: max(part.block_sizes[device] for part in self.kinds) for device in sorted(devices)}

    @property
    def engine_arguments(self) -> dict[str, object]:
        return _joined(part.engine_arguments for part in self.kinds)

    @property
    def cpu_engine_arguments(self) -> dict[str, object]:
        return _joined(part.cpu_engine_arguments for part in self.kinds)

    @property
    def whole_prompts(self) -> frozenset[str]:
        return frozenset().union(*(part.whole_prompts for part in self.kinds))

    @property
    def unreplayable(self) -> dict[str, str]:
        return {device: why for part in self.kinds for device, why in part.unreplayable.items()}

    @property
    def undrafted(self) -> str:
        return _listed(part.undrafted for part in self.kinds)

    @property
    def tp_divides(self) -> dict[str, int]:
        return {name: number for part in self.kinds for name, number in part.tp_divides.items()}

    @property
    def cp_divides(self) -> dict[str, int]:
        return {name: number for part in self.kinds for name, number in part.cp_divides.items()}

    def copied_dtypes(self, device: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(dtype for part in self.kinds for dtype in part.copied_dtypes(device)))

    def megatron_settings(self) -> dict[str, object]:
        return _joined(part.megatron_settings() for part in self.kinds)


def _joined(settings: Iterable[Mapping[str, object]]) -> dict[str, object]:
    joined: dict[str, object] = {}
    for own in settings:
        joined = {**own, **joined}
    return joined


def _listed(names: Iterable[str]) -> str:
    return " and ".join(name for name in dict.fromkeys(names) if name)


Attention = AttentionPart | MixedAttention
"""The attention of all layers of a model."""
