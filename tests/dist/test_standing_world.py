"""The world that stands between tests: what a function leaves in it is put back or named, and fails that test."""

from __future__ import annotations

import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import ranks
import torch
from ranks import STANDING, run_ranks
from tiny_models import run_config, save_qwen2

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]


def process_numbers() -> int:
    return os.getpid()


def numbers_drawn() -> tuple[list[float], list[float]]:
    return torch.rand(4).tolist(), np.random.rand(4).tolist()


def state() -> dict[str, object]:
    from megatron.core import parallel_state

    return {
        "variables": sorted(os.environ),
        "folder": os.getcwd(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "level": logging.getLogger().level,
        "filters": len(warnings.filters),
        "groups": parallel_state.is_initialized() or torch.distributed.is_initialized(),
        "modules": [name for name in sys.modules if name == "left_behind"],
    }


def change_all(folder: str) -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    logging.getLogger().setLevel(logging.DEBUG)
    warnings.simplefilter("error")


def build(config, roles: list[str]) -> str:
    """One rank with all that a run has."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    for role in roles:
        worker.build(role)
    return worker.device.kind


def leave_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), name="left thread", daemon=True).start()


def leave_process() -> None:
    torch.left_process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # which ends with this process


def leave_socket() -> None:
    torch.left_socket = socket.create_server(("127.0.0.1", 0))


def leave_model() -> None:
    torch.left_tensor = torch.zeros(200, 200)


def leave_group(config) -> None:
    from megatron_rl.roles.host import RankHost

    torch.left_host = RankHost(config)


def test_one_world_runs_one_function_after_the_other() -> None:
    """A failure, too, costs the world: nobody knows where its ranks stand."""
    first = run_ranks(2, process_numbers)
    assert run_ranks(2, process_numbers) == first
    assert run_ranks(3, process_numbers)[:2] == first
    assert not set(run_ranks(2, process_numbers, fresh=True)) & set(first)
    with pytest.raises(AssertionError, match="rank 0 failed"):
        run_ranks(1, build, None, [])
    assert STANDING == []
    assert not set(run_ranks(2, process_numbers)) & set(first)


def test_state_is_put_back(tmp_path) -> None:
    """Would not catch state that nobody thought of; the bit-equal tests of this folder may."""
    before, drawn = run_ranks(1, state), run_ranks(1, numbers_drawn)
    processes = run_ranks(1, process_numbers)
    run_ranks(1, change_all, str(tmp_path))
    assert run_ranks(1, state) == before
    assert run_ranks(1, numbers_drawn) == drawn == run_ranks(1, numbers_drawn, fresh=True)
    assert run_ranks(1, process_numbers) == processes


def test_roles_and_engines_leave_nothing(tmp_path) -> None:
    """Twice in the same processes: groups of two layouts, models, an engine with its KV cache."""
    path = save_qwen2(tmp_path)
    before, processes = run_ranks(2, state), run_ranks(2, process_numbers)
    for tp_size, pp_size in ((2, 1), (1, 2)):
        config = run_config(path, tp_size, pp_size)
        assert run_ranks(2, build, config, ["actor", "critic", "reference", "rollout"]) == ["cpu", "cpu"]
    assert run_ranks(2, state) == before
    assert run_ranks(2, process_numbers) == processes


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (leave_thread, "the thread 'left thread'"),
        (leave_process, "the process"),
        (leave_socket, "1 open sockets"),
        (leave_model, r"a tensor of shape \[200, 200\]"),
    ],
)
def test_what_is_left_behind_is_named(function, name: str, monkeypatch) -> None:
    """Its test fails, and the next has a world without it."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)
    with pytest.raises(AssertionError, match=f"left behind in the processes of ranks, .*rank 0: .*{name}"):
        run_ranks(1, function)
    assert STANDING == []


def test_a_host_that_is_left_behind_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)
    with pytest.raises(AssertionError, match="an object of class RankHost"):
        run_ranks(1, leave_group, run_config(save_qwen2(tmp_path), 1, 1))
