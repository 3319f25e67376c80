"""DRY_RUN of scripts/run_70b_ppo.sh: what it prints, what it refuses. No process of Ray or torch is started."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_rl.config.load import load_config
from megatron_rl.planning.preflight import preflight

REPOSITORY = Path(__file__).parents[2]
SCRIPT = "scripts/run_70b_ppo.sh"
CONFIG = "configs/llama3_70b_ppo.yaml"
NODES = [f"node{node}" for node in range(8)]


def launcher(*overrides: str, **variables: str) -> subprocess.CompletedProcess:
    """One call of the script, with no variables of the caller's but what Python needs."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    environment = keep | {"PYTHON": sys.executable, "COLUMNS": "200"} | variables
    command = ["bash", SCRIPT, *overrides]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def commands_of(printed: str) -> list[list[str]]:
    """The commands that were printed, as words, each after the comment that names its node."""
    lines = printed[printed.index("Commands, in") :].splitlines()[1:]
    return [["#", *line[2:].split()] if line.startswith("#") else shlex.split(line) for line in lines]


@pytest.fixture(scope="module")
def dry_run() -> subprocess.CompletedProcess:
    return launcher("trainer.seed=7", DRY_RUN="1")


def test_rehearse_hands_its_variables_on():
    """REHEARSE starts the rehearsal with the script's settings, and nothing else: its rule on ranks is broken here.

    Would not catch a rehearsal that goes wrong; tests/rehearse has some.
    """
    answer = launcher(REHEARSE="1", RANKS="64", LAYERS="2", NNODES="8")
    assert answer.returncode == 2 and answer.stdout == ""
    assert "--ranks 64 must be below 64" in answer.stderr
    assert "makes 84 layers" in launcher(REHEARSE="1", RANKS="0", LAYERS="21").stderr


def test_check_takes_the_place_of_training():
    """With the same settings, after the same plan. Would not catch what a check does: test_cluster_check.py."""
    *_, check = commands_of(launcher("trainer.seed=7", DRY_RUN="1", CHECK="1", STAGE="sft").stdout)
    *_, train = commands_of(launcher("trainer.seed=7", DRY_RUN="1", STAGE="sft").stdout)
    assert check == [*train[:3], "check-cluster", "--stage", *train[3:]]


def test_dry_run_of_products_in_eight_bits(dry_run):
    """Linears of 20 layers of 70B on a rank, an eighth of 855.6 million elements each: two bytes in the actor, one in
    the reference. transformer-engine changes nothing else of the plan, and is the default with fp8.

    Would not catch what its kernels take.
    """
    group = "actor_rollout_ref.actor.megatron.override_transformer_config"
    answer = launcher(f"{group}.fp8=e4m3", DRY_RUN="1")
    assert (answer.returncode, answer.stderr) == (0, "")
    linears = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    for name, size in (("actor", 2), ("reference", 1)):
        assert re.search(rf"{name} FP8 weights +│ +{size * linears * 20 / 8 / 1e9:.2f} GB", answer.stdout)
    fused = launcher(f"{group}.transformer_impl=transformer_engine", DRY_RUN="1")
    memory = [
        one.stdout[one.stdout.index("Memory per GPU") :].split("not yet run on GPUs: ") for one in (fused, dry_run)
    ]
    assert fused.returncode == 0 and memory[0][0] == memory[1][0]
    notes = [unproven.split("\n")[0] for _, unproven in memory]
    assert notes[0].replace("transformer-engine's linear layers, ", "") == notes[1] != notes[0]


def test_dry_run_with_a_teacher_in_its_own_pool():
    """70B that learn from 70B on 8 further GPUs: both pools fit. An eighth of the teacher is 17.6 GB.

    Would not catch that a ninth machine must be started by hand.
    """
    teacher, loss = "distillation.teacher_models.expert", "distillation.distillation_loss"
    pool = ("pools.teachers.nnodes=1", "pools.teachers.n_gpus_per_node=8", f"{teacher}.pool=teachers")
    model = (f"{teacher}.model_path=configs/models/llama-3-70b", f"{teacher}.megatron.pipeline_model_parallel_size=1")
    ways = (f"{loss}.loss_mode=jsd", f"{loss}.use_policy_gradient=false", f"{loss}.use_task_rewards=false")
    others = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "distillation.enabled=true")
    answer = launcher(*pool, *model, *ways, *others, DRY_RUN="1")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "does not fit" not in answer.stdout
    printed = answer.stdout[answer.stdout.index("Memory per GPU of teachers") :]
    rows = re.findall(r"│ (\S[^│]*?) +│ +([\d.]+) GB │", printed)
    assert ("init", "17.64") in rows and ("teacher_expert", "18.10") in rows
    assert re.search(r"│ teacher_expert +│ +[\d.]+ s │ +\d+%, on teachers", printed)


def test_dry_run_prints_the_plan(dry_run):
    """Figures of the 8 x 8 GPUs, without a download. The transition is (141.1 GB / 8) x 3/4 = 13.23 GB a GPU.

    Would not catch wrong arithmetic behind them; the planner's own tests do.
    """
    assert (dry_run.returncode, dry_run.stderr) == (0, "")
    printed = dry_run.stdout
    rows = dict(re.findall(r"│ (\S[^│]*?) +│ +(\S[^│]*?) +│", printed))
    shown = ("ranks", "TP", "PP", "DP", "rollout TP", "samples per step", "samples per DP rank")
    assert [rows[name] for name in shown] == ["64", "8", "4", "2", "8", "1024", "128"]
    assert rows["over the network"] == "13.23 GB"
    assert rows["training DP"] == "32" and rows["micro-DP"] == "64" and "[0, 8], [1, 9]" in printed
    assert {"gen", "update_critic", "update_actor", "save", "step"} <= rows.keys()
    assert "does not fit" not in printed
    page = (REPOSITORY / "docs/scale/launching.md").read_text()
    largest, built = re.search(r"([\d.]+) GB, in the updates .* first stage; ([\d.]+) GB while roles", page).groups()
    assert round(float(rows["update_critic on the first stage"].removesuffix(" GB")), 1) == float(largest)
    assert round(float(re.search(r"│ init +│ +([\d.]+) GB", printed)[1]), 1) == float(built)


def test_dry_run_prints_the_commands_of_every_node(dry_run):
    """Ray's head, seven that join it, and training with the overrides given. Would not catch one that fails there."""
    commands = commands_of(dry_run.stdout)
    places = [words[1].rstrip(",") for words in commands if words[0] == "#"]
    assert places == [*NODES, "node0"]
    starts = [words for words in commands if "start" in words]
    assert ["--head" in words for words in starts] == [True, *[False] * 7]
    assert "--no-monitor" in starts[0] and all("RAY_enable_metrics_collection=0" in words for words in starts)
    assert all("--address=node0:6379" in words and "--num-gpus=8" in words for words in starts[1:])
    *_, address, wait, train = commands
    assert address == ["export", "RAY_ADDRESS=node0:6379"]
    assert wait[1:4] == ["scripts/cluster/wait_for_nodes.py", "--nodes", "8"]
    assert train[1:6] == ["-m", "megatron_rl", "train", "--config", CONFIG] and train[-1] == "trainer.seed=7"


@pytest.mark.exhaustive
def test_what_is_printed_is_what_is_run():
    """Names, ports and an override with blanks come through whole. Would not catch another quoting than the shell's."""
    hosts = " ".join(f"gpu-{node}" for node in range(8))
    finished = launcher("trainer.experiment_name=two words", DRY_RUN="1", HOSTS=hosts, RAY_PORT="7000", ROLLOUT_TP="4",
                        MODEL_PATH="")  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    commands = commands_of(finished.stdout)
    assert ["export", "RAY_ADDRESS=gpu-0:7000"] in commands
    assert commands[-1][-1] == "trainer.experiment_name=two words"
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size=4" in commands[-1]
    assert re.search(r"│ sequences at once +│ +71 │", finished.stdout)  # as docs/scale/launching.md says
    assert "does not fit" not in finished.stdout


def test_bad_override_is_refused_before_anything_starts():
    """Code 2 and the nearest key. Would not catch a fault that only a GPU shows."""
    files = {"TRAIN_FILES": "assets/demo/train.parquet", "VAL_FILES": "assets/demo/test.parquet"}
    finished = launcher("trainer.seeed=2", MODEL_PATH="configs/models/llama-3-70b", **files)
    assert finished.returncode == 2
    assert "did you mean: trainer.seed=2" in finished.stderr and "Commands" not in finished.stdout


def test_faults_of_a_launch_exit_with_2():
    """Each named with its value: an unknown scale, too few hosts, a layout, files that are not there."""
    wrong_scale = launcher(SCALE="small")
    assert wrong_scale.returncode == 2 and "SCALE=small must be 70b or tiny" in wrong_scale.stderr
    few_hosts = launcher(DRY_RUN="1", HOSTS="a b")
    assert few_hosts.returncode == 2 and "HOSTS names 2 machines and NNODES=8" in few_hosts.stderr
    layout = launcher(DRY_RUN="1", PP="3")
    assert layout.returncode == 2 and "try: actor_rollout_ref.actor.megatron.pipeline" in layout.stderr
    assert "Commands" not in layout.stdout
    unset = launcher("data.val_files=[a.parquet]")
    assert unset.returncode == 2 and "not set: MODEL_PATH TRAIN_FILES." in unset.stderr and "DRY_RUN=1" in unset.stderr
    no_files = launcher(MODEL_PATH="configs/models/llama-3-70b", TRAIN_FILES="a.parquet", VAL_FILES="b.parquet")
    assert no_files.returncode == 2 and "it does not exist" in no_files.stderr and "*.safetensors" in no_files.stderr


@pytest.mark.exhaustive
def test_a_stage_is_started_by_the_same_script():
    """Command, configuration, nodes and layout of the stage, under the keys of its role; a plan that fits; code 2 for
    an unknown stage and for a layout that does not. Would not catch a stage that fails on GPUs."""
    tuned = launcher(DRY_RUN="1", STAGE="sft")
    assert (tuned.returncode, tuned.stderr) == (0, ""), tuned.stderr
    assert "does not fit" not in tuned.stdout and "update_actor" in tuned.stdout
    *_, wait, train = commands_of(tuned.stdout)
    assert wait[1:4] == ["scripts/cluster/wait_for_nodes.py", "--nodes", "4"]
    assert train[2:6] == ["megatron_rl", "sft", "--config", "configs/stages/llama3_70b_sft.yaml"]
    reward = launcher("trainer.seed=2", DRY_RUN="1", STAGE="reward", NNODES="2", HOSTS="a b", TP="4")
    assert (reward.returncode, reward.stderr) == (0, ""), reward.stderr
    train = commands_of(reward.stdout)[-1]
    assert train[2:4] == ["megatron_rl", "reward"] and train[-1] == "trainer.seed=2"
    assert {"trainer.nnodes=2", "critic.megatron.tensor_model_parallel_size=4"} <= set(train)
    assert not [word for word in train if "rollout" in word]
    unknown = launcher(DRY_RUN="1", STAGE="rm")
    assert unknown.returncode == 2 and "STAGE=rm must be ppo, sft, reward or dpo" in unknown.stderr
    layout = launcher(DRY_RUN="1", STAGE="dpo", PP="3")
    assert (
        layout.returncode == 2 and "pipeline_model_parallel_size" in layout.stderr and not layout.stdout.count("node1")
    )


def test_scripts_parse():
    """`bash -n`, and the job's YAML with eight workers of eight GPUs. Would not catch what SLURM or KubeRay refuse."""
    for script in (SCRIPT, "scripts/cluster/slurm_70b.sbatch"):
        subprocess.run(["bash", "-n", script], cwd=REPOSITORY, check=True)
        assert "set -euo pipefail" in (REPOSITORY / script).read_text()
    [workers] = yaml.safe_load((REPOSITORY / "scripts/cluster/rayjob_70b.yaml").read_text())["spec"]["rayClusterSpec"][
        "workerGroupSpecs"
    ]
    [container] = workers["template"]["spec"]["containers"]
    assert (workers["replicas"], container["resources"]["limits"]["nvidia.com/gpu"]) == (8, "8")


def test_launch_files_fit_one_another():
    """The job starts a script where the image has it, with the image's Python first on PATH, on a Ray that serves jobs.

    Would not catch what only a build or KubeRay shows.
    """
    image = (REPOSITORY / "docker/Dockerfile.gpu").read_text()
    [home] = re.findall(r"^WORKDIR (\S+)$", image, re.M)
    job = yaml.safe_load((REPOSITORY / "scripts/cluster/rayjob_70b.yaml").read_text())["spec"]
    shell, script = job["entrypoint"].split()
    assert shell == "bash" and Path(script).relative_to(home) == Path(SCRIPT)
    assert re.search(rf"^ENV PATH={home}/\.venv/bin:", image, re.M) and "PYTHON: python " in job["runtimeEnvYAML"]
    for file in re.findall(r"requirements/\w+\.txt", image):
        assert (REPOSITORY / file).is_file(), file
    pins = [
        re.findall(r"^ray(\S*)==(\S+)$", (REPOSITORY / f"requirements/{kind}.txt").read_text(), re.M)
        for kind in ("cpu", "gpu")
    ]
    assert [[("", version)], [("[default]", version)]] == pins if (version := pins[0][0][1]) else False
    assert "wget" in image.split()  # KubeRay's probes


def test_tiny_shape_keeps_the_architecture():
    """All keys of the 70B shape but sizes and tokens. Would not catch a key that only the library knows."""
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    try:
        from make_tiny_model import SHRUNK, TOKEN_KEYS, tiny_shape
    finally:
        sys.path.pop(0)
    shape = json.loads((REPOSITORY / "configs/models/llama-3-70b/config.json").read_text())
    demo = dict.fromkeys(TOKEN_KEYS, 3) | {"architectures": ["Other"], "tie_word_embeddings": True}
    tiny = tiny_shape(shape, demo)
    assert {key: tiny[key] for key in shape if key not in {*SHRUNK, *TOKEN_KEYS}} == {
        key: value for key, value in shape.items() if key not in {*SHRUNK, *TOKEN_KEYS}
    }
    assert tiny["architectures"] == ["LlamaForCausalLM"] and not tiny["tie_word_embeddings"]
    assert tiny["vocab_size"] == 3 and tiny["num_attention_heads"] > tiny["num_key_value_heads"]


def test_configuration_is_valid_by_itself():
    """Without the script, which only repeats its layout. Would not catch a value that is valid and unwise."""
    config = load_config(REPOSITORY / CONFIG, [f"actor_rollout_ref.model.path={REPOSITORY}/configs/models/llama-3-70b"])
    assert preflight(config, config_only=True) == []
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (8, 8)
