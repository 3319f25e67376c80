"""KV cache of the rollout engine: bytes per token on a rank, and the rule that one answer must fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.config.keys import ROLLOUT
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.ledger.planner.model_folder import ModelSizes
from megatron_rl.ledger.planner.weights import ELEMENT_BYTES


@dataclass(frozen=True)
class KVCacheSize:
    """The cache of one rank in vLLM's blocks. One block is never given to a request."""

    block_size: int
    bytes_per_token: int

    @classmethod
    def of(cls, config: RunConfig, model: ModelSizes) -> KVCacheSize:
        """The cache of a configuration."""
        shared = config.actor_rollout_ref
        element = ELEMENT_BYTES[shared.actor.megatron.dtype]
        return cls.at(model, shared.rollout.tensor_model_parallel_size, element, config.trainer.device)

    @classmethod
    def at(cls, model: ModelSizes, tp_size: int, element: int, device: str) -> KVCacheSize:
        """What all layers keep of a token on a rank. element: bytes."""
        return cls(model.attention.block_sizes[device], model.parts.cached_elements(tp_size) * element)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.bytes_per_token

    def blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence takes."""
        return -(-num_tokens // self.block_size)

    def needed_bytes(self, num_tokens: int) -> int:
        """The smallest cache in which a sequence of this length can be answered."""
        return (self.blocks(num_tokens) + 1) * self.block_bytes

    def num_tokens(self, num_bytes: int) -> int:
        """Tokens that a cache of this many bytes holds."""
        return max(0, num_bytes // self.block_bytes - 1) * self.block_size

    def num_sequences(self, num_bytes: int, num_tokens: int) -> int:
        """Sequences of this length that a cache of this many bytes holds at once."""
        return max(0, num_bytes // self.block_bytes - 1) // self.blocks(num_tokens)


def cache_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """The longest prompt with the longest answer must fit. Other rules report invalid sizes."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    model = next((model for model in models if model.path == config.actor_rollout_ref.model.path), None)
    numbers = (rollout.tensor_model_parallel_size, data.max_prompt_length, data.max_response_length)
    given = rollout.kv_cache_memory_bytes
    if rollout.gpu_memory_utilization is not None and config.trainer.device == "cuda":
        return  # the cache is made large enough
    if model is None or min(*numbers, given) < 1:
        return
    dtype, device = config.actor_rollout_ref.actor.megatron.dtype, config.trainer.device
    if device not in model.attention.block_sizes or dtype not in ELEMENT_BYTES:
        return
    length = data.max_prompt_length + data.max_response_length
    if any(length > limit for limit in model.longest.values()):
        return
    needed = KVCacheSize.of(config, model).needed_bytes(length)
    if given < needed:
        key = f"{ROLLOUT}.kv_cache_memory_bytes"
        rule = f"must be >= {needed}, so that {length} tokens (data.max_prompt_length + data.max_response_length) fit"
        yield Violation({key: given}, rule, {key: needed})
