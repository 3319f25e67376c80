"""What plan and map know of teachers: heads beside the actor's, columns, products with two heads, and places."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placing import enumerated, gpu, request, write_model

from megatron_rl.config.roles import Placement
from megatron_rl.planning.layout_search.search import Search
from megatron_rl.planning.layout_search.search_result import find_placements
from megatron_rl.planning.memory import plan_pools, plan_stages
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.role_ledger import UPDATE
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.step_time import estimator_of, step_load, updated_load
from megatron_rl.planning.teaching_costs import COLUMNS, NO_TEACHING

TEACHER, LOSS = "distillation.teacher_models.big", "distillation.distillation_loss"
MEGATRON = "actor_rollout_ref.actor.megatron"
GRPO = ("algorithm.adv_estimator=grpo", "distillation.enabled=true", f"{LOSS}.use_policy_gradient=false")
WHOLE, TOP = (f"{LOSS}.loss_mode=forward_kl",), (f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=64")
ITSELF = (f"{TEACHER}.model_path=self", f"{TEACHER}.prompt_key=hint", "actor_rollout_ref.actor.ppo_mini_batch_size=64")
TP2_PP2 = (f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.pipeline_model_parallel_size=2")
ROWS, HIDDEN, WIDE, RESPONSE = 32000, 1024, 1536, 1024


def big(folder) -> str:
    """A teacher's folder; with half as many columns again as the policy's model."""
    return f"{TEACHER}.model_path={write_model(folder / 'big', hidden_size=WIDE, num_hidden_layers=16)}"


def asked(folder, *keys: str, gpus: int = 8, **options):
    return request(folder, gpus, "data.max_response_length=1024", *GRPO, *keys, **options)


def models_of(folder, *keys: str) -> RunModels:
    config = asked(folder, *keys, "trainer.n_gpus_per_node=8").config
    assert preflight(config, config_only=True) == []
    return RunModels(config)


def test_heads_are_on_the_last_stage(tmp_path):
    """Of each teacher with a folder, over the actor's TP, in the teacher's dtype; they leave with its parameters.

    Would not catch a vocabulary that is padded to other rows.
    """
    away = f"{TEACHER}.megatron.param_offload=true"
    first, last = plan_stages(models_of(tmp_path, big(tmp_path), *WHOLE, *TP2_PP2, away))
    head = ROWS // 2 * WIDE * 2
    assert [stage.phases["update_actor"].get("big head") for stage in (first, last)] == [None, head]
    assert "big head" not in last.phases["gen"] and "big parameters" not in last.phases["gen"]
    (_, last) = plan_stages(models_of(tmp_path, big(tmp_path), *WHOLE, *TP2_PP2))
    assert last.phases["gen"]["big head"] == head and last.built["big head"] == head
    for others in ((big(tmp_path), *TOP), (*ITSELF, *WHOLE)):
        (_, last) = plan_stages(models_of(tmp_path, *others, *TP2_PP2))
        assert not any(name.endswith("head") for held in last.phases.values() for name in held)


def test_a_teacher_that_is_the_actor_holds_nothing(tmp_path):
    """But has a pass of its own, over the prompts that it reads. Would not catch what its pass holds."""
    (alone,) = plan_stages(models_of(tmp_path, *ITSELF, *WHOLE))
    assert alone.phases["teacher_big"]["big parameters"] == 0
    longer = f"{TEACHER}.max_prompt_length=512"
    models = models_of(tmp_path, *ITSELF, *WHOLE, longer)
    role = models.placement.roles["big"]
    passes = models.pools[role.pool].ledger(role).passes("score")
    assert passes.block.longest == 512 + RESPONSE


@pytest.mark.parametrize(
    ("mode", "of_token", "of_comparison"),
    [(WHOLE, WIDE * 2, HIDDEN * 2), (TOP, 64 * (4 + 4), HIDDEN * 2 + 64 * (8 + 10 * 4))],
)
def test_columns_of_one_micro_batch(tmp_path, mode, of_token, of_comparison):
    """Bytes of a token at the head, on the last stage alone. Would not catch those of the batch on the host."""
    models = models_of(tmp_path, big(tmp_path), *mode, *TP2_PP2)
    ledger = models.training.ledger(models.actor_role)
    block = ledger.passes(UPDATE).block
    held = [ledger.update(pp_rank, replace(ledger.passes(UPDATE), num_blocks=1)).get(COLUMNS) for pp_rank in (0, 1)]
    assert held == [None, block.response_tokens * (of_token + of_comparison)]


def test_roles_without_teachers_have_no_costs(tmp_path):
    """And those that have nothing to do with them. Would not catch a role that is new."""
    models = models_of(tmp_path, big(tmp_path), *WHOLE, "algorithm.use_kl_in_reward=true")
    pool = models.training
    assert pool.ledger(models.placement.roles["reference"]).teaching is NO_TEACHING
    sampled = models_of(tmp_path, big(tmp_path), f"{LOSS}.loss_mode=k2")
    assert all(sampled.training.ledger(role).teaching == NO_TEACHING for role in sampled.training.spec.megatron_roles)


@pytest.mark.parametrize(("mode", "products"), [(WHOLE, 4 + 2 * WIDE / HIDDEN), (TOP, 4)])
def test_products_with_two_heads_take_their_time(tmp_path, mode, products):
    """Of the tokens of answers alone, on one GPU's share of a head. Would not catch the rate of small products."""
    models = models_of(tmp_path, big(tmp_path), *mode)
    role, hardware = models.actor_role, gpu()
    estimator = estimator_of(models.training, role, hardware, 1)
    load = updated_load(step_load(models.config, 1 << 50, (128.0, 384.0)), role, models.config)
    load = replace(load, num_samples=1 << 12, mini_batch=1 << 12, block_tokens=1 << 20)  # no time to read or launch
    taught = replace(load, head_products=models.training.ledger(role).teaching.products)
    more = estimator.trained(taught).critical - estimator.trained(load).critical
    tokens = load.num_samples * load.response / models.grid.dp_size
    rate = hardware.flops("bfloat16") * hardware.matmul_efficiency * load.efficiency_share
    assert more == pytest.approx(products * tokens * 2 * ROWS * HIDDEN / rate, rel=0.05)


def test_map_places_a_teacher_like_any_frozen_role(tmp_path):
    """The search finds what enumeration finds; the best fits, and is what `plan` says of its settings.

    Would not catch an axis that neither tries.
    """
    keys = ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2560", big(tmp_path), *WHOLE)
    work = asked(tmp_path, *keys, gpus=8, hardware=gpu(8.0), per_node=4)
    found = Search(work.work).run()
    assert found[0].seconds == pytest.approx(min(enumerated(work.work)))
    mapped = find_placements(work)
    pools = {tuple(choice.block) for candidate in mapped.candidates for choice in candidate.placed.choices}
    assert {"big"} < set().union(*pools) and any("big" in pool and "actor" not in pool for pool in pools)
    best = mapped.candidates[0]
    planned = plan_pools(RunModels(best.config))
    assert preflight(best.config, config_only=True) == []
    for name, stages in planned.items():
        assert max(stage.peak for stage in stages) <= best.memory[name].peak * 1.001


def test_map_keeps_a_teacher_that_is_the_actor_with_it(tmp_path):
    """In every placement, with seconds and without bytes. Would not catch a rollout that it should share with."""
    mapped = find_placements(asked(tmp_path, *ITSELF, *WHOLE, gpus=8, per_node=4))
    assert len({len(candidate.placed.choices) for candidate in mapped.candidates}) > 1
    for candidate in mapped.candidates:
        placement = Placement.of(candidate.config)
        assert placement.roles["big"].pool == placement.roles["actor"].pool
        assert candidate.time.seconds["teacher_big"] > 0
        assert f"{TEACHER}.megatron.param_offload" in candidate.settings
        assert not candidate.settings[f"{TEACHER}.megatron.param_offload"]
