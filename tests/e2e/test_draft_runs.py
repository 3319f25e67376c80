"""Runs whose rollouts guess tokens, over several epochs of the same prompts: repeated and resumed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest
from safetensors.torch import load_file
from short_runs import LOCAL, SHORT, WITHOUT_RAY, metrics
from test_agent_runs import environment
from test_async_runs import ASYNC, SMALL, assert_same_bits, events, numbers

from megatron_rl.sampling.response_history import EARLIER_FILE

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

SPECULATIVE = "actor_rollout_ref.rollout.speculative"
TOKENS = "rollout/tokens_per_step"
DRAFTS = (TOKENS, "rollout/drafts_accepted")
NUM_PROMPTS = 16


@pytest.fixture
def epochs(tmp_path: Path, few_prompts: Path) -> str:
    """The setting of a file of so few prompts that a step or two are an epoch."""
    file = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(few_prompts / "train.parquet")[:NUM_PROMPTS], file)
    return f"data.train_files={file}"


def drafts(run) -> list[list[float]]:
    lines = [json.loads(line) for line in run.metrics().splitlines()]
    return [[line[name] for name in DRAFTS] for line in lines if TOKENS in line]


def must_be_repeated(command_line, way: str, *settings: str) -> None:
    """A run and its replay have the same metrics, drafts too, and weights; other keys of drafts are refused."""
    settings = (*settings, f"{SPECULATIVE}={way}", "trainer.test_freq=5040", "trainer.val_before_train=false")
    run = command_line(*settings, config=ASYNC)
    assert run.wait() == 0, run.text()
    again = command_line(*settings, f"--replay={run.run}", config=ASYNC)
    other = command_line(
        *settings, f"--replay={run.run}", "actor_rollout_ref.rollout.num_speculative_tokens=5", config=ASYNC
    )
    assert again.wait() == 0, again.text()
    assert_same_bits(again, run)
    assert drafts(again) == drafts(run)
    assert other.wait() == 2 and "drafts was {'speculative': " in other.text(), other.text()
    assert len(drafts(run)) == len(events(run, "taken"))
    if way == "earlier":
        assert drafts(run)[0][0] < 1.2 < drafts(run)[-1][0], drafts(run)


@pytest.mark.parametrize("way", [pytest.param("ngram", marks=pytest.mark.exhaustive), "earlier"])
def test_drafts_of_a_run_ahead_are_repeated(command_line, epochs, way) -> None:
    """In one process, with partial rollouts. From earlier answers, more is guessed right in later epochs.

    Would not catch replicas, which the sweep below has.
    """
    local = ("--local", "--collapse", "actor_rollout_ref.rollout.max_num_seqs=48", "trainer.total_training_steps=4")
    must_be_repeated(command_line, way, *SMALL, *local, epochs)


@pytest.mark.exhaustive
def test_drafts_of_turns_are_repeated(command_line, epochs) -> None:
    """Episodes of several turns, whose prompts grow: from earlier ones with what came between their turns.

    Would not catch log-probs that differ from the trainer's: a bound of every run does.
    """
    local = ("--local", "--collapse", "actor_rollout_ref.rollout.max_num_seqs=48", "trainer.total_training_steps=4")
    keys = (*local, *environment("Retry"), "actor_rollout_ref.rollout.temperature=0.7", epochs)
    must_be_repeated(command_line, "earlier", *SMALL, *keys)


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.parametrize("way", ["ngram", "earlier"])
def test_drafts_of_replicas_are_repeated(command_line, epochs, way) -> None:
    """Two replicas, two steps ahead of training, in an order that nothing computes.

    Would not catch a replica that is lost: its requests begin again as those of partial rollouts do.
    """
    ahead = (WITHOUT_RAY, "trainer.rollout_ahead=2", "trainer.total_training_steps=8")
    must_be_repeated(command_line, way, *SMALL, *ahead, epochs)


def must_go_on(command_line, *settings: str, **how: str) -> None:
    """A run that goes on after step 2 has the metrics of the one that was not interrupted, drafts too."""
    settings = (*settings, f"{SPECULATIVE}=earlier", "trainer.save_freq=2")
    whole = command_line(*settings, **how)
    assert whole.wait() == 0, whole.text()
    saved = whole.run / "global_step_2"
    assert len(load_file(saved / EARLIER_FILE)["answers"]) >= NUM_PROMPTS
    by_path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    resumed = command_line(*settings, *by_path, **how)
    assert resumed.wait() == 0, resumed.text()
    ours, theirs = metrics(resumed), metrics(whole)
    assert list(ours) == [3, 4, 5] and numbers(resumed) == numbers(whole)[-3:]
    # Those of a batch that a checkpoint has begun are of this process alone.
    whole_batches = [step for step in ours if step > 2 + theirs[5].get("staleness/max", 0)]
    assert [ours[step][TOKENS] for step in whole_batches] == [theirs[step][TOKENS] for step in whole_batches]
    assert ours[5][TOKENS] > 1.2 * theirs[1][TOKENS]


def test_earlier_answers_outlive_a_process(command_line, epochs) -> None:
    """Whole answers, drawn and trained in turns. Would not catch what is lost where answers outlive a step."""
    must_go_on(command_line, *SHORT, *LOCAL, epochs)


@pytest.mark.exhaustive
def test_earlier_answers_of_a_run_ahead_outlive_a_process(command_line, epochs) -> None:
    """Batches that a checkpoint has begun name what they named before. The schedule is computed.

    Would not catch a run that is killed, whose checkpoints are the same files.
    """
    ahead = (WITHOUT_RAY, "trainer.rollout_ahead=2", "async_training.deterministic=true")
    settings = (*ahead, "trainer.total_training_steps=5", "trainer.test_freq=5040", "trainer.val_before_train=false")
    must_go_on(command_line, *SMALL, *settings, epochs, config=ASYNC)
