"""vLLM in the worker process, built on the trainer's tensors, with one seed per request."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from vllm import LLM, ModelRegistry
from vllm.outputs import CompletionOutput
from vllm.v1.engine.llm_engine import LLMEngine

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.device import Device, keep_current_stream
from megatron_rl.observe.liveness import made_progress
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.parallel.vllm_ps import RolloutGroups, rank_order, read_rollout_groups
from megatron_rl.records import Generations, Prompts, Sampling, ragged, ragged_from_lengths
from megatron_rl.rollout.addresses import must_stay, places
from megatron_rl.rollout.arguments import engine_arguments
from megatron_rl.rollout.kv_cache import KVCache
from megatron_rl.rollout.seeds import request_seed
from megatron_rl.rollout.shared_weights import register_shared_loader
from megatron_rl.rollout.sliced import SlicedGeneration, forget_prefixes, of_ranks, sampling_params, token_log_probs
from megatron_rl.rollout.slices import Drawn, Slice
from third_party_patches.vllm.rank_order import using_rank_order


def inspect_in_process(architecture: str) -> None:
    """Register vLLM's own class for `architecture` as loaded, which saves it a subprocess of about 7 s."""
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def report_steps(engine: LLMEngine) -> None:
    """Report every engine step as progress. (A forward hook would not work: graphs call no module.)"""
    step = engine.step

    @functools.wraps(step)
    def counted() -> Any:
        made_progress()
        return step()

    engine.step = counted


class RolloutEngine:
    """One rank's vLLM engine. All ranks of a rollout TP group must call every method with the same arguments.

    tensors: vLLM parameter name -> tensor of this rank's shard. They must be readable during construction, which may
    capture graphs over them, and must never move again.
    hf_overrides: settings that replace those of the folder's config.json.
    routed_layers: the layers that have experts, if `generate` must be able to return the experts of every token; else
    None. is_latent: the model has latent attention.
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
        routed_layers: Sequence[int] | None = None,
        is_latent: bool = False,
    ) -> None:
        self.seed, self.routed_layers = seed, routed_layers or ()
        self.eos_token_ids = eos_token_ids
        inspect_in_process(architecture)
        register_shared_loader(tensors)
        returns_experts = routed_layers is not None
        arguments = engine_arguments(
            device.kind, model_path, config, max_model_len, dtype, seed, hf_overrides, returns_experts, is_latent
        )
        keep_current_stream(device.torch_device)
        with using_rank_order(rank_order(grid)):
            self.llm = LLM(**arguments)
        self.groups: RolloutGroups = read_rollout_groups(grid)
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.model: torch.nn.Module = runner.model
        report_steps(self.llm.llm_engine)
        self.kv_cache = KVCache(list(runner.kv_caches))
        self._places = places(self.model, self.kv_cache.tensors)
        self.sliced = SlicedGeneration(self.llm.llm_engine, eos_token_ids)

    def wake(self) -> None:
        """Allocate the KV cache and drop cached prefixes. Raises RuntimeError if the engine still has requests, and
        MovedTensorError if weights or cache are not where graphs read them.
        """
        must_stay(self._places, places(self.model, self.kv_cache.tensors))
        self.kv_cache.allocate()
        forget_prefixes(self.llm.llm_engine)

    def sleep(self) -> None:
        """Release the KV cache. Raises RuntimeError, and keeps it, while requests of slices are unfinished."""
        self.must_be_idle()
        self.kv_cache.release()

    def must_be_idle(self) -> None:
        """Raise RuntimeError while requests of slices are unfinished."""
        if self.sliced.unfinished:
            numbers = ", ".join(map(str, self.sliced.unfinished))
            raise RuntimeError(
                f"the KV cache cannot go while requests are unfinished: {numbers}; a slice that drops them comes first"
            )

    def generate(self, prompts: Prompts, sampling: Sampling, with_experts: bool = False) -> Generations:
        """One response per prompt row, with the engine's own log-prob of each token after temperature and filters.

        with_experts: return the experts of each token too; needs `routed_layers`.
        Raises RuntimeError while requests of slices are unfinished.
        """
        if self.sliced.unfinished:
            raise RuntimeError(f"generate() while requests of slices are unfinished: {list(self.sliced.unfinished)}")
        # Weights may have changed since `wake`, and these requests have no version.
        forget_prefixes(self.llm.llm_engine)
        params = [
            sampling_params(
                sampling,
                request_seed(self.seed, sampling.salt, index, sample),
                self.eos_token_ids,
                sampling.max_tokens,
            )
            for index, sample in zip(prompts.index.tolist(), prompts.sample.tolist(), strict=True)
        ]
        requests = [{"prompt_token_ids": row.tolist()} for row in prompts.prompt_ids.unbind()]
        answers = [answer.outputs[0] for answer in self.llm.generate(requests, params, use_tqdm=False)]
        generations = to_record(answers)
        if with_experts:
            generations.routed_experts = experts_of_tokens(answers, self.routed_layers)
        return generations

    def advance(self, order: Slice) -> tuple[dict[int, Drawn], int]:
        """Run a slice: see `SlicedGeneration.advance`. Raises RuntimeError if the ranks of the replica differ in it."""
        drawn, num_steps = self.sliced.advance(order)
        results = of_ranks(f"{num_steps} steps, {hashlib.sha256(repr(drawn).encode()).hexdigest()[:16]}")
        if len(set(results)) > 1:
            raise RuntimeError(f"the ranks of one replica drew different tokens or log-probs in one slice: {results}")
        return drawn, num_steps


def to_record(answers: Sequence[CompletionOutput]) -> Generations:
    """The record of vLLM's answers. An answer that was aborted before its first token is an empty row."""
    log_probs = [token_log_probs(answer) for answer in answers]
    return Generations(
        response_ids=ragged([torch.tensor(answer.token_ids, dtype=torch.int64) for answer in answers]),
        rollout_log_probs=ragged([torch.tensor(row, dtype=torch.float32) for row in log_probs]),
        truncated=torch.tensor([answer.finish_reason == "length" for answer in answers]),
        batch_size=[len(answers)],
    )


def experts_of_tokens(answers: Sequence[CompletionOutput], layers: Sequence[int]) -> torch.Tensor:
    """The experts of each row's tokens: uint8 or int16 [B, (T), layers, K].

    T counts prompt and response without the last token, which the engine has not read. layers: the layers of the model
    that have experts. Raises RuntimeError if an answer comes without experts.
    """
    rows = [answer.routed_experts for answer in answers]
    if any(row is None for row in rows):
        raise RuntimeError("vLLM has returned an answer without the experts of its tokens")
    # vLLM returns more than 256 experts as uint16, which torch hardly supports.
    tensors = [torch.from_numpy(row if row.itemsize == 1 else row.astype("int16")) for row in rows]
    return ragged_from_lengths(torch.cat(tensors)[:, list(layers)], torch.tensor([len(row) for row in tensors]))
