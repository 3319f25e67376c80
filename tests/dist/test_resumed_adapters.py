"""Adapters that were saved and loaded go on as if they had never stopped, in the same layout and in another.

`test_resumed_roles.py` has the argument: a checkpoint has whole tensors, here of adapters and of the critic's head.
"""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from test_resumed_roles import metrics_of, train
from tiny_models import run_config, save_llama, save_qwen3_moe
from tiny_qwen3_5 import save_qwen3_5

from megatron_rl.checkpoint.saved_tensors import SavedTensors

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

ADAPTERS = {f"{group}__model__lora__rank": 6 for group in ("actor_rollout_ref", "critic")}
ADAPTERS |= {"actor_rollout_ref__actor__optim__lr": 1e-3, "critic__optim__lr": 1e-3}
TP2, PP2, ONE = (2, 2, 1), (2, 1, 2), (1, 1, 1)
BF16 = {"actor_rollout_ref__actor__megatron__dtype": "bfloat16"}

EP2 = {
    f"{group}__megatron__{key}": value
    for group in ("actor_rollout_ref__actor", "critic")
    for key, value in (
        ("sequence_parallel", True),
        ("expert_model_parallel_size", 2),
        ("expert_tensor_parallel_size", 1),
    )
}


def config_of(path: str, layout: tuple[int, int, int], **keys):
    return run_config(path, *layout[1:], **ADAPTERS, **keys)


@pytest.mark.parametrize(
    ("layout", "keys"),
    [pytest.param(TP2, {}, marks=pytest.mark.exhaustive), pytest.param(PP2, BF16, marks=pytest.mark.exhaustive)],
    ids=["TP2", "PP2-bf16"],
)
def test_same_layout_is_bit_equal(layout, keys, tmp_path) -> None:
    """Four steps with a save after the second; the last two once more, from there, in new processes.

    What is saved has no weight of the base. Would not catch what both runs lose alike.
    """
    config = config_of(save_llama(tmp_path / "model"), layout, **keys)
    whole = run_ranks(layout[0], train, config, 1, 4, None, tmp_path / "saved", 2)
    resumed = run_ranks(layout[0], train, config, 3, 4, tmp_path / "saved")
    assert metrics_of(resumed) == metrics_of(whole)[2:]
    for ours, theirs in zip(resumed, whole, strict=True):
        for role in ("actor", "critic"):
            assert ours["state"][role].keys() == theirs["state"][role].keys()
            assert all(torch.equal(data, theirs["state"][role][name]) for name, data in ours["state"][role].items())
    for role, others in (("actor", set()), ("critic", {"score.weight"})):
        names = SavedTensors(tmp_path / "saved" / role).weights
        assert {name for name in names if ".lora_" not in name} == others


@pytest.mark.parametrize(
    ("save_model", "keys"),
    [
        (save_llama, {}),
        pytest.param(save_qwen3_moe, EP2, marks=pytest.mark.exhaustive),
        pytest.param(save_qwen3_5, {}, marks=pytest.mark.exhaustive),
    ],
    ids=["dense", "experts", "sections of one matrix"],
)
def test_other_layouts_go_on_alike(save_model, keys, tmp_path) -> None:
    """TP2 for 2 steps, PP2 for 2, one process for 2, against TP2 for all 6: within 1e-5 in every metric. Experts and
    their adapters are at first on both ranks, half of them on each.

    Would not catch a wrong adapter that no metric depends on.
    """
    path, first, second = save_model(tmp_path / "model"), tmp_path / "first", tmp_path / "second"
    expected = metrics_of(run_ranks(2, train, config_of(path, TP2, **keys), 1, 6, None, first, 2))
    ours = [
        *metrics_of(run_ranks(2, train, config_of(path, PP2), 3, 4, first, second)),
        *metrics_of(run_ranks(1, train, config_of(path, ONE), 5, 6, second)),
    ]
    for number, metrics in enumerate(ours):
        assert metrics == pytest.approx(expected[2 + number], rel=1e-5, abs=1e-5), number
    assert expected[1] != pytest.approx(expected[2], rel=1e-3)
