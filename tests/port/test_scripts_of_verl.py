"""Real launch scripts of verl: which pass, which features the others ask for, and how a script is read."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_rl.config.verl_compat.translate import Kind
from megatron_rl.errors import ConfigError
from megatron_rl.port.port import port

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "verl_scripts"
FEATURES = {
    "examples_ppo_trainer_run_moonlight16b_a3b_gsm8k_megatron": [],  # it leaves the path of its model to the user
    "recipe_gkd_megatron_test_qwen": [],  # its teacher's folder is named where the teacher's server is started
    "recipe_low_precision_run_dapo_qwen3_moe_30b_megatron_fp8e2e": [],  # its EP 8 is for more nodes than its default
    "recipe_qat_run_qwen3_30b_w4a16_megatron": ["quantization-aware training"],
}
"""Scripts that do not pass -> what they ask for that is not here."""

SCRIPT = r"""
set -x
export PATH=/opt/tools/bin:$PATH
source /opt/nothing/activate
MODEL=${MODEL:-models/Qwen2-7B-Instruct}
train=$HOME/data/gsm8k/train.parquet
files="['$train', '$HOME/data/math/train.parquet']"
GPUS=$(nvidia-smi -L | wc -l)
cd /nowhere
rm -rf $KEPT
mkdir -p $KEPT/made
ray start --head
# python3 -m verl.trainer.main_ppo trainer.nnodes=9
nohup python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=$((2 * 4)) \
    data.train_files="$files" data.val_files=$train \
    trainer.n_gpus_per_node=$GPUS \
    actor_rollout_ref.model.path=$MODEL \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_modules=null \
    trainer.logger='["console","wandb"]' \
    trainer.default_local_dir=$(pwd)/ckpts \
    trainer.total_epochs=15 $@ > train.log 2>&1 &
wait
"""


@pytest.fixture(scope="module")
def rows():
    module = runpy.run_path(str(REPOSITORY / "scripts/verl_table.py"))
    return {row.name: row for row in module["judged"](SCRIPTS)}


def test_scripts_pass_or_name_what_they_lack(rows):
    """All 39, as `plan --without-files` sees them. Would not catch a script that passes and trains something else."""
    assert len(rows) == 39
    assert {name for name, row in rows.items() if not row.passes} == FEATURES.keys()
    for name, wanted in FEATURES.items():
        found = rows[name].features
        assert len(found) == len(wanted), (name, found)
        assert all(any(one.startswith(feature) for one in found) for feature in wanted), (name, found)


def test_scripts_of_models_that_read_images_train_the_tower(monkeypatch):
    """Next to adapters it stays as it is. Would not catch a script that names another column of images."""
    monkeypatch.chdir(SCRIPTS)
    arguments = Path("examples_grpo_trainer_run_qwen3_vl-30b-megatron.args").read_text().split()
    freeze, rank = "actor_rollout_ref.actor.megatron.freeze_vision_model", "actor_rollout_ref.model.lora.rank"
    for added, expected in (([], False), ([f"{rank}=8"], None)):
        found = port(None, [*arguments, *added], {})
        values = {setting.key: setting.value for setting in found.settings}
        assert (values["data.image_key"], values.get(freeze)) == ("images", expected)


def test_the_table_of_the_docs_is_the_generated_one(rows):
    """Would not catch a page around it that says something else."""
    module = runpy.run_path(str(REPOSITORY / "scripts/verl_table.py"))
    page = (REPOSITORY / "docs/start/coming_from_verl.md").read_text()
    between = page.partition(module["BEGIN"])[2].partition(module["END"])[0]
    assert between.strip() == module["table"](rows.values())


def written(folder: Path, text: str) -> Path:
    file = folder / "run.sh"
    file.write_text(text)
    return file


def test_a_shell_script_is_run_without_what_it_starts(tmp_path, monkeypatch):
    """Its variables, arithmetic and lists; nothing is removed, made or written. Would not catch what no stub covers:
    `test_confined_scripts.py`."""
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.chdir(tmp_path)
    found = port(written(tmp_path, SCRIPT), ["trainer.nnodes=2"], {"HOME": "/home/me", "KEPT": str(kept)})
    values = {setting.key: setting.value for setting in found.settings}
    assert values["data.train_files"] == ["/home/me/data/gsm8k/train.parquet", "/home/me/data/math/train.parquet"]
    assert (values["trainer.n_gpus_per_node"], values["trainer.nnodes"], values["trainer.total_epochs"]) == (8, 2, 15)
    assert values["actor_rollout_ref.rollout.n"] == 8
    assert values["trainer.default_local_dir"] == f"{tmp_path}/ckpts"
    assert values["data.train_batch_size"] == 1024  # verl's default, which is another here
    assert found.of(Kind.UNSUPPORTED) == []
    assert list(kept.iterdir()) == [] and sorted(path.name for path in tmp_path.iterdir()) == ["kept", "run.sh"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=$B\n\npython3 -m verl.trainer.main_ppo a.b=1 \\\n trainer.nnodes=$NODES", "line 4: the variable NODES"),
        ("HERE=$WORK/data\npython3 -m verl.trainer.main_ppo data.val_files=$HERE/x", "line 1: the variable WORK"),
        ("set -u\necho $NOPE\npython3 -m verl.trainer.main_ppo a.b=1", "line 2: the variable NOPE"),
        ("echo nothing", "starts no trainer"),
        ("python3 -m verl.trainer.main_ppo a.b=1 \\\r\n trainer.nnodes=2\r\n", "line ends of Windows.*try: sed -i"),
        ("while true; do :; done", "did not end within"),
    ],
)  # fmt: skip
def test_what_cannot_be_resolved_is_named(tmp_path, monkeypatch, text, expected):
    """Variable and line. Would not catch a variable that another program would have set."""
    monkeypatch.setattr("megatron_rl.port.shell.TIME_LIMIT_S", 0.3 if "while" in text else 20.0)
    with pytest.raises(ConfigError, match=expected):
        port(written(tmp_path, text), [], {})


def test_a_file_that_is_nested_too_deeply(tmp_path):
    """Would not catch one whose interpolations go round."""
    file = tmp_path / "verl.yaml"
    file.write_text("trainer: " + "[" * 100_000)
    with pytest.raises(ConfigError, match="verl.yaml is not valid YAML"):
        port(file, [], {})


JOB = r"""
export WANDB_API_KEY=secret1 CUDA_DEVICE_MAX_CONNECTIONS=1 SAME=old
if true; then export VLLM_USE_V1=1; else export NEVER=1; fi
unexported=1
mkdir -p out && pip install verl
python3 prepare.py --to data
ray job submit --address="http://head:8265" --runtime-env-json='{"env_vars": {"HF_TOKEN": "secret2"}}' -- \
    NCCL_DEBUG=INFO python3 -m verl.trainer.main_ppo --multirun trainer.nnodes=2 trainer.seed=3 stray
nohup python3 -u -m verl.trainer.main_ppo trainer.nnodes=1 &
wait
"""


def test_what_no_configuration_holds_is_said(tmp_path):
    """Exports by name alone, the launcher, words that are no settings, other calls. A script that does nothing else has
    no such list. Would not catch a variable that a program of its own reads and sets.
    """
    found = port(written(tmp_path, JOB), [], {"SAME": "old", "SECRET": "secret3"})
    assert found.beside == [
        "exported variables: CUDA_DEVICE_MAX_CONNECTIONS, NCCL_DEBUG, VLLM_USE_V1, WANDB_API_KEY; export those that a "
        "run needs where you start it",
        "around the trainer: ray job submit with --address, --runtime-env-json; to start a run see "
        "docs/start/coming_from_verl.md",
        "another call of a trainer: verl.trainer.main_ppo, which is left out; port its arguments by themselves",
        "other programs that it calls: pip install, python3 prepare.py",
        "2 words of the trainer's command that are no settings: --multirun, stray",
    ]
    assert "secret" not in found.yaml() and "VLLM_USE_V1" in found.yaml()
    assert port(written(tmp_path, "nohup python3 -u -m verl.main_ppo trainer.nnodes=1"), [], {}).beside == []


def test_calls_without_end_are_refused(tmp_path):
    """5 MB of words in calls of programs. Would not catch one word that takes long."""
    text = "x=$(printf '%0125000d' 0)\nfor i in $(seq 40); do ray $x; done"
    with pytest.raises(ConfigError, match="more than 4 MiB of arguments"):
        port(written(tmp_path, text + "\npython3 -m verl.trainer.main_ppo trainer.nnodes=1"), [], {})


def test_what_could_not_be_checked_is_said(tmp_path, monkeypatch):
    """A model that is elsewhere, whose lengths are then not compared; a file with images. Would not catch images in
    later rows of a jsonl file.
    """
    monkeypatch.chdir(tmp_path)
    keys = ["actor_rollout_ref.model.path=m", "critic.model.path=m", "data.train_files=a.jsonl", "data.val_files=null"]
    keys += ["data.max_prompt_length=50", "data.max_response_length=60"]
    (unread,) = port(None, keys, {}).unread
    assert unread.startswith("actor_rollout_ref.model.path, critic.model.path=m: m/config.json")
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text('{"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 100}')
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "images": [{"path": "a.png"}]}\n')
    found = port(None, keys, {})
    assert found.unread == [] and any("config.json allows 100" in note.reason for note in found.of(Kind.RENAMED))
    (said,) = (note.reason for note in found.of(Kind.DIFFERS))
    rule = "rows with something in it are refused, unless data.image_key names a column of images"
    assert said == f"a.jsonl has images: {rule}" and found.features == []
    assert port(None, [*keys, "data.image_key=images"], {}).of(Kind.DIFFERS) == []
    assert port(None, ["data.video_key=films"], {}).features == ["videos or sounds in a column of another name"]


@pytest.mark.parametrize(
    ("program", "feature"),
    [
        ("verl.trainer.main_ppo", None),
        ("recipe.dapo.main_dapo", None),
        ("verl.experimental.one_step_off_policy.main_ppo", None),
        ("verl.experimental.fully_async_policy.fully_async_main", None),
        ("verl.trainer.fsdp_sft_trainer", "supervised fine-tuning"),
        ("recipe.gkd.megatron.main_gkd", None),
        ("recipe.own.run_it", "the program recipe.own.run_it"),
    ],
)
def test_programs_have_names(tmp_path, program, feature):
    """Would not catch a program whose name says something else."""
    found = port(written(tmp_path, f"python3 -m {program} trainer.nnodes=1"), [], {})
    assert found.features == ([] if feature is None else [feature])


def test_a_model_of_text_that_is_published_with_a_tower(tmp_path):
    """Qwen3.5: its script passes, and the note says that images are not read. Would not catch rows that have some."""
    model = REPOSITORY / "configs/models/qwen3.5-35b-a3b"
    text = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path={model} algorithm.adv_estimator=grpo"
    found = port(written(tmp_path, text), [], {})
    assert found.of(Kind.UNSUPPORTED) == [] and found.features == []
    notes = [str(note.reason) for note in found.of(Kind.DIFFERS) if note.setting.value == str(model)]
    assert notes == ["its language model alone is trained; data.image_key is for images"]


def test_what_is_not_supported_stays_in_the_file(tmp_path):
    """So that a run is refused until it is taken out; and verl's YAML is read as its arguments are.

    Would not catch a key that another row of the table takes away.
    """
    file = tmp_path / "verl.yaml"
    file.write_text(
        "defaults: [ppo_trainer, x, {a: b}, _self_]\n_target_: y\nactor_rollout_ref:\n  model: {path: m}\n  actor:\n"
        "    ppo_mini_batch_size: 64\n    megatron: {qat: {enable: true}, use_mbridge: true}\n"
        "  rollout: {prompt_length: '${oc.select:data.max_prompt_length,512}'}\ndata: {max_prompt_length: 99}\n"
    )
    found = port(file, ["trainer.nnodes=3", "trainer.magic=1"], {})
    assert found.features == ["quantization-aware training", "the key trainer.magic, which is in no table"]
    assert found.beside == [f"files that {file} is made of: x; port their settings, too"]
    assert port(None, ["--multirun", "trainer.nnodes=3"], {}).beside[0].endswith("are no settings: --multirun")
    tree = yaml.safe_load(found.yaml())
    assert tree["actor_rollout_ref"]["actor"] == {"ppo_mini_batch_size": 64, "megatron": {"qat": {"enable": True}}}
    assert tree["data"]["max_prompt_length"] == 99 and tree["trainer"]["nnodes"] == 3


CORRECTION, GROUPS, LOSS = (
    "algorithm.rollout_correction",
    "algorithm.filter_groups",
    "actor_rollout_ref.actor",
)
QUANTIZATION = "actor_rollout_ref.rollout.quantization"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([f"{CORRECTION}.rollout_rs=token_k1"], "divided by the number of kept tokens or responses"),
        ([f"{CORRECTION}.rollout_rs=null"], None),
        ([f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.bypass_mode=True"], None),
        ([f"{GROUPS}.enable=True", f"{GROUPS}.max_num_gen_batches=10"], "filled up with other groups"),
        ([f"{GROUPS}.enable=True", f"{GROUPS}.max_num_gen_batches=-1"], None),
        ([f"{GROUPS}.enable=False", f"{GROUPS}.max_num_gen_batches=10"], None),
        ([f"{LOSS}.loss_agg_mode=seq-mean-token-sum-norm"], "loss_scale_factor is data.max_response_length"),
        ([f"{LOSS}.loss_agg_mode=seq-mean-token-sum-norm", f"{LOSS}.loss_scale_factor=512"], None),
        ([f"{LOSS}.loss_agg_mode=token-mean"], None),
        ([f"{CORRECTION}.bypass_mode=True", f"{LOSS}.policy_loss.loss_mode=dppo_tv"], "verl takes PPO's"),
        ([f"{CORRECTION}.bypass_mode=True", f"{LOSS}.policy_loss.loss_mode=vanilla"], None),
        ([f"{LOSS}.policy_loss.loss_mode=dppo_tv"], None),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"], "in verl their KL is 0"),
        (["algorithm.kl_ctrl.type=adaptive"], None),
        ([f"{QUANTIZATION}=fp8"], "the activations are rounded, too"),
        ([f"{QUANTIZATION}=null"], None),
    ],
)
def test_what_the_same_key_does_elsewhere_is_said(arguments, expected):
    """Beside the settings, which stay; nothing of substance is lost. Would not catch a difference without a row."""
    result = port(None, arguments, {})
    notes = [str(note) for note in result.of(Kind.DIFFERS)]
    assert len(notes) == (expected is not None) and result.features == []
    assert expected is None or (expected in notes[0] and f"#   {notes[0]}" in result.yaml())


@pytest.mark.parametrize(
    ("arguments", "weights", "is_said"),
    [
        ([f"{QUANTIZATION}=fp8"], "token", True),
        (["+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization=fp8"], "token", True),
        ([f"{QUANTIZATION}=fp8", f"{CORRECTION}.rollout_is=null"], "token", True),
        ([f"{QUANTIZATION}=fp8", f"{CORRECTION}.rollout_is=sequence"], "sequence", False),
        ([f"{QUANTIZATION}=fp8", f"{CORRECTION}.bypass_mode=True"], None, False),
        ([f"{QUANTIZATION}=null"], None, False),
    ],
)
def test_rollouts_in_8_bits_get_importance_weights(arguments, weights, is_said):
    """Where a script has none, with a note. Would not catch a script whose weights correct for too little."""
    result = port(None, arguments, {})
    values = {setting.key: setting.value for setting in result.settings}
    said = [note for note in result.of(Kind.RENAMED) if "tokens are sampled with rounded weights" in note.reason]
    assert result.features == [] and len(said) == is_said
    assert values.get(f"{CORRECTION}.rollout_is") == weights
    assert values.get(QUANTIZATION) == (None if arguments == [f"{QUANTIZATION}=null"] else "fp8")


DISTILLATION, TEACHER = "distillation", "distillation.teacher_models.teacher"
LOSS_OF_TEACHERS = f"{DISTILLATION}.distillation_loss"


def test_a_teacher_behind_a_server_is_one_of_the_run():
    """The recipe gkd's: its loss, and the folder that the user must name, who may have. Would not catch a server of
    another recipe.
    """
    arguments = ["teacher.server_ip=127.0.0.1", "teacher.server_port=15555", "rollout.nnodes=1"]
    result = port(None, arguments, {})
    values = {setting.key: setting.value for setting in result.settings}
    assert result.features == [] and values[f"{TEACHER}.model_path"] is None
    assert values[f"{LOSS_OF_TEACHERS}.loss_mode"] == "forward_kl_topk" and values[f"{DISTILLATION}.enabled"] is True
    assert values[f"{LOSS_OF_TEACHERS}.use_policy_gradient"] is values[f"{LOSS_OF_TEACHERS}.use_task_rewards"] is False
    assert values["actor_rollout_ref.hybrid_engine"] is False
    (said,) = (str(note) for note in result.of(Kind.RENAMED) if note.setting.key == "teacher.server_ip")
    assert said.endswith(f"name the folder with which its server is started in {TEACHER}.model_path")
    result = port(None, [*arguments, f"{TEACHER}.model_path=big", "algorithm.adv_estimator=gae"], {})
    values = {setting.key: setting.value for setting in result.settings}
    assert (values[f"{TEACHER}.model_path"], values["algorithm.adv_estimator"]) == ("big", "gae")
    assert port(None, ["teacher.server_ip=null"], {}).features == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("+{t}.math.model_path=a", "+{t}.code.model_path=b", "{t}.code.inference.tensor_model_parallel_size=4"),
            {
                "pools.teachers.nnodes": 2,
                "pools.teachers.n_gpus_per_node": 4,
                "{t}.math.pool": "teachers",
                "{t}.math.megatron.tensor_model_parallel_size": 2,
                "{t}.code.megatron.tensor_model_parallel_size": 4,
                "{t}.code.megatron.pipeline_model_parallel_size": 1,
            },
        ),
        (
            ("{t}.math.model_path=a", "{t}.math.pool=mine", "{t}.math.inference.tensor_model_parallel_size=16"),
            {"{t}.math.pool": "mine", "{t}.math.megatron.tensor_model_parallel_size": 8},
        ),
        (
            ("{t}.math.model_path=a", "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2"),
            {"{t}.math.megatron.virtual_pipeline_model_parallel_size": None},
        ),
        (("distillation.teacher_model.model_path=a",), {"{t}.teacher_model.model_path": "a"}),
    ],
)
def test_machines_of_teachers_are_a_pool(arguments, expected):
    """Whose layout is the server's TP, and not the actor's. Would not catch teachers of different TP, of which the plan
    says that they share one grid.
    """
    sizes = (f"{DISTILLATION}.nnodes=2", f"{DISTILLATION}.n_gpus_per_node=4", f"{DISTILLATION}.enabled=True")
    teachers = f"{DISTILLATION}.teacher_models"
    result = port(None, [*sizes, *(text.replace("{t}", teachers) for text in arguments)], {})
    values = {setting.key: setting.value for setting in result.settings}
    wanted = {key.replace("{t}", teachers): value for key, value in expected.items()}
    assert result.features == [] and {key: values[key] for key in wanted} == wanted


def test_keys_of_distillation_that_ask_for_nothing_here():
    """Servers, and the ratio of a policy loss; earlier names of a loss. Would not catch a key that is new."""
    given = ["teacher_models.t.num_replicas=2", "teacher_models.t.inference.name=vllm", "nnodes=0", "n_gpus_per_node=8"]
    given += [f"distillation_loss.{text}" for text in ("policy_loss_mode=vanilla", "clip_ratio_low=0.2")]
    renamed = {"use_policy_loss": "use_task_rewards", "jsd_beta": "beta"}
    given += [f"distillation_loss.{name}=0" for name in renamed]
    result = port(None, [f"{DISTILLATION}.{text}" for text in given], {})
    assert result.features == [] and len(result.of(Kind.IGNORED)) == 6
    keys = {setting.key for setting in result.settings if setting.key.startswith(DISTILLATION)}
    assert keys == {f"{LOSS_OF_TEACHERS}.{name}" for name in renamed.values()}


@pytest.mark.parametrize("experts", [0, 4])
def test_routed_experts_get_no_adapters_on_gpus(experts, tmp_path):
    """With a note, where the model has some; what the script excludes stays. Would not catch a model that is not there
    to be read.
    """
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": experts}))
    excluded = "actor_rollout_ref.model.lora.exclude_modules"
    keys = [f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.model.lora_rank=8", f"{excluded}=[o_proj]"]
    result = port(None, keys, {})
    values = {setting.key: setting.value for setting in result.settings}
    assert values[excluded] == (["o_proj", "*.experts.*"] if experts else ["o_proj"])
    assert any("on CPUs alone" in note.reason for note in result.of(Kind.RENAMED)) == (experts > 0)


def test_other_quantized_rollouts_are_not_here():
    """By the feature's name. Would not catch a quantization that verl calls fp8 and is another."""
    assert port(None, [f"{QUANTIZATION}=torchao"], {}).features == ["quantized rollouts of this kind"]


def test_gdpo_divides_as_in_verl():
    """A key that verl does not obey is left out. Would not catch one that a user sets again."""
    key = "algorithm.norm_adv_by_std_in_grpo"
    result = port(None, ["algorithm.adv_estimator=gdpo", f"{key}=False"], {})
    assert key not in {setting.key for setting in result.settings}
    assert [note.setting.key for note in result.of(Kind.IGNORED)] == [key]
    assert key in {setting.key for setting in port(None, [f"{key}=False"], {}).settings}


def test_exit_codes_of_the_command(tmp_path):
    """0 where nothing is lost, 3 where something is, 2 where it cannot be read. Would not catch a wrong list."""
    command = [sys.executable, "-m", "megatron_rl", "port"]
    out = tmp_path / "out.yaml"
    said = {}
    for arguments in (
        ("--out", str(out), "--", "+trainer.nnodes=1", "trainer.max_actor_ckpt_to_keep=2"),
        ("--", "+reward_model.model.lora_rank=8"),
        ("no_such.sh",),
    ):
        finished = subprocess.run(
            [*command, *arguments],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ,
        )
        said[finished.returncode] = finished.stdout + finished.stderr
    assert set(said) == {0, 3, 2}
    assert "trainer.max_actor_ckpt_to_keep=2 -> trainer.max_ckpt_to_keep=2" in said[0] and out.is_file()
    assert "LoRA" in said[3] and "lora_rank: 8" in said[3]
    assert "there is no file no_such.sh" in said[2]


def test_stages_that_count_embedding_and_loss():
    """Both keys are here under Megatron's names, which the pool's layout has. Would not catch a critic's."""
    group = "actor_rollout_ref.actor.megatron"
    names = [f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss")]
    found = port(None, [f"+{group}.override_transformer_config.{name}=True" for name in names], {})
    values = {setting.key: setting.value for setting in found.settings}
    assert found.features == [] and [values[f"{group}.{name}"] for name in names] == [True, True]


def test_features_that_a_run_would_refuse_are_listed():
    """The line is the one that a run prints. Would not catch a pair that depends on the model's folder."""
    mtp = "actor_rollout_ref.model.mtp.enable_rollout=True"
    given = [mtp, "trainer.device=cpu", "actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v"]
    assert port(None, given, {}).apart == []
    found = port(None, [*given, "async_training.partial_rollout=True"], {})
    (line,) = (line for line in found.lists() if "do not go together" in line)
    pair = "actor_rollout_ref.rollout.speculative=mtp and async_training.partial_rollout=true"
    assert line.startswith(f"  {pair} do not go together: ")


READER = "reward_model.model.input_tokenizer"


@pytest.mark.parametrize(
    ("given", "vocab_size", "expected", "limit"),
    [
        ((), 50, "actor", 512),
        ((), 40, None, None),
        ((f"{READER}=null",), 50, None, None),
        ((f"{READER}=other",), 40, "other", 512),
        (("reward_model.enable=False",), 50, None, 512),
    ],
    ids=["another vocabulary", "the same", "told not to", "told to", "not enabled"],
)
def test_a_reward_model_of_another_vocabulary_reads_text(tmp_path, monkeypatch, given, vocab_size, expected, limit):
    """verl's default, where the actor's tokens mean nothing to it. A limit of text goes where there is none.

    Would not catch another tokenizer of the same size in a folder without tokenizer.json.
    """
    monkeypatch.chdir(tmp_path)
    for name, architecture, size in (
        ("actor", "Qwen2ForCausalLM", 40),
        ("judge", "LlamaForSequenceClassification", vocab_size),
    ):
        (tmp_path / name).mkdir()
        facts = {"architectures": [architecture], "vocab_size": size, "max_position_embeddings": 4096}
        (tmp_path / name / "config.json").write_text(json.dumps(facts))
    keys = ["actor_rollout_ref.model.path=actor", "reward_model.model.path=judge", "reward_model.enable=True"]
    found = port(None, [*keys, "reward_model.max_length=512", *given], {})
    values = {setting.key: setting.value for setting in found.settings}
    assert found.features == [] and values.get(READER) == expected
    assert values.get("reward_model.max_length") == limit
    ignored = [note.setting.key for note in found.of(Kind.IGNORED)]
    assert ("reward_model.max_length" in ignored) == (limit is None)
