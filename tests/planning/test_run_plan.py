"""Memory, advice and transition of whole configurations, from config.json alone."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from storage_meter import StorageMeter

from megatron_rl.config.keys import put
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import RunConfig
from megatron_rl.model.parts import Cut, GatedMLP, GroupedAttention, Layer, LayerBlock
from megatron_rl.planning.activations import MeanLayer, Recompute, in_flight
from megatron_rl.planning.fitting_changes import changes_as_json
from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.memory import plan_stages
from megatron_rl.planning.memory_advice import advice
from megatron_rl.planning.memory_report import memory_report
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.role_ledger import optimizer_temporaries
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.run_plan import RunPlan
from megatron_rl.planning.transition import TransitionPlan

MODELS = Path(__file__).parents[2] / "configs" / "models"
MEGATRON = "actor_rollout_ref.actor.megatron"
LARGE = (
    "trainer.nnodes=8",
    f"{MEGATRON}.tensor_model_parallel_size=8",
    f"{MEGATRON}.pipeline_model_parallel_size=4",
    f"{MEGATRON}.dtype=bfloat16",
    f"{MEGATRON}.sequence_parallel=true",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
)


EXPLICIT = """
algorithm: {use_kl_in_reward: true}
actor_rollout_ref: {actor: {megatron: {dtype: float32, sequence_parallel: false}}}
"""


@pytest.fixture
def config(tmp_path):
    def config(model: str, *overrides: str) -> RunConfig:
        file = tmp_path / "run.yaml"
        file.write_text("data: {train_files: a, val_files: b}\n" + EXPLICIT)
        path = f"actor_rollout_ref.model.path={MODELS / model}"
        found = load_config(file, [path, "data.max_prompt_length=1024", "data.max_response_length=1024", *overrides])
        assert preflight(found, config_only=True) == []
        return found

    return config


def test_transition_of_70b_over_the_network(config):
    """TP8 PP4 DP2 to rollout TP8 on 8 x 8 GPUs: (M / 8) * (3 / 4) = 13.2 GB a GPU, M = 141.1e9 bytes.

    The ends of the pipeline hold the vocabulary's two matrices beside their layers and so lack less than the middle.
    Would not catch bytes that an executor sends twice; the hybrid engine's own tests do.
    """
    plan = TransitionPlan.of(RunModels(config("llama-3-70b", *LARGE)))
    assert plan.model_bytes == 141_107_412_992
    assert plan.lower_bound == pytest.approx(13.229e9, rel=1e-4)
    assert plan.mean_network == pytest.approx(plan.lower_bound, rel=2e-4)
    assert round(plan.mean_network / 1e9, 1) == 13.2
    assert (min(plan.network), max(plan.network)) == (13_097_238_528, 13_361_889_280)
    # Norms are held whole by all TP ranks: a node fetches them once and passes them on.
    assert 0 < plan.mean_link < 3e6
    hardware = load_hardware("h100")
    assert plan.seconds(hardware) == pytest.approx(13_361_889_280 / 50e9 / 0.7, rel=1e-3)


def test_transition_inside_a_node(config):
    """TP4 to rollout TP1 on one node: 3/4 of the model, all over NVLink. Would not catch a slower path."""
    plan = TransitionPlan.of(
        RunModels(config("llama-2-7b", f"{MEGATRON}.tensor_model_parallel_size=4", f"{MEGATRON}.dtype=bfloat16",
                         "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                         "actor_rollout_ref.rollout.kv_cache_memory_bytes=2000000000"))
    )  # fmt: skip
    assert set(plan.network) == {0}
    assert plan.mean_link == pytest.approx(plan.model_bytes * 3 / 4, rel=1e-3)


def test_what_a_rank_of_70b_keeps(config):
    """Counted by hand: the middle stage has 20 of 80 layers, 1 / 8 of each. Would not catch wrong activations."""
    config = config("llama-3-70b", *LARGE, "critic.enable=true", f"{MEGATRON}.grad_offload=true")
    stages = plan_stages(RunModels(config))
    assert [stage.kind for stage in stages] == ["first", "middle", "middle", "last"]
    layer = (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672) // 8 + 2 * 8192
    middle = stages[1].phases["update_actor"]
    params = 20 * layer
    assert middle["actor parameters"] == pytest.approx(2 * params, rel=1e-6)
    assert middle["actor gradients"] == pytest.approx(4 * params, rel=1e-6)
    assert middle["actor moments"] == pytest.approx(8 * params / 2, rel=1e-6)
    assert middle["actor masters"] == pytest.approx(4 * params / 2, rel=1e-6)
    assert "actor gradients" not in stages[1].phases["gen"]
    assert stages[1].phases["gen"]["received shards"] == pytest.approx(13.36e9, rel=1e-3)
    assert "logits chunk" in stages[3].phases["old_log_prob"] and "logits chunk" not in middle


def test_cache_and_room(config):
    """8 key/value heads on 8 ranks, 80 layers of 128: 40960 bytes a token. Would not catch vLLM's own overhead."""
    config = config("llama-3-70b", *LARGE, "actor_rollout_ref.rollout.kv_cache_memory_bytes=20000000000")
    report = memory_report(config, RunModels(config), load_hardware("h100"))
    assert report.kv_cache.bytes_per_token == 2 * 80 * 128 * 2
    assert report.kv_tokens == (20_000_000_000 // (16 * 40960) - 1) * 16
    assert report.kv_sequences == report.kv_tokens // 2048
    changed = dataclasses.replace(config)
    put(changed, "actor_rollout_ref.rollout.kv_cache_memory_bytes", report.room_kv_bytes)
    stages = plan_stages(RunModels(changed))
    held = max(stage.total(phase) for stage in stages for phase in ("init", "gen", "reshard"))
    assert held <= report.usable < held + 2


@pytest.mark.parametrize("gpu", ["h100"])
def test_advice_makes_the_plan_fit(config, gpu):
    """Large micro-batches and nothing offloaded: every step of the advice is valid, and in the end it fits.

    Would not catch advice that costs more time than another.
    """
    config = config("llama-3-70b", *LARGE, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16")
    hardware, models = load_hardware(gpu), RunModels(config)
    report = memory_report(config, models, hardware)
    assert not report.fits
    changes = advice(config, models, hardware)
    for change in changes:
        for key, value in change.settings.items():
            put(config, key, value)
        assert preflight(config, config_only=True) == []
    after = memory_report(config, RunModels(config), hardware)
    assert after.fits and after.peak == changes[-1].peak


@pytest.mark.parametrize(
    ("keys", "alone", "together"),
    [
        ((f"{MEGATRON}.dtype=bfloat16", "critic.enable=true",
          "actor_rollout_ref.rollout.kv_cache_memory_bytes=2000000000"), 0, 3),
        pytest.param((*LARGE, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"), 3, 1,
                     marks=pytest.mark.exhaustive),
    ],
    ids=["7b", "70b"],
)  # fmt: skip
def test_what_is_enough_comes_first_and_nothing_is_needless(config, keys, alone, together):
    """Each change that is said to be enough is, by itself; of those that are enough together none can be left out.

    Would not catch a cheaper change that was not tried.
    """
    run, hardware = config("llama-3-70b" if alone else "llama-2-7b", *keys), load_hardware("h100")
    plan = RunPlan.of(run, hardware)
    assert plan.fitting is not None
    assert (len(plan.fitting.alone), len(plan.fitting.together)) == (alone, together)

    def fits(*changes):
        changed = copy.deepcopy(run)
        for key, value in (item for change in changes for item in change.settings.items()):
            put(changed, key, value)
        assert preflight(changed, config_only=True) == []
        return memory_report(changed, RunModels(changed), hardware).fits

    assert all(fits(change) for change in plan.fitting.alone) and fits(*plan.fitting.together)
    if together > 1:
        assert not any(
            fits(*(one for one in plan.fitting.together if one is not left)) for left in plan.fitting.together
        )
    first = plan.fitting.lines()[0]
    assert first.startswith("  one change is enough: " if alone else "  no single change is enough; all 3")
    said = changes_as_json(plan.fitting)
    assert said[-1]["peak_bytes"] <= plan.memory.usable and len(said) == together


def test_where_nothing_helps_that_is_said(config):
    """A 13B model on one GPU. Would not catch a layout with more GPUs that would help."""
    short = ("data.max_prompt_length=128", "data.max_response_length=128")
    config = config("llama-2-13b", "trainer.n_gpus_per_node=1", f"{MEGATRON}.dtype=bfloat16", *short)
    plan = RunPlan.of(config, load_hardware("h100"))
    notes = "\n".join(plan.notes())
    assert "does not fit" in notes and "take more GPUs" in notes and "must hold *.safetensors files" in notes


def test_plan_as_json_has_every_number(config):
    """Of a mixture of experts. Would not catch a number that is wrong; the tests above do."""
    config = config(
        "qwen3-30b-a3b",
        f"{MEGATRON}.expert_model_parallel_size=8",
        f"{MEGATRON}.dtype=bfloat16",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
    )
    plan = RunPlan.of(config, load_hardware("h200"), (128.0, 512.0))
    said = plan.as_json()
    assert said["groups"]["rollout TP"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert set(said["time"]["seconds"]) == {"gen", "old_log_prob", "ref", "update_actor", "reshard"}
    assert said["time"]["step_seconds"] == pytest.approx(sum(said["time"]["seconds"].values()))
    assert said["time"]["mean_response_length"] == 512.0
    assert len(said["transition"]["link_bytes_per_rank"]) == 8
    assert [table.title for table in plan.tables()][0] == "Layout and batch"


LAYER = Layer(64, GroupedAttention(64, num_heads=8, num_kv_heads=4, head_size=8), GatedMLP(64, 192))


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [(False, 4 * 10752 + 2 * 168), (True, 4 * 5376 + 2 * 84)],
)
def test_saved_tensors_of_one_layer(sequence_parallel, expected):
    """As they were read off a real layer at TP2, packed: 42 tokens of 4 segments in 56 slots, with and without SP.

    Would not catch a kernel that keeps other tensors, as on CUDA.
    """
    layer = MeanLayer(((LAYER, 1),), Cut(tp_size=2, sequence_parallel=sequence_parallel))
    attention = 2 * 3584 + 2 * 7168 + 896 + 5376
    mlp = 32256 + 16128
    assert layer.saved_bytes(LayerBlock(42, 56, 17, is_packed=True)) == expected + attention + mlp


def test_later_layers_have_freed_what_they_kept():
    """A wide layer before two narrow ones: its backward is the largest moment only where they kept nothing.

    Would not catch an order of layers that the model does not have.
    """
    wide = dataclasses.replace(LAYER, mlp=GatedMLP(64, 640))
    block, cut = LayerBlock(40, 40, 20, is_packed=False), Cut(element=2)
    layer = MeanLayer(((wide, 1), (LAYER, 2)), cut)
    of_wide, of_narrow = (each.running_bytes(block, cut, backward=True) for each in (wide, LAYER))
    freed = 2 * LAYER.kept_bytes(block, cut)
    assert of_wide > of_narrow > of_wide - freed
    chunk = (wide, LAYER, LAYER)
    assert layer.backward_bytes(block, "p2p", chunk, Recompute()) == of_narrow
    assert layer.backward_bytes(block, "p2p", chunk, Recompute("uniform", 1)) == of_wide
    assert layer.backward_bytes(block, "p2p", chunk[::-1], Recompute()) == of_wide


RECOMPUTE = f"{MEGATRON}.override_transformer_config.recompute"
FULL = (f"{RECOMPUTE}_granularity=full", f"{RECOMPUTE}_method=uniform", f"{RECOMPUTE}_num_layers=1")


@pytest.mark.parametrize(
    ("method", "number", "inputs", "layers", "made"),
    [(None, None, 0, 16, 0), ("uniform", 1, 16, 0, 1), ("uniform", 4, 4, 0, 4), ("block", 16, 16, 0, 1),
     ("block", 10, 10, 6, 0)],
)  # fmt: skip
def test_recomputation_keeps_inputs_and_what_is_made_again(config, method, number, inputs, layers, made):
    """Of the actor, half of 32 layers and two passes in flight: by hand. The critic keeps all.

    Would not catch what backward holds for a moment; `test_memory_plan.py` measures it.
    """
    again = () if method is None else (*FULL, f"{RECOMPUTE}_method={method}", f"{RECOMPUTE}_num_layers={number}")
    config = config("llama-2-7b", "trainer.n_gpus_per_node=2", "trainer.device=cpu",
                    f"{MEGATRON}.pipeline_model_parallel_size=2",
                    "actor_rollout_ref.rollout.kv_cache_memory_bytes=4000000000",
                    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", *again)  # fmt: skip
    models = RunModels(config)
    phases = plan_stages(models)[0].phases
    hidden, block = 2 * 2048 * 4096 * 4, LayerBlock(4096, 4096, 2048, is_packed=True)
    layer = models.training.ledger(models.actor_role).layer
    saved, running = layer.saved_bytes(block), layer.transient_bytes(block, backward=True)
    kept = 2 * (inputs * hidden + layers * saved + 2 * hidden)
    assert phases["update_actor"]["activations"] == int(kept + made * saved + running)
    assert phases["update_critic"]["activations"] == int(2 * (16 * saved + 2 * hidden) + running)


@pytest.mark.parametrize(("fused", "device"), [(True, "cuda"), (False, "cpu")])
def test_adams_temporaries_are_those_of_torch(fused, device):
    """Two steps of torch's own AdamW over three weights, its tensors followed. Would not catch another Adam, as that of
    transformer-engine, nor what kernels take inside."""
    sizes = (30_000, 1_000, 7_000)  # the largest first: on a CPU a quotient lives until the next one replaces it
    weights = [torch.randn(size, requires_grad=True) for size in sizes]
    optimizer = torch.optim.AdamW(weights, fused=fused, foreach=False)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = [tensor for weight in weights for tensor in (weight, weight.grad, *optimizer.state[weight].values())]
    with StorageMeter(kept, lambda: 0) as meter:
        optimizer.step()
    planned = optimizer_temporaries(sum(sizes), max(sizes), device)
    assert planned <= meter.peak <= 1.001 * planned + 100  # and numbers


@pytest.mark.exhaustive
def test_recomputing_is_offered_where_it_makes_the_plan_fit(config):
    """The keys that are offered are valid and come to what is said, in the actor's and the critic's time too.

    Would not catch a plan that is wrong about both.
    """
    sizes = (*LARGE, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", f"{MEGATRON}.grad_offload=true",
             "critic.megatron.grad_offload=true", f"{MEGATRON}.optimizer_offload=true",
             "critic.megatron.optimizer_offload=true")  # fmt: skip
    hardware = load_hardware("h100")
    plan = RunPlan.of(config("llama-3-70b", *sizes), hardware)
    assert plan.fitting is not None
    recomputing = next(change for change in plan.fitting.alone if plan.fitting.costs.get(str(change)))
    overrides = str(recomputing).split()
    assert {FULL[0], FULL[0].replace("actor_rollout_ref.actor", "critic")} < set(overrides)
    assert f"this one alone: {recomputing} (" in "\n".join(plan.notes())
    after = RunPlan.of(config("llama-3-70b", *sizes, *overrides), hardware)
    assert after.memory.fits and after.memory.peak == recomputing.peak
    for phase in ("update_actor", "update_critic"):
        assert 1.25 < after.seconds[phase] / plan.seconds[phase] < 1.4
    half = RunPlan.of(config("llama-3-70b", *sizes, *FULL, f"{RECOMPUTE}_method=block", f"{RECOMPUTE}_num_layers=10"),
                      hardware)  # fmt: skip
    seconds = [run.seconds["update_actor"] for run in (plan, half, after)]
    assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2)
    assert half.seconds["update_critic"] == plan.seconds["update_critic"]


@pytest.mark.parametrize(
    ("pp_size", "vpp_size", "blocks", "expected"),
    [
        (1, 1, 8, [1]),
        (4, 1, 8, [4, 3, 2, 1]),
        (4, 1, 2, [2, 2, 2, 1]),
        (2, 2, 8, [5, 3]),
        (2, 2, 2, [4, 4]),
    ],
)
def test_passes_in_flight(pp_size, vpp_size, blocks, expected):
    """Drawn by hand for one-forward-one-backward. Would not catch a schedule of a later Megatron."""
    assert [in_flight(pp_size, rank, vpp_size, blocks) for rank in range(pp_size)] == expected


def test_no_time_for_a_pass_that_is_not_made(config):
    """Where the engine's log-probs are the old ones the rest of the step takes what it took. Would not catch a trainer
    that makes the pass all the same.
    """
    model = ("llama-3-70b", *LARGE, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8")
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    whole, shorter = (RunPlan.of(config(*model, *more), load_hardware("h100")) for more in ((), (bypass,)))
    assert whole.time.seconds["old_log_prob"] > 0 and "old_log_prob" not in shorter.time.seconds
    assert whole.time.total - shorter.time.total == pytest.approx(whole.time.seconds["old_log_prob"])
