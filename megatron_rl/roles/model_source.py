"""Build this rank's model and read its weights from the Hugging Face folder that a role starts from.

A rank's model is a list of chunks, run in that order: one, or with a virtual pipeline several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.transformer import TransformerConfig
from transformers import PretrainedConfig

from megatron_rl.checkpoint.adapter_folder import AdapterFiles
from megatron_rl.checkpoint.adapter_weights import load_adapters
from megatron_rl.checkpoint.constants import load_constants
from megatron_rl.checkpoint.hf_import import HFFolder, global_name, load_hf_weights
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.megatron import FUSED_KERNELS, MegatronConfig
from megatron_rl.config.rollout_keys import MTPUse
from megatron_rl.device import Device
from megatron_rl.model.adapters import AdapterSet
from megatron_rl.model.bitwise import make_bitwise
from megatron_rl.model.decoder import Chunk, first_layer
from megatron_rl.model.eight_bits import emulate_eight_bits
from megatron_rl.model.families import (
    HEAD,
    Model,
    ParamSpec,
    image_form,
    is_reward_model,
    mtp_constants_of,
    mtp_specs,
    tower_of,
)
from megatron_rl.model.families.adapter_params import adapter_specs
from megatron_rl.model.gpt import build_language_model, build_value_model, transformer_config
from megatron_rl.model.image_tokens import read_images
from megatron_rl.model.layer_specs import rotary_frequencies
from megatron_rl.model.mtp import add_mtp_layer
from megatron_rl.model.te_layers import our_name, refuse_unusable
from megatron_rl.model.tower import VisionTower, add_tower, build_tower
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.parallel.sharding import Place, is_first_copy, vocab_multiple


@dataclass(frozen=True)
class UnloadedModel:
    """The chunks of a rank's stage before their weights are read.

    `load` fills the parameters in place. Call it once they are where they will stay (DDP moves them into its flat
    buffer): until then their memory is untouched, so no second copy ever exists.
    """

    chunks: list[Chunk]
    specs: dict[str, ParamSpec]
    source: ModelSource
    drawn: frozenset[str] = frozenset()
    """Parameters that were initialised at random and are in no folder."""
    trained: Mapping[str, ParamSpec] = field(default_factory=dict)
    """Global name -> spec of what is trained where that is not all weights: adapters, and a value head, in place of
    them, or all but a frozen multi-token prediction layer, or a vision tower, too; {}: the weights."""

    def load(self) -> None:
        """Read this rank's shards from the folder. Raises ConfigError when a tensor is missing or misshapen."""
        named, given = named_parameters(self.chunks), self.drawn | self.source.adapter_specs.keys()
        parameters = {name: p for name, p in named.items() if name not in given}
        folder = HFFolder(self.source.path)
        load_hf_weights(parameters, {**self.specs, **self.trained}, folder, self.source.place)
        model = self.source.model
        load_constants(named_buffers(self.chunks), model.constants | mtp_constants_of(model), folder)
        if self.source.adapter_specs and self.source.lora.adapter_path is not None:
            adapter = AdapterFiles.open(self.source.lora.adapter_path)
            adapter.refuse_other(self.source.lora)
            adapter.refuse_other_base(self.source.path)
            trained = {name: named[name] for name in named if name in self.trained}
            load_adapters(trained, self.trained, adapter, self.source.place)


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face folder seen by one rank. All ranks must call the builders, with the same arguments."""

    folder: ModelFolder
    groups: TrainGroups
    device: Device
    megatron: MegatronConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    seed: int = 0
    """Seed of adapters whose values no folder gives."""
    mtp: MTPUse = MTPUse.NONE
    """What becomes of the multi-token prediction layer."""
    trains_tower: bool = False
    """Whether the first stage has the vision tower, which is trained."""

    @property
    def path(self) -> Path:
        """The folder's path."""
        return self.folder.path

    @property
    def hf_config(self) -> PretrainedConfig:
        """What the folder's config.json says of the language model, with transformers' defaults."""
        return self.folder.language_config

    @cached_property
    def model(self) -> Model:
        """The model as its parts: sizes, parameters, constants."""
        return replace(Model.of(self.hf_config.to_dict()), has_mtp=self.mtp != MTPUse.NONE)

    @cached_property
    def adapter_specs(self) -> dict[str, ParamSpec]:
        """Global name -> spec of the adapters; {} without. Raises ConfigError as `adapter_specs` of the families."""
        return adapter_specs(self.model.specs, self.lora)

    @cached_property
    def tower_specs(self) -> dict[str, ParamSpec]:
        """Global name -> spec of the vision tower; {} where none is trained."""
        form = image_form(self.folder.settings) if self.trains_tower else None
        return {} if form is None else form.tower_specs

    @property
    def frequencies(self) -> torch.Tensor:
        """Inverse frequencies of the rotary embedding, float32 [turned / 2]."""
        return rotary_frequencies(self.hf_config, cast("int", self.model.attention.megatron_settings()["kv_channels"]))

    @property
    def vocab_multiple(self) -> int:
        """The vocabulary is padded to a multiple of this."""
        return vocab_multiple(self.megatron.make_vocab_size_divisible_by, self.groups.grid.tp_size)

    @property
    def place(self) -> Place:
        """Position of this rank's shards."""
        return self.groups.grid.place(self.groups.rank, self.vocab_multiple)

    def vision_tower(self) -> VisionTower:
        """Build the vision tower and read its weights. Raises ConfigError for a model without one, and as `load`."""
        config, form = self.folder.hf_config, image_form(self.folder.settings)
        module = build_tower(config, getattr(torch, self.megatron.dtype), self.device.torch_device)
        tower = tower_of(config.architectures)
        assert tower is not None and form is not None  # else no module is built
        read_tower(self.path, tower.prefix, module)
        return VisionTower(module, form)

    def language_model(self, bitwise: bool = False) -> UnloadedModel:
        """This rank's stage of the language model, of a trained tower, too; bitwise: with the arithmetic of
        `model.bitwise`.
        """
        chunks = build_language_model(self.hf_config, self._config(), self.groups, self.vocab_multiple)
        if bitwise:
            for chunk in chunks:
                make_bitwise(chunk, self.groups.tp_group)
        if self.model.has_mtp and self.groups.is_last_stage:
            add_mtp_layer(chunks, self.model, self.hf_config)
        if self.trains_tower and self.groups.is_first_stage:
            dtype, split = getattr(torch, self.megatron.dtype), self.megatron.sequence_parallel
            # On the CPU as the chunks are, which all move at once
            add_tower(chunks[0], self.folder.hf_config, dtype, torch.device("cpu"), is_split=split)
        return self._unloaded(chunks, self.model.specs)

    def value_model(self, head_seed: int) -> UnloadedModel:
        """This rank's stage of the trunk; the last stage ends in a value head.

        The head is the classification head of a reward model's folder; for a language model it starts randomly.
        """
        chunks = build_value_model(self.hf_config, self._config(), self.groups, self.vocab_multiple, head_seed)
        drawn = frozenset() if is_reward_model(self.hf_config.architectures) else frozenset({HEAD})
        return self._unloaded(chunks, self.model.value_specs, drawn, heads=frozenset({HEAD}))

    def _config(self) -> TransformerConfig:
        """Megatron's configuration. Raises ConfigError where what computes the layers is not installed."""
        refuse_unusable(self.megatron.override_transformer_config)
        return transformer_config(self.hf_config, self.groups, self.megatron, self.device)

    def _unloaded(
        self,
        chunks: list[Chunk],
        specs: dict[str, ParamSpec],
        drawn: frozenset[str] = frozenset(),
        heads: frozenset[str] = frozenset(),
    ) -> UnloadedModel:
        """heads: parameters that are trained next to adapters."""
        parameters = named_parameters(chunks)
        tower = self.tower_specs
        if unknown := sorted(parameters.keys() - specs.keys() - tower.keys()):
            computed_by = self.megatron.override_transformer_config.transformer_impl
            raise RuntimeError(f"parameters of transformer_impl={computed_by} that no family describes: {unknown}")
        trained: dict[str, ParamSpec] = {}
        if self.adapter_specs:
            AdapterSet(self.lora, specs, self.adapter_specs, self.place, self.seed).attach(chunks)
            trained = self.adapter_specs | {name: specs[name] for name in heads}
            parameters = named_parameters(chunks)
            for name in heads & parameters.keys():
                parameters[name].requires_grad_()
        ahead = mtp_specs(self.model)
        if self.mtp == MTPUse.FROZEN and not self.adapter_specs:
            trained = {name: spec for name, spec in specs.items() if name not in ahead}
        if tower:
            trained = (trained or specs) | tower
        mark_tensor_parallel(parameters, specs | trained, self.place)
        for name in ahead.keys() & parameters.keys():
            parameters[name].requires_grad_(self.mtp == MTPUse.TRAINED)
            vars(parameters[name])["shared"] = True  # the norm by which the policy's gradient is clipped leaves it out
        options = self.megatron.override_transformer_config
        if self.megatron.fp8_emulate and options.fp8 is not None:
            emulate_eight_bits(chunks, options.fp8, options.fp8_recipe)
        if self.megatron.attention_kernels == FUSED_KERNELS:
            from megatron_rl.model.fused_kernels import use_fused  # imports what else nothing needs

            use_fused(chunks)
        form = image_form(self.folder.settings)
        if form is not None:
            read_images(chunks, form)
        chunks = [chunk.to(self.device.torch_device) for chunk in chunks]
        return UnloadedModel(chunks, specs, self, drawn, trained)


def named_parameters(chunks: list[Chunk]) -> dict[str, torch.nn.Parameter]:
    """The parameters of all chunks under global names: layers counted over the whole model, whoever computes them."""
    return {
        global_name(our_name(name), first_layer(chunk)): parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    }


def named_buffers(chunks: list[Chunk]) -> dict[str, torch.Tensor]:
    """The buffers of all chunks under global names."""
    return {global_name(name, first_layer(chunk)): buffer for chunk in chunks for name, buffer in chunk.named_buffers()}


def mark_tensor_parallel(parameters: dict[str, torch.nn.Parameter], specs: dict[str, ParamSpec], place: Place) -> None:
    """Tell Megatron which parameters are split over TP ranks, and which of experts other ranks count.

    Megatron sets these marks only where it makes the initial weights. Without them the gradient norm counts what the
    first TP rank has, and experts are cut by other ranks than those of TP.
    """
    parameter: Any  # Megatron's marks are no attributes of torch's
    for name, parameter in parameters.items():
        tensor = specs[name].tensor
        if tensor.is_split or (tensor.is_expert and is_first_copy(tensor, place)):
            parameter.tensor_model_parallel = True
            parameter.partition_dim = tensor.tp_dim
            parameter.partition_stride = 1
        elif tensor.is_expert:
            parameter.shared = True


def read_tower(path: Path, prefix: str, module: torch.nn.Module) -> None:
    """Read the weights of a vision tower from a folder, whole. prefix: stands before its names there."""
    folder = HFFolder(path)
    for name, parameter in module.named_parameters():
        whole = tuple((0, size) for size in parameter.shape)
        folder.copy_box(prefix + name, whole, tuple(parameter.shape), parameter.data)
