"""What vLLM chose for a model with experts: attention, experts, model runner, stream, storages of the KV cache."""

from __future__ import annotations

from typing import Any

import step_outcome
from models import save
from rollouts import build, require_libraries


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Names as vLLM has them; and that experts are read where the trainer has them."""
    require_libraries()
    host = build(device, save("Qwen3Moe"), "bfloat16", figures)
    host.roles["rollout"].enter()
    generator = host.roles["rollout"].generator
    runner = generator.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    figures["model runner"] = f"{type(runner).__module__}.{type(runner).__name__}"
    layers = runner.vllm_config.compilation_config.static_forward_context
    backends = {layer.get_attn_backend().get_name() for layer in layers.values() if hasattr(layer, "get_attn_backend")}
    figures["attention"] = sorted(backends)
    methods = [getattr(module, "quant_method", None) for module in generator.model.modules()]
    figures["experts"] = sorted({method.unquantized_backend.value for method in methods if has_backend(method)})
    figures["KV storages"] = len({tensor.untyped_storage().data_ptr() for tensor in generator.kv_cache.tensors})
    own = {parameter.data_ptr() for parameter in host.roles["actor"].trainable.models[0].parameters()}
    experts = [p for name, p in generator.model.named_parameters() if "experts" in name]
    figures["experts shared"] = f"{sum(one.data_ptr() in own for one in experts)} of {len(experts)}"
    host.roles["rollout"].exit()
    assert experts and all(one.data_ptr() in own for one in experts), "experts are not read where the trainer has them"
    assert figures["stream before"] == figures["stream after"], "vLLM moved the thread to another stream"


def has_backend(method: object) -> bool:
    """Whether a layer's method has chosen among kernels of experts."""
    return hasattr(method, "unquantized_backend")


if __name__ == "__main__":
    step_outcome.main(run)
