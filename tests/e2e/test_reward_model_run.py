"""A run in which a reward model judges alone: no rule, no ground truth, no accuracy."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from command_line import REPOSITORY
from short_runs import LOCAL, ONE, SHORT, WITHOUT_RAY, metrics
from transformers import AutoConfig, Qwen2ForSequenceClassification

from megatron_rl.observe.sample_files import read_step, recorded_files

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

DEMO = REPOSITORY / "assets/demo"
ONE_ID = 5
"""The demo's token of the character 1."""


def save_reward_model(folder: Path) -> Path:
    """A random classifier that reads the demo's tokens."""
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(DEMO / "model")
    config.num_labels, config.initializer_range = 1, 0.2
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    for file in (DEMO / "model").glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    return folder


def without_ground_truth(file: Path, target: Path) -> Path:
    """The first 64 questions as JSON lines."""
    rows = pyarrow.parquet.read_table(file).slice(0, 64).to_pylist()
    target.write_text("".join(json.dumps({k: row[k] for k in ("data_source", "prompt")}) + "\n" for row in rows))
    return target


@pytest.mark.exhaustive
def test_a_reward_model_alone(command_line, tmp_path: Path) -> None:
    """ReMax, whose greedy answers it scores too; it rests while generating; mini-batches are uneven.

    Would not catch a wrong score; `tests/parity` does.
    """
    tables = tmp_path / "tables"
    run = command_line(
        *SHORT,
        *LOCAL,
        f"data.train_files={without_ground_truth(DEMO / 'train.parquet', tmp_path / 'train.jsonl')}",
        f"data.val_files={without_ground_truth(DEMO / 'test.parquet', tmp_path / 'test.jsonl')}",
        "custom_reward_function.path=null",
        "custom_reward_function.name=null",
        "reward_model.enable=true",
        f"reward_model.model.path={save_reward_model(tmp_path / 'reward')}",
        "reward_model.weight=-0.5",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",  # 3, 3 and 2 of the 8 prompts
        "reward_model.megatron.param_offload=true",
        "algorithm.adv_estimator=remax",
        "trainer.val_before_train=true",
        "trainer.total_training_steps=2",
        f"trainer.rollout_data_dir={tables}",
    )
    assert run.wait() == 0, run.text()
    logged = metrics(run)
    for step in (1, 2):
        rows = [json.loads(line) for line in (tables / f"{step}.jsonl").read_text().splitlines()]
        assert len(rows) == 64 and len({row["rm_score"] for row in rows}) > 8
        assert all(row["score"] == pytest.approx(-0.5 * row["rm_score"]) and row["gts"] is None for row in rows)
        scores, of_model = ([row[name] for row in rows] for name in ("score", "rm_score"))
        assert logged[step]["critic/score/mean"] == pytest.approx(statistics.fmean(scores), abs=1e-5)
        assert logged[step]["reward/rm_score/mean"] == pytest.approx(statistics.fmean(of_model), abs=1e-5)
        assert logged[step]["critic/advantages/min"] < 0 < logged[step]["critic/advantages/max"]
        assert "reward/failed_ratio" not in logged[step] and logged[step]["actor/grad_norm"] > 0
    validated = {name for name in logged[2] if name.startswith("val-")}
    assert validated == {"val-core/demo/addition/reward/mean@1", "val-aux/demo/addition/rm_score/mean@1"}
    summary = json.loads((run.run / "summary.json").read_text())
    assert summary["val_accuracy_before"] is summary["val_accuracy_after"] is None
    assert summary["val_reward_after"] == pytest.approx(logged[2]["val-core/demo/addition/reward/mean@1"])
    assert "held-out reward" in run.text() and run.left_over() == []


@pytest.mark.exhaustive
def test_a_process_reward_model(command_line, tmp_path: Path) -> None:
    """It scores every 1 that the policy writes and the end of its turn, as transformers does there; each part is the
    reward of its token. Would not catch several turns: tests/scoring/test_combined_reward.py has them.
    """
    folder, weight = save_reward_model(tmp_path / "reward"), 0.5
    keys = ("reward_model.score_at=turns", "reward_model.step_end=1", f"reward_model.weight={weight}")
    judged = ("reward_model.enable=true", f"reward_model.model.path={folder}", "reward_model.rule_weight=0")
    credit = (
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.turn_rewards=true",
        "algorithm.use_kl_in_reward=false",
    )
    run = command_line(*SHORT, *LOCAL, *judged, *keys, *credit, "trainer.total_training_steps=1")
    assert run.wait() == 0, run.text()
    recorded = read_step(recorded_files(run.run)[1])
    model, most = Qwen2ForSequenceClassification.from_pretrained(folder), 0
    head = model.get_submodule("score")
    for row in range(len(recorded.rows)):
        ids, sampled = (torch.tensor(recorded.of(name, row)) for name in ("input_ids", "sampled"))
        with torch.no_grad():
            values = weight * head(model.model(ids[None]).last_hidden_state)[0, :, 0]
        ends = sampled & (ids == ONE_ID)
        ends[-1] = True
        expected = (values * ends)[sampled]
        assert torch.tensor(recorded.of("rewards", row)).tolist() == pytest.approx(expected.tolist(), abs=1e-4)
        assert recorded.columns["scores"][row] == pytest.approx(float(expected.sum()), abs=1e-4)
        most = max(most, int(ends.sum()))
    assert most > 1


@pytest.mark.exhaustive
def test_two_reward_models_on_pools_of_their_own(command_line, tmp_path: Path) -> None:
    """One by verl's keys, one by name, beside the rule: the score is the weighted sum of all three.

    Both read the same folder, so that their scores are equal whatever pool computed them. Would not catch two models
    whose scores are exchanged; in one process test_text_reward_model_run.py does.
    """
    tables, folder = tmp_path / "tables", save_reward_model(tmp_path / "reward")
    run = command_line(
        *SHORT,
        *ONE,
        WITHOUT_RAY,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "reward_model.enable=true",
        f"reward_model.model.path={folder}",
        "reward_model.weight=-0.5",
        "reward_model.rule_weight=2",
        "reward_model.enable_resource_pool=true",
        "reward_model.nnodes=1",
        "reward_model.n_gpus_per_node=1",
        f"reward_models.strict.model.path={folder}",
        "reward_models.strict.weight=0.25",
        "reward_models.strict.score_at=turns",  # a response has one, which ends with it
        "reward_models.strict.pool=judges",
        "reward_models.strict.megatron.tensor_model_parallel_size=2",
        "pools.judges.n_gpus_per_node=2",
        "trainer.total_training_steps=1",
        "trainer.export_hf=false",
        f"trainer.rollout_data_dir={tables}",
    )
    assert run.wait() == 0, run.text()
    rows = [json.loads(line) for line in (tables / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and len({row["rm_score"] for row in rows}) > 4
    for row in rows:
        assert row["strict_score"] == pytest.approx(row["rm_score"], abs=1e-4)  # TP2 and TP1
        total = 2 * row["rule_score"] - 0.5 * row["rm_score"] + 0.25 * row["strict_score"]
        assert row["score"] == pytest.approx(total, abs=1e-5)
    logged = metrics(run)[1]
    assert logged["reward/strict_score/mean"] == pytest.approx(logged["reward/rm_score/mean"], abs=1e-4)
    assert run.left_over() == []
