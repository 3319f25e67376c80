"""Resumed training: roles, adapters and tasks, in the same layout and in others."""

from __future__ import annotations

from layout_keys import CP2, EP2, ETP1, SP, VPP2, of_actor, of_both
from resumed_observations import Leg, OtherLayouts, SameLayout, Untouched
from scenarios import ALONE, ALWAYS, LONG, Row, Scenario
from sweeps import WEEKLY
from tiny_gpt_oss import save_gpt_oss, save_gpt_oss_in_4_bits
from tiny_minimax import save_minimax
from tiny_models import save_llama, save_qwen2, save_qwen3_moe, save_reward_model
from tiny_qwen3_5 import save_qwen3_5

from megatron_rl.config.tasks import DPO, REWARD, SFT

FOUR, TP2, PP2, DP2 = (4, 2, 2), (2, 2, 1), (2, 1, 2), (2, 1, 1)
ALL_AXES = SP | EP2 | ETP1
TIED = {"tie_word_embeddings": True}
"""Embeddings that the first and the last stage share."""
BF16, ASYNC = of_actor({"dtype": "bfloat16"}), {"actor_rollout_ref__actor__checkpoint__async_save": True}
HOST_ADAM = {
    f"{role}__optim__override_optimizer_config__{key}": value
    for role in ("actor_rollout_ref__actor", "critic")
    for key, value in {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}.items()
}
DDP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}
OVERLAPPED = of_actor({f"override_ddp_config__{key}": value for key, value in DDP.items()})
DECAY = {"actor_rollout_ref__actor__optim__lr_decay_style": "linear", "trainer__total_training_steps": 30}
ADAPTERS = {f"{group}__model__lora__rank": 6 for group in ("actor_rollout_ref", "critic")}


def save_llama_reward_model(folder, **changes) -> str:
    """A Llama with one score."""
    return save_reward_model(folder, "Llama", **changes)


SAME = (
    Row(Scenario(save_qwen2, "TP2xPP2", FOUR, keys=DECAY), SameLayout()),
    Row(Scenario(save_qwen3_moe, "DP2xEP2, bf16, async", DP2, EP2, DECAY | BF16 | ASYNC), SameLayout(), ALWAYS),
    Row(Scenario(save_llama, "DP2, host Adam, overlapped", DP2, keys=HOST_ADAM | OVERLAPPED), SameLayout()),
    Row(Scenario(save_llama, "DP2, host Adam, bf16, async", DP2, keys=HOST_ADAM | ASYNC | BF16), SameLayout()),
    Row(Scenario(save_llama, "adapters, TP2", TP2, keys=ADAPTERS), SameLayout(is_adapted=True)),
    Row(Scenario(save_llama, "adapters, PP2, bf16", PP2, keys=ADAPTERS | BF16), SameLayout(is_adapted=True)),
)
# At first experts and their adapters are on both ranks, half of them on each.
OF_ADAPTERS = tuple(
    Row(
        Scenario(save, "adapters, TP2 to PP2 to one process", TP2, keys=keys, common=ADAPTERS),
        OtherLayouts((Leg(PP2), Leg(ALONE))),
        when,
    )
    for save, keys, when in (
        (save_llama, {}, ALWAYS),
        (save_qwen3_moe, of_both(ALL_AXES), LONG),
        (save_qwen3_5, {}, LONG),
    )
)
IN_TURN = OtherLayouts((Leg(PP2_DP2 := (4, 1, 2), 5), Leg(ALONE, 5)), True, ("actor/entropy", 1, 1e-3))
OF_ROLES = (
    Row(Scenario(save_llama, "TP2xPP2 to PP2xDP2 to one process", FOUR), IN_TURN),
    *(
        Row(Scenario(save, name, ranks, sizes, changes=changes), OtherLayouts((leg,)), when)
        for save, changes, name, ranks, sizes, leg, when in (
            (save_qwen3_moe, TIED, "TP2xPP2xEP2 to PP2xVPP2", FOUR, ALL_AXES, Leg(PP2, sizes=VPP2), ALWAYS),
            (save_qwen2, {}, "PP2xCP2 to TP2", PP2_DP2, CP2, Leg(TP2), LONG),
            (save_llama, {}, "DP2 to CP2", DP2, {}, Leg(DP2, sizes=CP2), LONG),
            (save_gpt_oss, {}, "TP2xETP2 to EP2", TP2, SP, Leg(DP2, sizes=EP2), LONG),
            (save_minimax, {}, "TP2 to PP2", TP2, SP, Leg(PP2), WEEKLY),
        )
    ),
)
# What a task keeps beside its role tests/e2e/test_stage_runs.py and test_stage_ends.py resume.
OF_TASKS = tuple(
    Row(
        Scenario(save, f"TP2xPP2 to {layout}", FOUR),
        OtherLayouts((Leg(ranks),), True, (f"{role}/grad_norm", 3, 1e-3), task),
        LONG if ranks is ALONE else WEEKLY,
    )
    for save, task, role in (
        (save_llama, SFT, "actor"),
        (save_llama_reward_model, REWARD, "critic"),
        (save_llama, DPO, "actor"),
    )
    for layout, ranks in (("one process", ALONE), ("DP2", DP2))
)
UNTOUCHED = (
    Row(Scenario(save_qwen3_moe, "TP2xPP2xEP2", FOUR, ALL_AXES, changes=TIED), Untouched(), ALWAYS),
    Row(Scenario(save_gpt_oss_in_4_bits, "TP2xPP2", FOUR, SP), Untouched(in_4_bits=True)),
)
RESUMED = (*SAME, *OF_ADAPTERS, *OF_ROLES, *OF_TASKS, *UNTOUCHED)
