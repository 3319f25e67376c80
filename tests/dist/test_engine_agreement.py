"""Engine and trainer have the same log-probs before an update and after, and packed rows are padded ones.

Each family is in the sweeps once in a layout that cuts it in the trainer; the other layouts are weekly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from rollout_checks import RANDOM, logprob_difference, round_trip
from sweeps import WEEKLY, marks_of
from test_layout_parity import NUM_ROWS
from tiny_gpt_oss import save_gpt_oss
from tiny_minimax import save_minimax
from tiny_models import random_batch, run_config
from tiny_qwen3_5 import save_qwen3_5, save_qwen3_5_moe, save_qwen3_next

from megatron_rl.columns import ACTOR_UPDATE, SCORING
from megatron_rl.controller.report import hf_sampled_logits

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

SAVED: tuple[Callable[..., str], ...] = (save_gpt_oss, save_minimax)
ROLLOUT_TP = "actor_rollout_ref__rollout__tensor_model_parallel_size"
SP = {"actor_rollout_ref__actor__megatron__sequence_parallel": True}
LAYOUTS = {
    "one process": ((1, 1, 1), {}),
    "TP2, PP2, SP": ((4, 2, 2), SP | {ROLLOUT_TP: 2}),
    "TP2, SP, rollout TP1": ((2, 2, 1), SP),
    "DP2, rollout TP2": ((2, 1, 1), {ROLLOUT_TP: 2}),
}

CASES = [(save, layout) for save in SAVED for layout in LAYOUTS]
SWEPT = ((save_gpt_oss, "TP2, PP2, SP"), (save_minimax, "TP2, SP, rollout TP1"))


def padded_logits(config) -> torch.Tensor | None:
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    return worker.roles["actor"].sampled_logits(random_batch(NUM_ROWS).read_by(SCORING))


@pytest.mark.parametrize(
    "save", [pytest.param(save_gpt_oss, marks=pytest.mark.exhaustive), pytest.param(save_minimax, marks=WEEKLY)]
)
def test_padded_rows_have_the_logits_of_packed_ones(save, tmp_path) -> None:
    """Both within 2e-5 of transformers. Would not catch rows that are longer than these."""
    path = save(tmp_path)
    expected = hf_sampled_logits(Path(path), random_batch(NUM_ROWS).read_by(SCORING))
    for packed in (True, False):
        config = run_config(path, 1, 1, actor_rollout_ref__model__use_remove_padding=packed)
        (logits,) = run_ranks(1, padded_logits, config)
        assert (logits - expected).abs().max() < 2e-5


def differences(config) -> list[float | None]:
    """Largest log-prob difference of engine and trainer over samples, before an update and after."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    found = [logprob_difference(worker, round_trip(worker, RANDOM)[0])]
    rows = random_batch(NUM_ROWS)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    rows.add(old_log_probs=rows["advantages"].clone())
    worker.roles["actor"].update(rows.read_by(ACTOR_UPDATE))
    return [*found, logprob_difference(worker, round_trip(worker, RANDOM)[0])]


@pytest.mark.parametrize(
    ("save", "layout"), [pytest.param(*case, marks=marks_of(case, weekly=set(CASES) - {*SWEPT})) for case in CASES]
)
def test_engine_and_trainer_agree_before_and_after_an_update(save, layout, tmp_path) -> None:
    """Log-probs within 5e-5, with what is cut in training cut otherwise in generation. Would not catch a rare tie."""
    (world_size, tp_size, pp_size), keys = LAYOUTS[layout]
    config = run_config(save(tmp_path), tp_size, pp_size, actor_rollout_ref__actor__optim__lr=0.02, **keys)
    found = [rank for rank in run_ranks(world_size, differences, config) if rank[0] is not None]
    assert found and max(max(rank) for rank in found) < 5e-5


@pytest.mark.parametrize(
    "save",
    [
        pytest.param(save_qwen3_5, marks=pytest.mark.exhaustive),
        *(pytest.param(save, marks=WEEKLY) for save in (save_qwen3_5_moe, save_qwen3_next)),
    ],
)
def test_engine_and_trainer_agree_in_bfloat16(save, tmp_path) -> None:
    """Layers of the gated delta rule around an update, as bfloat16 rounds; with experts rounding may choose another one
    for a token. Would not catch what only a GPU's kernels do.
    """
    # vLLM's kernels for bfloat16 on CPUs want sizes that are multiples of 32.
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 64}
    experts = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    path = save(tmp_path, **sizes, **({} if save is save_qwen3_5 else experts))
    config = run_config(path, 1, 1, actor_rollout_ref__actor__megatron__dtype="bfloat16")
    (found,) = run_ranks(1, differences, config)
    most = 0.3 if save is save_qwen3_5 else 1.0
    assert all(difference is not None and 1e-5 < difference < most for difference in found), found
