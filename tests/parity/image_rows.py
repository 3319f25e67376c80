"""Rows with images, whose positions have three axes and whose image tokens have features in place of embeddings.

Positions and features are computed from a row alone, before it is cut. Every rank turns the heads of its tokens by the
positions of these; the first stage puts features where its own part of the sequence has image tokens. So each way to
cut a sequence (CP, sequence parallelism) or the layers (PP, chunks) that gives one process's numbers has put all
features once. Equal prompts with different images are among the rows, as are rows of text.

Not exercised: images with several frames; kernels of CUDA.
"""

from __future__ import annotations

from dataclasses import replace

from image_examples import ImagePlainStep, ImageTask, save_qwen3_vl_reward_model
from image_observations import ImageFeatures, ImageGradients, ImageUpdate
from layout_keys import A2A, ALL_GATHER, CP2, FULL, P2P, PADDED, SP, VPP2, of_both
from scenarios import ALWAYS, LONG, Row, Scenario
from sweeps import WEEKLY
from task_observations import TaskUpdate
from vision_folders import (
    save_qwen3_5_moe_vl_folder,
    save_qwen3_5_vl_folder,
    save_qwen3_vl_folder,
    save_qwen3_vl_moe_folder,
    save_qwen25_vl_folder,
)

from megatron_rl.config.tasks import DPO, REWARD, SFT

GRADIENTS, UPDATE, FEATURES = ImageGradients(), ImageUpdate(), ImageFeatures()
TOWER = ImageGradients(name="tower gradients", trains_tower=True)
TOWER_UPDATE = ImageUpdate(name="tower update", trains_tower=True)
TOWER_BEFORE = replace(TOWER, name="tower gradients, images on the first rank", rows=(1, 2, 0, 5))
TOWER_BEHIND = replace(TOWER, name="tower gradients, images on the last rank", rows=(0, 5, 1, 2))
AGAIN = of_both(FULL)
OVERLAPPED = {"override_ddp_config__overlap_grad_reduce": True}
TREE = {"actor_rollout_ref__model__enable_tree_training": True}
IMAGES = tuple(
    Row(Scenario(save, layout, ranks, sizes, keys), observation, when)
    for save, layout, ranks, sizes, keys, observation, when in (
        (save_qwen25_vl_folder, "one process", (1, 1, 1), {}, {}, GRADIENTS, LONG),
        (save_qwen25_vl_folder, "one process, padded", (1, 1, 1), {}, PADDED, GRADIENTS, WEEKLY),
        (save_qwen3_vl_folder, "one process", (1, 1, 1), {}, {}, GRADIENTS, ALWAYS),
        (save_qwen3_vl_folder, "one process, padded", (1, 1, 1), {}, PADDED, GRADIENTS, LONG),
        (save_qwen3_vl_folder, "TP2, PP2, SP, VPP2", (4, 2, 2), SP | VPP2, AGAIN, UPDATE, ALWAYS),
        (save_qwen3_vl_folder, "TP2, SP, padded", (2, 2, 1), SP, PADDED, UPDATE, LONG),
        (save_qwen3_vl_folder, "PP2", (2, 1, 2), {}, {}, UPDATE, WEEKLY),
        (save_qwen3_vl_folder, "DP2", (2, 1, 1), {}, {}, UPDATE, WEEKLY),
        (save_qwen3_vl_folder, "CP2, p2p", (2, 1, 1), CP2 | P2P, {}, UPDATE, LONG),
        (save_qwen3_vl_folder, "CP2, a2a, padded", (2, 1, 1), CP2 | A2A, PADDED, UPDATE, WEEKLY),
        (save_qwen3_vl_folder, "one process, tree", (1, 1, 1), {}, TREE, UPDATE, LONG),
        (save_qwen25_vl_folder, "TP2", (2, 2, 1), {}, {}, UPDATE, WEEKLY),
        (save_qwen25_vl_folder, "PP2, padded", (2, 1, 2), {}, PADDED, UPDATE, WEEKLY),
        (save_qwen3_vl_folder, "TP2xDP2", (4, 2, 1), {}, {}, FEATURES, LONG),
        (save_qwen25_vl_folder, "PP2", (2, 1, 2), {}, {}, FEATURES, WEEKLY),
        # From transformers' own in float64, ours are at most 1.61e-5 and all together 5.6e-6, transformers' in float32
        # 1.73e-5 and 6.7e-6, so both may be 2e-5 apart.
        (save_qwen3_5_vl_folder, "one process", (1, 1, 1), {}, {}, ImageGradients(2e-5), WEEKLY),
        (save_qwen3_5_vl_folder, "TP2, PP2, padded", (4, 2, 2), {}, PADDED, UPDATE, WEEKLY),
        (save_qwen3_5_moe_vl_folder, "one process", (1, 1, 1), {}, {}, GRADIENTS, WEEKLY),
        (save_qwen3_5_moe_vl_folder, "TP2, PP2, SP", (4, 2, 2), SP, {}, UPDATE, LONG),
        (save_qwen3_vl_moe_folder, "one process", (1, 1, 1), {}, {}, GRADIENTS, WEEKLY),
        (save_qwen3_vl_moe_folder, "TP2, PP2, SP", (4, 2, 2), SP, {}, UPDATE, LONG),
        (save_qwen25_vl_folder, "one process", (1, 1, 1), {}, {}, TOWER, WEEKLY),
        (save_qwen3_vl_folder, "one process", (1, 1, 1), {}, {}, TOWER, LONG),
        (save_qwen3_vl_folder, "one process, full", (1, 1, 1), {}, AGAIN, TOWER, WEEKLY),
        (save_qwen3_5_vl_folder, "one process", (1, 1, 1), {}, {}, replace(TOWER, bound=2e-5), WEEKLY),
        (save_qwen25_vl_folder, "TP2", (2, 2, 1), {}, {}, TOWER, WEEKLY),
        (save_qwen3_vl_folder, "TP2, SP", (2, 2, 1), SP, {}, TOWER, WEEKLY),
        (save_qwen3_vl_folder, "PP2", (2, 1, 2), {}, {}, TOWER, WEEKLY),
        (save_qwen3_vl_folder, "DP2", (2, 1, 1), {}, {}, TOWER_BEFORE, LONG),
        (save_qwen25_vl_folder, "DP2", (2, 1, 1), {}, {}, TOWER_BEHIND, WEEKLY),
        (save_qwen3_vl_folder, "DP2, overlapped", (2, 1, 1), OVERLAPPED, {}, TOWER_BEHIND, WEEKLY),
        (save_qwen25_vl_folder, "TP2", (2, 2, 1), {}, {}, TOWER_UPDATE, WEEKLY),
        (save_qwen25_vl_folder, "PP2", (2, 1, 2), {}, {}, TOWER_UPDATE, WEEKLY),
        (save_qwen3_vl_folder, "TP2, PP2, SP, VPP2", (4, 2, 2), SP | VPP2, AGAIN, TOWER_UPDATE, LONG),
        (save_qwen3_vl_folder, "TP2", (2, 2, 1), {}, {}, TOWER_UPDATE, WEEKLY),
        (save_qwen3_vl_folder, "PP2, padded", (2, 1, 2), {}, PADDED, TOWER_UPDATE, WEEKLY),
        (save_qwen3_vl_folder, "CP2", (2, 1, 1), CP2 | P2P, {}, TOWER_UPDATE, WEEKLY),
        (save_qwen3_vl_folder, "DP2, overlapped", (2, 1, 1), OVERLAPPED, {}, TOWER_UPDATE, WEEKLY),
        (save_qwen3_5_moe_vl_folder, "TP2, PP2, SP", (4, 2, 2), SP, {}, TOWER_UPDATE, WEEKLY),
        (save_qwen25_vl_folder, "CP2, all_gather", (2, 1, 1), CP2 | ALL_GATHER, {}, UPDATE, WEEKLY),
    )
)
TUNED, RANKED, PREFERRED = ImageTask(SFT), ImageTask(REWARD, "all_pairs"), ImageTask(DPO, "dpo")
IMAGE_TASKS = tuple(
    Row(Scenario(save, layout, ranks, keys=keys), observation, when)
    for save, layout, ranks, keys, observation, when in (
        (save_qwen3_vl_folder, "one process", (1, 1, 1), {}, ImagePlainStep(TUNED), LONG),
        (save_qwen3_vl_folder, "one process", (1, 1, 1), {}, ImagePlainStep(PREFERRED), LONG),
        (save_qwen3_vl_reward_model, "one process", (1, 1, 1), {}, ImagePlainStep(RANKED), LONG),
        (save_qwen3_vl_folder, "TP2, PP2, packed", (4, 2, 2), {}, TaskUpdate(TUNED), WEEKLY),
        (save_qwen3_vl_folder, "TP2, PP2, packed", (4, 2, 2), {}, TaskUpdate(PREFERRED), LONG),
        (save_qwen3_vl_reward_model, "TP2xDP2", (4, 2, 1), {}, TaskUpdate(RANKED), WEEKLY),
    )
)
