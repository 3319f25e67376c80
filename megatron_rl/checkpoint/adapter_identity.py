"""The adapters that a checkpoint holds, as a part of its model's identity: a run resumes only its own. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.checkpoint.adapter_files import AdapterFiles
from megatron_rl.checkpoint.identity import weights_digest
from megatron_rl.config.lora import LoraConfig
from megatron_rl.model.families import Model
from megatron_rl.model.families.adapter_params import peft_targets

LORA = "lora"
"""The part's name in an identity; its value is None, or absent, where the whole model is trained."""
REFERENCE_ADAPTER = "adapter of the reference"
"""The name of the digest of `adapter_path` in an identity; None: the reference is without an adapter. Absent where
adapters are compared with no reference, and in checkpoints from before it was written."""
GROUPS = {"actor": "actor_rollout_ref", "critic": "critic"}
"""Trained role -> the group of the configuration that has its `model`."""
TARGETS = "target_modules"


def adapter_identity(settings: Mapping[str, Any], lora: LoraConfig) -> dict[str, Any]:
    """The part of the identity; JSON-ready. settings: of the config.json. Raises ConfigError as `adapted`."""
    if not lora.rank:
        return {LORA: None}
    return {LORA: {"rank": lora.rank, "alpha": lora.alpha, TARGETS: peft_targets(Model.of(settings).specs, lora)}}


def adapter_differences(role: str, saved: Mapping[str, Any] | None, configured: Mapping[str, Any] | None) -> list[str]:
    """Every reason why a role with the adapters `configured` cannot resume from those that are `saved`.

    Each is a clause with both values, and the key with which it could.
    """
    key = f"{GROUPS.get(role, role)}.model.lora"
    if configured is None:
        if saved is None:
            return []
        rank = saved.get("rank")
        return [
            f"it has only adapters of rank {rank}, and configured is to train the whole {role}: "
            f"to resume, set {key}.rank={rank}"
        ]
    if saved is None:
        return [
            f"it holds the whole {role}, and configured are adapters of rank {configured['rank']}: "
            f"to resume, set {key}.rank=0"
        ]
    return [
        f"{name} of the {role}'s adapters is {_text(saved.get(name))}, and configured is {_text(value)}: "
        f"to resume, set {key}.{name}={_text(saved.get(name))}"
        for name, value in configured.items()
        if saved.get(name) != value
    ]


def reference_identity(lora: LoraConfig) -> dict[str, Any]:
    """Return the part of the identity of a policy that is compared with a reference: each start reads it from
    `adapter_path`, as no checkpoint has it; JSON-ready. Raises ConfigError, and OSError, where it cannot be read.
    """
    if not lora.rank:
        return {}
    path = lora.adapter_path
    return {REFERENCE_ADAPTER: None if path is None else weights_digest(AdapterFiles.open(path).tensors)}


def reference_differences(role: str, saved: Mapping[str, Any], configured: Mapping[str, Any]) -> list[str]:
    """Return why the reference would be another one than before; []: it is the same, or one of both does not say."""
    if REFERENCE_ADAPTER not in saved.keys() & configured.keys():
        return []
    before, now = (_named(identity[REFERENCE_ADAPTER]) for identity in (saved, configured))
    if before == now:
        return []
    key = f"{GROUPS.get(role, role)}.model.lora.adapter_path"
    return [
        f"its reference has {before}, and configured is {now}: to resume, set {key} as it was at the start of the run"
    ]


def _named(digest: str | None) -> str:
    return "no adapter" if digest is None else f"an adapter with the digest {digest}"


def _text(value: Any) -> str:
    """As it is given on the command line."""
    if isinstance(value, float):
        return f"{value:g}"
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
