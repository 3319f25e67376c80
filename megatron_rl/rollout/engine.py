"""vLLM in the worker process: built on the trainer's tensors, sampling with one seed per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.outputs import CompletionOutput

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.observe.liveness import made_progress
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.parallel.vllm_ps import RolloutGroups, rank_order, read_rollout_groups
from megatron_rl.records import Generations, Prompts, Sampling, ragged
from megatron_rl.rollout.kv_cache import KVCache
from megatron_rl.rollout.seeds import request_seed
from megatron_rl.rollout.shared_weights import LOAD_FORMAT, register_shared_loader
from third_party_patches.vllm.rank_order import using_rank_order


def inspect_in_process(architecture: str) -> None:
    """Register vLLM's own class for `architecture` as loaded, which saves it a subprocess of about 7 s."""
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


class RolloutEngine:
    """One rank's vLLM engine. All ranks of a rollout TP group must call every method with the same arguments.

    tensors: vLLM parameter name -> tensor of this rank's shard; must be readable during construction.
    hf_overrides: settings that take the place of those in the folder's config.json.
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
    ) -> None:
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        inspect_in_process(architecture)
        register_shared_loader(tensors)
        with using_rank_order(rank_order(grid)):
            self.llm = LLM(
                model_path,
                load_format=LOAD_FORMAT,
                dtype=dtype,
                tensor_parallel_size=config.tensor_model_parallel_size,
                distributed_executor_backend="external_launcher",
                enforce_eager=config.enforce_eager,
                skip_tokenizer_init=True,
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                kv_cache_memory_bytes=config.kv_cache_memory_bytes,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                seed=seed,
                hf_overrides=hf_overrides,
            )
        self.groups: RolloutGroups = read_rollout_groups(grid)
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.model: torch.nn.Module = runner.model
        self.model.register_forward_hook(lambda *_: made_progress())
        self.kv_cache = KVCache(list(runner.kv_caches))

    def wake(self) -> None:
        """Take the KV cache and drop cached prefixes. Raises RuntimeError when the engine still has requests."""
        self.kv_cache.allocate()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def sleep(self) -> None:
        """Give the KV cache back."""
        self.kv_cache.release()

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generations:
        """One response per prompt row, with the engine's own log-prob of each token after temperature and filters."""
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop_token_ids=self.eos_token_ids,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                seed=request_seed(self.seed, sampling.salt, index, sample),
            )
            for index, sample in zip(prompts.index.tolist(), prompts.sample.tolist(), strict=True)
        ]
        requests = [{"prompt_token_ids": row.tolist()} for row in prompts.prompt_ids.unbind()]
        return to_record([answer.outputs[0] for answer in self.llm.generate(requests, params, use_tqdm=False)])


def to_record(answers: Sequence[CompletionOutput]) -> Generations:
    """vLLM's answers, one per row. One that was aborted before its first token is an empty row."""
    log_probs = [
        [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs or (), strict=True)]
        for answer in answers
    ]
    return Generations(
        response_ids=ragged([torch.tensor(answer.token_ids, dtype=torch.int64) for answer in answers]),
        rollout_log_probs=ragged([torch.tensor(row, dtype=torch.float32) for row in log_probs]),
        truncated=torch.tensor([answer.finish_reason == "length" for answer in answers]),
        batch_size=[len(answers)],
    )
