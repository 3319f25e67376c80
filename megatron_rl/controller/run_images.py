"""Images of a run: what reads them from files, and their tensors for a model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.checkpoint.model_folder import ModelFolder, form_of_images
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.image_processor import ImageForms
from megatron_rl.data.prompt_images import PlaceholderIds, PromptImages
from megatron_rl.errors import ConfigError
from megatron_rl.images import Grid, digest_of_numbers
from megatron_rl.parallel.rank_grid import train_grid
from megatron_rl.records import Batch, row_lengths
from megatron_rl.sampling.image_features import ImageFeatures, ImageRole, PatchesOf, TowerUse


def prompt_images(config: RunConfig, policy: ModelFolder) -> PromptImages | None:
    """Return what reads the images of a run's prompts; None where `data.image_key` is null.

    Raises ConfigError for a model that reads no images, and as `ImageForms.of_folder`.
    """
    data = config.data
    if data.image_key is None:
        return None
    form = form_of_images(policy)
    if form is None:
        names = ", ".join(policy.content.get("architectures") or ["no architecture"])
        raise ConfigError(
            f"data.image_key={data.image_key} is for models that read images, and {policy.key}={policy.given} is a "
            f"{names}; set data.image_key=null, or take a folder of Qwen2.5-VL, Qwen3-VL or Qwen3.5"
        )
    sizes = data.mm_processor_kwargs
    forms = ImageForms.of_folder(policy.path, sizes.min_pixels, sizes.max_pixels, data.image_folder)
    _check_sizes(policy, forms)
    marks = PlaceholderIds(form.token, form.unsampled)
    most = config.actor_rollout_ref.rollout.limit_images
    return PromptImages(data.image_key, forms, marks, most, is_optional=config.has_turns)


def image_features(placement: Placement, images: PromptImages | None, role: ImageRole) -> ImageFeatures | None:
    """Return the features of images by the tower of `role`, the leader; None where rows are text."""
    if images is None:
        return None
    leader = placement.leader
    num_readers = train_grid(placement.pool_of(leader.name).world_size, leader.megatron).dp_size
    use = TowerUse(not leader.trains_tower or placement.scores_beside_policy, leader.trains_tower)
    return ImageFeatures(images.patches, role, num_readers, use=use)


def _check_sizes(policy: ModelFolder, forms: ImageForms) -> None:
    """Raise ConfigError where the image processor of a folder makes other patches than its tower reads."""
    form = form_of_images(policy)
    assert form is not None
    defaults = {"merge_size": 2, "patch_size": 14, "temporal_patch_size": 2}
    tower = {"merge_size": form.merge, "patch_size": form.patch_size, "temporal_patch_size": form.temporal_patch_size}
    for name, read in tower.items():
        made = forms.settings.get(name, defaults[name])
        if made != read:
            raise ConfigError(
                f"{policy.path}: its image processor has {name}={made}, and its tower reads {read} (config.json); "
                "take the two files of one model"
            )


def tensors_of_part(batch: Batch, first: int, patches_of: PatchesOf, token_ids: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a model of transformers for the images of a conversation, {} for one that is text.

    first: the place of its first token among those of all rows end to end. token_ids: int64 [T], its own.
    """
    if "image_pieces" not in batch:
        return {}
    lengths, counts = row_lengths(batch["input_ids"]), row_lengths(batch["image_pieces"])
    numbers = batch.flat("image_pieces").clone()
    numbers[:, 0] += (lengths.cumsum(0) - lengths).repeat_interleave(counts) - first
    pieces = numbers[(numbers[:, 0] >= 0) & (numbers[:, 0] < len(token_ids))].tolist()
    if not pieces:
        return {}
    places = [place for start, number, *_ in pieces for place in range(start, start + number)]
    kinds = torch.zeros_like(token_ids)
    kinds[places] = 1
    images: Sequence[tuple[Grid, torch.Tensor]] = patches_of([digest_of_numbers(low, high) for *_, low, high in pieces])
    return {
        "pixel_values": torch.cat([patches for _, patches in images]),
        "image_grid_thw": torch.tensor([grid for grid, _ in images]),
        "mm_token_type_ids": kinds[None],
    }
