"""One update of a reward model and of preferences: as a plain loop of transformers and torch, and in every layout.

Why the layout cannot matter: a loss reads one or two numbers of each answer to a prompt, and all answers to a prompt
are in one pass of one data-parallel rank. The loss is a sum over prompts, divided by the number of prompts in the whole
batch, so it does not matter in which pass or on which rank a prompt is. The numbers themselves are log-probs or scores
of single rows, for which `tests/parity/updates.py` derives it.

Not exercised: regression in layouts: it differs from what is here after the numbers are there.
"""

from __future__ import annotations

import functools

import pytest
import torch
from layout_keys import LOSSES
from ranks import run_ranks
from sweeps import marks_of, often
from task_cases import (
    PlainLoop,
    answer_batch,
    answers_of,
    assert_equals_plain,
    assert_same,
    in_pairs,
    one_update,
    task_config,
)
from tiny_models import save_qwen2, save_qwen3_moe, save_reward_model
from torch.nn.functional import logsigmoid

from megatron_rl.config.declarations import PREFERENCE_LOSSES
from megatron_rl.config.tasks import DPO, REWARD

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

LAYOUTS = {"TP2xPP2": (4, 2, 2), "TP2xDP2": (4, 2, 1)}
DP2 = (2, 1, 1)
PAIRS = (2,) * 7
RANKINGS = (3, 2, 4, 2, 2)
ALONE = (1,) * 7
BETA, BASELINE = 0.1, 0.3
PREFERENCES = tuple(PREFERENCE_LOSSES)
SEVERAL = ("dpo", "sft", "apo_zero")
WEIGHTS = (0.8, 1.5, 0.3)
NAMES = {REWARD: "critic", DPO: "actor"}
OF_TASK = {REWARD: ("all_pairs", RANKINGS), DPO: ("dpo", PAIRS)}
PACKED = ("actor_rollout_ref__model__use_remove_padding", "critic__model__use_remove_padding")
ROLES = ("actor_rollout_ref__actor", "critic")
ROWS = tuple(f"{role}__ppo_micro_batch_size_per_gpu" for role in ROLES)


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def reward_path(tmp_path_factory) -> str:
    return save_reward_model(tmp_path_factory.mktemp("reward"), "Qwen2")


def run_layout(
    path: str, task: str, loss: str, sizes: tuple[int, ...], layout: tuple[int, int, int], **overrides
) -> list[dict]:
    """`one_update` on every rank; three prompts to a micro-batch unless told otherwise."""
    world_size, tp_size, pp_size = layout
    keys = {"critic__model__path": path, "reward_training__loss": loss} if task == REWARD else preference_keys(loss)
    config = task_config(path, task, tp_size, pp_size, **{**keys, **dict.fromkeys(ROWS, 3), **overrides})
    batch, baseline = answer_batch(sizes, task == REWARD), (BASELINE,) if loss == "kto" else ()
    return run_ranks(world_size, one_update, config, batch, len(batch), *baseline)


def preference_keys(loss: str) -> dict:
    """Of a loss, or of several with their weights."""
    names = loss.split("+")
    return {"dpo__loss": names, "dpo__loss_weights": None if len(names) == 1 else list(WEIGHTS)}


@functools.cache
def one_process(path: str, task: str, loss: str = "") -> list[dict]:
    """What the others are compared with. loss: "" for the usual one."""
    usual, sizes = OF_TASK[task]
    return run_layout(path, task, loss or usual, ALONE if loss == "kto" else sizes, (1, 1, 1))


def plain_scores(plain: PlainLoop, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Of each prompt its answers' scores, without the token after the last."""
    rows = answers_of(answer_batch(sizes, score_token=True))
    return list(torch.cat([plain.model(ids[None, :-1]).logits[:, 0] for ids, _ in rows]).split(list(sizes)))


def plain_log_probs(plain: PlainLoop, sizes: tuple[int, ...], mean: bool) -> list[torch.Tensor]:
    found = [plain.log_probs(*row) for row in answers_of(answer_batch(sizes, score_token=False))]
    return list(torch.stack([one.mean() if mean else one.sum() for one in found]).split(list(sizes)))


def plain_preference(loss: str, numbers: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of one prompt."""
    ratio = numbers - reference
    better, worse = BETA * ratio[0], BETA * ratio[-1]
    if loss == "kto":
        return 1 - torch.sigmoid((2 * labels[0] - 1) * BETA * (ratio[0] - BASELINE))
    if loss in ("dpo", "robust"):  # without label smoothing
        return -logsigmoid(better - worse)
    if loss == "hinge":
        return torch.clamp(1 - better + worse, min=0)
    if loss == "apo_zero":
        return 1 - torch.sigmoid(better) + torch.sigmoid(worse)
    if loss == "apo_down":
        return torch.sigmoid(better) + 1 - torch.sigmoid(better - worse)
    if loss == "sppo_hard":
        return (ratio[0] - 0.5 / BETA) ** 2 + (ratio[1] + 0.5 / BETA) ** 2
    if loss == "nca_pair":
        return -logsigmoid(better) - (logsigmoid(-better) + logsigmoid(-worse)) / 2
    if loss == "sft":
        return -numbers[0]
    if loss == "ipo":
        return (ratio[0] - ratio[1] - 1 / (2 * BETA)) ** 2
    if loss == "simpo":
        return -logsigmoid(BETA * (numbers[0] - numbers[1]) - 0.5)
    odds = numbers - torch.log1p(-numbers.exp())
    return -numbers[0] - BETA * logsigmoid(odds[0] - odds[1])


def test_rankings_with_margins_equal_a_plain_loop(reward_path: str) -> None:
    """Of every two answers to a prompt, each prompt counted once. Would not catch a score at another token of the
    plain loop's own, which transformers' classifier takes from the last."""
    alone = run_layout(reward_path, REWARD, "all_pairs", RANKINGS, (1, 1, 1))
    plain, batch = PlainLoop(reward_path, value_head=True), answer_batch(RANKINGS, score_token=True)
    losses = []
    for scores, margins in zip(plain_scores(plain, RANKINGS), batch["given"].unbind(), strict=True):
        pairs = [(i, j) for i in range(len(scores)) for j in range(i + 1, len(scores))]
        losses.append(-sum(logsigmoid(scores[i] - scores[j] - margins[i:j].sum()) for i, j in pairs) / len(pairs))
    assert_equals_plain(alone, plain, plain.step(torch.stack(losses).mean()), "critic", reward_path)


@pytest.mark.exhaustive
def test_regression_equals_a_plain_loop(reward_path: str) -> None:
    """Would not catch scores that are normalised, which they are not."""
    alone = run_layout(reward_path, REWARD, "regression", ALONE, (1, 1, 1))
    plain, batch = PlainLoop(reward_path, value_head=True), answer_batch(ALONE, score_token=True)
    loss = (torch.cat(plain_scores(plain, ALONE)) - batch.flat("given")).square().mean()
    assert_equals_plain(alone, plain, plain.step(loss), "critic", reward_path)


@pytest.mark.parametrize("loss", often((*PREFERENCES, "+".join(SEVERAL)), ("dpo", "+".join(SEVERAL))))
def test_preferences_equal_a_plain_loop(loss: str, policy_path: str) -> None:
    """Formulas written down here once more. Would not catch a formula misread in both places."""
    sizes, names = ALONE if loss == "kto" else PAIRS, loss.split("+")
    alone = one_process(policy_path, DPO, loss)
    plain, batch = PlainLoop(policy_path), answer_batch(sizes, score_token=False)
    total = torch.zeros(())
    for name, weight in zip(names, (1.0,) if len(names) == 1 else WEIGHTS, strict=True):
        numbers = plain_log_probs(plain, sizes, name in ("simpo", "orpo", "sft"))
        told = zip(numbers, batch["given"].unbind(), batch["labels"].unbind(), strict=True)
        total = total + weight * torch.stack([plain_preference(name, *one) for one in told]).mean()
    assert_equals_plain(alone, plain, plain.step(total), "actor", policy_path)


IN_LAYOUTS = ("simpo", "orpo", "kto", "+".join(SEVERAL))
"""Losses that read other numbers than dpo does. The others are weekly: they begin after the same numbers."""


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(name, marks=marks_of(name, weekly={*PREFERENCES} - {*IN_LAYOUTS}))
        for name in (*PREFERENCES, "+".join(SEVERAL))
        if name != "dpo"
    ],
)
def test_every_preference_loss_equals_one_process(loss: str, policy_path: str) -> None:
    """On TP2xPP2 in several passes. Would not catch an error that one process shares, which the plain loop does."""
    sizes, overrides = ALONE if loss == "kto" else PAIRS, dict.fromkeys(ROWS, 2)
    found = run_layout(policy_path, DPO, loss, sizes, LAYOUTS["TP2xPP2"], **overrides)
    assert_same(found, one_process(policy_path, DPO, loss), "actor", policy_path)


DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
"""The second is in the sweeps. The others are weekly: tests/losses has their formulas, of the same numbers."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=marks_of(kind, weekly={*DIVERGENCES} - {"js_divergence"})) for kind in DIVERGENCES],
)
def test_every_f_divergence_equals_one_process(kind: str, policy_path: str) -> None:
    """On TP2xPP2 and TP2xDP2, in several passes. Would not catch a wrong formula; tests/losses has those."""
    keys = {"dpo__f_divergence_type": kind}
    whole = run_layout(policy_path, DPO, "dpo", PAIRS, (1, 1, 1), **keys)
    for name in ("TP2xPP2", "TP2xDP2"):
        found = run_layout(policy_path, DPO, "dpo", PAIRS, LAYOUTS[name], **keys, **dict.fromkeys(ROWS, 2))
        assert_same(found, whole, "actor", policy_path)


CASES = [
    pytest.param(task, *case.values, marks=case.marks, id="-".join((task, *case.values)))
    for task, chosen in ((REWARD, ("TP2xDP2", "padded", "accumulated")), (DPO, None))
    for case in in_pairs(LAYOUTS, chosen)
]


@pytest.mark.parametrize(("task", "layout", "rows", "passes"), CASES)
def test_layouts_equal_one_process(
    task: str, layout: str, rows: str, passes: str, policy_path: str, reward_path: str
) -> None:
    """Rankings and pairs of answers; every pair of an axis, a way to lay rows out, and several passes or one. Would not
    catch what only other losses do: they begin after the numbers of answers; nor an error that every layout shares
    with one process, which the plain loop does."""
    path, loss, sizes = (reward_path if task == REWARD else policy_path), *OF_TASK[task]
    overrides = dict.fromkeys(PACKED, rows == "packed") | dict.fromkeys(ROWS, 2 if passes == "accumulated" else 16)
    assert_same(
        run_layout(path, task, loss, sizes, LAYOUTS[layout], **overrides), one_process(path, task), NAMES[task], path
    )


@pytest.mark.exhaustive
def test_blocks_by_tokens_and_ranks_without_rows(policy_path: str) -> None:
    """A batch of one pair on two data-parallel ranks, one of which only keeps up. Would not catch uneven work."""
    overrides = {
        "actor_rollout_ref__actor__use_dynamic_bsz": True,
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 60,
    }
    for sizes in (PAIRS, (2,)):
        alone = run_layout(policy_path, DPO, "dpo", sizes, (1, 1, 1))
        assert_same(run_layout(policy_path, DPO, "dpo", sizes, DP2, **overrides), alone, "actor", policy_path)


def split_over(cp_size: int, tokens: int | None = None, vpp_size: int | None = None) -> dict:
    """Keys of both roles. tokens: passes choose how many ranks share them, of at most so many tokens on a rank."""
    of_role: dict = {"megatron__context_parallel_size": cp_size}
    if tokens is not None:
        of_role |= {"megatron__dynamic_context_parallel": True, "use_dynamic_bsz": True}
        of_role |= {"ppo_max_token_len_per_gpu": tokens, "megatron__virtual_pipeline_model_parallel_size": vpp_size}
    return {f"{role}__{name}": value for role in ROLES for name, value in of_role.items()}


AS_TRIES = {"actor_rollout_ref__model__enable_tree_training": True}
BY_TOKENS = dict.fromkeys((f"{role}__use_dynamic_bsz" for role in ROLES), True)
BY_TOKENS |= dict.fromkeys((f"{role}__ppo_max_token_len_per_gpu" for role in ROLES), 60)
SPLIT = {
    "CP2": ((2, 1, 1), split_over(2)),
    "up to CP4": ((4, 1, 1), split_over(4, 16)),
    "up to CP2 of 4 ranks": ((4, 1, 1), split_over(2, 40)),
    "PP2, VPP2, up to CP2": ((4, 1, 2), split_over(2, 40, 2)),
    "DP2, as tries": (DP2, AS_TRIES),
    "CP2, as tries, by tokens": ((2, 1, 1), split_over(2) | AS_TRIES | BY_TOKENS),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize("task", [REWARD, DPO])
def test_split_sequences(task: str, layout: str, policy_path: str, reward_path: str) -> None:
    """Responses to one prompt in one pass over ranks that are its own. Would not catch passes that are all cut alike,
    which tests/parallel/test_context_packs.py does."""
    path, loss, sizes = (reward_path if task == REWARD else policy_path), *OF_TASK[task]
    found = run_layout(path, task, loss, sizes, *SPLIT[layout][:1], **SPLIT[layout][1])
    assert_same(found, one_process(path, task), NAMES[task], path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("balance", ["none", "losses"])
@pytest.mark.parametrize("task", [REWARD, DPO])
def test_expert_parallel_equals_one_process(task: str, balance: str, tmp_path) -> None:
    """EP2 over DP2, with losses of routers or none; the reward model starts from a language model. Would not catch a
    loss that one process shares, which `test_balanced_routers.py` has by its formula."""
    path, name = save_qwen3_moe(tmp_path), NAMES[task]
    losses = {f"{role}__megatron__{key}": value for role in ROLES for key, value in LOSSES.items()}
    losses = losses if balance == "losses" else {}
    expert = dict.fromkeys((f"{key}__megatron__expert_model_parallel_size" for key in ROLES), 2)
    alone = run_layout(path, task, *OF_TASK[task], (1, 1, 1), **losses)
    assert_same(run_layout(path, task, *OF_TASK[task], DP2, **expert, **losses), alone, name, path)
    assert (f"{name}/moe_aux_loss/mean" in alone[0][name]) == bool(losses)
