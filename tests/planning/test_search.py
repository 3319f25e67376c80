"""The search against plain enumeration, its baselines, and what the literature found."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placing import ACTOR, MODELS, ROLLOUT, enumerated, gpu, request, reward_model_like, write_model
from published.points import hardware_of

from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.layout_search.exact_ranking import Finalists
from megatron_rl.planning.layout_search.grids import Grid, GridShape
from megatron_rl.planning.layout_search.partitions import partitions
from megatron_rl.planning.layout_search.pools import Pools
from megatron_rl.planning.layout_search.search import Others, Placed, Search, undominated_others
from megatron_rl.planning.layout_search.search_result import find_placements

LARGE = """
data: {train_files: a, val_files: b, train_batch_size: 1024, max_prompt_length: 1024, max_response_length: 1024}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 256, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 2048}
  rollout: {update_weights_bucket_megabytes: 256}
algorithm: {use_kl_in_reward: true}
trainer: {device: cuda, total_training_steps: 1}
"""


def test_partitions_by_hand():
    """Bell numbers, and the five of three. Would not catch blocks in another order."""
    assert [len(list(partitions("abcdef"[:size]))) for size in range(1, 7)] == [1, 2, 5, 15, 52, 203]
    assert set(partitions("abc")) == {
        (("a",), ("b",), ("c",)), (("a", "b"), ("c",)), (("a", "c"), ("b",)), (("a",), ("b", "c")), (("a", "b", "c"),),
    }  # fmt: skip


SMALL_RUNS = (
    st.sampled_from([6, 8, 12]),
    st.sampled_from([(2, 2), (4, 4), (8, 8), (8, 4), (16, 8)]),
    st.sampled_from([4.0, 8.0, 85.0]),
    st.sampled_from([16.0, 128.0, 900.0]),
    st.booleans(),
)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(*SMALL_RUNS)
def test_the_search_finds_what_enumeration_finds(tmp_path, layers, cluster, memory, response, has_critic):
    """Random models, lengths and memories on up to 16 GPUs: the same seconds. Would not catch an axis that neither
    tries.
    """
    check_search(tmp_path, layers, cluster, memory, response, has_critic)


@pytest.mark.exhaustive
@pytest.mark.weekly
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(*SMALL_RUNS)
def test_the_search_finds_what_enumeration_finds_of_many_more(tmp_path, layers, cluster, memory, response, has_critic):
    """The same, four times as often."""
    check_search(tmp_path, layers, cluster, memory, response, has_critic)


def check_search(tmp_path, layers, cluster, memory, response, has_critic) -> None:
    gpus, per_node = cluster
    estimator = "gae" if has_critic and gpus < 16 else "grpo"
    asked = request(
        tmp_path, gpus, f"algorithm.adv_estimator={estimator}", "algorithm.use_kl_in_reward=true",
        "data.max_response_length=1024", f"{ACTOR}.ppo_max_token_len_per_gpu=2560",
        model=write_model(tmp_path / "model", num_hidden_layers=layers),
        hardware=gpu(memory), per_node=per_node, lengths=(128.0, response),
    )  # fmt: skip
    best = min(enumerated(asked.work), default=None)
    found = Search(asked.work).run()
    assert (best is None) == (not found)
    if best is not None:
        assert found[0].seconds == pytest.approx(best)
        mapped = find_placements(asked)
        assert mapped.candidates[0].seconds <= 1.01 * best


@pytest.fixture(scope="module")
def equal(tmp_path_factory):
    """PPO with four roles of one model on so many H100."""
    folder = tmp_path_factory.mktemp("equal")

    def asked(model: str, gpus: int, *keep: str, critic: str | None = None):
        trunk = MODELS / (critic or model)
        reward = reward_model_like(folder / f"reward-{trunk.name}", trunk)
        return request(
            folder, gpus, *keep, model=MODELS / model, critic=trunk, reward=reward,
            hardware=load_hardware("h100"), lengths=(512.0, 512.0), file=LARGE,
        )  # fmt: skip

    return asked


def best_of(asked) -> Placed:
    return Search(asked.work).run()[0]


def blocks(placed: Placed) -> list[tuple[str, ...]]:
    return [choice.block for choice in placed.choices]


@pytest.mark.exhaustive
def test_equal_models_share_all_ranks_at_small_scale_and_split_at_large(equal):
    """As HybridFlow found: colocated is best on 16 to 64 GPUs, and at 128 actor and reference apart from the critic.
    Would not catch a crossing at another scale.
    """
    for gpus in (16, 64):
        assert len(best_of(equal("llama-2-7b", gpus)).choices) == 1
    split = blocks(best_of(equal("llama-2-7b", 128)))
    assert len(split) == 2 and not any("actor" in block and "critic" in block for block in split)


@pytest.mark.exhaustive
def test_batches_short_of_ranks_stand_alone(equal):
    """Optimizer steps of 16 samples on 128 GPUs: every model but the rollout's has ranks of its own. Would not catch
    samples that could be cut.
    """
    found = best_of(equal("llama-2-7b", 128, "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16"))
    assert len(found.choices) >= 4


@pytest.mark.exhaustive
def test_a_large_critic_has_ranks_apart_from_the_actor(equal):
    """13B actor, 70B critic and reward model, in HybridFlow's space, which has no context parallelism. Would not catch
    a critic that should be alone.
    """
    groups = (ACTOR, "actor_rollout_ref.ref", "critic", "reward_model")
    whole = [f"{group}.megatron.context_parallel_size=1" for group in groups]
    found = best_of(equal("llama-2-13b", 128, *whole, critic="llama-2-70b"))
    assert not any({"actor", "critic"} <= set(block) for block in blocks(found))
    (critic,) = (choice for choice in found.choices if "critic" in choice.block)
    assert critic.shape.num_ranks > found.choices[0].shape.num_ranks


@pytest.mark.slow
@pytest.mark.exhaustive
def test_placements_on_the_machines_of_hybridflow(equal):
    """13B models, prompts and answers of 1,024 tokens, as in its evaluation: one pool on 64 GPUs, and on 96 actor and
    reference apart from critic and reward model. Would not catch what it found at 128, which the clock does not say.
    """
    groups = (ACTOR, "actor_rollout_ref.ref", "critic", "reward_model")
    keep = [f"{group}.megatron.context_parallel_size=1" for group in groups]
    keep += [f"{group}.ppo_mini_batch_size=128" for group in (ACTOR, "critic")]
    machines, lengths = hardware_of("a100_200gbps"), (1024.0, 1023.0)
    found = [
        best_of(dataclasses.replace(equal("llama-2-13b", gpus, *keep), hardware=machines, lengths=lengths))
        for gpus in (64, 96)
    ]
    assert len(found[0].choices) == 1
    assert set(blocks(found[1])) == {("actor", "reference", "rollout"), ("critic", "reward_model")}


def test_a_rollout_beside_a_critic_of_other_stages(tmp_path):
    """The actor's 4 layers cannot be cut like the critic's 9, on whose ranks it generates. Would not catch a wrong
    time.
    """
    asked = request(
        tmp_path, 4, "algorithm.adv_estimator=gae", "critic.pool=others", f"{ROLLOUT}.pool=others",
        "critic.megatron.pipeline_model_parallel_size=2", "critic.megatron.num_layers_in_last_pipeline_stage=4",
        model=write_model(tmp_path / "actor", num_hidden_layers=4),
        critic=write_model(tmp_path / "critic", num_hidden_layers=9), per_node=2,
    )  # fmt: skip
    (trainer, drawer) = find_placements(asked, 1).candidates[0].placed.choices
    assert drawer.block == ("critic", "rollout") and drawer.grid is not None and drawer.grid.last == 4
    assert "actor" in trainer.block


def test_rollout_tp_is_below_training_tp(equal):
    """7B at training TP 8, as in HybridFlow's experiment. Would not catch another size below."""
    tp = f"{ACTOR}.megatron.tensor_model_parallel_size=8"
    (found,) = best_of(equal("llama-2-7b", 16, tp)).choices
    assert found.grid is not None and found.grid.tp == 8
    assert found.generation is not None and found.generation.tp < 8


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("llama-2-7b", 16),
        pytest.param("llama-2-13b", 32, marks=pytest.mark.exhaustive),
        pytest.param("llama-2-7b", 64, marks=pytest.mark.exhaustive),
    ],
)
def test_never_worse_than_the_usual_layouts(equal, model, gpus):
    """TP8 x PP(n/8) for every role, and everything colocated, by the same clock. Would not catch a baseline that the
    space lacks.
    """
    asked = equal(model, gpus)
    best = find_placements(asked, 1).candidates[0]
    tp, pp = (f"megatron.{name}_model_parallel_size" for name in ("tensor", "pipeline"))
    groups = (ACTOR, "actor_rollout_ref.ref", "critic", "reward_model")
    usual = [f"{group}.{key}={size}" for group in groups for key, size in ((tp, 8), (pp, gpus // 8))]
    plain = find_placements(equal(model, gpus, *usual, f"{ROLLOUT}.tensor_model_parallel_size=8"), 1).candidates[0]
    assert best.seconds <= plain.seconds
    pools = [f"{group}.pool=global_pool" for group in (*groups, ROLLOUT)]
    colocated = find_placements(equal(model, gpus, *pools), 1).candidates[0]
    assert len(colocated.placed.choices) == 1 and best.seconds <= colocated.seconds


def test_a_rollout_of_its_own_runs_ahead_where_stale_tokens_are_corrected(equal):
    """GRPO with truncated importance sampling: some placement has staleness 1, and no other does without correction.
    Would not catch staleness that costs reward.
    """
    grpo = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "reward_model.enable=false")
    corrected = equal("llama-2-7b", 16, *grpo, "algorithm.rollout_correction.rollout_is=token")
    assert {placed.ahead for placed in Search(corrected.work).run()} == {0, 1}
    assert {placed.ahead for placed in Search(equal("llama-2-7b", 16, *grpo).work).run()} == {0}
    kept = equal("llama-2-7b", 16, *grpo, "algorithm.rollout_correction.rollout_is=token", "trainer.rollout_ahead=1")
    first = find_placements(kept, 1).candidates[0]
    assert first.is_ahead and first.config.trainer.rollout_ahead == 1 and len(first.placed.choices) > 1


def ppo_70b(equal, gpus: int):
    """70B actor and reference, 7B critic and reward model."""
    return equal("llama-2-70b", gpus, critic="llama-2-7b")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("gpus", "layouts", "allocations"),
    [(64, 8_500, 120), pytest.param(1024, 150_000, 35_000, marks=pytest.mark.slow)],
)
def test_work_is_bounded(equal, gpus, layouts, allocations):
    """Layouts of pools and allocations that are compared, out of tens and hundreds of thousands. Would not catch a
    layout that is slow to judge.
    """
    mapped = find_placements(ppo_70b(equal, gpus))
    assert mapped.num_layouts < layouts and mapped.num_placements < allocations
    assert mapped.candidates and mapped.gap < 0.5


def test_sizes_with_equal_parts_share_their_passes(equal):
    """64 samples on 512 to 1,024 GPUs, one for each replica: timed once, as each size alone. Would not catch a part of
    the cluster that these sizes have in common.
    """
    asked, grid = equal("llama-2-7b", 1024, "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16"), Grid(2, 2)
    shared = Pools(asked.work)
    for nodes in (64, 96, 128):
        mine, alone = (
            pools.on_grid("actor", grid, GridShape(nodes, 8), ("actor",)) for pools in (shared, Pools(asked.work))
        )
        assert mine.options == alone.options
        sizes = [[[each.bytes_of(option) for option in each.options["update"]]] for each in (mine, alone)]
        assert sizes[0] == sizes[1]
    assert len(shared.work.ways) == len(mine.options) == 2


@pytest.mark.parametrize("cores", [0, 4])
def test_fronts_of_other_pools_are_those_of_every_size(tmp_path, cores):
    """Scores, updates and work of two pools without the actor, against every pair of sizes. Would not catch three."""
    hardware = dataclasses.replace(gpu(), parallel_ranks=cores)
    asked = request(
        tmp_path, 16, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true",
        model=write_model(tmp_path / "model"), critic=write_model(tmp_path / "critic", num_hidden_layers=6),
        hardware=hardware, per_node=4,
    )  # fmt: skip
    search, blocks = Search(asked.work), (("reference",), ("critic",))
    every = [
        (one.units + other.units, Others(0.0, 0.0).joined(one).joined(other))
        for first in search.names.sizes(blocks[0])
        for one in search.pools.front(blocks[0], first)
        for second in search.names.sizes(blocks[1])
        for other in search.pools.front(blocks[1], second)
    ]
    for left, front in enumerate(search.others(blocks)):
        expected = undominated_others([others for units, others in every if units <= left])
        assert [(one.score, one.update, one.work) for one in front] == [
            (one.score, one.update, one.work) for one in expected
        ]


def test_faster_networks_and_more_memory_never_hurt(equal):
    """Would not catch numbers that are not used."""
    asked = equal("llama-2-7b", 16)
    seconds = [
        find_placements(dataclasses.replace(asked, hardware=hardware), 1).candidates[0].seconds
        for hardware in (load_hardware("h100"), load_hardware("h200"))
    ]
    assert seconds[1] <= seconds[0]


def test_finalists_count_what_is_alike_once(equal):
    """Ten placements, fewer exchange plans. Would not catch a plan that is another's."""
    asked = equal("llama-2-7b", 16)
    work = asked.work
    search = Search(work)
    finalists = Finalists(work, search.names)
    found = finalists.best(search.run(), 10)
    assert len(found) == 10 and len(finalists._transitions) < 10
