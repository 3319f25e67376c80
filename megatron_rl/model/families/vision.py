"""What a family's models do with images, as data: the tower, the tokens that stand for images, rotary sections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_rl.model.families.family import Tower
from megatron_rl.model.families.registry import inside_of
from megatron_rl.model.families.rope import rope_of
from megatron_rl.model.families.tower_sizes import TowerSizes
from megatron_rl.model.parts import ParamSpec
from megatron_rl.model.parts.param_spec import whole

TOWER = "vision_tower."
"""Beginning of the global names of a trained tower's parameters."""
Value = TypeVar("Value")
TOKEN_KEYS = ("image_token_id", "video_token_id")
"""config.json's names of the tokens that stand for images and videos."""


@dataclass(frozen=True)
class ImageForm:
    """How one model reads images.

    token: the id that stands for a part of an image. unsampled: ids that no policy may sample, as an image or video
    would be missing behind them. merge: merge x merge patches make one token. levels: how many of the first layers add
    features of their own to their output. sections: numbers of rotary angles of time, height and width. alternating:
    angles belong to these in turn; else one after the other. tower: sizes of the module that makes features. prefix:
    the beginning of its tensors' names in a folder. shapes: the rest of each name, and its shape.
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
    prefix: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def num_params(self) -> int:
        """Parameters of the tower."""
        return self.tower.num_params

    @property
    def tower_specs(self) -> dict[str, ParamSpec]:
        """Global Megatron name -> spec of a tower that is trained: in the first stage, whole on every rank."""
        return {TOWER + name: whole(self.prefix + name, shape) for name, shape in self.shapes}

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
    given = _given(tower, settings)
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
        tower.prefix,
        tuple(tower_shapes(tower, given).items()),
    )


def tower_shapes(tower: Tower, given: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return parameter of transformers' module -> shape, of patches, blocks and mergers, in the module's order.

    given: `vision_config` with defaults.
    """
    keys = ("hidden_size", "intermediate_size", "out_hidden_size", "depth")
    hidden, inner, out, depth = (int(given[key]) for key in keys)
    merged, size = hidden * int(given["spatial_merge_size"]) ** 2, int(given["patch_size"])
    channels = int(given.get("in_channels", given.get("in_chans", 3)))
    has_biases = not tower.gated  # of norms, and of the product with patches

    def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}

    def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
        kinds = ("weight", "bias") if has_biases else ("weight",)
        return {f"{name}.{kind}": (width,) for kind in kinds}

    def merger(name: str, width: int) -> dict[str, tuple[int, ...]]:
        first, second = ("mlp.0", "mlp.2") if tower.gated else ("linear_fc1", "linear_fc2")
        products = linear(f"{name}.{first}", merged, merged) | linear(f"{name}.{second}", out, merged)
        of_norm = norm(f"{name}.{'ln_q' if tower.gated else 'norm'}", width)
        return of_norm | products

    patch = (hidden, channels, int(given["temporal_patch_size"]), size, size)
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": patch}
    if has_biases:
        positions = int(given["num_position_embeddings"])
        shapes |= {"patch_embed.proj.bias": (hidden,), "pos_embed.weight": (positions, hidden)}
    for block in (f"blocks.{number}" for number in range(depth)):
        shapes |= norm(f"{block}.norm1", hidden) | norm(f"{block}.norm2", hidden)
        shapes |= linear(f"{block}.attn.qkv", 3 * hidden, hidden) | linear(f"{block}.attn.proj", hidden, hidden)
        into, back = (("gate_proj", "up_proj"), "down_proj") if tower.gated else (("linear_fc1",), "linear_fc2")
        for name in into:
            shapes |= linear(f"{block}.mlp.{name}", inner, hidden)
        shapes |= linear(f"{block}.mlp.{back}", hidden, inner)
    shapes |= merger("merger", hidden)
    levels = len(given["deepstack_visual_indexes"]) if tower.has_levels else 0
    for number in range(levels):
        shapes |= merger(f"deepstack_merger_list.{number}", merged)
    return shapes


def without_tower(of_names: Mapping[str, Value]) -> dict[str, Value]:
    """Leave out the parameters of a tower, which generation and roles that only score do not have."""
    return {name: value for name, value in of_names.items() if not name.startswith(TOWER)}


def _given(tower: Tower, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tower's settings with defaults for absent ones."""
    vision, given = settings.get("vision_config"), dict(tower.defaults)
    if isinstance(vision, Mapping):  # transformers refuses settings of other types
        given |= {key: value for key, value in vision.items() if isinstance(value, int | list | tuple)}
    return given
