"""`megatron-rl rehearse`, as typed: ranks of the 70B recipe on GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
RECIPE = "configs/llama3_70b_ppo.yaml"

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]


def rehearse(out, *options, config=RECIPE):
    command = [sys.executable, "-m", "megatron_rl", "rehearse", "--config", config, "--out", str(out), *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def report(out, number):
    return json.loads((out / f"rank{number}.json").read_text())


def test_a_rank_of_the_70b_recipe(tmp_path):
    """Code 0, owned bytes equal to the plan's, peaks within 2%, and no forward pass that reads the device.

    The last stage has the head and the losses. Would not catch what only other stages do.
    """
    answer = rehearse(tmp_path, "--ranks", "63", "--layers", "1", "--jobs", "1")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = report(tmp_path, 63)
    owned = found["phases"]["update_critic"]["owned"]
    # One layer of the last stage, over TP8, with a head of 128,256 x 8192 and the last norm.
    layer = (8192 * (8192 + 2048) + 8192 * 8192 + 3 * 8192 * 28672) // 8 + 2 * 8192
    head = 128256 * 8192 // 8
    actor = 2 * (layer + head + 8192)
    assert owned["actor parameters"] == pytest.approx(actor, rel=1e-4)
    assert owned["reference parameters"] == actor
    assert owned["actor gradients"] == 2 * owned["actor parameters"]
    assert owned["actor moments"] == pytest.approx(owned["actor gradients"], rel=1e-4)  # 8 bytes, over two replicas
    assert {"init", "old_log_prob", "ref", "values", "update_actor", "update_critic"} == set(found["phases"])
    scores = [call for call in found["calls"] if call["phase"] == "old_log_prob"]
    assert {"recv", "allgather_base", "reduce_scatter_base"} <= {call["name"] for call in scores}
    assert all(call["peer"] == 47 for call in scores if call["name"] == "recv")  # the same rank one stage before


@pytest.mark.exhaustive
def test_ranks_of_the_70b_recipe_with_all_layers(tmp_path):
    """First, middle and last: every peak within 2% of the plan. Would not catch a rank that differs in its stage."""
    answer = rehearse(tmp_path, "--ranks", "0,20,63")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [report(tmp_path, number)["pp_rank"] for number in (0, 20, 63)] == [0, 1, 3]


def test_a_failing_rank_is_named(tmp_path):
    """A loss that raises: code 1 with its traceback. Would not catch a rank that is killed without a word."""
    loss = tmp_path / "loss.py"
    loss.write_text("def mine(tokens, config):\n    raise ValueError('no such luck')\n")
    mine = [
        f"actor_rollout_ref.actor.policy_loss.custom.path={loss}",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine",
    ]
    answer = rehearse(tmp_path / "out", "--ranks", "63", "--layers", "1", *mine)
    assert answer.returncode == 1
    assert "rank 63 could not be rehearsed" in answer.stderr and "no such luck" in answer.stderr
