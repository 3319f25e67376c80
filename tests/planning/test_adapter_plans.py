"""Plans of policies that train adapters: bytes by hand, what moves and when, and what an update costs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.cli import app
from megatron_rl.config.load import load_config
from megatron_rl.config.lora import LoraConfig
from megatron_rl.errors import shown
from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.layout_search.pools import Pools
from megatron_rl.planning.layout_search.search_problem import ClusterSize, Keeps, SearchProblem
from megatron_rl.planning.memory import plan_stages
from megatron_rl.planning.memory_report import amount
from megatron_rl.planning.plan_sections import base_notes, transition_rows
from megatron_rl.planning.run_models import RunModels, host_copy_bytes
from megatron_rl.planning.run_plan import RunPlan
from megatron_rl.planning.time import ModelCost
from megatron_rl.planning.transition import TransitionPlan

LARGE, SMALL = "configs/recipes/llama3_70b_lora_grpo.yaml", "configs/recipes/qwen2.5_7b_lora_grpo.yaml"
LORA, MEGATRON = "actor_rollout_ref.model.lora", "actor_rollout_ref.actor.megatron"
TP2_PP2 = (
    f"{MEGATRON}.tensor_model_parallel_size=2",
    f"{MEGATRON}.pipeline_model_parallel_size=2",
    "trainer.n_gpus_per_node=4",
)
RANK = 32


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


def elements(hidden: int, kv: int, ffn: int, tp: int) -> int:
    """Of A and B of one layer on one of `tp` ranks: of linears cut by outputs A is whole, of the others B."""
    by_outputs = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, ffn), (hidden, ffn)]
    by_inputs = [(hidden, hidden), (ffn, hidden)]
    return RANK * (sum(i + o // tp for i, o in by_outputs) + sum(i // tp + o for i, o in by_inputs))


def test_70b_on_8_gpus():
    """414M adapter parameters, held once a rank with float32 gradients, moments and masters; a reference for nothing,
    or for the adapters that the policy starts from.

    Would not catch what vLLM needs for adapters on GPUs.
    """
    plan = RunPlan.of(load_config(LARGE), load_hardware("h100"))
    assert plan.memory.fits and plan.memory.peak < 60e9
    adapters = plan.models.actor_adapters
    assert adapters is not None
    assert (
        80 * elements(8192, 1024, 28672, 1)
        == 414_187_520
        == ModelCost.of(plan.models.actor, LoraConfig(RANK)).adapter_params
    )
    own = 80 * elements(8192, 1024, 28672, 8)
    assert own == 180_224_000
    layer = (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672) // 8 + 2 * 8192
    base = 80 * layer + 2 * 128256 * 8192 // 8 + 8192
    (stage,) = plan_stages(plan.models)
    held = stage.phases["ref"]
    assert held["actor parameters"] == 2 * (base + own)
    assert held["actor gradients"] == 4 * own == held["actor masters"]
    assert held["actor moments"] == 8 * own
    assert held["reference parameters"] == 0
    (stage,) = plan_stages(RunModels(load_config(LARGE, [f"{LORA}.adapter_path=an/adapter"])))
    assert stage.phases["ref"]["reference parameters"] == 2 * own
    assert set(plan.transition.received) == {0} and plan.transition.model_bytes == 2 * 414_187_520


def test_7b_on_one_gpu():
    """80.7M adapter parameters. Would not catch a plan that fits by its estimates alone."""
    plan = RunPlan.of(load_config(SMALL), load_hardware("h100"))
    assert plan.memory.fits
    held = plan.memory.worst.phases["update_actor"]
    assert held["actor gradients"] == 4 * 28 * elements(3584, 512, 18944, 1) == 4 * 80_740_352


def test_a_second_base_for_a_critic():
    """PPO on 8 GPUs with adapters on both: two bases fit, and the critic's head is trained. Would not catch its size in
    another family."""
    keys = ("trainer.nnodes=1", f"{MEGATRON}.pipeline_model_parallel_size=1")
    ranks = (f"{LORA}.rank={RANK}", f"critic.model.lora.rank={RANK}")
    plan = RunPlan.of(load_config("configs/llama3_70b_ppo.yaml", [*keys, *ranks]), load_hardware("h100"))
    assert plan.memory.fits
    (stage,) = plan_stages(plan.models)
    held = stage.phases["values"]
    assert held["critic gradients"] - held["actor gradients"] == 4 * 8192
    without = RunPlan.of(load_config("configs/llama3_70b_ppo.yaml", [*keys, ranks[0]]), load_hardware("h100"))
    assert not without.memory.fits


@pytest.mark.parametrize("base", ["resident", "host", "refetch"])
def test_what_moves_and_stays(base):
    """TP2 x PP2 to TP1, by hand: each rank lacks all but its part. A base that stays moves before the first step and
    is there in every phase; brought again it moves in every step. Would not catch bytes between nodes."""
    models = RunModels(load_config(SMALL, [*TP2_PP2, f"{LORA}.base={base}"]))
    plan = TransitionPlan.of(models)
    hidden, kv, ffn, vocab = 3584, 512, 18944, 152064
    lacking = 28 * elements(hidden, kv, ffn, 1) - 14 * elements(hidden, kv, ffn, 2)
    matrices, whole = 2 * hidden * (hidden + kv) + 3 * hidden * ffn + hidden + 2 * kv, 2 * hidden
    first_stage = 14 * (matrices // 2 + whole) + vocab * hidden // 2
    of_base = 28 * (matrices + whole) + 2 * vocab * hidden + hidden - first_stage
    adapters, weights = 2 * lacking, 2 * of_base
    if base != "refetch":
        assert plan.received[0] == adapters and plan.once is not None and plan.once.received[0] == weights
        assert "once in a run" in [row[0] for row in transition_rows(plan)]
    else:
        assert plan.received[0] == adapters + weights and plan.once is None
    stage = plan_stages(models)[0]
    foreign = {phase: held.get("received shards", 0) for phase, held in stage.phases.items()}
    shard = 2 * (28 * (matrices + whole) + 2 * vocab * hidden + hidden)
    # What TP halves is whole in foreign memory; what it leaves whole, norms and one of A and B, is not there twice.
    shared = 2 * 14 * whole
    between = {phase: size for phase, size in foreign.items() if phase not in ("init", "reshard", "gen")}
    assert set(between.values()) == {shard - shared if base == "resident" else 0}
    assert foreign["gen"] == foreign["reshard"] > shard - shared
    if base == "host":  # in whole MiB, as pinned memory is taken
        assert host_copy_bytes(models, 0) == -(-(shard - shared) // 2**20) * 2**20
        (note,) = base_notes(models)
        assert f"{amount(max(host_copy_bytes(models, stage) for stage in (0, 1)))} of pinned host memory" in note
    else:
        assert base_notes(models) == []


def test_a_base_that_does_not_fit_waits_on_the_host():
    """By the plan's advice, where 15 GB beside training are too much. Would not catch
    advice that is dear."""
    keys = (*TP2_PP2, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=28000")
    plan = RunPlan.of(load_config(SMALL, keys), load_hardware("h100"))
    assert plan.fitting is not None and plan.fitting.alone[0].settings == {f"{LORA}.base": "host"}
    assert plan.fitting.alone[0].peak <= plan.memory.usable


@pytest.mark.parametrize("recipe", [LARGE, SMALL])
def test_documented_figures(recipe):
    """The table of docs/train/lora.md. Would not catch a sixth more or less of the seconds."""
    plan = RunPlan.of(load_config(recipe), load_hardware("h100"))
    row = next(line for line in Path("docs/train/lora.md").read_text().splitlines() if f"{Path(recipe).name})" in line)
    adapters, peak, phase, seconds, whole = re.search(
        r"\| ([\d,]+) \| ([\d.]+) GB \| (\w+) \| (\d+) s \| ([\d.]+) GB, does not fit", row
    ).groups()
    assert int(adapters.replace(",", "")) * 2 == plan.transition.model_bytes
    assert plan.memory.peak / 1e9 == pytest.approx(float(peak), abs=0.06) and plan.memory.worst.worst_phase == phase
    assert plan.step_seconds == pytest.approx(float(seconds), rel=1 / 6)
    stages = plan_stages(RunModels(load_config(recipe, [f"{LORA}.rank=0"])))
    assert max(stage.peak for stage in stages) / 1e9 == pytest.approx(float(whole), abs=0.06)


def test_an_update_spares_the_gradients_of_weights():
    """Two passes of frozen matrices in place of three, by FLOPs; and with the plan's clock less than full training.

    Would not catch kernels that adapters add on GPUs.
    """
    model = ModelFolder("configs/models/qwen2.5-7b").model
    full, cost = ModelCost.of(model), ModelCost.of(model, LoraConfig(RANK))
    assert full.update_flops(0) == 6 * full.matrix_params
    assert cost.update_flops(0) == 4 * full.matrix_params + 6 * 80_740_352
    assert full.trained_params == model.num_params and cost.trained_params == 80_740_352
    hardware = load_hardware("h100")
    with_adapters, without = (
        RunPlan.of(load_config(SMALL, [f"{LORA}.rank={rank}"]), hardware).seconds for rank in (RANK, 0)
    )
    assert 0.6 < with_adapters["update_actor"] / without["update_actor"] < 0.8
    assert 1.0 <= with_adapters["old_log_prob"] / without["old_log_prob"] < 1.05


def found(*keep: str, gpus: int = 4) -> dict:
    """What `map` finds for 7B."""
    kept = [part for each in keep for part in ("--keep", each)]
    ran = CliRunner().invoke(app, ["map", "--config", SMALL, "--gpus", str(gpus), "--json", *kept])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def test_the_search_knows_adapters():
    """Fastest with the reference on the actor's ranks, where it takes nothing; and where a base must stay beside
    training, placements that the search takes to fit do. Would not catch a placement that the search leaves out."""
    best, *others = found()["candidates"]
    assert best["settings"]["actor_rollout_ref.ref.pool"] == best["settings"]["actor_rollout_ref.rollout.pool"]
    plan = RunPlan.of(load_config(SMALL, overrides(best["settings"])), load_hardware("h100"))
    assert plan.memory.peak == max(best["memory_bytes"].values()) and plan.step_seconds == best["step_seconds"]
    assert all(held.get("reference parameters", 0) == 0 for held in plan.memory.worst.phases.values())
    cut, *_ = found(f"{MEGATRON}.pipeline_model_parallel_size=2", "actor_rollout_ref.rollout.pool=global_pool")[
        "candidates"
    ]
    models = RunModels(load_config(SMALL, overrides(cut["settings"])))
    assert plan_stages(models)[0].phases["update_actor"]["received shards"] > 7e9


def overrides(settings: dict) -> list[str]:
    """Settings as they are typed."""
    return [f"{key}={shown(value)}" for key, value in settings.items()]


@pytest.mark.parametrize("merge", [False, True])
def test_the_search_moves_what_a_run_moves(merge):
    """Merged weights cross whole in every step, adapters alone otherwise: as the exact plan of one layout.

    Would not catch seconds, which follow from the bytes.
    """
    config = load_config(SMALL, [*TP2_PP2, f"{LORA}.merge={str(merge).lower()}"])
    pools = Pools(SearchProblem(config, load_hardware("h100"), ClusterSize(1, 4), (256.0, 768.0), Keeps({})))
    plan = TransitionPlan.of(RunModels(config))
    assert pools.moved.model == pytest.approx(plan.model_bytes, rel=1e-6)
    assert (pools.moved.model > 1e10) == merge
    assert pools.work.keeps_base != merge and (plan.once is None) == merge
    held = plan_stages(RunModels(config))[0].phases["gen"]
    assert ("own merged" in held) == merge
