"""From a Hugging Face folder to this rank's model with its weights: what every role starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from transformers import AutoConfig, PretrainedConfig

from megatron_rl.checkpoint.hf_import import HFFolder, global_name, load_hf_weights
from megatron_rl.device import Device
from megatron_rl.model.families import ParamSpec, family_of, param_map
from megatron_rl.model.gpt import build_language_model, build_value_model, transformer_config
from megatron_rl.parallel.mpu import TrainGroups


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face folder seen by one rank. All ranks must call the builders, with the same arguments."""

    path: Path
    hf_config: PretrainedConfig
    groups: TrainGroups
    device: Device
    dtype: torch.dtype

    @classmethod
    def open(cls, path: str, groups: TrainGroups, device: Device, dtype: str) -> ModelSource:
        """Read the folder's config.json; `dtype` is "float32" or "bfloat16"."""
        return cls(Path(path), AutoConfig.from_pretrained(path), groups, device, getattr(torch, dtype))

    @property
    def specs(self) -> dict[str, ParamSpec]:
        """Global Megatron name -> what it is made of, for the whole model."""
        family = family_of(self.hf_config.architectures)
        return param_map(family, self.hf_config.num_hidden_layers, self.hf_config.tie_word_embeddings)

    def language_model(self) -> GPTModel:
        """This rank's stage of the language model with its weights."""
        config = transformer_config(self.hf_config, self.groups, self.dtype, self.device)
        model = build_language_model(self.hf_config, config, self.groups)
        self._load(named_parameters(model))
        return model.to(self.device.torch_device)

    def value_model(self, head_seed: int) -> GPTModel:
        """This rank's stage of the trunk with its weights, and a fresh value head on the last stage."""
        config = transformer_config(self.hf_config, self.groups, self.dtype, self.device)
        model = build_value_model(self.hf_config, config, self.groups, head_seed)
        trunk = {name: p for name, p in named_parameters(model).items() if not name.startswith("output_layer.")}
        self._load(trunk)
        return model.to(self.device.torch_device)

    def _load(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        mark_tensor_parallel(parameters, self.specs)
        load_hf_weights(
            parameters,
            self.specs,
            HFFolder(self.path),
            self.hf_config.vocab_size,
            self.groups.tp_rank,
            self.groups.grid.tp_size,
        )


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
        if specs[name].tp_dim is not None:
            parameter.tensor_model_parallel = True
            parameter.partition_dim = specs[name].tp_dim
            parameter.partition_stride = 1
