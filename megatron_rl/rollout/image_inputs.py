"""Images in vLLM by their features, which the trainer's tower has computed: no tower, no processor and no tokenizer.

    Start.images --> vLLM's processed input --> its encoder cache, by digest --> rows of the embedding

vLLM takes prompts that are processed already, and features instead of pixels. It wants a processor all the same, to
learn how many tokens an image may have, and a tower, whose dtype and merge size it reads. Both have stand-ins here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseProcessingInfo

from megatron_rl.remote_columns import RemoteColumn
from megatron_rl.rollout.slices import ImageInput, Start

IMAGE = "image"
"""vLLM's name of the kind of input."""


class FeatureInfo(BaseProcessingInfo):
    """What vLLM asks of a model's processor, answered without one."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Any number of images in a prompt, and nothing else."""
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """An image may fill the longest sequence, so that any image of a prompt fits into the encoder cache."""
        return {IMAGE: seq_len}


class NoProcessor:
    """Stands for a model's processor: prompts are processed before they come here."""

    def __init__(self, info: FeatureInfo, dummy_inputs: object) -> None:
        self.info = info


class AbsentTower(torch.nn.Module):
    """Stands for the tower of an engine that is given features; has what vLLM reads of a tower next to its output."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.dtype: torch.dtype = tower.dtype
        self.spatial_merge_size: int = tower.spatial_merge_size
        self.out_hidden_size: int = tower.out_hidden_size

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Raise RuntimeError."""
        raise RuntimeError("the rollout engine has no tower: images come to it as features, not as pixels")


def reading_features(model_class: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return vLLM's class of a model that reads images, changed to read their features alone; it has no tower."""

    class ReadsFeatures(model_class):  # type: ignore[misc, valid-type]
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            for name in self._tower_model_names:  # of parameters on the meta device
                setattr(self, name, AbsentTower(getattr(self, name)))

    ReadsFeatures.__name__ = model_class.__name__
    ReadsFeatures.without_features = model_class
    register: Any = MULTIMODAL_REGISTRY.register_processor
    changed: type[torch.nn.Module] = register(NoProcessor, info=FeatureInfo, dummy_inputs=lambda info: None)(
        ReadsFeatures
    )
    return changed


def prompt_of(start: Start, cache_salt: str, read: dict[str, MultiModalKwargsItem]) -> dict[str, Any]:
    """vLLM's prompt of a request; with images its processed input.

    read: `ImageInput.key` -> what vLLM is given of an image; images that are not in it are read, and added.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": list(start.token_ids), "cache_salt": cache_salt}
    if not start.images:
        return prompt
    for image in start.images:
        if image.key not in read:
            read[image.key] = item_of(image)
    pieces, keys = [image.piece for image in start.images], [image.key for image in start.images]
    return prompt | {
        "type": "multimodal",
        "mm_kwargs": MultiModalKwargsItems({IMAGE: [read[key] for key in keys]}),
        "mm_hashes": {IMAGE: keys},
        "mm_placeholders": {IMAGE: [PlaceholderRange(offset=piece.first, length=piece.num_tokens) for piece in pieces]},
    }


def item_of(image: ImageInput) -> MultiModalKwargsItem:
    """What vLLM is given of an image: its features [num_tokens, H * (1 + D)] and its grid.

    Raises ValueError where there are not as many features as placeholders.
    """
    features = RemoteColumn.of_pieces([[image.features]]).values()
    if len(features) != image.piece.num_tokens:
        raise ValueError(
            f"image {image.piece.digest} has {len(features)} features for {image.piece.num_tokens} placeholders"
        )
    fields = {
        "image_embeds": MultiModalFieldConfig.flat_from_sizes(IMAGE, torch.tensor([len(features)])),
        "image_grid_thw": MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
    }
    given: Any = {"image_embeds": features, "image_grid_thw": torch.tensor([image.piece.grid])}
    item: MultiModalKwargsItem = MultiModalKwargsItems.from_hf_inputs(given, fields)[IMAGE][0]
    return item


def without_tokens(drafts: Sequence[Sequence[int]], tokens: Iterable[int]) -> list[list[int]]:
    """Return draft tokens, each up to the first of `tokens`, which no request can sample."""
    barred = set(tokens)
    kept = []
    for draft in drafts:
        stop = next((place for place, token in enumerate(draft) if token in barred), len(draft))
        kept.append(list(draft[:stop]))
    return kept
