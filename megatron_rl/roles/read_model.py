"""The model of a role that only scores, on one rank: read, and never trained.

A row of `config.roles` says which of three it is. It has weights of its own. Or it is the model of a trained role on
the same ranks (`RoleSpec.model_of`) as that is now, and computes in its memory. Or, for a reference, it is that model
with other adapters or none, and holds these adapters alone. Methods of roles are the same for all three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from megatron_rl.config.roles import RoleSpec
from megatron_rl.errors import ConfigError
from megatron_rl.hybrid_engine.offload import HostCopy, Offloadable
from megatron_rl.observe.memory_ledger import storage_bytes
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import Role, TrainedRole

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.model.decoder import Chunk
    from megatron_rl.model.families import ParamSpec
    from megatron_rl.roles.model_source import ModelSource
    from megatron_rl.roles.pipeline import Pipeline
    from megatron_rl.roles.token_scorer import TokenScorer


@dataclass(frozen=True)
class ReadModel:
    """A model that is read and not trained, on one rank."""

    source: ModelSource
    """The folder that the model comes from."""
    pipeline: Pipeline
    """Passes over the chunks of this rank."""
    models: list[Chunk]
    """The chunks, of which the last stage's last one has the head."""
    parameters: Mapping[str, Tensor]
    """Tensors of this model alone, by global Megatron names; {}: all are those of another role."""
    specs: dict[str, ParamSpec]
    """Specs of the parameters that can follow a policy, of all ranks."""
    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    """A pass inside of this context reads this model, and not the one that is trained in the same memory."""

    @property
    def following(self) -> dict[str, Tensor]:
        """The parameters of this rank that can follow a policy."""
        return {name: tensor for name, tensor in self.parameters.items() if name in self.specs}

    def scorer(self, num_tokens: int, temperature: float, unsampled: tuple[int, ...]) -> TokenScorer:
        """Return log-probs under this language model, over the first `num_tokens` of its vocabulary but `unsampled`."""
        from megatron_rl.roles.token_scorer import TokenScorer

        settings = self.source.hf_config.to_dict()
        return TokenScorer(self.pipeline, self.models, settings, temperature, num_tokens, unsampled)


def read_model(spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> ReadModel:
    """Make the model of a role that only scores; all ranks of its pool must call.

    neighbours: the roles of this rank, with that of `RoleSpec.model_of`, which has read no checkpoint yet. Raises
    ConfigError for a folder that has no head for the role.
    """
    if spec.model_of is None:
        return _with_own_weights(spec, rank)
    return _in_memory_of(cast(TrainedRole, neighbours[spec.model_of]), spec, rank)


def _with_own_weights(spec: RoleSpec, rank: Rank) -> ReadModel:
    from megatron_rl.model.families import is_reward_model
    from megatron_rl.roles.model_source import named_parameters
    from megatron_rl.roles.pipeline import Pipeline

    source = rank.source(spec)
    if spec.has_value_head and not is_reward_model(source.hf_config.architectures):
        raise ConfigError(f"{source.path} ({source.hf_config.architectures}) has no head that gives a score")
    model = source.value_model(head_seed=0) if spec.has_value_head else source.language_model()
    model.load()
    chunks = [chunk.requires_grad_(False) for chunk in model.chunks]
    pipeline = Pipeline(list(chunks), rank.groups, rank.device.torch_device)
    return ReadModel(source, pipeline, chunks, named_parameters(chunks), dict(model.trained or model.specs))


def _in_memory_of(trained: TrainedRole, spec: RoleSpec, rank: Rank) -> ReadModel:
    from megatron_rl.model.adapters import initial_adapters, keep_initial
    from megatron_rl.roles.pipeline import Pipeline

    models = trained.trainable.models
    # Without routing: the trained role's choices of experts are not this model's.
    pipeline = Pipeline(list(trained.trainable.chunks), rank.groups, rank.device.torch_device)
    shared = trained.source, pipeline, models
    if spec.kind.initial_of is None:
        return ReadModel(*shared, {}, {})
    names = {parameter: name for name, parameter in trained.trained.parameters.items()}
    kept = keep_initial(models) if spec.lora.rank else []
    adapters = {names[parameter]: copy for parameter, copy in kept}
    return ReadModel(*shared, adapters, dict(trained.trained.specs), partial(initial_adapters, models))


class ScoringRole(Role):
    """A role that only scores; constructing it reads the weights."""

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> None:
        """Read the weights. neighbours: the roles of this rank, as for `read_model`. Raises ConfigError as that."""
        super().__init__(spec)
        self.model = read_model(spec, rank, neighbours)
        self.cut = rank.micro_batching(spec.score)

    def memory(self) -> dict[str, int]:
        """Bytes of its own parameters, and of those that emulated products in FP8 keep of them."""
        held = list(self.model.parameters.values())
        parameters = {f"{self.spec.name} parameters": storage_bytes(held)} if held else {}
        return parameters | ({} if self.spec.model_of else self._in_eight_bits(self.model.models))

    def offloadable(self) -> list[Offloadable]:
        """Its own parameters, if the offload key says so."""
        return [HostCopy(self.model.parameters.values)] if self.spec.megatron.param_offload else []
