"""Biases that follow the load of experts: the same in every layout, in generation, checkpoints and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_keys import EP2, ETP1, SP
from ranks import run_ranks
from rollout_checks import hugging_face_greedy
from safetensors.torch import load_file
from saved_updates import updated
from sweeps import WEEKLY
from task_cases import NAMES, answer_batch, task_config, token_batch
from tiny_minimax import save_minimax
from tiny_models import run_config, save_glm4_moe

from megatron_rl.checkpoint.export_saved import export_saved
from megatron_rl.config.tasks import DPO, REWARD, SFT
from megatron_rl.controller.lifecycle import copy_model_files

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300), pytest.mark.exhaustive]

OPTIONS = "override_transformer_config__moe_router_"
BIASED = {f"{OPTIONS}enable_expert_bias": True, f"{OPTIONS}bias_update_rate": 0.3}
BIAS = ".e_score_correction_bias"


def config_of(path: str, tp_size: int = 1, pp_size: int = 1, **sizes):
    """A learning rate of 0: what changes are biases alone."""
    keys = {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in (BIASED | sizes).items()}
    rates = {"actor_rollout_ref__actor__optim__lr": 0.0, "actor_rollout_ref__actor__optim__weight_decay": 0.0}
    return run_config(path, tp_size, pp_size, **keys, **rates)


def moved_by(config, folder: Path, batch, *arguments) -> dict:
    """One update of a task's role: its biases before and after, and its metrics; what it exports has them."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    name = NAMES[config.trainer.stage]
    worker.build(name)
    role = worker.roles[name]
    rows = torch.arange(len(batch)).tensor_split(worker.groups.grid.dp_size)[worker.groups.dp_rank]
    before = role.checkpoint.bias.whole()
    update = role.update_preferences if config.trainer.stage == DPO else role.update
    metrics = update(batch[rows], *arguments)
    role.export_hf(folder)
    return {"before": before, "after": role.checkpoint.bias.whole(), "metrics": metrics}


@pytest.mark.parametrize("task", NAMES)
def test_biases_follow_in_tasks(task: str, tmp_path) -> None:
    """In one process, over EP2 and over two stages alike, by the rate or not at all, and by the sign of the load: a
    layer's busiest expert goes down. Would not catch a load that all layouts count wrongly."""
    path = save_glm4_moe(tmp_path / "model")
    roles = ("actor_rollout_ref__actor", "critic")
    keys = {f"{role}__megatron__{key}": value for role in roles for key, value in BIASED.items()}
    keys |= {"critic__model__path": path, "reward_training__loss": "all_pairs"}
    batch = token_batch() if task == SFT else answer_batch((2,) * 6, score_token=task == REWARD)
    arguments = () if task == SFT else (len(batch),)
    found = {}
    for layout, (ranks, pp_size, ep_size) in {"one": (1, 1, 1), "EP2": (2, 1, 2), "PP2": (2, 2, 1)}.items():
        sizes = {f"{role}__megatron__expert_model_parallel_size": ep_size for role in roles}
        config = task_config(path, task, 1, pp_size, **keys, **sizes)
        found[layout] = run_ranks(ranks, moved_by, config, tmp_path / layout, batch, *arguments)[-1]
    name, one = NAMES[task], found["one"]
    assert one["metrics"][f"{name}/expert_load/max"] > 1
    for bias, before in one["before"].items():
        step = one["after"][bias] - before
        assert set(step.mul(10).round().tolist()) <= {-3.0, 0.0, 3.0} and step.min() < 0 < step.max()
        for layout in ("EP2", "PP2"):
            assert torch.equal(found[layout]["after"][bias], one["after"][bias]), (layout, bias)
            assert torch.equal(biases(tmp_path / layout)[bias], one["after"][bias]), (layout, bias)


def biases(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name.endswith(BIAS)}


@pytest.mark.parametrize(("save", "num_routed"), [(save_glm4_moe, 3), pytest.param(save_minimax, 4, marks=WEEKLY)])
def test_biases_go_everywhere(save, num_routed, tmp_path) -> None:
    """In one process and in two layouts; generation is transformers' with the exported biases; resumed in another
    layout, or exported without ranks, they are what was saved. Would not catch a bias that moves by the wrong sign in
    all.
    """
    path = save(tmp_path / "model")
    layouts = {"one": (1, 1, 1, {}), "EP2": (4, 2, 1, SP | EP2 | ETP1), "PP2": (2, 1, 2, {})}
    found = {}
    for name, (ranks, tp_size, pp_size, sizes) in layouts.items():
        runs = run_ranks(ranks, updated, config_of(path, tp_size, pp_size, **sizes), tmp_path / name)
        found[name] = biases(tmp_path / name / "exported")
        expected = hugging_face_greedy(str(tmp_path / name / "exported"))
        assert all(run["greedy"] == expected for run in runs)
    before = biases(Path(path))
    assert expected != hugging_face_greedy(path), "the biases moved too little to be noticed"
    steps = {name: found["one"][name] - before[name] for name in before}
    assert len(steps) == num_routed
    for name, step in steps.items():
        assert set(step.abs().mul(10).round().tolist()) <= {0.0, 3.0} and step.any()
        assert all(torch.equal(found[layout][name], found["one"][name]) for layout in layouts)
    copy_model_files({"actor": path}, tmp_path / "EP2" / "saved")
    export_saved(tmp_path / "EP2" / "saved", "actor", tmp_path / "offline")
    assert all(torch.equal(tensor, found["one"][name]) for name, tensor in biases(tmp_path / "offline").items())
    resumed = run_ranks(2, updated, config_of(path, 1, 2), tmp_path / "again", tmp_path / "EP2" / "saved")
    assert all(run["greedy"] == expected for run in resumed)
    assert all(torch.equal(tensor, found["one"][name]) for name, tensor in biases(tmp_path / "again/exported").items())
