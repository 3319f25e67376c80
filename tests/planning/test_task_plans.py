"""Preflight, memory and time of tasks that do not generate, from config.json alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.config.keys import put
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.task_config import for_task
from megatron_rl.errors import ConfigError
from megatron_rl.planning.follower_transfers import follower_transfers
from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.memory import plan_stages
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.run_plan import TaskPlan
from megatron_rl.planning.step_load import RL_SHARE

MODELS = Path(__file__).parents[2] / "configs" / "models"
ACTOR = "actor_rollout_ref.actor"
LARGE = (
    "trainer.nnodes=8",
    f"{ACTOR}.megatron.tensor_model_parallel_size=8",
    f"{ACTOR}.megatron.pipeline_model_parallel_size=4",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
)
SYNC_KEY, KL = "actor_rollout_ref.ref.sync_ref_model", "actor_rollout_ref.actor.use_kl_loss=true"
SYNC = f"{SYNC_KEY}=true"
OTHER = "pools.other.n_gpus_per_node=8 pools.other.nnodes=8 critic.pool=other actor_rollout_ref.ref.pool=other"


@pytest.fixture
def config(tmp_path):
    def config(task: str, *overrides: str) -> RunConfig:
        file = tmp_path / "run.yaml"
        file.write_text("data: {train_files: a, val_files: b, max_length: 2048}\n")
        path = f"actor_rollout_ref.model.path={MODELS / 'llama-3-70b'}"
        return for_task(load_config(file, [path, *LARGE, *overrides]), task)

    return config


def test_memory_of_tuning_70b(config) -> None:
    """The weights of all stages are the model's 70.55e9 parameters in bfloat16, one copy over TP8 x PP4, with gradients
    in float32 beside them; and nothing of a rollout. Would not catch a wrong layer, which PPO's plan shares."""
    stages = plan_stages(RunModels(config("sft")))
    assert set(stages[0].phases) == {"init", "log_probs", "update_actor", "save"}
    held = [stage.phases["update_actor"] for stage in stages]
    assert 8 * sum(one["actor parameters"] for one in held) == pytest.approx(141_107_412_992, rel=1e-3)
    assert all(one["actor gradients"] == 2 * one["actor parameters"] for one in held)
    assert not [name for one in held for name in one if "KV" in name or "critic" in name]


def test_pairs_take_twice_the_activations(config) -> None:
    """A pass of one pair reads two rows, and a reference on the fly one more copy of the weights. Would not catch a
    reward model's head, whose one row is nothing beside the vocabulary's."""
    many = f"{ACTOR}.ppo_micro_batch_size_per_gpu=16"
    tuned, pairs = (plan_stages(RunModels(config(task, many)))[1].phases["update_actor"] for task in ("sft", "dpo"))
    assert pairs["activations"] == pytest.approx(2 * tuned["activations"], rel=0.01)
    labelled = plan_stages(RunModels(config("dpo", many, "dpo.loss=kto")))[1].phases["update_actor"]
    assert labelled == tuned
    fly = plan_stages(RunModels(config("dpo", "dpo.reference=on_the_fly")))[1]
    assert fly.phases["ref"]["reference parameters"] == pytest.approx(tuned["actor parameters"], rel=1e-3)
    scorer = plan_stages(RunModels(config("reward")))[3].phases
    assert "update_critic" in scorer and "logits chunk" not in scorer["update_critic"]


def test_time_of_a_step(config) -> None:
    """Pairs cost twice the rows, a reference on the fly a third of an update more, at least, and kto's baseline a pass
    of each model. Would not catch a wrong share of the peak, which is PPO's."""
    hardware = load_hardware("h100")
    tuned, pairs, fly = (
        TaskPlan.of(config(task, *overrides), hardware, 1024.0)
        for task, overrides in (("sft", ()), ("dpo", ()), ("dpo", ("dpo.reference=on_the_fly",)))
    )
    assert pairs.time.total == pytest.approx(2 * tuned.time.total, rel=0.1)
    assert fly.time.total > pairs.time.total * 1.2 and set(fly.time.seconds) == {"ref", "update_actor"}
    shared = "actor_rollout_ref"
    one_row = (f"{shared}.{part}.log_prob_micro_batch_size_per_gpu=1" for part in ("rollout", "ref"))
    keys = ("dpo.loss=kto", *one_row)
    kto, kto_fly = (
        TaskPlan.of(config("dpo", *keys, f"dpo.reference={reference}"), hardware, 1024.0).time.seconds
        for reference in ("stored", "on_the_fly")
    )
    assert kto["update_actor"] == pytest.approx(tuned.time.total) and set(kto) == {"log_probs", "update_actor"}
    assert 0.25 < kto["log_probs"] / kto["update_actor"] < 0.4
    # The step's answers, and those to other prompts.
    assert kto_fly["ref"] == pytest.approx(2 * kto["log_probs"])
    assert tuned.memory.fits and tuned.as_json()["batch"]["DP"] == "2" and tuned.tables() and not tuned.notes()


def test_a_profiled_machine_reaches_its_measured_rate(config) -> None:
    """No share of it, as of a data sheet's. Would not catch a rate that was measured wrongly."""
    sheet = load_hardware("h100")
    profiled = replace(sheet, half_rows=1e-9)
    seconds = [TaskPlan.of(config("sft"), one, 1024.0).time.total for one in (sheet, profiled)]
    assert RL_SHARE * seconds[0] <= seconds[1] < 0.95 * seconds[0]


@pytest.mark.parametrize(
    ("task", "override", "key"),
    [
        ("sft", "data.max_length=9000", "data.max_length"),
        ("sft", f"{ACTOR}.megatron.tensor_model_parallel_size=3", f"{ACTOR}.megatron.tensor_model_parallel_size"),
        ("reward", "critic.optim.lr=-1", "critic.optim.lr"),
        ("dpo", "dpo.beta=0", "dpo.beta"),
        ("dpo", "dpo.loss=ppo", "dpo.loss"),
        ("dpo", "dpo.loss=[]", "dpo.loss"),
        ("dpo", "dpo.loss=[dpo,dpo]", "dpo.loss"),
        ("dpo", "dpo.loss=[dpo,kto]", "dpo.loss"),
        ("dpo", "dpo.loss_weights=[1.0,2.0]", "dpo.loss_weights"),
        ("dpo", "dpo.loss_weights=[0.0]", "dpo.loss_weights"),
        ("dpo", "dpo.loss=robust dpo.label_smoothing=0.5", "dpo.label_smoothing"),
        ("dpo", "dpo.loss=[sppo_hard,sft] dpo.f_divergence_type=forward_kl", "dpo.f_divergence_type"),
        ("dpo", SYNC, SYNC_KEY),
        ("dpo", f"{SYNC} dpo.loss=simpo", SYNC_KEY),
        ("dpo", f"{SYNC} actor_rollout_ref.model.lora.rank=8 dpo.reference=on_the_fly", SYNC_KEY),
        ("ppo", f"{SYNC} algorithm.use_kl_in_reward=false", SYNC_KEY),
        ("ppo", f"{SYNC} actor_rollout_ref.model.lora.rank=8 {KL}", SYNC_KEY),
        ("sft", "data.truncation=middle", "data.truncation"),
    ],
)
def test_what_cannot_start_is_refused(config, task: str, override: str, key: str) -> None:
    """With the key, and what it offers can start. Would not catch rows that are too long, which are found when files
    are read."""
    assert preflight(config(task), config_only=True) == []
    broken = config(task, *override.split())
    problems = preflight(broken, config_only=True)
    assert any(key in problem.settings for problem in problems), problems
    for name, value in [pair for problem in problems for pair in problem.nearest.items()]:
        put(broken, name, value)
    assert preflight(broken, config_only=True) == []


def test_one_fault_is_one_sentence(config) -> None:
    """A batch of 0, from which mini-batches follow. Would not catch a batch that is too small to be wise."""
    [problem] = preflight(config("sft", "data.train_batch_size=0"), config_only=True)
    assert set(problem.settings) == {"data.train_batch_size"} and problem.nearest == {"data.train_batch_size": 1}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("dpo", "--config"), "what `megatron-rl sft` trains, and this is `dpo`; try: megatron-rl sft"),
        (("train", "--config"), "what `megatron-rl sft` trains, and this is `train`; try: megatron-rl sft"),
        (("map", "--gpus", "8", "--config"), "megatron-rl map is for PPO alone, and trainer.stage=sft"),
        (("nightly", "--config"), "megatron-rl nightly is for PPO alone, and trainer.stage=sft"),
        (("ablate", "--config"), "megatron-rl ablate is for PPO alone, and trainer.stage=sft"),
    ],
    ids=lambda one: one[0] if isinstance(one, tuple) else "",
)
def test_a_configuration_goes_to_its_own_command(arguments, said: str, monkeypatch, tmp_path) -> None:
    """One that names its task, given to another command. Would not catch one that names none, which has no other
    columns than what the command looks for."""
    monkeypatch.chdir(MODELS.parents[1])
    file = "configs/stages/llama3_70b_sft.yaml"
    if arguments[0] == "ablate":
        (tmp_path / "ablation.yaml").write_text(f"config: {file}\npoints: [{{trainer.seed: 2}}]\n")
        file = str(tmp_path / "ablation.yaml")
    ran = CliRunner().invoke(app, [*arguments, file])
    assert isinstance(ran.exception, ConfigError) and said in str(ran.exception), ran.exception


def test_a_plan_that_cannot_fit_asks_for_more(config) -> None:
    """70B on one node: what can be changed is said, and that it is not enough. Would not catch advice that is worse
    than other advice."""
    plan = TaskPlan.of(
        config("sft", "trainer.nnodes=1", f"{ACTOR}.megatron.pipeline_model_parallel_size=1"), load_hardware("h100")
    )
    assert not plan.memory.fits and plan.notes()[-1].endswith("take more GPUs")


def test_what_belongs_to_rollouts_is_no_rule_of_a_task(config) -> None:
    """A rollout TP that fits nothing, and no ground truth. Would not catch a rule that nobody thought of."""
    assert preflight(config("sft", "actor_rollout_ref.rollout.tensor_model_parallel_size=5"), config_only=True) == []


def test_tokens_of_a_pass_hold_the_longest_row(config) -> None:
    """By the key of the role that is trained. Would not catch answers that stay together, counted with the data."""
    dynamic = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1000")
    problems = preflight(config("sft", *dynamic), config_only=True)
    assert any(problem.nearest.get(f"{ACTOR}.ppo_max_token_len_per_gpu") == 2048 for problem in problems)


def test_a_reference_that_follows_in_another_pool(config) -> None:
    """TP8 x PP4 to TP8 on 64 ranks: each receives an eighth of 141.1 GB, for which it has memory meanwhile, and each of
    the actor's a message's. An 8th over 50 GB/s at 0.7, once in 512 steps. Would not catch bytes that are sent twice;
    tests/dist count them."""
    pool = ("pools.other.n_gpus_per_node=8", "pools.other.nnodes=8", "actor_rollout_ref.ref.pool=other")
    layout = "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=1"
    found = config("dpo", SYNC, "dpo.reference=on_the_fly", *pool, layout)
    assert preflight(found, config_only=True) == []
    plan = TaskPlan.of(found, load_hardware("h100"))
    (transfer,) = follower_transfers(plan.models)
    (stage,) = plan_stages(plan.models, "other")
    share = 141_107_412_992 / 8
    assert len(transfer.received) == 64 and max(transfer.received) == pytest.approx(share, rel=1e-3)
    assert stage.phases["reshard"]["arriving weights"] == pytest.approx(share, rel=1e-3)
    scratch = found.actor_rollout_ref.rollout.update_weights_bucket_megabytes << 20
    assert plan_stages(plan.models)[0].phases["reshard"]["exchange scratch"] == scratch
    assert plan.time.seconds["reshard"] == pytest.approx(share / 50e9 / 0.7 / 512, rel=0.1)
    assert ("weights for reference", "17.64 GB", "every 512 steps, to a rank of other") in plan.rows()
