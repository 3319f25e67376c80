"""Products in 8 bits, emulated: passes have fitting numbers of tokens, one recipe, and never an old weight.

The emulated layers refuse a number of tokens that transformer-engine's would not take, and keep their rounded weights
until the mark is set by which Megatron tells transformer-engine's to round again.
"""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny_models import random_batch, run_config, save_qwen2

from megatron_rl.columns import ACTOR_UPDATE, SCORING
from megatron_rl.config.trainer import GLOBAL_POOL
from megatron_rl.planning.memory import MemoryOfStage
from megatron_rl.planning.run_models import RunModels

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS = 11
HELD = "actor FP8 weights"
MEGATRON, ACTOR = "actor_rollout_ref__actor__megatron", "actor_rollout_ref__actor"
PACKED = {"actor_rollout_ref__model__use_remove_padding": True}
BY_TOKENS = PACKED | {f"{ACTOR}__use_dynamic_bsz": True, "actor_rollout_ref__rollout__log_prob_use_dynamic_bsz": True}
SP = {f"{MEGATRON}__sequence_parallel": True}
LAYOUTS = {
    "padded": (1, 1, 1, "blockwise", {}),
    "TP2, parts of the sequence": (2, 2, 1, "blockwise", SP | PACKED),
    "PP2, VPP2": (2, 1, 2, "tensorwise", {f"{MEGATRON}__virtual_pipeline_model_parallel_size": 2}),
    "CP2": (2, 1, 1, "tensorwise", BY_TOKENS | {f"{MEGATRON}__context_parallel_size": 2}),
    "CP2, dynamic": (
        2,
        1,
        1,
        "blockwise",
        BY_TOKENS | {f"{MEGATRON}__context_parallel_size": 2, f"{MEGATRON}__dynamic_context_parallel": True},
    ),
}
"""Name -> ranks, TP, PP, recipe, further keys."""


def eight_bit_config(model: str, layout: str, fp8: str | None = "hybrid"):
    _, tp_size, pp_size, recipe, keys = LAYOUTS[layout]
    options = {"fp8": fp8, "fp8_recipe": recipe}
    keys = keys | {f"{MEGATRON}__override_transformer_config__{name}": value for name, value in options.items()}
    keys |= {f"{ACTOR}__optim__lr": 0.01, f"{MEGATRON}__fp8_emulate": fp8 is not None}
    return run_config(model, tp_size, pp_size, **keys)


def score_update_score(config, forgets: bool) -> dict:
    """Log-probs before and after an update, and the latter again from weights that were rounded anew.

    forgets: Megatron's schedules do not set the mark.
    """
    from megatron_rl.model.eight_bits import EightBitProduct
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    where, actor = worker.coordinates(), worker.roles["actor"]
    mine = random_batch(NUM_ROWS)[torch.arange(NUM_ROWS).tensor_split(where.dp_size)[where.dp_rank]]

    def scored() -> list | None:
        own = actor.log_probs(mine.read_by(SCORING))
        return None if own is None else own["old_log_probs"].values().tolist()

    before, memory = actor.log_probs(mine.read_by(SCORING)), actor.memory()
    mine.add(old_log_probs=mine["advantages"] if before is None else before["old_log_probs"])
    if forgets:
        for chunk in actor.trainable.chunks:
            chunk.set_is_first_microbatch = lambda: None
    metrics, after = actor.update(mine.read_by(ACTOR_UPDATE)), scored()
    products = [
        getattr(module, "_forward_impl", None) for chunk in actor.trainable.models for module in chunk.modules()
    ]
    for product in products:
        if isinstance(product, EightBitProduct):
            product.weight = None
    before = None if before is None else before["old_log_probs"].values().tolist()
    return {"before": before, "after": after, "anew": scored(), "metrics": metrics, "memory": memory}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "layout", ["padded", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in [*LAYOUTS][1:])]
)
def test_one_recipe_and_no_old_weight(layout: str, model: str) -> None:
    """In an update the probabilities are those of the pass for old log-probs, bit for bit; after it they are those of
    the new weights. Without 8 bits they differ by what rounding to three bits does. Would not catch a GPU's products.
    """
    ranks = run_ranks(LAYOUTS[layout][0], score_update_score, eight_bit_config(model, layout), False)
    plain = run_ranks(LAYOUTS[layout][0], score_update_score, eight_bit_config(model, layout, None), False)
    models = RunModels(eight_bit_config(model, layout))
    for number, (found, exact) in enumerate(zip(ranks, plain, strict=True)):
        stage = number * LAYOUTS[layout][2] // len(ranks)
        planned = MemoryOfStage(models, GLOBAL_POOL, stage).planned().phases["update_actor"]
        assert found["memory"][HELD] == planned[HELD] > 0
        if found["before"] is None:
            continue
        assert found["metrics"]["actor/ppo_kl"] == 0.0
        assert found["after"] == found["anew"] != found["before"]
        differences = (torch.tensor(found["before"]) - torch.tensor(exact["before"])).abs()
        assert 1e-3 < differences.mean() < 0.2


@pytest.mark.exhaustive
def test_a_weight_that_is_kept_over_an_update_is_seen(model: str) -> None:
    """The test above fails where the mark is not set."""
    [found] = run_ranks(1, score_update_score, eight_bit_config(model, "padded"), True)
    assert found["after"] != found["anew"]


def score_without_multiples(config) -> str:
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    actor = worker.roles["actor"]
    actor.scorer.pipeline._token_multiple = 1
    try:
        actor.log_probs(random_batch(3).read_by(SCORING))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.exhaustive
def test_tokens_that_do_not_fit_are_seen(model: str) -> None:
    """The test above fails where passes are not filled up."""
    [refused] = run_ranks(1, score_without_multiples, eight_bit_config(model, "padded"))
    assert refused.startswith("blockwise products take a multiple of 128 tokens, and a pass has ")
