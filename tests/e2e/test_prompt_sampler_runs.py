"""Runs whose prompts a class of the user's chooses by the scores of earlier answers."""

from __future__ import annotations

import json
import re

import pytest
from short_runs import LOCAL, WITHOUT_RAY, metrics
from test_async_runs import ASYNC, SMALL, events, weights_equal

from megatron_rl.config.load import read_config
from megatron_rl.planning.preflight import preflight

GRPO = "configs/grpo_cpu.yaml"
LEAST_DRAWN = """
import json, pathlib
class LeastScored:
    def __init__(self, rows, batch_size, seed, log):
        self.log, self.batch_size, self.sums = pathlib.Path(log), batch_size, [0.0] * len(rows)
    def next_indices(self):
        drawn = sorted(range(len(self.sums)), key=lambda i: (self.sums[i], i))[: self.batch_size]
        with self.log.open("a") as log:
            log.write(json.dumps(drawn) + "\\n")
        return drawn
    def update(self, indices, scores):
        for index, score in zip(indices, scores):
            self.sums[index] += 1 + score
    def state_dict(self):
        return {"sums": self.sums}
    def load_state_dict(self, state):
        self.sums = state["sums"]
"""


def keys(tmp_path, name: str) -> tuple[str, ...]:
    (tmp_path / "mine.py").write_text(LEAST_DRAWN)
    own = {"log": str(tmp_path / name)}
    return (
        f"data.sampler.path={tmp_path}/mine.py",
        "data.sampler.name=LeastScored",
        f"data.sampler.kwargs={json.dumps(own)}",
    )


@pytest.mark.timeout(300)
def test_a_curriculum_chooses_the_prompts(command_line, tmp_path) -> None:
    """No prompt comes twice before all have come, and a class that draws too few ends the run with code 4 and a
    sentence. Would not catch scores of other prompts; unit tests do.
    """
    short = (*LOCAL, "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    short = (*short, "actor_rollout_ref.rollout.n=2", "trainer.val_before_train=false", "trainer.test_freq=5040")
    run = command_line(*short, *keys(tmp_path, "log"), "trainer.total_training_steps=2", config=GRPO)
    assert run.wait() == 0, run.text()
    first, second = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert first == list(range(16)) and second == list(range(16, 32)) and len(metrics(run)) >= 2
    own = keys(tmp_path, "log")
    text = (tmp_path / "mine.py").read_text().replace("[: self.batch_size]", "[:3]")
    (tmp_path / "mine.py").write_text(text)
    short = (*short, "trainer.total_training_steps=2")
    wrong = command_line(*short, *own, config=GRPO)
    assert wrong.wait() == 4 and "must return 16 positions from 0 to" in wrong.text()


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.weekly), 2])
def test_a_killed_run_draws_what_it_would_have(command_line, tmp_path, ahead) -> None:
    """Killed after a checkpoint, resumed: the weights of the run that was left alone, also where batches had begun
    ahead of training. Would not catch a class whose draws are random and not in its state.
    """
    settings = (
        *(*SMALL, f"trainer.rollout_ahead={ahead}", "async_training.deterministic=true", WITHOUT_RAY),
        *("trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.test_freq=5040"),
        "trainer.val_before_train=false",
    )
    life = command_line(*settings, *keys(tmp_path, "log"), config=ASYNC)
    life.wait_for(lambda: '"step": 3, ' in life.metrics(), interval=0.01)
    life.kill_all()
    last = command_line(*settings, *keys(tmp_path, "log"), folder=life.folder, config=ASYNC)
    assert last.wait() == 0, last.text()
    assert "resuming after step" in last.text() and (not ahead or events(last, "saved"))
    whole = command_line(*settings, *keys(tmp_path, "other"), config=ASYNC)
    assert whole.wait() == 0, whole.text()
    assert weights_equal(last, whole)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (("data.sampler.name=LeastScore",), "must be a class of .*mine.py; did you mean: LeastScored"),
        (("data.train_file_weights=[1]",), "do not go together: the class chooses from the prompts of all files"),
        (("data.sampler.path=tests/no.py",), "data.sampler.path=tests/no.py"),
    ],
)
def test_bad_keys_are_refused_by_plan(tmp_path, changes, sentence) -> None:
    """Before anything starts. Would not catch a class that cannot be made, which a run says."""
    config, problems = read_config(GRPO, [*keys(tmp_path, "log"), *changes])
    assert not problems
    found = [str(violation) for violation in preflight(config)]
    assert len(found) == 1 and re.search(sentence, found[0]), found
