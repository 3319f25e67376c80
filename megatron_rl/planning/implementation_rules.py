"""Rules of who computes a role's linear layers, and of products in FP8."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.config.megatron import FP8_FORMATS, LOCAL, TE_LINEAR, TRANSFORMER_ENGINE
from megatron_rl.config.roles import RoleSpec
from megatron_rl.errors import Violation
from megatron_rl.planning.model_folder import ModelSizes

GROUP = "megatron.override_transformer_config"
CPU = "cpu"


def implementation_problems(role: RoleSpec, model: ModelSizes | None, device: str) -> Iterable[Violation]:
    """Return what is wrong with one role's `transformer_impl`.

    device: trainer.device. model: of the role; None if its folder cannot be read, and then only `device` is looked at.
    """
    options = role.megatron.override_transformer_config
    chosen, key = options.transformer_impl, f"{role.key}.{GROUP}.transformer_impl"
    if chosen not in (TE_LINEAR, TRANSFORMER_ENGINE):
        return
    if device == CPU:
        rule = f"needs trainer.device=cuda: transformer-engine computes on GPUs alone, not on {device}"
        yield Violation({key: chosen}, rule, {key: LOCAL})
    elif model is not None:
        yield from _unfit(key, chosen, model)


def _unfit(key: str, chosen: str, model: ModelSizes) -> Iterable[Violation]:
    """Models whose layers are not Megatron's."""
    if own := model.attention.te_lacks:
        rule = f"is not supported for {own}, which {model.path} has: its layers are this project's own"
        yield Violation({key: chosen}, rule, {key: LOCAL})
    elif chosen == TRANSFORMER_ENGINE and model.parts.family.style.zero_centred_norms:
        rule = f"has no norms whose weight w stands for 1 + w, which {model.path} has"
        yield Violation({key: chosen}, rule, {key: TE_LINEAR})


def eight_bit_problems(role: RoleSpec, model: ModelSizes | None, device: str) -> Iterable[Violation]:
    """Return what is wrong with one role's `fp8`, and with its emulation on CPUs. Arguments as in
    `implementation_problems`.
    """
    options, emulates = role.megatron.override_transformer_config, role.megatron.fp8_emulate
    key, emulation = f"{role.key}.{GROUP}.fp8", f"{role.key}.megatron.fp8_emulate"
    if emulates and (device != CPU or options.fp8 is None):
        rule = f"needs {key}" if device == CPU else "is only for trainer.device=cpu: GPUs compute in FP8"
        yield Violation({emulation: True}, rule, {emulation: False})
    if options.fp8 not in FP8_FORMATS:
        return
    if device == CPU and not emulates:
        hint = f"{emulation}=true rounds as FP8 does, and is slow"
        yield Violation({key: options.fp8}, "needs trainer.device=cuda: CPUs have no FP8 products", {key: None}, hint)
    elif device == CPU:
        yield from _not_emulated(role, key, model)
    elif options.transformer_impl == LOCAL:
        impl = f"{role.key}.{GROUP}.transformer_impl"
        rule = "needs transformer-engine"
        yield Violation({key: options.fp8, impl: LOCAL}, rule, {impl: TE_LINEAR}, subject=f"{key}={options.fp8}")
    if options.gradient_accumulation_fusion and device == CPU:
        fusion = f"{role.key}.{GROUP}.gradient_accumulation_fusion"
        yield Violation({fusion: True}, f"is not emulated with {key}={options.fp8}", {fusion: False})


def _not_emulated(role: RoleSpec, key: str, model: ModelSizes | None) -> Iterable[Violation]:
    options = role.megatron.override_transformer_config
    if model is not None and model.num_experts:
        yield Violation({key: options.fp8}, f"is not emulated for experts, which {model.path} has", {key: None})
    elif model is not None and (own := model.attention.own_linears):
        rule = f"is not emulated for {own}, which {model.path} has"
        yield Violation({key: options.fp8}, rule, {key: None})
    again = f"{role.key}.{GROUP}.recompute_granularity"
    if options.recompute_granularity is not None:
        rule = f"is not emulated with {key}={options.fp8}: Megatron recomputes FP8 products with transformer-engine"
        yield Violation({again: options.recompute_granularity}, rule, {again: None})
