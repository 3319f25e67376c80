"""From a Hugging Face folder to this rank's model with its weights: what every role starts from."""

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
from megatron_rl.model.families import ModelShape, ParamSpec, family_of, param_map
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
    def place(self) -> Place:
        """Where this rank's shards lie."""
        return self.groups.grid.place(self.groups.rank, self.megatron.make_vocab_size_divisible_by)

    def language_model(self) -> GPTModel:
        """This rank's stage of the language model with its weights."""
        config = transformer_config(self.hf_config, self.groups, self.megatron, self.device)
        model = build_language_model(self.hf_config, config, self.groups, self.megatron.make_vocab_size_divisible_by)
        self._load(named_parameters(model))
        return model.to(self.device.torch_device)

    def value_model(self, head_seed: int) -> GPTModel:
        """This rank's stage of the trunk with its weights, and a fresh value head on the last stage."""
        config = transformer_config(self.hf_config, self.groups, self.megatron, self.device)
        model = build_value_model(
            self.hf_config, config, self.groups, self.megatron.make_vocab_size_divisible_by, head_seed
        )
        trunk = {name: p for name, p in named_parameters(model).items() if not name.startswith("output_layer.")}
        self._load(trunk)
        return model.to(self.device.torch_device)

    def _load(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        mark_tensor_parallel(parameters, self.specs)
        load_hf_weights(parameters, self.specs, HFFolder(self.path), self.place)


def named_parameters(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """The model's parameters under global names: layers counted over the whole pipeline."""
    layers = model.decoder.layers
    first_layer = layers[0].layer_number - 1 if len(layers) else 0
    return {global_name(name, first_layer): parameter for name, parameter in model.named_parameters()}


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
