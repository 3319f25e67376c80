"""Necessary changes to libraries: one concern per file, all applied by one call.

Importing this package changes nothing, and `import megatron_rl` applies `without_triton` alone. Every worker process
calls `apply_patches` once, before it builds a model or an engine, and so does a driver before it starts Ray. Each patch
states its reason, its library with the supported versions, and the upstream change that would make it unnecessary. On
any other version it refuses to run.
"""

from __future__ import annotations

import importlib

from third_party_patches.guard import Patch, PatchError, is_needed, require_version

COMMON_PATCHES = (
    "third_party_patches.megatron_core.without_triton",
    "third_party_patches.megatron_core.router_gemm",
    "third_party_patches.megatron_core.l2_norm",
    "third_party_patches.megatron_core.fused_weight_gradient",
    "third_party_patches.megatron_core.permute_without_waits",
    "third_party_patches.megatron_core.dispatcher_lets_go",
    "third_party_patches.megatron_core.threaded_writer",
    "third_party_patches.vllm.queue_name",
    "third_party_patches.vllm.rank_order",
    "third_party_patches.vllm.several_dp_groups",
    "third_party_patches.vllm.adapter_views",
    "third_party_patches.vllm.experts_without_adapters",
    "third_party_patches.vllm.routed_experts_everywhere",
    "third_party_patches.vllm.keys_for_values",
    "third_party_patches.vllm.worlds_of_gpt_oss",
    "third_party_patches.vllm.slots_in_a_block",
    "third_party_patches.vllm.reports_at_the_end",
)
CPU_PATCHES = (
    "third_party_patches.megatron_core.cpu_torch",
    "third_party_patches.megatron_core.cpu_matmul",
    "third_party_patches.megatron_core.cpu_rng",
    "third_party_patches.megatron_core.cpu_token_counts",
    "third_party_patches.megatron_core.cpu_offloaded_adam",
    "third_party_patches.megatron_core.uneven_gather",
    "third_party_patches.vllm.unpacked_linear",
    "third_party_patches.vllm.unpacked_experts",
    "third_party_patches.vllm.sigmoid_routing",
    "third_party_patches.vllm.cpu_async_scheduling",
    "third_party_patches.vllm.cpu_dense_adapters",
    "third_party_patches.vllm.cpu_gated_delta",
    "third_party_patches.vllm.cpu_partial_prompts",
    "third_party_patches.vllm.cpu_routed_experts",
    "third_party_patches.vllm.drafts_keep_samples",
    "third_party_patches.vllm.shared_partial_blocks",
    "third_party_patches.vllm.sinks_in_one_piece",
    "third_party_patches.vllm.kernel_scan",
    "third_party_patches.vllm.without_torchvision",
    "third_party_patches.vllm.cpu_uneven_tokens",
    "third_party_patches.vllm.shm_group_name",
    "third_party_patches.vllm.shm_lifetime",
)
DRIVER_PATCHES = (
    "third_party_patches.ray.few_daemons",
    "third_party_patches.ray.on_loopback",
    "third_party_patches.ray.own_session",
)

REHEARSAL_PATCHES = (
    "third_party_patches.torch.fake_cuda",
    "third_party_patches.torch.fake_parameters",
    "third_party_patches.torch.fake_worlds",
)

VLLM = "third_party_patches.vllm."

__all__ = ["Patch", "PatchError", "apply_patches", "is_needed", "modules_for", "patches_for", "require_version"]


def modules_for(kind: str, generates: bool = True) -> list[str]:
    """Return the names of the modules of `patches_for` without importing them."""
    modules = {
        "cpu": COMMON_PATCHES + CPU_PATCHES,
        "cuda": COMMON_PATCHES,
        "driver": DRIVER_PATCHES,
        "rehearsal": COMMON_PATCHES + REHEARSAL_PATCHES,
    }[kind]
    return [name for name in modules if generates or not name.startswith(VLLM)]


def patches_for(kind: str, generates: bool = True) -> list[Patch]:
    """Return the patches for a worker on "cpu" or "cuda", a "driver" or a "rehearsal", in the order of application.

    generates: False where no engine is ever built; then vLLM is not imported.
    """
    return [importlib.import_module(name).PATCH for name in modules_for(kind, generates)]


def apply_patches(kind: str, generates: bool = True) -> list[str]:
    """Apply every patch for `kind` (see `patches_for`) that is needed, once per process; returns their names.

    Raises PatchError, naming the patch and both versions, when an installed library is not one a patch knows.
    """
    patches = [patch for patch in patches_for(kind, generates) if is_needed(patch)]
    for patch in patches:
        require_version(patch)
    for patch in patches:
        patch.apply()
    return [patch.name for patch in patches]
