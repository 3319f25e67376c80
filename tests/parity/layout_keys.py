"""Keys of the actor's group `megatron` that cut a model further than TP and PP; other roles follow the actor."""

from __future__ import annotations

LAYOUTS = {"TP2xPP2": (4, 2, 2), "TP2xDP2": (4, 2, 1)}
"""Name -> (ranks, tp, pp): every axis, TP with each of the others."""
SP = {"sequence_parallel": True}
EP2, ETP1 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
CP2, CP4 = ({"context_parallel_size": size} for size in (2, 4))
P2P, ALL_GATHER, A2A = ({"override_transformer_config__cp_comm_type": way} for way in ("p2p", "all_gather", "a2a"))
FULL = {
    "override_transformer_config__recompute_granularity": "full",
    "override_transformer_config__recompute_method": "uniform",
    "override_transformer_config__recompute_num_layers": 1,
}
SELECTIVE = {"override_transformer_config__recompute_granularity": "selective"}
LOSSES = {
    "override_transformer_config__moe_router_load_balancing_type": "seq_aux_loss",
    "override_transformer_config__moe_aux_loss_coeff": 0.7,
    "override_transformer_config__moe_z_loss_coeff": 0.05,
}
"""Losses that keep the load of experts even, large enough to be noticed."""
PADDED = {"actor_rollout_ref__model__use_remove_padding": False}
"""Of any group: rows are filled up instead of packed."""


def of_actor(keys: dict[str, object]) -> dict[str, object]:
    """The same by their whole names."""
    return {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in keys.items()}


def of_critic(keys: dict[str, object]) -> dict[str, object]:
    """For the critic alone."""
    return {f"critic__megatron__{key}": value for key, value in keys.items()}


def of_both(keys: dict[str, object]) -> dict[str, object]:
    """For actor and critic, where the critic does not follow."""
    return of_actor(keys) | of_critic(keys)
