"""vLLM in the worker process, built on the trainer's tensors, with one seed per request."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoConfig
from vllm import LLM, ModelRegistry
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from megatron_rl.config.rollout_keys import EARLIER, RolloutConfig
from megatron_rl.device import Device, keep_current_stream
from megatron_rl.model.families import KNOWN_TYPES
from megatron_rl.model.parts import Attention
from megatron_rl.observe.liveness import made_progress
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.parallel.vllm_ps import RolloutGroups, rank_order, read_rollout_groups
from megatron_rl.rollout.addresses import must_stay, places
from megatron_rl.rollout.arguments import FEATURES, engine_arguments, with_adapter, with_cache_pool
from megatron_rl.rollout.bitwise_model import compute_bitwise
from megatron_rl.rollout.image_inputs import reading_features, without_tokens
from megatron_rl.rollout.in_flight_requests import InFlightRequests, forget_prefixes, of_ranks
from megatron_rl.rollout.kv_cache import POOL, KVCache
from megatron_rl.rollout.replica_groups import ReplicaGroups
from megatron_rl.rollout.shared_weights import MTPModel, register_shared_loader
from megatron_rl.rollout.slices import Drawn, Slice
from third_party_patches.vllm.adapter_views import using_adapters
from third_party_patches.vllm.rank_order import using_rank_order


def inspect_in_process(architecture: str, reads_images: bool = False) -> None:
    """Register vLLM's own class for `architecture` as loaded, which saves it a subprocess of about 7 s.

    reads_images: change it to read images by their features.
    """
    own: Any = ModelRegistry.models[architecture].load_model_cls()
    own = getattr(own, "without_features", own)  # an earlier engine of this process has changed it
    ModelRegistry.register_model(architecture, reading_features(own) if reads_images else own)


def register_known_types() -> None:
    """Let transformers, through which vLLM reads config.json, read published types that it does not know."""
    for kind, known in KNOWN_TYPES.items():
        if kind not in CONFIG_MAPPING:
            usual = CONFIG_MAPPING[known]
            AutoConfig.register(kind, type(usual.__name__, (usual,), {"model_type": kind}))


def sample_first(model: Any, num_tokens: int | None, barred: Sequence[int] = ()) -> None:
    """Give the ids of vLLM's model from `num_tokens` on, and the barred ones, probability 0. No graph is captured over
    its logits.
    """
    compute, others = model.compute_logits, list(barred)

    @functools.wraps(compute)
    def of_tokens(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        logits: torch.Tensor | None = compute(*args, **kwargs)
        if logits is not None:  # only one rank of a TP group may have them
            if num_tokens is not None:
                logits[..., num_tokens:] = -torch.inf
            if others:
                logits[..., others] = -torch.inf
        return logits

    model.compute_logits = of_tokens


def draft_no(drafter: Any, barred: Sequence[int]) -> None:
    """Cut the proposals of a drafter of vLLM before their first barred token."""
    propose = drafter.propose

    @functools.wraps(propose)
    def before_barred(*args: Any, **kwargs: Any) -> list[list[int]]:
        return without_tokens(propose(*args, **kwargs), barred)

    drafter.propose = before_barred


def report_steps(engine: LLMEngine) -> CachePeak:
    """Report every engine step as progress. (A forward hook would not work: graphs call no module.)

    Returns the peak of the cache's usage, which every step may raise.
    """
    step, peak = engine.step, CachePeak()
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager

    @functools.wraps(step)
    def counted() -> Any:
        made_progress()
        outputs = step()
        peak.share = max(peak.share, manager.usage)
        return outputs

    engine.step = counted
    return peak


@dataclass
class CachePeak:
    """The largest share of the KV cache that requests have taken at the end of a step since the last `take`."""

    share: float = 0.0

    def take(self) -> float:
        """Return it, and begin again."""
        share, self.share = self.share, 0.0
        return share


class EngineAdapters(NamedTuple):
    """Adapters that generation reads: vLLM's name of a projection with lora_A or lora_B -> tensor of this rank's
    shards [slots, rows, columns].

    rank: rows of every A, one of vLLM's. scale: of their products.
    """

    tensors: dict[str, torch.Tensor]
    rank: int
    scale: float

    @property
    def num_slots(self) -> int:
        """Adapters that requests may name; 0 without any."""
        return next((len(tensor) for tensor in self.tensors.values()), 0)

    def with_slots(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of an engine that reads them, too."""
        return with_adapter(arguments, self.rank, self.scale, self.tensors, self.num_slots)

    def hold(self, engine: LLMEngine, runner: Any, path: str) -> tuple[LoRARequest, ...]:
        """Let vLLM count every slot as taken, by an adapter of its own; returns the names for requests, by slot.

        path: the model's folder, in which no adapter is read. Raises RuntimeError for another order of slots.
        """
        requests = tuple(LoRARequest(f"slot {slot}", slot + 1, path) for slot in range(self.num_slots))
        for request in requests:
            engine.add_lora(request)
        wanted = [request.lora_int_id for request in requests]
        if wanted and wanted != (taken := runner.lora_manager._adapter_manager.lora_index_to_id):
            raise RuntimeError(f"vLLM has put the adapters {wanted} into its slots as {taken}")
        return requests


class RolloutEngine:
    """One rank's vLLM engine. All ranks of a replica must call every method with the same arguments.

    tensors: vLLM parameter name -> tensor of this rank's shard. They must be readable during construction, which may
    capture graphs over them, and must never move again.
    hf_overrides: settings that replace those of the folder's config.json.
    routed_layers: the layers that have experts, if the engine must be able to return the experts of every token; else
    None. attention: of the model; its blocks of the cache and its arguments are the engine's. adapters: read next to
    `tensors`; they must not move either. None: there are none. text_only: the folder's model is larger than `tensors`,
    which are its language model's. mtp: what drafts with speculative=mtp; its tensors must not move either.
    num_tokens: of the first ids, which may be sampled; None: all. placeholders: the ids that stand for images, none of
    which is sampled; requests may have images then. (): they have none.
    bitwise_frequencies: those of the trainer's rotary embedding, with whose arithmetic the model computes; None: with
    vLLM's. cache_pool: on CUDA the tag of its KV cache's memory, another one for each engine of the process.
    """

    def __init__(
        self,
        model_path: str,
        architecture: str,
        eos_token_ids: list[int],
        config: RolloutConfig,
        max_model_len: int,
        dtype: str,
        grid: RolloutGrid,
        tensors: dict[str, torch.Tensor],
        seed: int,
        hf_overrides: dict[str, Any],
        device: Device,
        attention: Attention,
        routed_layers: Sequence[int] | None = None,
        adapters: EngineAdapters | None = None,
        text_only: bool = False,
        mtp: MTPModel | None = None,
        num_tokens: int | None = None,
        placeholders: Sequence[int] = (),
        bitwise_frequencies: torch.Tensor | None = None,
        cache_pool: str = POOL,
    ) -> None:
        inspect_in_process(architecture, bool(placeholders))
        if mtp is not None:
            inspect_in_process(mtp.architecture)
        register_known_types()
        register_shared_loader(tensors, mtp)
        returns_experts = routed_layers is not None
        given = (model_path, config, max_model_len, dtype, seed, hf_overrides, attention, returns_experts)
        arguments = engine_arguments(device.kind, *given, grid.tp_rank(dist.get_rank()), text_only)
        arguments = with_cache_pool(arguments, cache_pool)
        arguments |= FEATURES if placeholders else {}
        adapters = adapters or EngineAdapters({}, 0, 1.0)
        if adapters.tensors:
            arguments = adapters.with_slots(arguments)
        keep_current_stream(device.torch_device)
        with using_rank_order(rank_order(grid)), using_adapters(adapters.tensors, adapters.scale):
            self.llm = LLM(**arguments)
        self.groups: RolloutGroups = read_rollout_groups(grid)
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.model: torch.nn.Module = runner.model
        if num_tokens is not None or placeholders:
            sample_first(self.model, num_tokens, placeholders)
        self._models = [self.model, *([] if mtp is None else [runner.drafter.model])]
        if bitwise_frequencies is not None:
            compute_bitwise(self.model, bitwise_frequencies, adapters.scale)
        if config.speculative == EARLIER:
            runner.drafter.attach(runner, config)
        if placeholders and mtp is not None:
            sample_first(runner.drafter.model, None, placeholders)
        elif placeholders and config.speculative is not None:
            draft_no(runner.drafter, placeholders)
        self.cache_peak = report_steps(self.llm.llm_engine)
        self.kv_cache = KVCache(list(runner.kv_caches), cache_pool)
        self._places = places(self._models, self.kv_cache.tensors)
        in_slots = adapters.hold(self.llm.llm_engine, runner, model_path)
        among = ReplicaGroups(self.groups.dp_group)
        self.requests = InFlightRequests(self.llm.llm_engine, among, eos_token_ids, routed_layers or (), in_slots)

    def wake(self) -> None:
        """Allocate the KV cache and drop cached prefixes. Raises RuntimeError if the engine still has requests, and
        MovedTensorError if weights or cache are not where graphs read them.
        """
        must_stay(self._places, places(self._models, self.kv_cache.tensors))
        self.kv_cache.allocate()
        forget_prefixes(self.llm.llm_engine)

    def sleep(self) -> None:
        """Release the KV cache. Raises RuntimeError, and keeps it, while requests of slices are unfinished."""
        self.must_be_idle()
        self.kv_cache.release()

    def must_be_idle(self) -> None:
        """Raise RuntimeError while requests of slices are unfinished."""
        if self.requests.unfinished:
            numbers = ", ".join(map(str, self.requests.unfinished))
            raise RuntimeError(
                f"the KV cache cannot go while requests are unfinished: {numbers}; a slice that drops them comes first"
            )

    def advance(self, order: Slice) -> tuple[dict[int, Drawn], int]:
        """Run a slice: see `InFlightRequests`. Raises RuntimeError if the ranks of a TP group differ in it."""
        drawn, num_steps = self.requests.advance(order)
        self.cache_peak.share = self.requests.groups.largest(self.cache_peak.share)
        results = of_ranks(f"{num_steps} steps, {digest(drawn)}")
        if len(set(results)) > 1:
            raise RuntimeError(
                f"the ranks of one TP group sampled different tokens or log-probs in one slice: {results}"
            )
        return drawn, num_steps


def digest(drawn: dict[int, Drawn]) -> str:
    """Sixteen digits that tell apart other tokens, log-probs or ends, in the order in which requests were reported."""
    content = hashlib.sha256()
    for request, new in drawn.items():
        content.update(f"{request} {len(new.token_ids)} {new.finish}".encode())
        content.update(array("q", new.token_ids).tobytes() + array("d", new.log_probs).tobytes())
    return content.hexdigest()[:16]
