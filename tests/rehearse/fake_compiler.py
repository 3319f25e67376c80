"""vLLM's compiler for a GPU that is pretended: Dynamo traces, vLLM cuts the graph, and the pieces run as they are."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import _disable_current_modes


def trace_alone() -> None:
    """Let Dynamo trace without the rehearsal's mode, which would make its fake tensors, and load nothing from disk."""
    from vllm.compilation import backends, decorators, wrapper
    from vllm.compilation.compiler_interface import EagerAdaptor

    compiled = wrapper.TorchCompileWithNoGuardsWrapper.aot_compile

    def aot_compile(self: Any, *args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return compiled(self, *args, **options)

    wrapper.TorchCompileWithNoGuardsWrapper.aot_compile = aot_compile
    decorators._try_load_aot_compiled_fn = lambda *args: None
    backends.make_compiler = lambda config: EagerAdaptor()
