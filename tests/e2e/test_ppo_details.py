"""PPO with a reward model for each source, normalised scores and a pretraining loss: killed, and over layouts.

One configuration has all of it, as each is a part of the state that a run goes on from.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from recorded_runs import RecordedRun
from short_runs import LOCAL, ONE, SHORT, TP2, WITHOUT_RAY, metrics, reached, steps_saved
from test_reward_model_run import save_reward_model

from megatron_rl.checkpoint.score_statistics import ScoreStatistics, write_statistics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600), pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> tuple[str, ...]:
    """Sums of two sources, one reward model for each, and sums as plain text."""
    folder, draw = tmp_path_factory.mktemp("files"), random.Random(0)
    for split, count in (("train", 40), ("test", 8)):
        rows = [
            {"data_source": ("small", "large")[number % 2], "prompt": f"{draw.randint(1, 9)}+{draw.randint(1, 99)}="}
            for number in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(11)]
    texts = [{"text": f"{left}+{right}={left + right}"} for left, right in pairs]
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    model = save_reward_model(folder / "reward")
    write_statistics(model, ScoreStatistics(0.5, 0.25))
    return (
        *SHORT,
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'test.jsonl'}",
        "custom_reward_function.path=null",
        "custom_reward_function.name=null",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "reward_model.enable=true",
        f"reward_model.model.path={model}",
        "reward_model.data_sources=[small]",
        "reward_model.normalize_reward=running",
        "reward_models.strict.weight=0.5",
        f"reward_models.strict.model.path={model}",
        "reward_models.strict.data_sources=[large]",
        "reward_models.strict.normalize_reward=held_out",
        "reward_models.strict.reward_clip_range=[-1,1]",
        "ptx.coef=0.2",
        f"ptx.files={folder / 'texts.jsonl'}",
        "ptx.mini_batch_size=3",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.export_hf=false",
    )


@pytest.fixture
def tables(keys) -> Path:
    """Where the samples of the whole run are."""
    return Path(next(key for key in keys if key.startswith("ptx.files=")).removeprefix("ptx.files=")).parent / "tables"


@pytest.fixture
def whole(recorded, keys, tables: Path) -> RecordedRun:
    """In one process, left alone."""
    return recorded("rewards by source", *keys, *LOCAL, f"trainer.rollout_data_dir={tables}")


def test_killed_run_goes_on_exactly(command_line, whole, keys, tables: Path) -> None:
    """`kill -9` after step 3: running means, the order of the examples and all metrics are the uninterrupted run's, bit
    for bit; what counts of each answer is what its own reward model says, shaped. Would not catch a wrong score."""
    killed = command_line(*keys, *LOCAL)
    killed.wait_for(reached(killed, 3), interval=0.02)
    killed.process.kill()
    assert killed.wait() in (-9, 0)
    saved = steps_saved(killed)[0]
    resumed = command_line(*keys, *LOCAL, folder=killed.folder)
    assert resumed.wait() == 0, resumed.text()
    assert saved == 4 or f"resuming after step {saved}" in resumed.text()
    expected = metrics(whole)
    assert metrics(resumed) == expected
    seen: list[float] = []
    for step in range(1, 5):
        rows = [json.loads(line) for line in (tables / f"{step}.jsonl").read_text().splitlines()]
        seen += [row["rm_score"] for row in rows if row["data_source"] == "small"]
        mean = sum(seen) / len(seen)
        std = (sum((score - mean) ** 2 for score in seen) / (len(seen) - 1)) ** 0.5
        assert expected[step]["reward/reward_model/running_mean"] == pytest.approx(mean, abs=1e-6)
        assert expected[step]["actor/ptx_loss"] > 0
        for row in rows:
            if row["data_source"] == "small":
                assert "strict_score" not in row
                assert row["score"] == pytest.approx((row["rm_score"] - mean) / std, abs=1e-4)
            else:
                clipped = min(max((row["strict_score"] - 0.5) / 0.25, -1), 1)
                assert "rm_score" not in row and row["score"] == pytest.approx(0.5 * clipped, abs=1e-5)
    runs = [json.loads((run.run / "global_step_4" / "run.json").read_text())["run"] for run in (whole, resumed)]
    assert runs[0]["reward_shaping"] == runs[1]["reward_shaping"] and runs[0]["pretraining"] == runs[1]["pretraining"]


def test_layouts_give_the_same(command_line, whole, keys) -> None:
    """Two ranks of TP and of DP, the latter with three examples for two ranks, against one: rewards and losses of the
    first steps within rounding. Would not catch what only larger grids do, which tests/dist go through."""
    few = (*keys, "trainer.total_training_steps=2", "trainer.save_freq=-1")
    dp2 = (*ONE, "trainer.n_gpus_per_node=2")
    runs = [command_line(*few, *layout, WITHOUT_RAY) for layout in (TP2, dp2)]
    for run in runs:
        assert run.wait() == 0, run.text()
    expected = metrics(whole)
    names = ("reward/rm_reward/mean", "reward/strict_reward/mean", "actor/ptx_loss", "actor/grad_norm")
    for found in map(metrics, runs):
        for step, name in ((step, name) for step in (1, 2) for name in names):
            assert found[step][name] == pytest.approx(expected[step][name], rel=2e-3, abs=1e-5), (step, name)


def test_a_source_without_a_model_is_refused(command_line, keys) -> None:
    """Before anything is started, with the nearest choice. Would not catch a source that comes with a later file."""
    run = command_line(*keys, *ONE, "reward_models.strict.data_sources=[small]")
    assert run.wait() == 2
    assert "leave responses to prompts of large without a score" in run.text()
    assert "try: reward_model.data_sources=['small', 'large']" in run.text()
