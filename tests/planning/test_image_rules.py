"""What a plan counts of a vision tower, and which layouts it refuses where rows have images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from task_cases import task_config
from tiny_models import run_config
from torch.utils.flop_counter import FlopCounterMode
from vision_folders import save_qwen3_5_vl_folder, save_qwen3_vl_folder, save_qwen25_vl_folder

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.roles import Placement
from megatron_rl.config.tasks import WITHOUT_ROLLOUT
from megatron_rl.model.tower import build_tower, features_of
from megatron_rl.planning.folder_checks import read_model_folder
from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.image_rules import image_problems
from megatron_rl.planning.memory import plan_stages, planned_memory
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.run_plan import plan_of

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


@pytest.mark.parametrize("save", [save_qwen25_vl_folder, save_qwen3_vl_folder, save_qwen3_5_vl_folder])
def test_flops_of_a_pass_over_an_image_are_those_that_torch_counts(save, tmp_path) -> None:
    """4 x 8 patches; the windows of Qwen2.5-VL have 16. Attention that makes its scores is counted as products."""
    folder = ModelFolder(save(tmp_path / "model"))
    form = folder.model.images
    module = build_tower(folder.hf_config, torch.float32, torch.device("cpu"))
    module.config._attn_implementation = "eager"
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        module(torch.zeros(32, form.patch_values), grid_thw=torch.tensor([[1, 4, 8]]))
    planned = form.tower.matrix_flops(32) + form.tower.attention_flops(32)
    assert planned == pytest.approx(counted.get_total_flops(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("save", [save_qwen25_vl_folder, save_qwen3_vl_folder])
def test_bytes_that_a_trained_tower_keeps_are_those_that_torch_keeps(save, dtype, tmp_path) -> None:
    """16 x 16 patches; tables of angles, which the plan leaves out, are some percent of so narrow a tower."""
    folder = ModelFolder(save(tmp_path / "model"))
    form = folder.model.images
    module = build_tower(folder.hf_config, dtype, torch.device("cpu")).requires_grad_()
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # held, so that no other one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features_of(module, torch.zeros(256, form.patch_values), torch.tensor([1, 16, 16]))
    size = sum(storage.nbytes() for number, storage in kept.items() if number not in own)
    assert form.tower.kept_bytes(256, dtype.itemsize) == pytest.approx(size, rel=0.04)


def test_a_trained_tower_is_in_the_update_of_the_first_stage(tmp_path) -> None:
    """Its parameters, their optimizer state, its backward pass and seconds; the frozen one is there for a reference.

    Would not catch a kernel with memory of its own.
    """
    path = save_qwen3_vl_folder(tmp_path / "model")
    trained = {"actor_rollout_ref__actor__megatron__freeze_vision_model": False}
    large = READS | {"data__mm_processor_kwargs__max_pixels": 1 << 20, "data__max_prompt_length": 1024}
    large["actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"] = 1
    whole, frozen = (plan_of(run_config(path, 1, 2, **large, **keys), load_hardware("h100")) for keys in (trained, {}))
    size = 4 * ModelFolder(path).model.images.num_params
    first, last = (stage.phases["update_actor"] for stage in plan_stages(whole.models))
    before = plan_stages(frozen.models)[0].phases["update_actor"]
    assert first["actor parameters"] - before["actor parameters"] == pytest.approx(size, abs=4 * 64 * 100)
    assert first["tower's backward"] > 0 and "tower's backward" not in last
    assert whole.seconds["update_actor"] > frozen.seconds["update_actor"]
    read = whole.models.placement.num_towers / frozen.models.placement.num_towers
    assert whole.seconds["images"] / frozen.seconds["images"] == pytest.approx(read, rel=0.2)


def test_images_of_a_step_are_planned_by_the_limits_of_pixels_and_prompts(tmp_path) -> None:
    """One image in each prompt; a tower on the last stage of each data-parallel rank reads one image after another."""
    path = save_qwen3_vl_folder(tmp_path / "model")  # 16 tokens an image at most, of 4 patches of 16 x 16
    for keys, tokens in (({}, 16), ({"data__mm_processor_kwargs__max_pixels": 5 * 1024}, 5)):
        config = run_config(path, 1, 2, **READS, **keys)
        plan = plan_of(config, load_hardware("h100"))
        images = plan.as_json()["images"]
        num_prompts = config.batch_sizes.num_prompts
        rows = num_prompts * tokens
        assert (images["num_images"], images["tokens"], images["patches"]) == (num_prompts, tokens, 4 * tokens)
        assert images["feature_bytes"] == rows * 2 * 128 * 4 and images["patch_bytes"] == 4 * rows * 1536 * 4
        assert plan.seconds["images"] > 0 and plan.time.pools["images"] == ("global_pool",)
        stages = plan_stages(plan.models)
        held = [stage.phases["images"].get("image pass", 0) for stage in stages]
        assert held[0] == 0 and held[1] >= rows // num_prompts * (4 * 1536 + 256) * 4
    text = plan_of(run_config(path, 1, 2), load_hardware("h100"))
    assert "images" not in text.as_json() and "images" not in text.seconds


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


@pytest.mark.parametrize("stage", WITHOUT_ROLLOUT)
def test_a_task_that_does_not_generate_trains_no_tower(stage) -> None:
    """Would not catch a critic's tower, which no run trains."""
    trained = {"actor_rollout_ref__actor__megatron__freeze_vision_model": False}
    for keys, expected in ((trained, 1), ({}, 0)):
        found = [str(one) for one in preflight(task_config("unused", stage, 1, 1, **READS, **keys), config_only=True)]
        assert len([one for one in found if f"{stage} reads images by the folder's tower" in one]) == expected
