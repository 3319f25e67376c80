"""Kimi-K2, GLM-4.7-Flash, Gemma-4: gradients, updates in several layouts, tokens and log-probs around an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from rollout_checks import GREEDY, RANDOM, hugging_face_greedy, logprob_difference, round_trip, tokens
from safetensors.torch import load_file
from sweeps import marks_of
from test_expert_bias_updates import updated
from test_layout_parity import NUM_ROWS, assert_same, relative, run_layout, whole_weights
from test_moe_parity import EP2, ETP1, SP, hugging_face_gradients, policy_gradients
from tiny_gemma4 import save_gemma4, save_gemma4_with_keys_for_values
from tiny_glm import save_glm4_moe_lite
from tiny_models import random_batch, run_config
from tiny_moonshot import save_kimi_k2

from megatron_rl.checkpoint.export_saved import export_saved
from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.controller.lifecycle import copy_model_files

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

GEMMA4 = (save_gemma4, save_gemma4_with_keys_for_values)
SAVED = (save_kimi_k2, save_glm4_moe_lite, *GEMMA4)
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
FULL = {
    "override_transformer_config__recompute_granularity": "full",
    "override_transformer_config__recompute_method": "uniform",
    "override_transformer_config__recompute_num_layers": 1,
}
LAYOUTS = {
    save_glm4_moe_lite: {"TP2, PP2, EP2, ETP1": ((4, 2, 2), SP | EP2 | ETP1)},
    save_gemma4: {"TP2, PP2, VPP2, SP": ((4, 2, 2), SP | VPP2), "PP2, made again": ((2, 1, 2), FULL)},
    save_gemma4_with_keys_for_values: {"TP2, PP2, SP": ((4, 2, 2), SP), "DP2, PP2": ((4, 1, 2), {})},
}
LOG_PROB_BOUND = 5e-5


def swept(models: Iterable[Callable[..., str]]) -> list:
    """Parameters: keys that are values, which are new, exhaustive; the others weekly, whose parts other files have."""
    weekly = {*SAVED} - {save_gemma4_with_keys_for_values}
    return [pytest.param(save, marks=marks_of(save, weekly=weekly)) for save in models]


@pytest.mark.parametrize("save", swept(GEMMA4))
def test_gradients_equal_those_of_transformers(save, tmp_path) -> None:
    """Every parameter's, before clipping, in one process, with a window shorter than rows. Would not catch errors of
    splitting: layouts do.
    """
    path = save(tmp_path)
    ours = whole_weights(run_ranks(1, policy_gradients, run_config(path, 1, 1)), "actor", path)
    expected = hugging_face_gradients(path)
    assert ours.keys() - {"lm_head.weight"} == expected.keys() - {"lm_head.weight"}
    assert all(gradient.any() for gradient in ours.values())
    assert max(relative(gradient, expected[name]) for name, gradient in ours.items()) < 1e-5


@pytest.mark.parametrize("save", swept(LAYOUTS))
def test_layouts_equal_one_process_of_relatives(save, tmp_path) -> None:
    """Scores, gradient norms and an update, of actor and critic. Would not catch an error in one process, too."""
    path = save(tmp_path)
    reference = run_layout(path, 1, 1, 1)
    for ranks, sizes in LAYOUTS[save].values():
        assert_same(run_layout(path, *ranks, **sizes), reference, path)


def around_an_update(config, exported: Path) -> list[tuple[list[list[int]], float | None]]:
    """Greedy answers before an update and after, each with the largest log-prob difference to the trainer over samples;
    the updated model as a folder.
    """
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")

    def seen() -> tuple[list[list[int]], float | None]:
        greedy, _ = round_trip(worker, GREEDY)
        drawn, _ = round_trip(worker, RANDOM)
        return tokens(greedy), logprob_difference(worker, drawn)

    before = seen()
    rows = random_batch(NUM_ROWS)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    rows.add(old_log_probs=rows["advantages"].clone())
    worker.roles["actor"].update(rows.read_by(ACTOR_UPDATE))
    after = seen()
    worker.roles["actor"].export_hf(exported)
    return [before, after]


@pytest.mark.parametrize("save", swept(SAVED))
def test_tokens_and_log_probs_around_an_update(save, tmp_path) -> None:
    """TP2 x PP2: greedy answers are those of transformers on what goes in and what comes out; log-probs of samples are
    within 5e-5 of the trainer's. Would not catch a rare tie.
    """
    path = save(tmp_path / "model")
    keys = {"actor_rollout_ref__actor__optim__lr": 0.02, "actor_rollout_ref__actor__megatron__sequence_parallel": True}
    ranks = run_ranks(4, around_an_update, run_config(path, 2, 2, **keys), tmp_path / "exported")
    expected = [hugging_face_greedy(path), hugging_face_greedy(str(tmp_path / "exported"))]
    assert all([greedy for greedy, _ in rank] == expected for rank in ranks)
    assert expected[0] != expected[1]
    differences = [far for rank in ranks for _, far in rank if far is not None]
    assert len(differences) == 4 and max(differences) < LOG_PROB_BOUND


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_adapters_on_two_sizes_of_heads(tmp_path) -> None:
    """TP2 x PP2: tokens and log-probs before and after an update of adapters alone. Would not catch a rare tie."""
    path = save_gemma4(tmp_path / "model")
    keys = {"actor_rollout_ref__actor__optim__lr": 0.02, "actor_rollout_ref__model__lora__rank": 8}
    ranks = run_ranks(4, around_an_update, run_config(path, 2, 2, **keys), tmp_path / "exported")
    expected = [hugging_face_greedy(path), hugging_face_greedy(str(tmp_path / "exported"))]
    assert all([greedy for greedy, _ in rank] == expected for rank in ranks) and expected[0] != expected[1]
    assert max(far for rank in ranks for _, far in rank if far is not None) < LOG_PROB_BOUND


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_wide_heads_are_saved_resumed_and_exported(tmp_path) -> None:
    """Saved in TP2 x PP2 and resumed in one process: the same greedy answers; exported without ranks: the bytes of the
    live export, scales of layers included. Would not catch moments of Adam.
    """
    path = save_gemma4_with_keys_for_values(tmp_path / "model")
    keys = {"actor_rollout_ref__actor__optim__lr": 0.02}
    ranks = run_ranks(4, updated, run_config(path, 2, 2, **keys), tmp_path / "cut")
    saved = tmp_path / "cut" / "saved"
    copy_model_files({"actor": path}, saved)
    (whole,) = run_ranks(1, updated, run_config(path, 1, 1, **keys), tmp_path / "whole", saved)
    assert all(rank["greedy"] == whole["greedy"] for rank in ranks)
    export_saved(saved, "actor", tmp_path / "exported")
    live, alone, resumed = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "cut" / "exported", tmp_path / "exported", tmp_path / "whole" / "exported")
    )
    assert live.keys() == alone.keys() == resumed.keys() == load_file(Path(path, "model.safetensors")).keys()
    assert all(torch.equal(live[name], other[name]) for name in live for other in (alone, resumed))
    assert "model.layers.1.layer_scalar" in live and "model.layers.1.self_attn.v_proj.weight" not in live
