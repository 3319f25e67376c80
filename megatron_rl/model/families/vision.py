"""What a family's models do with images, as data: the tower, the tokens that stand for images, rotary sections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.model.families.family import Tower
from megatron_rl.model.families.registry import inside_of
from megatron_rl.model.families.rope import rope_of
from megatron_rl.model.families.tower_sizes import TowerSizes

TOKEN_KEYS = ("image_token_id", "video_token_id")
"""config.json's names of the tokens that stand for images and videos."""


@dataclass(frozen=True)
class ImageForm:
    """How one model reads images.

    token: the id that stands for a part of an image. unsampled: ids that no policy may sample, as an image or video
    would be missing behind them. merge: merge x merge patches make one token. levels: how many of the first layers add
    features of their own to their output. sections: numbers of rotary angles of time, height and width. alternating:
    angles belong to these in turn; else one after the other. tower: sizes of the module that makes features.
    """

    token: int
    unsampled: tuple[int, ...]
    merge: int
    patch_size: int
    temporal_patch_size: int
    channels: int
    levels: int
    sections: tuple[int, ...]
    alternating: bool
    tower: TowerSizes

    @property
    def num_params(self) -> int:
        """Parameters of the tower."""
        return self.tower.num_params

    @property
    def patch_values(self) -> int:
        """How many numbers a patch has, over its channels and neighbouring frames."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    def axes(self, num_angles: int) -> tuple[int, ...]:
        """Return for each rotary angle the axis by whose position it turns: 0 time, 1 height, 2 width."""
        return axes_of_angles(self.sections, self.alternating, num_angles)


def axes_of_angles(sections: Sequence[int], alternating: bool, num_angles: int) -> tuple[int, ...]:
    """Return the axis of each rotary angle. sections: how many angles each axis has.

    With `alternating` angles belong to time, height and width in turn, as long as the last two have some left.
    """
    if not alternating:
        return tuple(axis for axis, number in enumerate(sections) for _ in range(number))
    axes = [0] * num_angles
    for axis in (1, 2):
        for angle in range(axis, 3 * sections[axis], 3):
            axes[angle] = axis
    return tuple(axes)


def tower_of(architectures: Iterable[str] | None) -> Tower | None:
    """The tower next to a language model; None: it reads text alone."""
    inside = inside_of(architectures)
    return None if inside is None else inside.tower


def image_form(settings: Mapping[str, Any]) -> ImageForm | None:
    """How the model of a config.json reads images, from `text_settings` of it; None: its family has no tower."""
    tower = tower_of(settings.get("architectures"))
    if tower is None:
        return None
    vision = settings.get("vision_config")
    given = dict(tower.defaults)
    if isinstance(vision, Mapping):  # transformers refuses settings of other types
        given |= {key: value for key, value in vision.items() if isinstance(value, int | list | tuple)}
    image, video = (settings.get(key, absent) for key, absent in zip(TOKEN_KEYS, tower.ids, strict=True))
    sections = rope_of(settings).get("mrope_section") or tower.sections
    return ImageForm(
        image,
        (image, video),
        given["spatial_merge_size"],
        given["patch_size"],
        given["temporal_patch_size"],
        given.get("in_channels", given.get("in_chans", 3)),
        len(given["deepstack_visual_indexes"]) if tower.has_levels else 0,
        tuple(sections) if isinstance(sections, list | tuple) else tower.sections,
        tower.alternating,
        TowerSizes.of(tower, given),
    )
