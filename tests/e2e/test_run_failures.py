"""Whatever goes wrong: one clear message, a non-zero code, within 60 s, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from command_line import REPOSITORY
from short_runs import LOCAL, ONE, TP2, WITHOUT_RAY

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

LIMIT = 60
SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.val_before_train=false",
)
TRAIN_KEY = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"


def assert_clean_end(run, code: int, *fragments: str) -> None:
    """`code` and `fragments` in the output, which must not be a bare traceback of the controller; nothing left."""
    assert run.wait(LIMIT) == code, run.text()
    for fragment in fragments:
        assert fragment in run.text().replace("\n", " "), run.text()
    assert "megatron_rl/cli/" not in run.text(), run.text()
    assert run.left_over() == []


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["data.train_files=assets/demo/trian.parquet"], ["trian.parquet", "train.parquet"]),
        (["trainer.total_trainning_steps=3"], ["total_trainning_steps", "trainer.total_training_steps"]),
        ([f"{TRAIN_KEY}=3"], ["tp(3)", "pp(2)", "4"]),
    ],
    ids=["missing-file", "misspelt-key", "layout-does-not-divide"],
)
def test_user_errors(command_line, overrides: list[str], fragments: list[str]) -> None:
    """Exit code 2 before any process is started; would not catch a message that is merely hard to read."""
    assert_clean_end(command_line(*overrides), 2, *fragments)


def test_raising_reward_function(command_line, tmp_path: Path) -> None:
    """On every sample: the user's own exception is named; would not catch a function that raises when validating."""
    reward, reached = tmp_path / "reward.py", tmp_path / "reached"
    reward.write_text(
        "import pathlib\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    pathlib.Path({str(reached)!r}).touch()\n"
        "    raise KeyError('no such rule')\n"
    )
    run = command_line(*SMALL, *LOCAL, f"custom_reward_function.path={reward}")
    run.wait_for(reached.exists, may_end=True)
    assert_clean_end(run, 4, "KeyError", "no such rule", "demo/addition")


def test_failing_samples_of_a_reward_function(command_line, tmp_path: Path) -> None:
    """Prompts raise or return NaN: counted, and the run goes on.

    Those that sleep or end their process take processes of their own: tests/scoring has all four. The first step trains
    the critic alone, and of steps and epochs the smaller number counts. Would not catch a failed sample whose score
    reaches another row, nor an actor that has moved without an update of its own.
    """
    reward, tables = tmp_path / "reward.py", tmp_path / "tables"
    reward.write_text(
        "import math\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    kind = extra_info['index'] % 8 if extra_info['split'] == 'train' else 7\n"
        "    if kind == 0: raise KeyError('no such rule')\n"
        "    if kind == 1: return math.nan\n"
        "    return {'score': float(solution_str == ground_truth), 'length': len(solution_str)}\n"
    )
    run = command_line(
        *SMALL,
        *LOCAL,
        f"custom_reward_function.path={reward}",
        "data.train_batch_size=32",
        "actor_rollout_ref.rollout.n=2",
        "reward_model.timeout_s=0.5",
        "reward_model.failed_score=-1",
        "trainer.total_training_steps=2",
        "trainer.critic_warmup=2",
        "trainer.total_epochs=1",
        f"trainer.rollout_data_dir={tables}",
    )
    run.wait_for((run.run / "summary.json").exists, may_end=True)
    assert_clean_end(run, 0, "samples could not be scored; the first: the reward function")
    logged = [metrics for metrics in map(json.loads, run.metrics().splitlines()) if "reward/failed_ratio" in metrics]
    assert len(logged) == 2 and all(step["critic/grad_norm"] > 0 for step in logged)
    assert ["actor/grad_norm" in step for step in logged] == [False, True]
    for kind in ("raised", "no_score"):
        assert sum(metrics[f"reward/{kind}"] for metrics in logged) > 0
    rows = [json.loads(line) for line in (tables / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 64 and all((row["score"] == -1) == bool(row["failure"]) for row in rows)


def test_damaged_prompt_file(command_line, tmp_path: Path) -> None:
    """Half of the demo's file, refused before any process is started; would not catch damage that still parses."""
    damaged = tmp_path / "train.parquet"
    content = (REPOSITORY / "assets/demo/train.parquet").read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    run = command_line(f"data.train_files=[assets/demo/train.parquet,{damaged}]")
    assert_clean_end(run, 2, str(damaged), "is not a readable parquet file")


@pytest.mark.exhaustive
def test_raising_worker(command_line, tmp_path: Path) -> None:
    """A user's loss that raises; would not catch a rank that raises while its peers wait for it.

    tests/cluster/test_worker_failures.py has one among several.
    """
    loss = tmp_path / "loss.py"
    loss.write_text("def broken(tokens, config):\n    raise RuntimeError('no such loss')\n")
    key = "actor_rollout_ref.actor.policy_loss"
    run = command_line(*SMALL, *ONE, WITHOUT_RAY, f"{key}.loss_mode=broken", f"{key}.custom.path={loss}")
    run.wait_for(lambda: "raised" in run.text(), may_end=True)
    assert_clean_end(run, 3, "(actor)", "in update", "Traceback", "no such loss")


@pytest.mark.parametrize(
    ("one", "number", "code"),
    [
        pytest.param(LOCAL, signal.SIGINT, 130, id="SIGINT-local"),
        pytest.param(LOCAL, signal.SIGTERM, 143, id="SIGTERM-local", marks=pytest.mark.exhaustive),
        pytest.param(ONE, signal.SIGINT, 130, id="SIGINT-ray", marks=pytest.mark.exhaustive),
    ],
)
def test_interrupted_controller(command_line, one, number: int, code: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM; would not catch a signal that arrives before the run has begun.

    A driver that waits for Ray gets them in tests/cluster/test_driver_death.py, too.
    """
    run = command_line(*SMALL, *one, "trainer.total_training_steps=1000", "trainer.test_freq=5040")
    run.wait_for(lambda: '"step": 1' in run.metrics())
    run.process.send_signal(number)
    assert_clean_end(run, code)


@pytest.mark.exhaustive
def test_killed_controller(command_line, tmp_path: Path) -> None:
    """kill -9 of the controller, while a reward function sleeps in C beside a child of its own, takes all of Ray and
    all workers along, their sockets and their shared memory.

    Whatever the ranks have made says to which run it belongs, and nothing in a rank listens on all interfaces. `make
    test` kills one in test_resumed_runs.py. Would not catch what is made and gone meanwhile.
    """
    reward, reached = tmp_path / "reward.py", tmp_path / "reached"
    reward.write_text(
        "import ctypes, pathlib, subprocess\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        f"    pathlib.Path({str(reached)!r}).touch()\n"
        "    ctypes.CDLL(None).sleep(1000)\n"
    )
    run = command_line(*SMALL, *TP2, f"custom_reward_function.path={reward}", "reward_model.timeout_s=1000")
    run.wait_for(reached.exists)
    assert len(run.workers()) == 2
    sockets, segments = opened(run.workers())
    [run_id] = run.run_ids
    assert sockets and all(f"megatron_rl-{os.getuid()}/{run_id}/" in path for path in sockets), sockets
    assert segments and all(path.startswith(f"/dev/shm/megatron_rl-{run_id}-") for path in segments), segments
    for rank in run.workers():
        listening = [one.laddr for one in rank.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        assert listening and not [address for address in listening if address.ip in ("::", "0.0.0.0")], listening
    run.process.kill()
    assert run.wait(LIMIT) == -9
    assert run.left_over(patience=LIMIT) == []


def opened(processes: list[psutil.Process]) -> tuple[set[str], set[str]]:
    """(paths of sockets, names in shared memory) that these processes have open and that are there."""
    sockets = {one.laddr for process in processes for one in process.net_connections("unix") if one.laddr}
    mapped = {area.path for process in processes for area in process.memory_maps()}
    return (
        {path for path in sockets if Path(path).exists()},
        {path for path in mapped if path.startswith("/dev/shm/") and Path(path).exists()},
    )
