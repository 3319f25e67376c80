"""The parameters of a role's model, and those that it trains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_rl.config.roles import RoleSpec
from megatron_rl.config.rollout_keys import MTPUse
from megatron_rl.model.families import HEAD, Model, mtp_specs
from megatron_rl.model.families.adapter_params import adapter_specs, merged_rows
from megatron_rl.planning.weights import ModelParams


@dataclass(frozen=True)
class RoleParams:
    """The parameters of a role's model, and those that it trains, if it does.

    base: parameters of the model, without those trained next to adapters. trained: adapters, and a value head; None:
    the base.
    still: parameters of the base that are frozen where the others are trained. with_tower: the base with a vision tower
    that is trained, too; None: it is frozen.
    """

    base: ModelParams
    trained: ModelParams | None = None
    still: frozenset[str] = frozenset()
    with_tower: ModelParams | None = None

    @classmethod
    def of(cls, role: RoleSpec, model: Model) -> RoleParams:
        """Read a role's. Raises ConfigError for adapters of linears that the model does not have."""
        specs = model.value_specs if role.has_value_head else model.specs
        adapters = adapter_specs(model.specs, role.lora)
        if not adapters:
            still = mtp_specs(model) if role.mtp == MTPUse.FROZEN and role.is_trained else ()
            tower = model.tower_specs if role.trains_tower else {}
            whole = ModelParams(specs | tower) if tower else None
            return cls(ModelParams(specs), still=frozenset(still), with_tower=whole)
        heads = {HEAD} if role.has_value_head else set()
        base = {name: spec for name, spec in specs.items() if name not in heads}
        return cls(ModelParams(base), ModelParams(adapters | {name: specs[name] for name in heads}))

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Parameters of the base into which adapters can be merged."""
        return frozenset(merged_rows(self.base.specs, self.trained.specs) if self.trained is not None else ())
