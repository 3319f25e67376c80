"""Plans of runs whose roles live in several pools: memory, transition and time by hand, and every rank once."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_folders import write_model
from rich.console import Console

from megatron_rl.config.keys import put
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import RunConfig
from megatron_rl.model.parts import LayerBlock
from megatron_rl.planning.batch_arithmetic import batch_rows
from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.layout_sizes import Layout
from megatron_rl.planning.memory import plan_pools, planned_memory
from megatron_rl.planning.memory_advice import advice
from megatron_rl.planning.memory_report import memory_report
from megatron_rl.planning.planned_steps import PHASES, SHORTEST_S, stall_timeout_s
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.run_plan import RunPlan
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.step_time import CALL_SECONDS, StepTime
from megatron_rl.planning.time import LINK_EFFICIENCY, Estimator, ModelCost

MODELS = Path(__file__).parents[2] / "configs" / "models"
MEGATRON, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
NUM_PARAMS, HIDDEN, LAYERS = 8_030_261_248, 4096, 32
"""Of Llama-3-8B."""
NORMS = (2 * LAYERS + 1) * HIDDEN
KV_BYTES = 30_000_000_000
SPLIT = (
    "trainer.nnodes=2",
    "pools.critic_pool.n_gpus_per_node=4",
    "pools.gen_pool.n_gpus_per_node=8",
    "critic.pool=critic_pool",
    "critic.megatron.pipeline_model_parallel_size=1",
    f"{MEGATRON}.tensor_model_parallel_size=4",
    f"{MEGATRON}.pipeline_model_parallel_size=2",
    f"{MEGATRON}.dtype=bfloat16",
    f"{ROLLOUT}.pool=gen_pool",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.kv_cache_memory_bytes={KV_BYTES}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
)
"""Actor and reference on 2 x 8 ranks, the critic on 4, generation on 8."""


EXPLICIT = """
algorithm: {use_kl_in_reward: true}
actor_rollout_ref: {actor: {megatron: {dtype: float32, sequence_parallel: false}}}
"""


@pytest.fixture
def config(tmp_path):
    def config(*overrides: str, model: str | None = None) -> RunConfig:
        file = tmp_path / "run.yaml"
        file.write_text("data: {train_files: a, val_files: b}\n" + EXPLICIT)
        lengths = ["data.max_prompt_length=1024", "data.max_response_length=1024"]
        path = model or str(MODELS / "llama-3-8b")
        found = load_config(file, [f"actor_rollout_ref.model.path={path}", *lengths, *overrides])
        assert list(map(str, preflight(found, config_only=True))) == []
        return found

    return config


def test_a_split_rollout_holds_its_shard_and_nothing_else(config):
    """Half of every matrix and all norms in bfloat16, at rest too; receiving takes one bucket more.

    Would not catch what vLLM holds beside its weights.
    """
    memory = planned_memory(config(*SPLIT))
    assert list(memory) == ["global_pool", "critic_pool", "gen_pool"]
    gen, shard = memory["gen_pool"], 2 * ((NUM_PARAMS - NORMS) // 2 + NORMS)
    assert shard == 8_030_527_488
    assert list(gen) == ["init", "reshard", "gen"]
    assert gen["reshard"] == {"rollout weights": shard, "exchange scratch": 32 << 20}
    assert gen["gen"].keys() == {"rollout weights", "KV cache", "vLLM activations"}
    assert gen["gen"] == gen["init"] and gen["gen"]["rollout weights"] == shard and gen["gen"]["KV cache"] == KV_BYTES


def test_the_actors_pool_of_a_split_rollout_only_sends(config):
    """No phase of generation, no foreign stages and nothing that rests. Would not catch a second bucket."""
    given = config(*SPLIT, f"{MEGATRON}.param_offload=true", f"{MEGATRON}.grad_offload=true")
    train = planned_memory(given)["global_pool"]
    assert list(train) == ["init", "reshard", "old_log_prob", "ref", "update_actor", "save"]
    held = {name: size for name, size in train["old_log_prob"].items() if name.startswith(("actor", "reference"))}
    assert train["reshard"] == held | {"exchange scratch": 32 << 20}
    layer = (HIDDEN * (HIDDEN + 2 * 1024) + HIDDEN * HIDDEN + 3 * HIDDEN * 14336) // 4 + 2 * HIDDEN
    stage = LAYERS // 2 * layer + 128256 * HIDDEN // 4
    assert held["actor parameters"] == pytest.approx(2 * stage, rel=1e-5)
    assert held["actor moments"] == pytest.approx(2 * 4 * stage / 2, rel=1e-5)
    assert held["reference parameters"] == pytest.approx(2 * stage, rel=1e-5)


def test_a_critic_of_its_own_goes_by_its_own_layout(config):
    """TP4 PP1 on 4 ranks, so that it has its whole optimizer; no reshard. Would not catch wrong activations."""
    critic = planned_memory(config(*SPLIT))["critic_pool"]
    assert list(critic) == ["init", "values", "update_critic", "save"]
    layer = (HIDDEN * (HIDDEN + 2 * 1024) + HIDDEN * HIDDEN + 3 * HIDDEN * 14336) // 4 + 2 * HIDDEN
    params = LAYERS * layer + 128256 * HIDDEN // 4 + 2 * HIDDEN
    expected = {"parameters": 2, "gradients": 4, "moments": 8, "masters": 4}
    for name, width in expected.items():
        assert critic["update_critic"][f"critic {name}"] == pytest.approx(width * params, rel=1e-5)
    assert "logits chunk" not in critic["values"] and "critic moments" not in critic["init"]


def test_generation_beside_the_critic(config):
    """What the critic offloads rests while its ranks generate, and only then. Would not catch too slow a link."""
    overrides = [one for one in SPLIT if "gen_pool" not in one]
    beside = config(*overrides, f"{ROLLOUT}.pool=critic_pool", "critic.megatron.optimizer_offload=true")
    memory = planned_memory(beside)
    assert list(memory) == ["global_pool", "critic_pool"]
    phases = memory["critic_pool"]
    assert list(phases) == ["init", "reshard", "gen", "values", "update_critic", "save"]
    assert "critic moments" not in phases["gen"] and "critic moments" not in phases["reshard"]
    assert {"critic gradients", "KV cache", "rollout weights"} <= phases["gen"].keys()
    assert {"critic moments", "rollout weights"} <= phases["values"].keys()


def test_bytes_of_a_transfer(config):
    """A rank of generation receives its shard; all of training sends M, each rank its part. By hand.

    Would not catch bytes that an executor sends twice.
    """
    plan = RunPlan.of(config(*SPLIT), load_hardware("h100")).transition
    shard = 2 * ((NUM_PARAMS - NORMS) // 2 + NORMS)
    assert plan.network == (shard, shard) and plan.link == (0, 0)
    assert plan.model_bytes == sum(plan.sent) == 2 * NUM_PARAMS and plan.lower_bound == NUM_PARAMS
    layer = HIDDEN * (HIDDEN + 2 * 1024) + HIDDEN * HIDDEN + 3 * HIDDEN * 14336 + 2 * HIDDEN
    first = LAYERS // 2 * layer + 128256 * HIDDEN
    assert plan.sent[0] == 2 * first // 8 and plan.sent[8] == 2 * (NUM_PARAMS - first) // 8
    assert plan.seconds(load_hardware("h100")) == pytest.approx(shard / 50e9 / LINK_EFFICIENCY)


def test_a_narrow_trainer_is_what_a_transition_waits_for(config):
    """One rank sends all of M to eight that take an eighth each. Would not catch a slow receiver."""
    plan = RunPlan.of(
        config("trainer.n_gpus_per_node=1", "pools.gen.n_gpus_per_node=8", f"{ROLLOUT}.pool=gen",
               f"{ROLLOUT}.tensor_model_parallel_size=8", f"{MEGATRON}.dtype=bfloat16", "critic.enable=false",
               "algorithm.adv_estimator=reinforce_plus_plus"),
        load_hardware("h100"),
    )  # fmt: skip
    assert plan.transition.seconds(load_hardware("h100")) == pytest.approx(2 * NUM_PARAMS / 50e9 / LINK_EFFICIENCY)


def test_the_critical_path_by_hand():
    """Scores overlap, updates too, and rounds wait for each other. Would not catch a wrong number of seconds."""
    seconds = {"reshard": 1.0, "gen": 10.0, "rm_scores": 4.0, "old_log_prob": 2.0, "ref": 3.0, "values": 4.5,
               "update_critic": 5.0, "update_actor": 8.0}  # fmt: skip
    rounds = (("reshard",), ("gen",), ("rm_scores", "old_log_prob", "ref", "values"), ("update_critic", "update_actor"))
    one = StepTime(seconds, dict.fromkeys(seconds, ("all",)), rounds)
    assert one.total == sum(seconds.values()) and one.critical_path == list(seconds)
    pools = dict.fromkeys(seconds, ("train",)) | {
        "reshard": ("train", "gen"), "gen": ("gen",), "values": ("critic",), "update_critic": ("critic",),
        "rm_scores": ("critic",),
    }  # fmt: skip
    split = StepTime(seconds, pools, rounds)
    assert split.critical_path == ["reshard", "gen", "rm_scores", "values", "update_actor"]
    assert split.total == 1 + 10 + 8.5 + 8


def test_phases_take_what_their_pools_ranks_take(config):
    """Each on the layout of its pool; the step overlaps them, and all ranks share its tokens.

    Would not catch an error of the estimate itself.
    """
    hardware = load_hardware("h100")
    plan = RunPlan.of(config(*SPLIT), hardware, (512.0, 512.0))
    cost = ModelCost.of(RunModels(plan.config).actor)
    load = Load(64, 512.0, 512.0, 1024, mini_batch=32, block_tokens=4 * 1024, max_seqs=256)
    of_calls = {"gen": 8, "update_critic": 2 * 4, "values": 4, "update_actor": 2 * 16}
    seconds = plan.seconds | {phase: plan.seconds[phase] - CALL_SECONDS * num for phase, num in of_calls.items()}
    assert seconds["gen"] == pytest.approx(Estimator(cost, Layout(8, 8, rollout_tp=2), hardware).generate(load))
    on_critic = Estimator(cost, Layout(4, 4, tp=4), hardware)
    assert seconds["update_critic"] == pytest.approx(on_critic.train(load))
    assert seconds["values"] == pytest.approx(on_critic.forward(load))
    assert seconds["update_actor"] == pytest.approx(Estimator(cost, Layout(16, 8, tp=4, pp=2), hardware).train(load))
    seconds = plan.seconds
    scores = max(seconds["old_log_prob"] + seconds["ref"], seconds["values"])
    updates = max(seconds["update_actor"], seconds["update_critic"])
    assert plan.step_seconds == pytest.approx(seconds["reshard"] + seconds["gen"] + scores + updates)
    assert plan.tokens_per_second == pytest.approx(64 * 1024 / plan.step_seconds / 28)
    said = plan.as_json()
    assert said["time"]["pools"]["reshard"] == ["global_pool", "gen_pool"]
    assert said["time"]["critical_path"][:2] == ["reshard", "gen"]
    assert {name: value for name, value, _ in batch_rows(plan.config)}["ranks"] == "28"


def test_tables_say_who_runs_where(config):
    """Every pool with its roles, layout and ranks, its memory, and the path that decides. Would not catch bad taste."""
    plan = RunPlan.of(config(*SPLIT), load_hardware("h100"))
    console = Console(width=200, record=True, file=io.StringIO())
    for table in plan.tables():
        console.print(table)
    rows = [re.split(r" *│ *", line)[1:-1] for line in console.export_text().splitlines() if line.startswith("│")]
    for row in (
        ["global_pool", "2 x 8", "actor, reference", "TP4 PP2 DP2", "0-15"],
        ["critic_pool", "1 x 4", "critic", "TP4 PP1 DP1", "0-3"],
        ["gen_pool", "1 x 8", "rollout", "rollout TP2 x 4", "0-7"],
        ["gen_pool rollout TP", "4", "[0, 1], [2, 3], [4, 5], [6, 7]"],
        ["critical path", f"{plan.step_seconds:.2f} s", " + ".join(plan.time.critical_path)],
    ):
        assert row in rows, row
    titles = [table.title for table in plan.tables()]
    assert [title.split(",")[0] for title in titles if title.startswith("Memory")] == [
        f"Memory per GPU of {name}" for name in ("global_pool", "critic_pool", "gen_pool")
    ]


def test_the_critic_is_timed_by_its_own_batches(config):
    """Twice the epochs take twice the time. Would not catch overlapping epochs."""
    once = RunPlan.of(config(*SPLIT), load_hardware("h100")).seconds
    twice = RunPlan.of(config(*SPLIT, "critic.ppo_epochs=2"), load_hardware("h100")).seconds
    assert twice["update_critic"] == pytest.approx(2 * once["update_critic"])
    assert twice["update_actor"] == once["update_actor"]


def test_a_stalled_verb_is_one_that_takes_ten_of_the_longest_phase(config):
    """With answers as long as they may get. Would not catch a phase that is not planned."""
    large = config(*SPLIT, "data.train_batch_size=65536")
    plan = RunPlan.of(large, load_hardware("h100"), (1024.0, 1024.0))
    assert stall_timeout_s(large) == pytest.approx(PHASES * max(plan.seconds.values()))
    assert stall_timeout_s(config(*SPLIT, "data.train_batch_size=32")) == SHORTEST_S


REWARDED = ("reward_model.enable=true", "reward_models.helpful.weight=0.5", "trainer.n_gpus_per_node=1",
            "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.use_kl_in_reward=false")  # fmt: skip


def test_reward_models_read_one_token_more(config, tmp_path):
    """Two of them, each with its parameters and its phase; activations of 64 + 1 tokens. By hand.

    Would not catch what a reward model keeps between passes.
    """
    sizes = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    paths = [write_model(tmp_path / name, **sizes) for name in ("judge", "helpful")]
    given = config(
        *REWARDED, f"reward_model.model.path={paths[0]}", f"reward_models.helpful.model.path={paths[1]}",
        "data.max_prompt_length=16", "data.max_response_length=48", "reward_model.micro_batch_size_per_gpu=2",
        "reward_models.helpful.use_dynamic_bsz=true", "reward_models.helpful.forward_max_token_len_per_gpu=194",
        model=write_model(tmp_path / "model"),
    )  # fmt: skip
    models = RunModels(given)
    phases = planned_memory(given)["global_pool"]
    assert list(phases)[:5] == ["init", "reshard", "gen", "rm_scores", "rm_scores_helpful"]
    judge, helpful = phases["rm_scores"], phases["rm_scores_helpful"]
    assert judge["reward_model parameters"] == judge["helpful parameters"] > 0
    layer = models.training.ledger(models.actor_role).layer
    # 194 tokens are room for 2 of 65, not for 3
    for held in (judge, helpful):
        block = LayerBlock(130, 130, 96, is_packed=True)
        assert held["activations"] == int(2 * 130 * 384 * 4 + layer.transient_bytes(block, backward=False))
    seconds = RunPlan.of(given, load_hardware("h100"), (8.0, 24.0)).seconds
    assert {"rm_scores", "rm_scores_helpful"} <= seconds.keys()
    load = Load(64, 9.0, 24.0, 48, mini_batch=32, block_tokens=66)
    judged = Estimator(ModelCost.of(models.actor), Layout(1, 1), load_hardware("h100"), "float32").forward(load)
    assert seconds["rm_scores"] == pytest.approx(judged + CALL_SECONDS)


def test_reward_models_that_read_text_have_lengths_of_their_own(config, tmp_path):
    """Conversations of 128 + 1 tokens in memory; in time as full as prompts and answers, which fill half. By hand.

    Would not catch tokenizers that make fewer tokens of the same text.
    """
    judge = write_model(tmp_path / "judge", architectures=["Qwen2ForSequenceClassification"], num_labels=1,
                        max_position_embeddings=128, vocab_size=70)  # fmt: skip
    given = config(
        *REWARDED[2:], "reward_model.enable=true", f"reward_model.model.path={judge}", "reward_model.max_length=128",
        "data.max_prompt_length=16", "data.max_response_length=48", "reward_model.micro_batch_size_per_gpu=2",
        f"reward_model.model.input_tokenizer={tmp_path / 'model'}", model=write_model(tmp_path / "model"),
    )  # fmt: skip
    models = RunModels(given)
    layer = models.training.ledger(models.actor_role).layer
    block = LayerBlock(258, 258, 96, is_packed=True)
    held = planned_memory(given)["global_pool"]["rm_scores"]
    assert held["activations"] == int(2 * 258 * 384 * 4 + layer.transient_bytes(block, backward=False))
    load = Load(64, 17.0, 48.0, 48, mini_batch=32, block_tokens=130)
    [role] = [role for role in models.placement.megatron_roles if role.name == "reward_model"]
    cost = ModelCost.of(models.pools["global_pool"].model(role))
    judged = Estimator(cost, Layout(1, 1), load_hardware("h100"), "float32").forward(load)
    seconds = RunPlan.of(given, load_hardware("h100"), (8.0, 24.0)).seconds
    assert seconds["rm_scores"] == pytest.approx(judged + CALL_SECONDS)


def test_advice_is_for_the_pool_that_does_not_fit(config):
    """The critic's ranks are too few: only its keys are changed, and in the end it fits.

    Would not catch advice that costs more time than another.
    """
    given = config(*SPLIT, "critic.ppo_micro_batch_size_per_gpu=16", "critic.forward_micro_batch_size_per_gpu=16")
    hardware, models = load_hardware("h100"), RunModels(given)
    report = memory_report(given, models, hardware)
    peaks = {name: max(stage.peak for stage in stages) for name, stages in report.pools.items()}
    assert not report.fits and [name for name, peak in peaks.items() if peak > report.usable] == ["critic_pool"]
    changes = advice(given, models, hardware)
    assert changes and all(key.startswith("critic.") for change in changes for key in change.settings)
    for change in changes:
        for key, value in change.settings.items():
            put(given, key, value)
        assert preflight(given, config_only=True) == []
    assert memory_report(given, RunModels(given), hardware).fits
    notes = RunPlan.of(config(*SPLIT, "critic.ppo_micro_batch_size_per_gpu=16"), hardware).notes()
    assert any("the worst rank of critic_pool needs" in note for note in notes)


def test_another_layout_of_a_rollout_pool_is_offered(config):
    """70 billion parameters on one GPU of generation each: wider TP is what helps. Would not catch a cheaper way."""
    given = config(
        "trainer.nnodes=8", "pools.gen.n_gpus_per_node=8", f"{ROLLOUT}.pool=gen", f"{MEGATRON}.dtype=bfloat16",
        f"{MEGATRON}.tensor_model_parallel_size=8", f"{MEGATRON}.pipeline_model_parallel_size=4",
        f"{MEGATRON}.sequence_parallel=true", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1", f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.kv_cache_memory_bytes=2000000000", "algorithm.adv_estimator=reinforce_plus_plus",
        model=str(MODELS / "llama-3-70b"),
    )  # fmt: skip
    hardware, models = load_hardware("h100"), RunModels(given)
    changes = advice(given, models, hardware)
    assert changes[-1].settings == {f"{ROLLOUT}.tensor_model_parallel_size": 2}
    assert changes[-1].peak <= memory_report(given, models, hardware).usable


ROLES = {"actor": "actor_rollout_ref.actor", "reference": "actor_rollout_ref.ref", "critic": "critic",
         "reward_model": "reward_model", "helpful": "reward_models.helpful"}  # fmt: skip


@st.composite
def placements(draw) -> list[str]:
    """Overrides that put five roles and the rollout into up to four pools, each with a layout of its own."""
    names = [f"pool_{number}" for number in range(draw(st.integers(1, 4)))]
    where = {role: draw(st.sampled_from(names)) for role in (*ROLES, "rollout")}
    overrides = [f"{ROLES[role]}.pool={where[role]}" for role in ROLES] + [f"{ROLLOUT}.pool={where['rollout']}"]
    for name in dict.fromkeys(where.values()):
        tp, pp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 2, 3), (1, 2)))
        world_size = tp * pp * dp
        nodes = draw(st.sampled_from([number for number in range(1, world_size + 1) if world_size % number == 0]))
        overrides += [f"pools.{name}.nnodes={nodes}", f"pools.{name}.n_gpus_per_node={world_size // nodes}"]
        for role, key in ROLES.items():
            if where[role] == name:
                overrides += [f"{key}.megatron.tensor_model_parallel_size={tp}"]
                overrides += [f"{key}.megatron.pipeline_model_parallel_size={pp}"]
        if where["rollout"] == name:
            fitting = [size for size in (1, 2) if world_size % size == 0]
            overrides.append(f"{ROLLOUT}.tensor_model_parallel_size={draw(st.sampled_from(fitting))}")
    return overrides


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(overrides=placements())
def test_any_valid_placement_passes_and_its_plan_has_every_rank_once(config, tmp_path, overrides):
    """Groups of every kind partition their pool, every role's phases are its pool's, every stage is planned.

    Would not catch a layout that only Megatron refuses.
    """
    check_placement(config, tmp_path, overrides)


@pytest.mark.exhaustive
@pytest.mark.weekly
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(overrides=placements())
def test_many_more_placements(config, tmp_path, overrides):
    """The same, for longer."""
    check_placement(config, tmp_path, overrides)


def check_placement(config, tmp_path: Path, overrides: list[str]) -> None:
    sizes = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    rewards = [write_model(tmp_path / name, **sizes) for name in ("judge", "other")]
    given = config(
        *overrides, "data.max_prompt_length=16", "data.max_response_length=48", "reward_model.enable=true",
        f"reward_model.model.path={rewards[0]}", f"reward_models.helpful.model.path={rewards[1]}",
        "trainer.device=cpu", model=write_model(tmp_path / "model"),
    )  # fmt: skip
    plan = RunPlan.of(given, load_hardware("cpu"))
    placement, pools = plan.models.placement, plan.as_json()["pools"]
    assert sorted(role for pool in pools.values() for role in pool["roles"]) == sorted(placement.roles)
    assert sum(len(pool["ranks"]) for pool in pools.values()) == placement.world_size
    for pool in pools.values():
        assert len(pool["ranks"]) == pool["nnodes"] * pool["n_gpus_per_node"]
        for groups in pool["groups"].values():
            assert sorted(rank for group in groups for rank in group) == pool["ranks"]
    memory = plan_pools(plan.models)
    assert memory.keys() == pools.keys()
    for name, stages in memory.items():
        assert [stage.pp_rank for stage in stages] == list(range(pools[name].get("pp", 1)))
        of_roles = {one.phase for role in placement.pools[name].roles for one in role.passes}
        own = set(stages[0].phases) - {"init", "reshard", "gen", "save"}
        assert own == of_roles and ("gen" in stages[0].phases) == ("rollout" in pools[name]["roles"])
        assert ("save" in stages[0].phases) == any(role.is_trained for role in placement.pools[name].roles)
        assert all(math.isfinite(stage.peak) and stage.peak > 0 for stage in stages)
    time = plan.time
    assert max(time.seconds.values()) <= time.total <= sum(time.seconds.values()) * (1 + 1e-9)
