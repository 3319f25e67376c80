"""The whole run in one process: the same numbers as through Ray, bit for bit, and a debugger in a loss.

Metrics and resumed runs of one rank are compared here, where a run costs no processes; other layouts are compared with
each other in tests/dist.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from forked_run import ForkedRun
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SMALL = (
    *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2"),
    *("trainer.val_before_train=false", "trainer.test_freq=0", "trainer.logger=[jsonl]", "trainer.save_freq=2"),
    *("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=1"),
    *("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",),
)


def run(folder: Path, *arguments: str, code: int = 0) -> str:
    """`megatron-rl train` of a small run; what it printed."""
    command = [sys.executable, "-m", "megatron_rl", "train", "--config", "configs/demo_cpu.yaml"]
    finished = subprocess.run(
        [*command, *SMALL, f"trainer.default_local_dir={folder}", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == code, finished.stdout[-2000:] + finished.stderr[-4000:]
    return finished.stdout + finished.stderr


def metrics(folder: Path) -> list[dict]:
    """Every step's numbers without those that clocks and memory make."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = ("timing_s/", "perf/", "reshard/exchange_s", "reshard/verify_s")
    return [{name: value for name, value in line.items() if not name.startswith(measured)} for line in lines]


def weights(folder: Path) -> dict:
    return load_file(folder / "hf_model" / "model.safetensors")


@pytest.mark.exhaustive
def test_five_local_steps_are_those_of_ray_and_so_are_resumed_ones(tmp_path):
    """Metrics and weights bit for bit; the local run also in two lives. Would not catch what both do wrong.

    `make test` has a local run that a killed one through Ray equals, in test_resumed_runs.py.
    """
    through_ray, local, resumed = (tmp_path / name for name in ("ray", "local", "resumed"))
    run(through_ray, "trainer.total_training_steps=5")
    run(local, "trainer.total_training_steps=5", "--local")
    run(resumed, "trainer.total_training_steps=2", "--local")
    said = run(resumed, "trainer.total_training_steps=5", "--local")
    assert "going on after step 2" in said
    expected = metrics(through_ray)
    assert [line["step"] for line in expected] == [1, 2, 3, 4, 5]
    for folder in (local, resumed):
        found = metrics(folder)
        assert found[:1] + found[2:] == expected[:1] + expected[2:]
        # The first life of the resumed run ends with step 2, which is therefore validated, too.
        assert expected[1].items() <= found[1].items()
        for name, tensor in weights(through_ray).items():
            assert tensor.equal(weights(folder)[name]), name


LOSS = """
def stopping(tokens, config):
    from megatron_rl.losses.policy import vanilla_loss

    terms = vanilla_loss(tokens, config)
    breakpoint()
    return terms
"""


def test_a_breakpoint_in_a_loss_stops_and_steps(tmp_path):
    """What the user types is answered, then the debugger is left and the run with it.

    Forked, with its imports; test_unread_output.py has a run as users start it. Would not catch a debugger that needs a
    terminal.
    """
    (tmp_path / "loss.py").write_text(textwrap.dedent(LOSS))
    typed, output = tmp_path / "typed", tmp_path / "output"
    typed.write_text("p terms.loss.shape == tokens.log_probs.shape\nnext\np 'stepped to ' + type(terms).__name__\nq\n")
    arguments = [
        *("train", "--config", "configs/demo_cpu.yaml", *SMALL, "--local", "trainer.total_training_steps=1"),
        "actor_rollout_ref.actor.policy_loss.loss_mode=stopping",
        f"actor_rollout_ref.actor.policy_loss.custom.path={tmp_path / 'loss.py'}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    debugged = ForkedRun(arguments, REPOSITORY, {}, output, typed)
    assert debugged.wait(200) == 1, output.read_text()
    said = output.read_text()
    assert "(Pdb) True" in said and "-> return terms" in said and "stepped to PolicyTerms" in said
    assert "BdbQuit" in said


def test_more_ranks_than_one_are_refused_unless_they_may_be_collapsed(tmp_path):
    """With the pools that are too large. Would not catch a collapsed run that learns something else."""
    said = run(tmp_path / "run", "--local", "trainer.n_gpus_per_node=2", code=2)
    assert "global_pool has 2 (trainer.nnodes=1 * trainer.n_gpus_per_node=2)" in said and "--collapse" in said
