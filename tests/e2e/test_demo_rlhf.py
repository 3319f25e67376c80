"""The commands of `make demo-rlhf`, shortened: each stage from what the one before left, and the table of all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import REPOSITORY
from safetensors.torch import load_file
from short_runs import WITHOUT_RAY, metrics

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(480)]

SCRIPTS = REPOSITORY / "scripts"
FEW = """
import sys, make_demo_preferences as made
whole = made.split_questions
made.split_questions = lambda seed: tuple(part[:60] for part in whole(seed))
made.main(["--output", sys.argv[1]])
"""
SHORT = (
    "data.train_batch_size=32",
    "trainer.test_freq=2",
    "trainer.save_freq=2",
    "trainer.n_gpus_per_node=1",
    "--local",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The demo's files, of 60 + 60 questions."""
    folder = tmp_path_factory.mktemp("few") / "stages"
    subprocess.run([sys.executable, "-c", FEW, str(folder)], cwd=SCRIPTS, check=True, timeout=240)
    return folder


def test_the_three_stages(command_line, data: Path, tmp_path: Path) -> None:
    """PPO's scores are the reward model's, and no sample of training has a ground truth; held-out answers have the
    rule's accuracy. The script shows what the runs logged.

    Would not catch stages that learn nothing: their figures in docs/train/sft_reward_dpo.md are of the whole demo.
    """

    def run(stage: str, name: str, *keys: str):
        done = command_line(
            *SHORT, *keys, folder=tmp_path / name, config=f"configs/stages/{name}_cpu.yaml", stage=stage
        )
        assert done.wait() == 0, done.text()
        return done

    def files(kind: str) -> tuple[str, str]:
        return f"data.train_files={data / f'{kind}_train.parquet'}", f"data.val_files={data / f'{kind}_test.parquet'}"

    untrained, policy = data / "untrained", "actor_rollout_ref.model.path"
    sft = run("sft", "sft", *files("answers"), f"{policy}={untrained}", "trainer.total_training_steps=4")
    tuned = sft.run / "hf_model"
    keys = (f"{policy}={tuned}", f"critic.model.path={tuned}")
    reward = run("reward", "reward", *files("pairs"), *keys, "trainer.total_training_steps=3")
    judge, tables = reward.run / "hf_model", tmp_path / "tables"
    ppo = run(
        *("train", "rlhf", *files("questions"), f"{policy}={tuned}", f"reward_model.model.path={judge}"),
        *(f"critic.model.path={tuned}", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *("trainer.total_training_steps=2", f"trainer.rollout_data_dir={tables}"),
    )
    assert set(load_file(judge / "model.safetensors")) > {"score.weight"}
    weight, logged = 0.1, metrics(ppo)
    for step in (1, 2):
        rows = [json.loads(line) for line in (tables / f"{step}.jsonl").read_text().splitlines()]
        assert len(rows) == 64 and all(row["gts"] is None and "rule_score" not in row for row in rows)
        assert all(row["score"] == pytest.approx(weight * row["rm_score"], abs=1e-5) for row in rows)
        assert "reward/rule_score/mean" not in logged[step]
    validated = {name.split("/", 1)[1] for name in logged[2] if name.startswith("val-")}
    source = "demo/addition"
    assert validated == {f"{source}/{name}/mean@1" for name in ("acc", "reward", "rule_score", "rm_score")}
    folder = tmp_path / "all"
    folder.mkdir()
    for name, one in (("sft", sft), ("reward", reward), ("ppo", ppo)):
        (folder / name).symlink_to(one.run)
    command = [sys.executable, str(SCRIPTS / "show_stages.py"), str(folder)]
    shown = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=120).stdout
    assert f"{logged[2][f'val-core/{source}/acc/mean@1']:.3f}" in shown and (folder / "stages.png").stat().st_size > 0


ONE_QUESTION = ("reward_model.judge.form=single", 'reward_model.judge.prompt="{question}{response}?"')
COMPARISONS = (
    *("reward_model.judge.form=pairwise", 'reward_model.judge.prompt="{question}{response_a},{response_b}?"'),
    *("reward_model.judge.verdicts={a: 1, b: 0}", "actor_rollout_ref.rollout.n=4"),
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    """The folder of the demo's judge, which is wrong about fewer than one answer of any kind in 100."""
    folder = tmp_path_factory.mktemp("made") / "judge"
    command = [sys.executable, str(SCRIPTS / "make_demo_judge.py"), "--output", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=3000)
    wrong = json.loads((folder / "verdicts.json").read_text())
    assert max(wrong.values()) < 0.01, wrong
    return folder


@pytest.mark.weekly
@pytest.mark.timeout(4800)
@pytest.mark.parametrize("keys", [ONE_QUESTION, (), COMPARISONS], ids=["single", "rubric", "pairwise"])
def test_a_judge_teaches_the_demo(command_line, judge: Path, keys) -> None:
    """Its verdicts are the only reward; the rule measures. Seeds 2 and 3 are in docs/train/judges.md."""
    files = (f"data.{name}_files={judge / f'{kind}.parquet'}" for name, kind in (("train", "train"), ("val", "test")))
    own = (f"reward_model.model.path={judge / 'model'}", WITHOUT_RAY, "trainer.export_hf=false")
    run = command_line(*files, *own, *keys, config="configs/stages/judge_cpu.yaml")
    assert run.wait(1200) == 0, run.text()
    last = metrics(run)[20]
    assert last["val-core/demo/addition/acc/mean@1"] >= 0.9 and last["reward/rm_unparsed/mean"] < 0.01, last
