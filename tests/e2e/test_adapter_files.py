"""Runs that train adapters: what they leave, what goes out of their checkpoints, and what goes on from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import REPOSITORY, CommandLine
from forked_run import ForkedRun
from recorded_runs import RecordedRun
from safetensors.torch import load_file, save_file
from short_runs import LOCAL, MEGATRON, SHORT, TP2, WITHOUT_RAY, metrics, steps_saved
from stage_files import command_of, keys_of
from test_several_nodes import tiny_moe

from megatron_rl.checkpoint.saved_tensors import SavedTensors

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

LORA = "actor_rollout_ref.model.lora"
RANK6 = (f"{LORA}.rank=6", "critic.model.lora.rank=6")
FOUR = (*SHORT, *RANK6, "trainer.total_training_steps=4", "trainer.save_freq=2")
GRPO = "configs/grpo_cpu.yaml"
MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"


@pytest.fixture
def four_steps(recorded) -> RecordedRun:
    """Actor and critic with adapters of rank 6 in one process, saved after steps 2 and 4, and exported."""
    return recorded("four steps of adapters", *FOUR, *LOCAL)


def printed(folder: Path, *arguments: str | Path, code: int = 0) -> str:
    """What the command prints; it must end with this code, and never with a traceback."""
    output = folder / "printed.txt"
    assert ForkedRun([*map(str, arguments)], REPOSITORY, {"COLUMNS": "200"}, output).wait() == code, output.read_text()
    assert "Traceback" not in output.read_text()
    return output.read_text()


def test_what_a_run_leaves(four_steps, tmp_path: Path) -> None:
    """The merged model is the trainer's within the run's own bound, and its checkpoint exports the same bytes; so are
    the adapter's. Of the critic both come out, too. Would not catch a mistake in both ways."""
    run = four_steps.run
    assert json.loads((run / "summary.json").read_text())["hf_export_logit_diff_max"] < 1e-4
    base, merged = load_file(REPOSITORY / "assets/demo/model" / MODEL), load_file(run / "hf_model" / MODEL)
    assert base.keys() == merged.keys()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    exported = ("export", "--checkpoint", run, "--target")
    printed(tmp_path, *exported, tmp_path / "merged")
    printed(tmp_path, *exported, tmp_path / "adapter", "--adapter")
    assert (tmp_path / "merged" / MODEL).read_bytes() == (run / "hf_model" / MODEL).read_bytes()
    for name in (ADAPTER, "adapter_config.json", "base_model.json"):
        assert (tmp_path / "adapter" / name).read_bytes() == (run / "adapter" / name).read_bytes()
    printed(tmp_path, *exported, tmp_path / "values", "--role", "critic")
    printed(tmp_path, *exported, tmp_path / "critic", "--role", "critic", "--adapter")
    head = load_file(tmp_path / "critic" / ADAPTER)["base_model.model.score.weight"]
    assert torch.equal(load_file(tmp_path / "values" / MODEL)["score.weight"], head)
    for role, heads in (("actor", 0), ("critic", 1)):
        names = SavedTensors(run / "global_step_4" / role).weights
        assert sum(".lora_" not in name for name in names) == heads


@pytest.mark.exhaustive
def test_a_base_that_has_moved_or_changed(four_steps, tmp_path: Path) -> None:
    """Its new place is taken, another model refused; the adapter alone needs none. Would not catch a base that differs
    in a few numbers only."""
    copy = four_steps.copy(tmp_path / "copied") / "run"
    content = json.loads((copy / "global_step_4/run.json").read_text())
    assert content["config"]["actor_rollout_ref"]["model"]["path"] == "assets/demo/model"
    moved, other = tmp_path / "moved", tmp_path / "other"
    for folder in (moved, other):
        shutil.copytree(REPOSITORY / "assets/demo/model", folder)
    weights = load_file(other / MODEL)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / MODEL, metadata={"format": "pt"})
    exported = ("export", "--checkpoint", copy, "--base")
    printed(tmp_path, *exported, moved, "--target", tmp_path / "merged")
    assert (tmp_path / "merged" / MODEL).read_bytes() == (copy / "hf_model" / MODEL).read_bytes()
    text = printed(tmp_path, *exported, other, "--target", tmp_path / "no", code=2)
    assert f"{other} is another model than the base of the adapters: weights is" in text
    text = printed(tmp_path, *exported, tmp_path / "none", "--target", tmp_path / "no", code=2)
    assert "cannot be read" in text and "export --base FOLDER names the folder" in text
    assert not (tmp_path / "no").exists()
    printed(tmp_path, *exported, tmp_path / "none", "--target", tmp_path / "adapter", "--adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["r"] == 6


@pytest.mark.exhaustive
def test_two_checkpoints_are_averaged(four_steps, tmp_path: Path) -> None:
    """The average is that of the merged models. Would not catch a base that is read wrong, which others do."""
    printed(tmp_path, "average", "--checkpoints", four_steps.run, "--target", tmp_path / "mean")
    printed(tmp_path, "export", "--checkpoint", four_steps.run / "global_step_2", "--target", tmp_path / "second")
    parts = [load_file(folder / MODEL) for folder in (tmp_path / "second", four_steps.run / "hf_model")]
    for name, tensor in load_file(tmp_path / "mean" / MODEL).items():
        assert (tensor - (parts[0][name] + parts[1][name]) / 2).abs().max() < 1e-6, name


def test_two_and_two_steps_are_four(command_line, four_steps) -> None:
    """In one process: metrics, merged model and adapter, bit for bit. Would not catch a clock that starts anew."""
    first = command_line(*FOUR, *LOCAL, "trainer.total_training_steps=2")
    assert first.wait() == 0, first.text()
    second = command_line(*FOUR, *LOCAL, folder=first.folder)
    assert second.wait() == 0, second.text()
    assert "resuming after step 2" in second.text() and steps_saved(second) == [4, 2]
    ours, theirs = metrics(second), metrics(four_steps)
    assert list(ours) == list(theirs)
    for step, expected in theirs.items():  # the first life ended with a validation of its own
        assert {name: ours[step].get(name) for name in expected} == expected, step
    for name in (f"hf_model/{MODEL}", f"adapter/{ADAPTER}"):
        assert (second.run / name).read_bytes() == (four_steps.run / name).read_bytes()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((f"{LORA}.rank=8",), f"to resume, set {LORA}.rank=6"),
        pytest.param(
            (f"{LORA}.target_modules=[linear_qkv]",),
            "target_modules of the actor's adapters is [down_proj,",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            (f"{LORA}.rank=0",),
            "it has only adapters of rank 6, and configured is to train the whole actor",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["rank", "targets", "whole"],
)
def test_others_do_not_go_on(command_line, four_steps, tmp_path: Path, keys, expected: str) -> None:
    """Before any process is started. Would not catch other values of `select`, which tests/checkpoint have."""
    other = command_line(*FOUR, *LOCAL, *keys, folder=four_steps.copy(tmp_path))
    assert other.wait() == 2, other.text()
    assert expected in " ".join(other.text().split()) and "Traceback" not in other.text()


@pytest.mark.exhaustive
def test_half_an_adapter(command_line, four_steps, tmp_path: Path) -> None:
    """A start from a folder without weights ends with one sentence. Would not catch what tests/checkpoint name."""
    half = tmp_path / "half"
    shutil.copytree(four_steps.run / "adapter", half)
    (half / ADAPTER).chmod(0o600)
    (half / ADAPTER).unlink()
    run = command_line(*FOUR, *LOCAL, f"{LORA}.adapter_path={half}")
    assert run.wait() == 2, run.text()
    assert f"is missing {ADAPTER}" in " ".join(run.text().split()) and "Traceback" not in run.text()


@pytest.mark.exhaustive
def test_two_ranks_start_from_an_adapter(command_line, four_steps, tmp_path: Path) -> None:
    """TP2 in processes of its own: no step leaves the adapter's bytes; another rank ends with one sentence there, too.

    Would not catch a layout whose stages differ, which tests/dist have.
    """
    keys = (*FOUR, *TP2, WITHOUT_RAY, f"{LORA}.adapter_path={four_steps.run / 'adapter'}")
    run = command_line(*keys, "actor_rollout_ref.actor.optim.lr=0")
    assert run.wait() == 0, run.text()
    assert (run.run / "adapter" / ADAPTER).read_bytes() == (four_steps.run / "adapter" / ADAPTER).read_bytes()
    other = command_line(*keys, f"{LORA}.rank=8", folder=tmp_path)
    assert other.wait() == 2, other.text()
    assert f"{LORA}.rank=8 must be 6, the r of" in " ".join(other.text().split()) and "Traceback" not in other.text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "dpo on the fly"])
def test_stages(command_line, files: Path, stage: str, tmp_path: Path) -> None:
    """Each learns adapters, and its checkpoint exports the bytes that the run left, merged and alone.

    Would not catch a layout of several ranks, which tests/dist have.
    """
    role = "critic" if stage == "reward" else "actor"
    run: CommandLine = command_line(*keys_of(files, stage), *RANK6, *LOCAL, stage=command_of(stage))
    assert run.wait() == 0, run.text()
    exported = ("export", "--checkpoint", run.run / "global_step_5", "--role", role, "--target")
    printed(tmp_path, *exported, tmp_path / "merged")
    printed(tmp_path, *exported, tmp_path / "adapter", "--adapter")
    assert (tmp_path / "merged" / MODEL).read_bytes() == (run.run / "hf_model" / MODEL).read_bytes()
    assert (tmp_path / "adapter" / ADAPTER).read_bytes() == (run.run / "adapter" / ADAPTER).read_bytes()


@pytest.mark.exhaustive
def test_experts(command_line, files: Path, tmp_path: Path) -> None:
    """Adapters of every expert on two ranks that share them: `sft`, and `train` from its adapter. That merges for
    generation, and told not to ends with one sentence. Checkpoints export the adapter's bytes and the merged model.

    Would not catch experts that are cut, which tests/dist have.
    """
    model = tiny_moe(tmp_path / "model")
    layout = (*TP2, f"{MEGATRON}.tensor_model_parallel_size=1", f"{MEGATRON}.expert_model_parallel_size=2", WITHOUT_RAY)
    keys = (*layout, f"actor_rollout_ref.model.path={model}", f"{LORA}.rank=6", "trainer.total_training_steps=2")
    tuned = command_line(*keys_of(files, "sft"), *keys, stage="sft")
    assert tuned.wait() == 0, tuned.text()
    keys = (*SHORT, *keys, f"{LORA}.adapter_path={tuned.run / 'adapter'}", "trainer.save_freq=2")
    refused = command_line(*keys, f"{LORA}.merge=false", config=GRPO)
    assert refused.wait() == 2 and f"try: {LORA}.merge=true" in " ".join(refused.text().split())
    merged = command_line(*keys, config=GRPO)
    assert merged.wait() == 0, merged.text()
    assert f"{LORA}.merge=true is chosen: " in merged.text()
    name = "base_model.model.model.layers.1.mlp.experts.5.up_proj.lora_B.weight"
    first, second = (load_file(run.run / "adapter" / ADAPTER)[name] for run in (tuned, merged))
    assert first.any() and not torch.equal(first, second)
    for number, run in enumerate((tuned, merged)):
        exported = ("export", "--checkpoint", run.run / "global_step_2", "--target")
        folder = tmp_path / str(number)
        printed(tmp_path, *exported, folder / "merged")
        printed(tmp_path, *exported, folder / "alone", "--adapter")
        assert (folder / "alone" / ADAPTER).read_bytes() == (run.run / "adapter" / ADAPTER).read_bytes()
        ours, theirs = (load_file(where / MODEL) for where in (folder / "merged", run.run / "hf_model"))
        assert ours.keys() == theirs.keys()
        assert all((ours[name] - theirs[name]).abs().max() < 1e-6 for name in ours)
