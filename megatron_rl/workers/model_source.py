"""From a Hugging Face folder to this rank's model with its weights: what every role starts from.

A rank's model is a list of chunks, run in that order: one, or with a virtual pipeline several.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from transformers import AutoConfig, PretrainedConfig

from megatron_rl.checkpoint.hf_import import HFFolder, global_name, load_hf_weights
from megatron_rl.config.schema import MegatronConfig
from megatron_rl.device import Device
from megatron_rl.model.families import ModelShape, ParamSpec, family_of, param_map, whole
from megatron_rl.model.gpt import build_language_model, build_value_model, transformer_config
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.parallel.sharding import Place


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face folder seen by one rank. All ranks must call the builders, with the same arguments."""

    path: Path
    hf_config: PretrainedConfig
    groups: TrainGroups
    device: Device
    megatron: MegatronConfig

    @classmethod
    def open(cls, path: str, groups: TrainGroups, device: Device, megatron: MegatronConfig) -> ModelSource:
        """Read the folder's config.json."""
        return cls(Path(path), AutoConfig.from_pretrained(path), groups, device, megatron)

    @cached_property
    def specs(self) -> dict[str, ParamSpec]:
        """Global Megatron name -> what it is made of, for the whole model."""
        return param_map(family_of(self.hf_config.architectures), ModelShape.from_hf(self.hf_config.to_dict()))

    @property
    def value_specs(self) -> dict[str, ParamSpec]:
        """The same for the value model, whose head is named as in a Hugging Face folder of such models."""
        return {**self.specs, "output_layer.weight": whole("score.weight", (1, self.hf_config.hidden_size))}

    @property
    def place(self) -> Place:
        """Where this rank's shards lie."""
        return self.groups.grid.place(self.groups.rank, self.megatron.make_vocab_size_divisible_by)

    def language_model(self) -> list[GPTModel]:
        """The chunks of this rank's stage of the language model with their weights."""
        config = transformer_config(self.hf_config, self.groups, self.megatron, self.device)
        chunks = build_language_model(self.hf_config, config, self.groups, self.megatron.make_vocab_size_divisible_by)
        self._load(named_parameters(chunks))
        return [chunk.to(self.device.torch_device) for chunk in chunks]

    def value_model(self, head_seed: int) -> list[GPTModel]:
        """The chunks of this rank's stage of the trunk with their weights; the last stage ends in a fresh head."""
        config = transformer_config(self.hf_config, self.groups, self.megatron, self.device)
        chunks = build_value_model(
            self.hf_config, config, self.groups, self.megatron.make_vocab_size_divisible_by, head_seed
        )
        trunk = {name: p for name, p in named_parameters(chunks).items() if not name.startswith("output_layer.")}
        self._load(trunk)
        return [chunk.to(self.device.torch_device) for chunk in chunks]

    def _load(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        mark_tensor_parallel(parameters, self.specs)
        load_hf_weights(parameters, self.specs, HFFolder(self.path), self.place)


def named_parameters(chunks: list[GPTModel]) -> dict[str, torch.nn.Parameter]:
    """The parameters of all chunks under global names: layers counted over the whole model."""
    return {
        global_name(name, chunk.decoder.layers[0].layer_number - 1): parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    }


def mark_tensor_parallel(parameters: dict[str, torch.nn.Parameter], specs: dict[str, ParamSpec]) -> None:
    """Tell Megatron which parameters are split over TP ranks.

    Megatron sets these marks only where it draws the initial weights. Without them the gradient norm counts the
    shards of TP rank 0 alone.
    """
    for name, parameter in parameters.items():
        if specs[name].tensor.tp_dim is not None:
            parameter.tensor_model_parallel = True
            parameter.partition_dim = specs[name].tensor.tp_dim
            parameter.partition_stride = 1
