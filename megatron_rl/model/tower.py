"""The vision tower of a folder: transformers' own module, with weights that the importer reads.

It is whole on every rank and in no exchange. Each image is computed alone, so that its features do not depend on the
images of the same step. A tower that is trained is a part of the first stage's first chunk.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl.errors import ConfigError
from megatron_rl.model.families import ImageForm, tower_of


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make floating-point tensors in this dtype, where no other is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_tower(hf_config: Any, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Build the tower of a model's configuration, weights not yet read.

    hf_config: transformers', of the whole model. Raises ConfigError for a model without one.
    """
    tower = tower_of(hf_config.architectures)
    if tower is None:
        raise ConfigError(f"architecture {hf_config.architectures} has no vision tower that is supported")
    source = importlib.import_module(f"transformers.models.{tower.model}.modeling_{tower.model}")
    settings = hf_config.vision_config
    settings._attn_implementation = "sdpa"
    with default_dtype(dtype), device:
        module: torch.nn.Module = getattr(source, tower.module)(settings)
    return module.eval().requires_grad_(False)


def add_tower(chunk: Any, hf_config: Any, dtype: torch.dtype, device: torch.device, *, is_split: bool) -> None:
    """Give the first chunk of a model the tower that is trained with it, weights not yet read.

    is_split: TP ranks have parts of a sequence each, so that gradients of the tower are sums over them. Raises
    ConfigError as `build_tower`.
    """
    module = build_tower(hf_config, dtype, device).requires_grad_()
    for parameter in module.parameters():
        vars(parameter)["sequence_parallel"] = is_split  # Megatron's mark
    chunk.vision_tower = module


class VisionTower:
    """A tower with its weights, and the form in which its features are handed on."""

    def __init__(self, module: torch.nn.Module, form: ImageForm) -> None:
        self.module, self.form = module, form

    @property
    def parameters(self) -> list[Tensor]:
        """Its weights."""
        return list(self.module.parameters())

    @torch.no_grad()
    def features(self, patches: Tensor, grid: Tensor) -> Tensor:
        """Return `features_of` one image, without gradients."""
        return features_of(self.module, patches, grid)


def features_of(module: torch.nn.Module, patches: Tensor, grid: Tensor) -> Tensor:
    """Return the rows of one image's tokens, [n, H * (1 + D)]: in place of their embeddings, then for each level.

    patches: [t * h * w, values]. grid: int64 [3].
    """
    first = next(module.parameters())
    given = patches.to(first.device, first.dtype)
    out: Any = module(given, grid_thw=grid[None].to(first.device))
    levels = list(getattr(out, "deepstack_features", None) or [])
    return torch.cat([out.pooler_output, *levels], dim=-1)


def trained_features(module: torch.nn.Module, patches: Tensor, grid: Tensor) -> Tensor:
    """Return `features_of` one image with gradients, for which the backward pass computes the tower once more: it
    keeps one image's activations at a time.
    """
    rows: Tensor = checkpoint(features_of, module, patches, grid, use_reentrant=False, preserve_rng_state=False)
    return rows


class WithoutGradients(torch.autograd.Function):
    """Pass hidden states on, and give parameters a gradient of zeros: those that no image of a pass has used."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        """Return the hidden states."""
        ctx.save_for_backward(*parameters)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient, and zeros."""
        return gradients[0], *map(torch.zeros_like, ctx.saved_tensors)
