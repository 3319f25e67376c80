"""vLLM's compiler for a GPU that is pretended: Dynamo traces, vLLM cuts the graph, and the pieces run as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes


class Traced:
    """What vLLM would keep of a model's compiled code. key: the folder, below its cache; code: of each graph, with its
    constants.
    """

    def __init__(self) -> None:
        self.key, self.code = "", list[str]()

    def as_json(self) -> dict[str, Any]:
        """Return both."""
        return {"key": self.key, "code": self.code}


class Enough(BaseException):
    """The model is traced, and nothing else is wanted."""


def trace_alone(only: bool = False) -> Traced:
    """Let Dynamo trace without the rehearsal's mode, which would make its fake tensors, and load nothing from disk.

    only: end with `Enough` when the model is traced.
    """
    from vllm import envs
    from vllm.compilation import backends, decorators, wrapper
    from vllm.compilation.compiler_interface import EagerAdaptor

    traced = Traced()
    compiled, split = wrapper.TorchCompileWithNoGuardsWrapper.aot_compile, backends.split_graph

    def aot_compile(self: Any, *args: Any, **options: Any) -> Any:
        # The folder that is looked into before anything is traced.
        traced.key = str(Path(self._aot_cache_dir).relative_to(envs.VLLM_CACHE_ROOT))
        with _disable_current_modes():
            return compiled(self, *args, **options)

    def split_graph(graph: Any, *args: Any, **options: Any) -> Any:
        traced.code.append(graph.code)
        if only:
            raise Enough
        return split(graph, *args, **options)

    wrapper.TorchCompileWithNoGuardsWrapper.aot_compile = aot_compile
    decorators._try_load_aot_compiled_fn = lambda *args: None
    backends.make_compiler = lambda config: EagerAdaptor()
    backends.split_graph = split_graph
    return traced
