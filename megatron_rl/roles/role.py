"""Base classes of roles: memory and offload of every role; training, checkpoint and export of trained roles.

A role is built on all ranks of its pool; unless a method says otherwise all of them must be called.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.checkpoint.hf_folder import MAX_SHARD_BYTES
from megatron_rl.checkpoint.storage import writing
from megatron_rl.config.megatron import MUON
from megatron_rl.config.roles import RoleSpec
from megatron_rl.config.rollout_keys import MTPUse
from megatron_rl.dispatch import Dispatch, remote_method
from megatron_rl.hybrid_engine.offload import Offloadable
from megatron_rl.roles.rank import Rank

if TYPE_CHECKING:
    from megatron_rl.model.families import ParamSpec
    from megatron_rl.roles.model_source import ModelSource, UnloadedModel


class Role:
    """One role on one rank."""

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec

    def memory(self) -> dict[str, int]:
        """Bytes of the tensors that this role holds now, under the names of the memory plan."""
        return {}

    def offloadable(self) -> list[Offloadable]:
        """Memory of this role that is offloaded during generation."""
        return []

    def _in_eight_bits(self, chunks: Iterable[Any]) -> dict[str, int]:
        from megatron_rl.model.eight_bits import eight_bit_bytes

        size = eight_bit_bytes(chunks) if self.spec.megatron.fp8_emulate else 0
        return {f"{self.spec.name} FP8 weights": size} if size else {}


class TrainedRole(Role):
    """A model with Megatron's DDP, optimizer and schedule, which is saved and exported.

    Specs and architecture are those of the exported model: of a language model, or of a classifier with one label.
    watches_experts: whether routers are watched where nothing balances them.
    """

    watches_experts = False

    def __init__(self, spec: RoleSpec, rank: Rank, source: ModelSource, model: UnloadedModel) -> None:
        from megatron_rl.roles.flat_parameters import FrozenBuffer, WeightView
        from megatron_rl.roles.model_source import named_parameters
        from megatron_rl.roles.role_checkpoint import RoleCheckpoint
        from megatron_rl.roles.training import TrainableModel

        super().__init__(spec)
        self.config, self.reads_images = spec.settings, rank.reads_images
        self.cut, self.score_cut = rank.micro_batching(spec.update), rank.micro_batching(spec.score)
        self.loss_scale = rank.loss_scale(spec)
        self.source = source
        still = [each for each in named_parameters(model.chunks).values() if not each.requires_grad]
        frozen = [FrozenBuffer(still)] if still else []
        self.trainable = TrainableModel(
            model.chunks,
            model.load,
            rank.optim(spec),
            rank.num_run_steps(spec),
            spec.megatron,
            rank.groups,
            rank.device.torch_device,
            frozen,
        )
        models, buffers = self.trainable.models, self.trainable.param_buffers
        self.base = self.trained = WeightView.of(models, model.specs, [*buffers, *frozen])
        if model.trained:
            self.trained = WeightView.of(models, model.trained, buffers)
        self.checkpoint = RoleCheckpoint(self.trainable, dict(self.trained.specs), source.place)
        if self.config.optim.optimizer == MUON:
            self._take_muon(rank)
        self._watch_experts(rank)

    def _take_muon(self, rank: Rank) -> None:
        """Let Muon update the layers' matrices."""
        from megatron_rl.roles.model_source import named_parameters
        from megatron_rl.roles.muon import muon_parts

        trainable, specs = self.trainable, self.trained.specs
        named = named_parameters(trainable.models).items()
        known = {parameter: (name, specs[name]) for name, parameter in named if name in specs}
        override, groups = self.config.optim.override_optimizer_config, rank.groups
        parts = muon_parts(trainable.optimizer, override, known, self.source.place, groups.tp_group)
        trainable.adam.muon = list(parts)

    def _watch_experts(self, rank: Rank) -> None:
        """Put taps into the routers where the options ask for balance, and find the biases of experts."""
        from megatron_rl.roles.expert_balance import ExpertBalance
        from megatron_rl.roles.expert_bias import ExpertBias, biases_of
        from megatron_rl.roles.expert_routing import ExpertRouting
        from megatron_rl.roles.model_source import named_buffers

        models, device, model = self.trainable.models, rank.device.torch_device, self.source.model
        if biases := biases_of(model.constants):
            self.checkpoint.bias = ExpertBias(named_buffers(models), biases, rank.groups, device)
        options = self.spec.megatron.override_transformer_config
        rate = options.bias_update_rate
        is_balanced = options.moe_aux_loss_coeff or options.moe_z_loss_coeff or rate
        if model.shape.num_experts and (is_balanced or self.watches_experts):
            self.trainable.pipeline.routing = ExpertRouting(models, rank.groups, device, options)
            balance = (self.spec.name, self.trainable.pipeline.routing, self.checkpoint.bias, rate)
            self.trainable.balance = ExpertBalance(*balance)

    @property
    def specs(self) -> dict[str, ParamSpec]:
        """Global Megatron name -> its spec, of the model that the folder names, with a tower that is trained."""
        return {**self.base.specs, **self.source.tower_specs}

    @property
    def architecture(self) -> str:
        """transformers' class of the exported model."""
        family = self.source.model.family
        if self.spec.has_value_head:
            return family.classifier(self.reads_images).reward_architecture
        return family.architecture

    def memory(self) -> dict[str, int]:
        """Bytes of parameters, gradients, moments and masters, and of weights that emulated products in FP8 keep."""
        held = {f"{self.spec.name} {name}": size for name, size in self.trainable.memory().items()}
        return held | self._in_eight_bits(self.trainable.models)

    def offloadable(self) -> list[Offloadable]:
        """Tensors that the offload keys select."""
        return self.trainable.offloadable()

    @remote_method(Dispatch.ONE_TO_ALL, phase="export")
    def export_hf(self, target: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write the model as a Hugging Face folder, in files of at most `max_shard_bytes`.

        Adapters are merged in, and pass-through tensors copied from the folder that the role started from. A critic
        becomes a classifier with one label, which a critic can start from; it carries its tower where the run reads
        images, else nothing. Raises ConfigError if that folder cannot be read, StorageError if a file of this rank
        cannot be written.
        """
        import torch

        from megatron_rl.checkpoint.adapter_weights import MergedParameters
        from megatron_rl.checkpoint.constants import read_constants
        from megatron_rl.checkpoint.hf_export import ScatteredTensors, export_hf
        from megatron_rl.checkpoint.hf_folder import Description
        from megatron_rl.checkpoint.pass_through import PassThroughTensors
        from megatron_rl.model.families import classifier_map, mtp_specs
        from megatron_rl.roles.model_source import named_parameters

        source, bias = self.source, self.checkpoint.bias
        is_text = self.spec.has_value_head and not self.reads_images
        carried = None if is_text else PassThroughTensors.of(source.path)
        constants = read_constants(source.model.constants.values(), source.path, torch.device("cpu"), dtype=None)
        if bias is not None and bias.has_moved:
            constants |= {name: row.cpu() for name, row in bias.whole().items()}
        parameters = named_parameters(self.trainable.models)
        merged = MergedParameters(parameters, self.specs, source.adapter_specs, source.place, source.lora.scale)
        with writing(target):
            model = source.model
            specs = self.specs
            if self.spec.has_value_head:
                specs = classifier_map(model.family, model.shape, self.reads_images)
            if source.mtp == MTPUse.FROZEN:  # it is passed through, byte for byte
                ahead = mtp_specs(model)
                specs = {name: spec for name, spec in specs.items() if name not in ahead}
            weights = ScatteredTensors.of(parameters, specs, source.groups.grid, source.vocab_multiple, merged)
            dtype = next(iter(weights.dtypes.values()))
            description = Description(source.path, self.architecture, dtype)
            carried = None if carried is None else carried.without(weights.tensors)
            export_hf(weights, target, description, max_shard_bytes, constants, carried)

    @remote_method(Dispatch.ONE_TO_ALL, phase="export")
    def export_adapter(self, target: Path) -> None:
        """Write the adapters, and a value head next to them, as PEFT's folder. Raises StorageError as `export_hf`."""
        from megatron_rl.checkpoint.adapter_folder import PeftSettings, head_modules, head_spec
        from megatron_rl.checkpoint.adapter_weights import export_adapter
        from megatron_rl.checkpoint.hf_export import ScatteredTensors
        from megatron_rl.checkpoint.identity import folder_digest
        from megatron_rl.model.families.adapter_params import peft_specs, peft_targets

        source, lora, model = self.source, self.source.lora, self.source.model.specs
        heads = {name: head_spec(spec) for name, spec in self.trained.specs.items() if name not in source.adapter_specs}
        specs = peft_specs(model, lora) | heads
        settings = PeftSettings(
            lora.rank,
            lora.alpha,
            head_modules(heads),
            base=source.path,
            targets=tuple(peft_targets(model, lora)),
            digest=folder_digest(source.path),
        )
        with writing(target):
            weights = ScatteredTensors.of(self.trained.parameters, specs, source.groups.grid, source.vocab_multiple)
            export_adapter(weights, settings, target)
