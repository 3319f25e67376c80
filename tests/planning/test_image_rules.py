"""What a plan counts of a vision tower, and which layouts it refuses where rows have images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import run_config
from vision_folders import save_qwen3_5_vl_folder, save_qwen3_vl_folder, save_qwen25_vl_folder

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.roles import Placement
from megatron_rl.model.tower import build_tower
from megatron_rl.planning.folder_checks import read_model_folder
from megatron_rl.planning.image_rules import image_problems
from megatron_rl.planning.memory import planned_memory

READS = {"data__image_key": "images"}


@pytest.mark.parametrize("save", [save_qwen25_vl_folder, save_qwen3_vl_folder, save_qwen3_5_vl_folder])
def test_parameters_of_a_tower_are_those_of_transformers(save, tmp_path) -> None:
    folder = ModelFolder(save(tmp_path / "model"))
    built = build_tower(folder.hf_config, torch.float32, torch.device("meta"))
    assert folder.model.images.num_params == sum(parameter.numel() for parameter in built.parameters())


def test_a_tower_is_in_the_plan_where_rows_have_images(tmp_path) -> None:
    """Would not catch a tower on ranks whose features do not count."""
    path = save_qwen3_vl_folder(tmp_path / "model")
    size = 4 * ModelFolder(path).model.images.num_params
    for keys, expected in ((READS, size), ({}, None)):
        phases = planned_memory(run_config(path, 1, 1, **keys))["global_pool"]
        assert {held.get("actor vision tower") for held in phases.values()} == {expected}


def test_layers_that_read_features_must_be_in_the_first_chunk(tmp_path) -> None:
    path = save_qwen3_vl_folder(tmp_path / "model")
    sizes, _ = read_model_folder("actor_rollout_ref.model.path", ModelFolder(Path(path)))
    assert sizes is not None and sizes.model is not None and sizes.model.images is not None
    three = replace(sizes, model=replace(sizes.model, images=replace(sizes.model.images, levels=3)))
    for keys, model, expected in ((READS, sizes, 0), (READS, three, 1), ({}, three, 0)):
        config = run_config(path, 1, 2, **keys)
        found = list(image_problems(config, Placement.of(config).pools.values(), [model]))
        assert len(found) == expected
        if found:
            assert "must leave the first 3 layers of" in str(found[0]) and "it has 2" in str(found[0])
