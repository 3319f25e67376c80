"""Tasks: every pair of an axis, a way to lay rows out, and several passes or one; each loss; sequences that are cut.

Not exercised: a rank without a counted token in a pass of context parallelism; regression in layouts, which differs
from rankings after the numbers are there; what only three of an axis, a way and passes do together.
"""

from __future__ import annotations

from layout_keys import LAYOUTS, LOSSES
from scenarios import ALWAYS, LONG, Row, SaveModel, Scenario
from sweeps import WEEKLY
from task_observations import PlainStep, Task, TaskUpdate, in_roles
from tiny_models import save_qwen2, save_qwen3_moe, save_reward_model

from megatron_rl.config.declarations import PREFERENCE_LOSSES
from megatron_rl.config.tasks import DPO, REWARD, SFT

PAIRS, RANKINGS, SINGLE = (2,) * 7, (3, 2, 4, 2, 2), (1,) * 7
SUPERVISED, RANKED, PREFERRED = Task(SFT), Task(REWARD, "all_pairs", RANKINGS), Task(DPO, "dpo", PAIRS)
SEVERAL = "dpo+sft+apo_zero"
DP2 = (2, 1, 1)


def save_qwen2_reward_model(folder, **changes) -> str:
    """A Qwen2 with one score."""
    return save_reward_model(folder, "Qwen2", **changes)


MODELS: dict[Task, SaveModel] = {SUPERVISED: save_qwen2, RANKED: save_qwen2_reward_model, PREFERRED: save_qwen2}


def row(task: Task, layout: str, ranks: tuple[int, int, int], keys: dict[str, object], when=LONG) -> Row:
    """An update of the task's own model."""
    return Row(Scenario(MODELS[task], layout, ranks, keys=keys), TaskUpdate(task), when)


def laid_out(task: Task, often: tuple[str, str, str] | None) -> tuple[Row, ...]:
    """Each layout with packed and padded rows and with several passes and one, and these in all pairs: of SFT in the
    sweeps, of the others half, the rest weekly.
    """
    found = []
    for number, (layout, ranks) in enumerate(LAYOUTS.items()):
        for packed in (True, False):
            several = packed == (number == 0)
            words = (layout, "packed" if packed else "padded", "accumulated" if several else "at once")
            keys = {f"{group}__model__use_remove_padding": packed for group in ("actor_rollout_ref", "critic")}
            micro_batch = 16 if not several else 3 if task.kind == SFT else 2
            keys |= in_roles("ppo_micro_batch_size_per_gpu", micro_batch)
            swept = LONG if task is SUPERVISED or packed == (number % 2 == 0) else WEEKLY
            found.append(row(task, ", ".join(words), ranks, keys, ALWAYS if words == often else swept))
    return tuple(found)


def by_tokens(tokens: int) -> dict[str, object]:
    """Passes of at most so many tokens on a rank."""
    return in_roles("use_dynamic_bsz", True) | in_roles("ppo_max_token_len_per_gpu", tokens)


def up_to(cp_size: int, tokens: int) -> dict[str, object]:
    """Each pass over as few ranks as its tokens need."""
    megatron = {"context_parallel_size": cp_size, "dynamic_context_parallel": True}
    return by_tokens(tokens) | of_roles(megatron)


def of_roles(megatron: dict[str, object]) -> dict[str, object]:
    """Keys of the group `megatron` of actor and critic."""
    return {name: value for key, each in megatron.items() for name, value in in_roles(f"megatron__{key}", each).items()}


CP2, VPP2 = of_roles({"context_parallel_size": 2}), of_roles({"virtual_pipeline_model_parallel_size": 2})
EP2 = of_roles({"expert_model_parallel_size": 2})
BALANCED = of_roles(LOSSES)
AS_TRIES = {"actor_rollout_ref__model__enable_tree_training": True}
# Each rank's head sees a part of the tokens that count; logits are made twice.
SPLIT = (
    row(SUPERVISED, "TP2xCP2", (4, 2, 1), CP2),
    row(SUPERVISED, "PP2, VPP2", (2, 1, 2), VPP2),
    row(SUPERVISED, "up to CP4", (4, 1, 1), up_to(4, 12)),
    row(SUPERVISED, "up to CP2 of 4 ranks", (4, 1, 1), up_to(2, 16)),
    row(SUPERVISED, "PP2, VPP2, up to CP2", (4, 1, 2), VPP2 | up_to(2, 16)),
    row(SUPERVISED, "DP2, as tries", DP2, AS_TRIES),
    row(SUPERVISED, "DP2, by tokens", DP2, by_tokens(40)),
    # Responses to one prompt are in one pass over ranks that are its own.
    *(
        row(task, layout, ranks, keys, LONG if task is PREFERRED or layout == "up to CP4" else WEEKLY)
        for task in (RANKED, PREFERRED)
        for layout, ranks, keys in (
            ("CP2", DP2, CP2),
            ("up to CP4", (4, 1, 1), up_to(4, 16)),
            ("up to CP2 of 4 ranks", (4, 1, 1), up_to(2, 40)),
            ("PP2, VPP2, up to CP2", (4, 1, 2), VPP2 | up_to(2, 40)),
            ("DP2, as tries", DP2, AS_TRIES),
            ("CP2, as tries, by tokens", DP2, CP2 | AS_TRIES | by_tokens(60)),
        )
    ),
    row(PREFERRED, "DP2, by tokens", DP2, by_tokens(60)),
    # A batch of one pair on two ranks, one of which only keeps up.
    Row(Scenario(save_qwen2, "DP2, one pair, by tokens", DP2, keys=by_tokens(60)), TaskUpdate(Task(DPO, "dpo", (2,)))),
)
# The reward model starts from a language model.
EXPERTS = tuple(
    Row(
        Scenario(save_qwen3_moe, layout + (", balanced" if common else ""), DP2, keys=EP2 | keys, common=common),
        TaskUpdate(task, is_balanced=bool(common)),
        LONG if task is SUPERVISED or not common else WEEKLY,
    )
    for task, layout, keys in (
        (SUPERVISED, "EP2", {}),
        (SUPERVISED, "up to CP2, EP2", up_to(2, 16)),
        (RANKED, "EP2", {}),
        (PREFERRED, "EP2", {}),
    )
    for common in ({}, BALANCED)
)


def preference(loss: str) -> Task:
    return Task(DPO, loss, SINGLE if loss == "kto" else PAIRS)


LOSSES_OF_PREFERENCES = (*PREFERENCE_LOSSES, SEVERAL)
OTHER_NUMBERS = ("simpo", "orpo", "kto", SEVERAL)
"""They read other numbers than dpo does; the others begin after the same numbers, and are weekly in layouts."""
PLAIN = (
    Row(Scenario(save_qwen2, "one process"), PlainStep(SUPERVISED), ALWAYS),
    Row(Scenario(save_qwen2_reward_model, "one process"), PlainStep(RANKED), ALWAYS),
    Row(Scenario(save_qwen2_reward_model, "one process"), PlainStep(Task(REWARD, "regression", SINGLE))),
    *(
        Row(Scenario(save_qwen2, "one process"), PlainStep(preference(loss)), ALWAYS if often else LONG)
        for loss in LOSSES_OF_PREFERENCES
        for often in (loss in ("dpo", SEVERAL),)
    ),
)
PREFERENCES = (
    *(
        Row(
            Scenario(save_qwen2, "TP2xPP2", LAYOUTS["TP2xPP2"], keys=in_roles("ppo_micro_batch_size_per_gpu", 2)),
            TaskUpdate(preference(loss)),
            LONG if loss in OTHER_NUMBERS else WEEKLY,
        )
        for loss in LOSSES_OF_PREFERENCES
        if loss != "dpo"
    ),
    # tests/losses has the formulas of divergences, which are of the same numbers.
    *(
        Row(
            Scenario(
                save_qwen2,
                f"{layout}, {kind}",
                ranks,
                keys=in_roles("ppo_micro_batch_size_per_gpu", 2),
                common={"dpo__f_divergence_type": kind},
            ),
            TaskUpdate(PREFERRED),
            LONG if (kind, layout) == ("js_divergence", "TP2xPP2") else WEEKLY,
        )
        for kind in ("forward_kl", "js_divergence", "alpha_divergence")
        for layout, ranks in LAYOUTS.items()
    ),
)
TASKS = (
    *PLAIN,
    *laid_out(SUPERVISED, ("TP2xDP2", "packed", "at once")),
    *laid_out(RANKED, ("TP2xDP2", "padded", "accumulated")),
    *laid_out(PREFERRED, None),
    *SPLIT,
    *EXPERTS,
    *PREFERENCES,
)
