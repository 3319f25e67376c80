"""KV cache of the rollout engine: bytes per token on a rank, and the rule that one response must fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.keys import ROLLOUT
from megatron_rl.config.rollout_keys import MTPUse
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.planning.folder_checks import ModelSizes
from megatron_rl.planning.weights import ELEMENT_BYTES

UNEVEN = 1.5
"""vLLM fills up groups of the rarer kind of layer, and not many of them, below this proportion of the two."""
STATES_HELD = 2
"""States of a request: vLLM reads one and writes the next where it keeps those at the ends of blocks for prefixes."""


@dataclass(frozen=True)
class KVCacheSize:
    """The cache of one rank in vLLM's blocks. One block is never given to a request.

    bytes_per_token: of all layers. block_bytes: of one block. shared_by: block tables of a request for keys and values,
    which have a block each for the same tokens. states: blocks of a request that hold states, however long it is.
    """

    block_size: int
    bytes_per_token: int
    block_bytes: int
    shared_by: int = 1
    states: int = 0

    @classmethod
    def of(cls, config: RunConfig, model: ModelSizes) -> KVCacheSize:
        """The cache of a configuration."""
        shared = config.actor_rollout_ref
        if model.model is not None and shared.mtp_use != MTPUse.NONE:
            model = replace(model, model=replace(model.model, has_mtp=True))
        element = ELEMENT_BYTES[shared.actor.megatron.dtype]
        return cls.at(model, shared.rollout.tensor_model_parallel_size, element, config.trainer.device)

    @classmethod
    def at(cls, model: ModelSizes, tp_size: int, element: int, device: str) -> KVCacheSize:
        """What all layers keep on a rank. element: bytes.

        Layers with states have pages as large as those of keys and values, whose blocks are enlarged until a state
        fits in. A block has a page for each layer of a group, and all groups have as many layers as the rarer kind.
        """
        block_size, per_token = model.attention.block_sizes[device], model.parts.cached_elements(tp_size) * element
        kinds = model.parts.kinds.items()
        state = max(layer.attention.state_bytes(tp_size, element) for layer, _ in kinds)
        if not state:
            return cls(block_size, per_token, block_size * per_token)
        with_state = sum(number for layer, number in kinds if layer.attention.state_bytes(tp_size, element))
        others = model.num_hidden_layers - with_state
        enlarged = block_size * -(-state * others // (block_size * per_token))
        few, many = sorted((with_state, others))
        size = many if many < UNEVEN * few else few
        block_bytes = enlarged * per_token // others * size
        return cls(enlarged, per_token, block_bytes, -(-others // size), STATES_HELD * -(-with_state // size))

    def blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence takes."""
        return -(-num_tokens // self.block_size) * self.shared_by + self.states

    def needed_bytes(self, num_tokens: int) -> int:
        """The smallest cache in which a sequence of this length can be answered."""
        return (self.blocks(num_tokens) + 1) * self.block_bytes

    def num_tokens(self, num_bytes: int, length: float | None = None) -> int:
        """Tokens that a cache of this many bytes holds, of sequences of this length; None: of one sequence."""
        blocks = max(0, num_bytes // self.block_bytes - 1)
        if length is not None and self.states:
            return int(blocks // self.blocks(math.ceil(length)) * length)
        return max(0, blocks - self.states) // self.shared_by * self.block_size

    def num_sequences(self, num_bytes: int, num_tokens: int) -> int:
        """Sequences of this length that a cache of this many bytes holds at once."""
        return max(0, num_bytes // self.block_bytes - 1) // self.blocks(num_tokens)

    def bytes_of(self, num_sequences: int, length: float) -> int:
        """Bytes of a cache for sequences of this mean length. Without states they share the last blocks evenly."""
        if self.states:
            return (self.blocks(math.ceil(length)) * num_sequences + 1) * self.block_bytes
        return (math.ceil(num_sequences * length / self.block_size) + 1) * self.block_bytes


def cache_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """The longest prompt with the longest response must fit. Other rules report invalid sizes."""
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
