"""The whole run in one process: a debugger in a loss, and what it refuses.

That its numbers are those through Ray, bit for bit, is in test_resumed_runs.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from forked_run import ForkedRun
from short_runs import LOCAL, SHORT, metrics

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
    assert debugged.wait() == 1, output.read_text()
    said = output.read_text()
    assert "(Pdb) True" in said and "-> return terms" in said and "stepped to PolicyTerms" in said
    assert "BdbQuit" in said


def test_more_ranks_than_one_are_refused_unless_they_may_be_collapsed(tmp_path):
    """With the pools that are too large. Would not catch a collapsed run that learns something else."""
    said = run(tmp_path / "run", "--local", "trainer.n_gpus_per_node=2", code=2)
    assert "global_pool has 2 (trainer.nnodes=1 * trainer.n_gpus_per_node=2)" in said and "--collapse" in said


STRICT = """
from megatron_rl.records import Batch

class Strict:
    in_validation = True
    def __init__(self, config): ...
    def start(self, batch):
        self.rows = batch.rows
        batch.metrics["strict/rows"] = float(len(batch.rows))
    def take(self):
        return Batch(scores=self.rows["scores"] - 2.0)
"""


def test_a_scorer_of_the_users_scores_held_out_answers(command_line, tmp_path) -> None:
    """One that says so takes 2 off every reward, in training and in validation; accuracy is the rule's.

    Would not catch a scorer that does not say so, which is not asked.
    """
    (tmp_path / "strict.py").write_text(STRICT)
    keys = (*SHORT, *LOCAL, "trainer.total_training_steps=1", "trainer.test_freq=1")
    run = command_line(*keys, f"custom_scorers.Strict.path={tmp_path / 'strict.py'}")
    assert run.wait() == 0, run.text()
    line = metrics(run)[1]
    means = {name.split("/")[-2]: value for name, value in line.items() if name.endswith("/mean@1")}
    assert means["reward"] == pytest.approx(means["acc"] - 2.0) and line["val-aux/strict/rows"] == 40
    assert -2.0 <= line["critic/score/mean"] <= -1.0


def test_validation_that_is_off_stays_off(command_line, tmp_path) -> None:
    """Nothing held out is answered, and the export is compared on samples of the last step. The folder had another
    run's metrics. Would not catch a run that resumes with no step left.
    """
    (tmp_path / "second/run").mkdir(parents=True)
    (tmp_path / "second/run/metrics.jsonl").write_text('{"step": 1}\n')
    keys = (*LOCAL, *SMALL, "trainer.total_training_steps=1", "trainer.save_freq=-1")
    run = command_line(*keys, folder=tmp_path / "second")
    assert run.wait() == 0, run.text()
    summary = json.loads((run.run / "summary.json").read_text())
    assert summary["val_accuracy_after"] is None and 0 < summary["hf_export_logit_diff_max"] < 1e-4
    assert not [name for name in metrics(run)[1] if name.startswith("val-")]
    assert "no held-out accuracy: trainer.test_freq=0 and trainer.val_before_train=false" in run.text()
    assert f"they are now in {run.run}/run.set_aside" in run.text()
    assert (run.run / "run.set_aside/metrics.jsonl").read_text() == '{"step": 1}\n'
