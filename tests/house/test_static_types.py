"""What a type checker sees of a remote method: the controller's side, so that a wrong call is an error before a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HEAD = """
from megatron_rl.dispatch import Future
from megatron_rl.records import ActorBatch, Sequences, TokenScores
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.bridge_address import BridgeAddress
from megatron_rl.controller.run import Run

run: Run
batch: ActorBatch
sequences: Sequences
"""
RIGHT = """
metrics: Future[dict[str, float]] = run.roles.actor.update(batch)
scores: Future[TokenScores] = run.roles.actor.log_probs(sequences)
address: Future[BridgeAddress] = run.roles.actor.offer_bridge(4)
reasons: Future[list[str]] = run.roles.actor.join_bridge(address.get())
"""
WRONG = {
    "run.roles.actor.update(sequences)": "arg-type",
    "run.roles.actor.update()": "call-arg",
    "run.roles.actor.update(batch)[0]": "index",
    "run.roles.actor.log_probs(sequences).scores": "attr-defined",
    "run.roles.actor.upgrade(batch)": "attr-defined",
    "run.roles.critic.values(sequences)": "union-attr",
}


def mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What it says, from the repository's root."""
    command = [sys.executable, "-m", "mypy", *arguments]
    variables = os.environ | {"MYPYPATH": "."}  # the same names of files as in `make lint`, and so its cache
    return subprocess.run(
        command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_types_hold():
    """Of everything that `make lint` checks; here, as `make test` does that beside other tests, on a core that they
    leave. Would not catch what comes from libraries that are not read.
    """
    checked = mypy()
    assert checked.returncode == 0, checked.stdout + checked.stderr


def faults_of(program: Path) -> list[str]:
    """Line number and code of everything that mypy finds in a file, such as "7 arg-type"."""
    checked = mypy("--no-error-summary", "--hide-error-context", str(program))
    assert not checked.stderr, checked.stderr
    lines = [line for line in checked.stdout.splitlines() if ": error: " in line]
    return [f"{line.split(':')[1]} {line.rpartition('[')[2].rstrip(']')}" for line in lines]


@pytest.mark.timeout(300)
def test_checker_sees_verbs_as_the_controller_calls_them(tmp_path):
    """Each wrong line has its own fault, and the right ones have none. Would not catch a method that a rank calls as if
    it were remote; nor a handle whose answers are not what their types say, which the tests of pools do.
    """
    program = tmp_path / "calls.py"
    program.write_text(HEAD + RIGHT + "\n".join(WRONG) + "\n")
    first = (HEAD + RIGHT).count("\n") + 1
    assert faults_of(program) == [f"{first + number} {code}" for number, code in enumerate(WRONG.values())]
