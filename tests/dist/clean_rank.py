"""What a function leaves behind in the process of a standing rank: it is taken down, and what stays is named."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch
from tqdm import tqdm

from third_party_patches import apply_patches

TESTS = Path(__file__).parents[1]
LARGE = 10_000
"""Elements of a tensor that no library keeps for itself: a parameter, a buffer of several, a KV cache."""
LIBRARIES = ("megatron.core", "megatron_rl.", "vllm.")
OWNERS = ("DistributedDataParallel", "GroupCoordinator", "LLM", "LLMEngine", "ProcessGroup", "RankHost", "TCPStore")
"""Classes of whose objects none may be left."""


class CleanRank:
    """This process as it is before functions run in it: with all patches of libraries, as every rank has them.

    Caches of pure functions stay.
    """

    def __init__(self) -> None:
        apply_patches("cpu")
        tqdm.monitor_interval = 0  # no thread that looks after bars
        # An engine freezes all objects there are, and those of a test would never be looked through again.
        gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]
        self._variables, self._folder, self._paths = dict(os.environ), os.getcwd(), list(sys.path)
        self._modules, self._globals = set(sys.modules), values_of_libraries()
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._filters, self._levels = list(warnings.filters), {name: one.level for name, one in loggers()}
        self._torch = torch_settings()
        self._threads, self._children, self._num_sockets = set(threading.enumerate()), children(), num_sockets()
        self._tensors = {id(one) for one in gc.get_objects() if is_tensor(one)}
        self._resident = psutil.Process().memory_info().rss

    def restore(self, grace_s: float) -> list[str]:
        """Take down what a function has made; returns the names of what is still there.

        grace_s: how long threads, processes and sockets that are ending may take.
        All ranks of the world must have come to the end of their function.
        """
        take_down()
        put_back(self._globals)
        self._put_back_process()
        gc.collect()
        deadline, pause = time.monotonic() + grace_s, 0.01
        while (left := self._ending()) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
            gc.collect()
        return left + self._held()

    def growth(self) -> int:
        """Bytes that this process has more than at first."""
        return psutil.Process().memory_info().rss - self._resident

    def _put_back_process(self) -> None:
        for name in os.environ.keys() - self._variables.keys():
            del os.environ[name]
        os.environ |= {name: value for name, value in self._variables.items() if os.environ.get(name) != value}
        os.chdir(self._folder)
        sys.path[:] = self._paths
        for name in sys.modules.keys() - self._modules:
            if is_of_tests(sys.modules[name]):  # its caches may hold models
                del sys.modules[name]
        python, numpy, tensor = self._random
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(tensor)
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if warnings.filters != self._filters:
            warnings.filters[:] = self._filters
            warnings._filters_mutated()
        for name, one in loggers():
            if name in self._levels and one.level != self._levels[name]:
                one.setLevel(self._levels[name])
        restore_torch(self._torch)

    def _ending(self) -> list[str]:
        """What may need a moment to end."""
        left = [f"the thread {one.name!r}" for one in threading.enumerate() if one not in self._threads]
        left += [f"the process {one}" for one in sorted(children() - self._children)]
        more = num_sockets() - self._num_sockets
        return left if more <= 0 else [*left, f"{more} open sockets"]

    def _held(self) -> list[str]:
        """Objects that somebody holds."""
        objects = gc.get_objects()
        new = [one for one in objects if is_tensor(one) and id(one) not in self._tensors]
        large = [one for one in new if one.numel() > LARGE]
        left = sorted({f"an object of class {type(one).__name__}" for one in objects if type(one).__name__ in OWNERS})
        return left + [f"a tensor of shape {list(one.shape)}" for one in large[:3]]


def take_down() -> None:
    """End the engines, and the groups of vLLM, Megatron and torch."""
    from megatron.core import parallel_state
    from vllm.distributed import parallel_state as vllm_ps
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

    for one in gc.get_objects():
        if type(one) is AuxOutputWorkerConnector:  # which writes experts from a thread
            one.close()
        # Megatron's dispatcher of tokens keeps its last probabilities, and cycles through graphs are not garbage to gc.
        if is_tensor(one):
            with suppress(RuntimeError):  # a view, of a tensor that is here as well
                if one.grad_fn is not None:
                    one.detach_()
    gc.collect()  # engines end while there are groups
    vllm_ps.destroy_model_parallel()
    vllm_ps.destroy_distributed_environment()
    parallel_state.destroy_model_parallel()


def values_of_libraries() -> dict[str, dict[str, Any]]:
    """Module -> name -> what it holds that is no function, class or module; of a dictionary it and a copy."""
    return {
        name: {
            key: (value, dict(value) if type(value) is dict else None)
            for key, value in vars(module).items()
            if not (key.startswith("__") or callable(value) or isinstance(value, ModuleType))
        }
        for name, module in list(sys.modules.items())
        if name.startswith(LIBRARIES)
    }


def put_back(known: dict[str, dict[str, Any]]) -> None:
    """The libraries' values are those of `values_of_libraries`: groups, registers, counters."""
    for name, values in known.items():
        now = vars(sys.modules[name])
        for key, (value, content) in values.items():
            if now.get(key) is not value:
                now[key] = value
            if content is not None and not is_same(value, content):
                value.clear()
                value.update(content)


def is_same(left: dict[Any, Any], right: dict[Any, Any]) -> bool:
    return len(left) == len(right) and all(left.get(key) is value for key, value in right.items())


def children() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)}


def num_sockets() -> int:
    """How many this process has open."""
    number = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            number += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return number


def loggers() -> Iterator[tuple[str, logging.Logger]]:
    yield "", logging.getLogger()
    for name, one in list(logging.Logger.manager.loggerDict.items()):
        if isinstance(one, logging.Logger):
            yield name, one


def is_of_tests(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(TESTS)


def torch_settings() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def restore_torch(settings: tuple[Any, ...]) -> None:
    if torch_settings() != settings:
        dtype, device, num_threads, grad, deterministic = settings
        torch.set_default_dtype(dtype)
        torch.set_default_device(None if device == torch.device("cpu") else device)
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(grad)
        torch.use_deterministic_algorithms(deterministic)


def is_tensor(one: object) -> bool:
    """Without asking the object, which may be a proxy."""
    return issubclass(type(one), torch.Tensor)
