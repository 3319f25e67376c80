"""What an ablation knows of its points before it starts any: which can run, why others cannot, what is planned."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from megatron_rl import cli
from megatron_rl.config.load import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.planning.preflight import preflight
from megatron_rl.trials.ablation import LOCK
from megatron_rl.trials.ablation_file import AblationConfig, Settings, read_ablation
from megatron_rl.trials.points import GroupSizes, plan_points

REPOSITORY = Path(__file__).parents[2]
MEGATRON = "actor_rollout_ref.actor.megatron"
TP, PP = f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size"
ROLLOUT_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.fixture
def files(tmp_path, monkeypatch) -> Settings:
    """Settings that give the demo's configuration tiny files of its own: 4 heads of 32 and 4 layers."""
    monkeypatch.chdir(REPOSITORY)
    shape = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
    }
    shape |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 32,
        "vocab_size": 64,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(shape))
    (tmp_path / "model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "model/tokenizer.json").write_text('{"model": {}}')
    row = {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "data.parquet")
    data = dict.fromkeys(("data.train_files", "data.val_files"), str(tmp_path / "data.parquet"))
    return data | {"actor_rollout_ref.model.path": str(tmp_path / "model")}


def ablation_of(files: Settings, **changes) -> AblationConfig:
    return dataclasses.replace(AblationConfig("configs/demo_cpu.yaml", overrides=files), **changes)


def test_a_grid_of_layouts(files, tmp_path):
    """By hand: of 27 combinations on 4 ranks 6 pairs of TP and PP come out even, each with 3 rollout TPs.

    With TP1 PP1 a rank holds everything and receives nothing, with rollout TP of 4 also no more than it holds.
    """
    sizes = [1, 2, 4]
    planned = plan_points(ablation_of(files, grid={TP: sizes, PP: sizes, ROLLOUT_TP: sizes}), tmp_path / "out")
    valid = [point for point in planned if not point.violations]
    assert len(planned) == 27 and len(valid) == 18
    assert all(point.layout.num_ranks == 4 for point in valid)
    assert valid[0].layout == GroupSizes(1, 1, 4, 1) and valid[0].label == "TP1 PP1 DP4 \N{RIGHTWARDS ARROW} TP1"
    assert [point.expected.received_bytes for point in valid[:3]] == [0, 0, 0]
    assert all(point.expected.received_bytes > 0 for point in valid if point.layout.pp > 1)
    refused = next(point for point in planned if point.violations)
    assert refused.label == "tp2-pp4-rollout_tp1" and refused.layout is None
    assert "tp(2) * pp(4) must divide the 4 ranks" in refused.reason


def test_options_and_their_rules(files, tmp_path):
    """Options are told beside the layout; steps that do not count, and records that nobody writes, are refused."""
    points = [
        {"actor_rollout_ref.actor.use_dynamic_bsz": True},
        {"trainer.total_training_steps": 2},
        {"trainer.logger": ["console"]},
        {"name": "mistyped", "trainer.seed": "one"},
    ]
    planned = plan_points(ablation_of(files, points=points, warmup_steps=2), tmp_path / "out")
    assert planned[0].options == "use_dynamic_bsz=true" and not planned[0].violations
    nearest = [point.violations[0].nearest for point in planned[1:3]]
    assert nearest == [{"trainer.total_training_steps": 3}, {"trainer.logger": ["console", "jsonl"]}]
    assert "must be of type int" in planned[3].reason


def test_a_point_starts_anew(files, tmp_path):
    """A base that goes on from a checkpoint which is not there cannot run; its points can.

    Would not catch what an earlier attempt left, as its folder is emptied first.
    """
    base = tmp_path / "base.yaml"
    resume = f"trainer:\n  resume_mode: resume_path\n  resume_from_path: {tmp_path}/global_step_1\n"
    base.write_text(Path("configs/demo_cpu.yaml").read_text().replace("trainer:\n", resume))
    overrides = [f"{key}={value}" for key, value in files.items()]
    assert len(preflight(load_config(base, overrides))) == 1
    (planned,) = plan_points(ablation_of(files, config=str(base), points=[{"trainer.seed": 3}]), tmp_path / "out")
    assert not planned.violations


def test_dry_run_starts_nothing_and_writes_nothing(files, tmp_path):
    """One point that can and one that cannot; where none can, the reasons and code 2."""
    file, out = tmp_path / "ablation.yaml", tmp_path / "out"
    content = {"config": "configs/demo_cpu.yaml", "overrides": files, "folder": str(out), "grid": {TP: [2, 3]}}
    file.write_text(json.dumps(content))
    finished = CliRunner().invoke(cli.app, ["ablate", "--config", str(file), "--dry-run"], env={"COLUMNS": "200"})
    assert finished.exit_code == 0 and not out.exists()
    assert "1 points can run" in finished.stdout and "1 points cannot" in finished.stdout
    refused = pytest.raises(
        ConfigError, match=r"no point can run: 6 problems\n  1. tp2, tp3: tp\(2\) \* pp\(3\) and tp"
    )
    with refused:
        CliRunner().invoke(cli.app, ["ablate", "--config", str(file), f"{PP}=3"], catch_exceptions=False)
    assert not out.exists()
    out.mkdir()  # with a report of an earlier time, which must not stay
    (out / LOCK).touch()
    (out / "ablation.md").write_text("fine")
    with refused:
        CliRunner().invoke(cli.app, ["ablate", "--config", str(file), f"{PP}=3"], catch_exceptions=False)
    assert "2 points: 2 invalid" in (out / "ablation.md").read_text()


def test_the_ablation_of_turns_can_run(files, tmp_path):
    """All its points pass the preflight of a run. Would not catch one that fails while it trains."""
    own = files | {"data.max_response_length": 16}
    turns = read_ablation(Path("configs/ablations/turns.yaml"), [f"{key}={value}" for key, value in own.items()])
    planned = plan_points(turns, tmp_path / "out")
    assert len(planned) == 6 and not any(point.violations for point in planned)


def test_the_ablation_of_drafts_can_run(files, tmp_path):
    """All its points pass the preflight of a run. Would not catch one that fails while it trains."""
    given = [f"{key}={value}" for key, value in files.items()]
    planned = plan_points(read_ablation(Path("configs/ablations/drafts.yaml"), given), tmp_path / "out")
    assert len(planned) == 5 and not any(point.violations for point in planned)


@pytest.mark.parametrize(("device", "valid"), [("cpu", 3), ("cuda", 7)])
def test_the_ablation_of_implementations_can_run(files, tmp_path, device, valid):
    """On CPUs Megatron's layers, plain and with emulated rounding; on a GPU those and transformer-engine's, plain and
    in 8 bits. Would not catch one that fails while it trains.
    """
    given = [f"{key}={value}" for key, value in (files | {"trainer.device": device}).items()]
    planned = plan_points(read_ablation(Path("configs/ablations/implementations.yaml"), given), tmp_path / "out")
    assert len(planned) == 11 and sum(not point.violations for point in planned) == valid


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_ablation_of_presets_can_run(files, tmp_path, device):
    """Presets are an axis. Would not catch one that fails while it trains: tests/e2e/test_preset_runs.py."""
    given = [f"{key}={value}" for key, value in (files | {"trainer.device": device}).items()]
    planned = plan_points(read_ablation(Path("configs/ablations/presets.yaml"), given), tmp_path / "out")
    assert len(planned) == 3 and not any(point.violations for point in planned)


def test_the_ablation_of_judges_can_run(files, tmp_path):
    """Its points ask a judge in three forms. Would not catch one that fails while it trains."""
    given = [f"{key}={value}" for key, value in (files | {"reward_model.model.path": "assets/demo/model"}).items()]
    planned = plan_points(read_ablation(Path("configs/ablations/judges.yaml"), given), tmp_path / "out")
    assert len(planned) == 3 and not any(point.violations for point in planned)


def test_the_ablation_of_pixels_lacks_files_alone(tmp_path):
    """Three sizes of images, whose only faults are the files of a user. Would not catch what those have."""
    planned = plan_points(read_ablation(Path("configs/ablations/image_pixels.yaml"), []), tmp_path / "out")
    keys = {key for point in planned for violation in point.violations for key in violation.settings}
    assert len(planned) == 3
    assert keys == {"data.train_files", "data.val_files", "actor_rollout_ref.model.path"}
