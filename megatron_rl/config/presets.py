"""Presets: names for many keys at once. Each sets defaults; keys of the user count first.

A row is left out where it would be refused, or where a package or a device is missing; plans list the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from megatron_rl.config.keys import ACTOR, CRITIC, ROLLOUT
from megatron_rl.config.megatron import LOCAL, TRANSFORMER_ENGINE
from megatron_rl.config.trainer import FAST, REPRODUCIBLE
from megatron_rl.errors import shown

Read = Callable[[str], Any]
"""Return the value of a dotted key."""
OPTIONS, DDP = "megatron.override_transformer_config", "megatron.override_ddp_config"
IMPLEMENTATION, FUSION = f"{OPTIONS}.transformer_impl", f"{OPTIONS}.gradient_accumulation_fusion"
GRADIENTS, PARAMETERS = f"{DDP}.overlap_grad_reduce", f"{DDP}.overlap_param_gather"
NO_GPU = "there is no GPU"


@dataclass(frozen=True)
class PresetRow:
    """A key that a preset sets, and why. only_at: other keys -> values at which it does.

    off_cpu: why a run on CPUs leaves it out; "": it does not. package: a module that must be installed.
    """

    key: str
    value: Any
    why: str
    only_at: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    off_cpu: str = ""
    package: str = ""

    def left_out(self, read: Read) -> str:
        """Return why a run leaves the row out; "": it does not."""
        if self.off_cpu and read("trainer.device") == "cpu":
            return self.off_cpu
        if self.package and find_spec(self.package) is None:
            return f"{self.package} must be installed"
        values = ((key, read(key), allowed) for key, allowed in self.only_at.items())
        return next((f"{key}={shown(value)}" for key, value, allowed in values if value not in allowed), "")


def _of_trained(name: str, value: Any, why: str, only_at: str = "") -> Iterator[PresetRow]:
    """Rows of one key of the actor and the critic. only_at: another of their keys, which must be true."""
    for group in (ACTOR, CRITIC):
        yield PresetRow(f"{group}.{name}", value, why, {f"{group}.{only_at}": (True,)} if only_at else {})


WITHOUT_SLICES = {
    f"{ROLLOUT}.multi_turn.enable": (False,),
    "reward_model.launch_reward_fn_async": (False,),
    "async_training.partial_rollout": (False,),
    "trainer.rollout_ahead": (0,),
    f"{ROLLOUT}.speculative": (None,),
    f"{ROLLOUT}.prefix_match_unit": (None,),
    f"{ROLLOUT}.data_parallel_size": (1,),
    f"{ROLLOUT}.enable_rollout_routing_replay": (False,),
    f"{ACTOR}.router_replay.mode": ("disabled", "R2"),
}
"""Where asynchronous scheduling is not refused: `planning.feature_rows` has the reasons."""

PRESETS: dict[str, tuple[PresetRow, ...]] = {
    FAST: (
        PresetRow(
            f"{ROLLOUT}.async_scheduling",
            True,
            "an engine step is scheduled while another one runs",
            only_at=WITHOUT_SLICES,
        ),
        PresetRow(
            f"{ROLLOUT}.disable_custom_all_reduce",
            False,
            "vLLM's all-reduce over NVLink, which it may fuse with norms; memory is then cut into fixed segments",
            only_at={f"{ROLLOUT}.tensor_model_parallel_size": (2, 4, 6, 8)},
            off_cpu=NO_GPU,
        ),
        PresetRow(f"{ACTOR}.use_dynamic_bsz", True, "as few passes as the tokens allow; all roles follow"),
        PresetRow(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384, "long passes; all roles follow"),
        PresetRow(
            f"{ACTOR}.{IMPLEMENTATION}",
            TRANSFORMER_ENGINE,
            "norms fused with linears; all roles follow",
            only_at={"actor_rollout_ref.model.lora.rank": (0,)},
            off_cpu="transformer-engine computes on GPUs alone",
            package="transformer_engine",
        ),
        *_of_trained(GRADIENTS, True, "gradients are reduced during the backward pass"),
        *_of_trained(PARAMETERS, True, "parameters are gathered during the next forward pass", only_at=GRADIENTS),
        *_of_trained(FUSION, True, "weight gradients are added up where they are made"),
    ),
    REPRODUCIBLE: (
        PresetRow(f"{ROLLOUT}.async_scheduling", False, "a step begins when the one before is known"),
        PresetRow(f"{ROLLOUT}.enforce_eager", True, "compilers choose kernels by measured time"),
        PresetRow(f"{ROLLOUT}.disable_custom_all_reduce", True, "sums in NCCL's order, at all sizes"),
        PresetRow(
            "async_training.deterministic",
            True,
            "a schedule without clocks",
            only_at={f"{ROLLOUT}.min_replicas": (0,), f"{ROLLOUT}.over_sample_rate": (0.0,)},
        ),
        PresetRow(f"{ACTOR}.{IMPLEMENTATION}", LOCAL, "the layers that tests on CPUs compare; all roles follow"),
        *_of_trained(GRADIENTS, False, "gradients are added up in one order, not by buckets"),
        *_of_trained(PARAMETERS, False, "no pass begins before all parameters are gathered"),
        *_of_trained(FUSION, False, "the same kernels with and without apex"),
    ),
}
"""Preset -> its rows."""


def preset_defaults(read: Read, given: Collection[str]) -> dict[str, Any]:
    """Return the defaults of the preset of a configuration. given: keys that the user has set."""
    defaults: dict[str, Any] = {}
    for row in PRESETS.get(read("trainer.preset"), ()):
        if row.key not in given and not row.left_out(lambda key: defaults[key] if key in defaults else read(key)):
            defaults[row.key] = row.value
    return defaults
