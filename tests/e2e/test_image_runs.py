"""Runs that read images learn what is to be seen, and nothing where there is nothing to be seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from colour_task import write_colours
from command_line import REPOSITORY
from safetensors.torch import load_file
from short_runs import LOCAL, MEGATRON, metrics
from sweeps import WEEKLY
from test_async_runs import ASYNC, assert_same_bits, events, weights_equal
from test_resumed_runs import export
from transformers import AutoModel
from vision_folders import save_qwen3_vl_folder, save_qwen25_vl_folder
from zoom_task import one_token_turns, write_lessons, write_zoom

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

CONFIG, LESSONS = "configs/grpo_cpu.yaml", "configs/stages/image_model_cpu.yaml"
FORBIDDEN = """
class Zoom:
    def reset(self, row):
        raise RuntimeError("may not run")

    step = reset
"""
HELD_OUT = "val-core/colour/acc/mean@1"


def keys_of(folder: Path, save=save_qwen25_vl_folder, side: int = 28, **options) -> tuple[str, ...]:
    return *write_colours(folder / "data", side, **options), f"actor_rollout_ref.model.path={save(folder / 'model')}"


@pytest.mark.exhaustive
def test_two_steps_of_a_run_with_images(command_line, tmp_path) -> None:
    """Engine beside trainer, and the export beside transformers, which reads the pictures themselves; the run says what
    it compared. The tower reads each of the 16 pictures once, for all samples, epochs, steps and the validation. Would
    not catch a model that learns nothing.
    """
    often = ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.ppo_epochs=3")
    keys = (*keys_of(tmp_path), *LOCAL, "trainer.total_training_steps=2", *often)
    run = command_line(*keys, config=CONFIG)
    assert run.wait() == 0, run.text()
    steps = metrics(run)
    assert all(steps[step]["training/rollout_logprob_diff_max"] <= 5e-5 for step in (1, 2))
    assert [steps[step]["images/tower_passes"] for step in (1, 2)] == [16, 16]


@pytest.mark.parametrize(
    ("save", "side", "is_noise"),
    [
        pytest.param(save_qwen25_vl_folder, 28, False, marks=WEEKLY, id="Qwen2.5-VL"),
        pytest.param(save_qwen3_vl_folder, 32, False, marks=WEEKLY, id="Qwen3-VL"),
        pytest.param(save_qwen25_vl_folder, 28, True, marks=WEEKLY, id="noise"),
    ],
)
def test_the_colour_of_a_square_is_learned(command_line, tmp_path, save, side: int, is_noise: bool) -> None:
    """From a quarter to nearly all in 30 steps; with noise in place of pictures no more than a third is right. Would
    not catch a place that is read as another.
    """
    keys = keys_of(tmp_path, save, side, is_noise=is_noise)
    run = command_line(*keys, *LOCAL, "trainer.seed=1", config=CONFIG)
    assert run.wait() == 0, run.text()
    steps = metrics(run)
    assert steps[0][HELD_OUT] <= 0.35
    assert steps[30][HELD_OUT] <= 0.35 if is_noise else steps[30][HELD_OUT] >= 0.95


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_the_demo_with_images_learns(command_line, tmp_path) -> None:
    """`make demo-image`, from its script to its last validation: 64 images that it was not trained on. Would not catch
    a colour that it names by its place: every place has all colours.
    """
    subprocess.run([sys.executable, "scripts/make_image_assets.py"], cwd=REPOSITORY, check=True, timeout=300)
    keys = ("data.val_files=assets/images/test.parquet", f"trainer.validation_data_dir={tmp_path}/validation")
    run = command_line(*keys, config="configs/images_cpu.yaml")
    assert run.wait() == 0, run.text()
    name = "val-core/demo/colours/acc/mean@1"
    accuracy = [line[name] for line in metrics(run).values() if name in line]
    assert accuracy[0] <= 0.45 and accuracy[-1] >= 0.95
    command = [sys.executable, "scripts/show_answers.py", str(tmp_path / "validation")]
    shown = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    assert f"{accuracy[0]:.3f}" in shown and f"{accuracy[-1]:.3f}" in shown


ROLLOUT = "actor_rollout_ref.rollout"
REPLICAS = (
    *("actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2"),
    *(f"{ROLLOUT}.tensor_model_parallel_size=1", "trainer.launcher=local", "async_training.partial_rollout=true"),
    "algorithm.rollout_correction.rollout_is=token",
)
"""Two replicas on ranks of their own."""


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=WEEKLY, id="asynchronous")])
def test_replicas_read_images_while_the_actor_trains(command_line, tmp_path, ahead: int) -> None:
    """Two replicas on ranks of their own, a trainer of TP2 with sequence parallelism, and a resumed run: engine beside
    trainer. Would not catch a replica that is lost.
    """
    keys = [
        *keys_of(tmp_path, save_qwen3_vl_folder, 32),
        *("trainer.n_gpus_per_node=2", f"{MEGATRON}.tensor_model_parallel_size=2", *REPLICAS),
        *(f"trainer.rollout_ahead={ahead}", "trainer.save_freq=2"),
    ]
    first = command_line(*keys, "trainer.total_training_steps=2", config=CONFIG)
    assert first.wait() == 0, first.text()
    run = command_line(*keys, "trainer.total_training_steps=4", config=CONFIG, folder=first.folder)
    assert run.wait() == 0 and "resuming after step 2" in run.text(), run.text()
    assert sorted(metrics(run)) == [0, 1, 2, 3, 4]
    compared = [step.get("training/rollout_logprob_diff_max") for step in metrics(run).values()]
    assert max(worst for worst in compared if worst is not None) <= 5e-5  # of steps that one policy sampled


FILTER, TRAINED = "algorithm.filter_groups", f"{MEGATRON}.freeze_vision_model=false"
SHORTLY = ("trainer.total_training_steps=2", "trainer.test_freq=5040", "trainer.val_before_train=false")
FEW = ("actor_rollout_ref.rollout.n=4", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
TP2 = ("trainer.n_gpus_per_node=2", f"{MEGATRON}.tensor_model_parallel_size=2")
PP2 = ("trainer.n_gpus_per_node=2", f"{MEGATRON}.pipeline_model_parallel_size=2", "trainer.launcher=local")
PIXELS = "data.mm_processor_kwargs.max_pixels"
REFERENCE = "actor_rollout_ref.ref"
MOVES = ("actor_rollout_ref.actor.use_kl_loss=true", f"{REFERENCE}.sync_ref_model=true")
MOVES += (f"{REFERENCE}.ref_model_sync_steps=1",)
FURTHER = {
    "dynamic sampling": ("--local", f"{FILTER}.enable=true", f"{FILTER}.metric=acc", f"{FILTER}.max_num_gen_batches=2"),
    "critic": ("--local", "algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"),
    "critic, trained tower": (*PP2, TRAINED, "algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"),
    "trained tower": ("--local", TRAINED),
    "trained tower, Ray": (*TP2, TRAINED),
    "trained tower, replicas": (*REPLICAS, TRAINED, "trainer.rollout_ahead=1", "trainer.total_training_steps=3"),
    "trained tower, bfloat16": ("--local", TRAINED, f"{MEGATRON}.dtype=bfloat16"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=WEEKLY) for name in FURTHER])
def test_further_runs_with_images(command_line, tmp_path, name: str) -> None:
    """Groups that begin after verdicts have their images read; values read them, too. What a checkpoint has is
    exported: the actor as the run did, with the tower that it trained; the critic as a model of transformers, which has
    no class for the head. Would not catch a head that is not the critic's.
    """
    run = command_line(*keys_of(tmp_path), *SHORTLY, *FEW, "trainer.save_freq=1", *FURTHER[name], config=CONFIG)
    assert run.wait() == 0, run.text()
    differences = [line.get("training/rollout_logprob_diff_max") for line in metrics(run).values()]
    compared = [worst for worst in differences if worst is not None]  # of steps that one policy sampled
    assert compared and all(0 < worst <= (0.1 if "bfloat16" in name else 5e-5) for worst in compared)
    export(run, "actor", tmp_path / "actor")
    folders = (tmp_path / "actor", run.run / "hf_model", tmp_path / "model")
    ours, theirs, before = (load_file(folder / "model.safetensors") for folder in folders)
    assert ours.keys() == theirs.keys() and all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    moved = {not ours[name].equal(before[name]) for name in ours if name.startswith("visual.")}
    assert moved == {TRAINED in FURTHER[name]}
    if "critic" in name:
        export(run, "critic", tmp_path / "critic")
        _, told = AutoModel.from_pretrained(tmp_path / "critic", output_loading_info=True)
        assert not told["missing_keys"] and {*told["unexpected_keys"]} == {"score.weight"}


@pytest.mark.parametrize("keys", [pytest.param((), marks=WEEKLY), pytest.param(MOVES, marks=WEEKLY, id="moving")])
def test_a_trained_tower_is_resumed(command_line, tmp_path, keys: tuple[str, ...]) -> None:
    """Bit for bit, also with a reference that follows the policy; but its tower reads images again, which are counted
    from each start. Would not catch other layouts: `tests/dist` does.
    """
    all_keys = (*keys_of(tmp_path), "--local", *SHORTLY, *FEW, TRAINED, "trainer.save_freq=1", *keys)
    whole = command_line(*all_keys, config=CONFIG)
    first = command_line(*all_keys, "trainer.total_training_steps=1", config=CONFIG)
    assert whole.wait() == 0 and first.wait() == 0, whole.text() + first.text()
    resumed = command_line(*all_keys, config=CONFIG, folder=first.folder)
    assert resumed.wait() == 0 and "resuming after step 1" in resumed.text(), resumed.text()
    ours, theirs = ({**metrics(run)[2], "images/tower_passes": 0} for run in (resumed, whole))
    assert ours == theirs and weights_equal(resumed, whole)


@pytest.mark.parametrize("sizes", [pytest.param((784, 3136), marks=WEEKLY)])
def test_sizes_of_images_are_an_axis_of_an_ablation(command_line, tmp_path, sizes: tuple[int, ...]) -> None:
    """As configs/ablations/image_pixels.yaml: smaller images have fewer tokens. Would not catch its larger model."""
    shortly = ("trainer.launcher=local", *SHORTLY, *FEW, "trainer.export_hf=false", "trainer.logger=[console,jsonl]")
    pairs = (one.partition("=") for one in (*keys_of(tmp_path), *shortly))
    overrides = {key: yaml.safe_load(value) for key, _, value in pairs}
    file, out = tmp_path / "ablation.yaml", tmp_path / "out"
    content = {"config": CONFIG, "folder": str(out), "overrides": overrides, "grid": {PIXELS: [*sizes]}}
    file.write_text(yaml.safe_dump(content | {"baseline": f"max_pixels={sizes[-1]}", "warmup_steps": 1}))
    run = command_line(command=(sys.executable, "-m", "megatron_rl", "ablate", "--config", file), names_folder=False)
    assert run.wait() == 0, run.text()
    steps = [(out / f"points/max_pixels={size}/run/metrics.jsonl").read_text().splitlines() for size in sizes]
    lengths = [json.loads(first)["prompt_length/mean"] for first, _ in steps]
    assert lengths[1] - lengths[0] == 3  # 28 x 28 pixels a token


def zoom_keys(folder: Path, save=save_qwen25_vl_folder, with_agent: bool = False) -> tuple[str, ...]:
    path = one_token_turns(save(folder / "model"))
    return *write_zoom(folder / "data", with_agent), f"actor_rollout_ref.model.path={path}"


SHORT_ZOOM = (*SHORTLY, "actor_rollout_ref.rollout.n=4")
MODEL, TURNS = "actor_rollout_ref.model", "actor_rollout_ref.rollout.multi_turn"
TURN_CASES = [
    (save_qwen3_vl_folder, "agent", ("--local",)),
    (save_qwen25_vl_folder, "padded", ("--local", f"{MODEL}.use_remove_padding=false")),
    (save_qwen25_vl_folder, "anew", ("--local", f"{TURNS}.environment.name=Anew")),
    (save_qwen3_vl_folder, "tree", ("--local", f"{MODEL}.enable_tree_training=true")),
    (save_qwen3_vl_folder, "TP2", TP2),
    (save_qwen25_vl_folder, "PP2", PP2),
    (save_qwen3_vl_folder, "CP2", ("trainer.n_gpus_per_node=2", f"{MEGATRON}.context_parallel_size=2")),
]


@pytest.mark.parametrize(
    ("save", "way", "keys"),
    [pytest.param(*case, marks=pytest.mark.exhaustive if case[1] == "agent" else WEEKLY) for case in TURN_CASES],
)
def test_turns_with_images(command_line, tmp_path, save, way: str, keys: tuple[str, ...]) -> None:
    """Engine beside trainer where the second turn follows an image, of an environment or of an agent behind the
    endpoint, or begins another conversation with one. Exports are compared with transformers, too. Would not catch an
    image that a template leaves out: its episode fails.
    """
    run = command_line(
        *zoom_keys(tmp_path, save, way == "agent"), *SHORT_ZOOM, *keys, "trainer.launcher=local", config=CONFIG
    )
    assert run.wait() == 0, run.text()
    for line in metrics(run).values():
        assert 0 < line["training/rollout_logprob_diff_max"] <= 5e-5
        assert line["num_turns/mean"] == 2 and line["episode/failed_ratio"] == 0


OPTIM = "actor_rollout_ref.actor.optim"
CALM = (f"{OPTIM}.lr_decay_style=WSD", f"{OPTIM}.lr_wsd_decay_style=linear", f"{OPTIM}.lr_wsd_decay_steps=12")
"""Near its end a policy that is sure has gradients of few samples, and a large step forgets a picture."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=WEEKLY) for seed in (1, 2, 3)])
def test_a_zoom_is_learned(command_line, tmp_path, seed: int) -> None:
    """From one in 16 to nearly all: the policy looks where its prompt shows it to, and names what the crop shows. Would
    not catch a crop that it need not read: by the prompt alone no more than a quarter is right.
    """
    model = f"actor_rollout_ref.model.path={one_token_turns(save_qwen25_vl_folder(tmp_path / 'model'))}"
    taught = command_line(*write_lessons(tmp_path / "lessons"), model, "--local", stage="sft", config=LESSONS)
    assert taught.wait() == 0, taught.text()
    keys = (*write_zoom(tmp_path / "data"), f"actor_rollout_ref.model.path={taught.run / 'hf_model'}")
    run = command_line(*keys, *LOCAL, *CALM, f"trainer.seed={seed}", config=CONFIG)
    assert run.wait(3000) == 0, run.text()
    steps = metrics(run)
    assert steps[0]["val-core/zoom/reward/mean@1"] <= 0.35 and steps[max(steps)]["val-core/zoom/reward/mean@1"] >= 0.9


@pytest.mark.exhaustive
def test_turns_with_images_are_repeated_without_their_environment(command_line, tmp_path) -> None:
    """Ahead of training in one process, with a validation; the replay has an environment that may not run, and a copy
    of the images. Would not catch several replicas.
    """
    keys = (*zoom_keys(tmp_path), *LOCAL, "--collapse", "trainer.total_training_steps=2", "trainer.test_freq=2")
    keys += ("actor_rollout_ref.rollout.n=4",)
    run = command_line(*keys, config=ASYNC)
    assert run.wait() == 0, run.text()
    (forbidden := tmp_path / "forbidden.py").write_text(FORBIDDEN)
    path = "actor_rollout_ref.rollout.multi_turn.environment.path"
    again = command_line(*keys, f"{path}={forbidden}", f"--replay={run.run}", config=ASYNC)
    assert again.wait() == 0, again.text()
    assert any('"images"' in line for line in (run.run / "schedule.jsonl").read_text().splitlines())
    assert events(again, "turn") == events(run, "turn")
    assert_same_bits(again, run)
