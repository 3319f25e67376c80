"""Further examples in the actor's update: as a plain loop of transformers and torch, and the same in every layout.

Why the layout cannot matter: the gradient is that of the samples' loss plus a coefficient times that of the examples'
cross-entropy. Each of both is a sum divided by a number of the whole mini-batch, so each is cut and spread as in
`tests/parity`, and their gradients are added in one buffer.

Not exercised: losses of routers on examples.
"""

from __future__ import annotations

import math

import pytest
import torch
from layout_keys import LAYOUTS
from ranks import run_ranks
from sweeps import often
from task_cases import PlainLoop, token_batch
from task_rows import AS_TRIES, up_to
from tiny_models import random_batch, run_config, save_qwen2, save_qwen3_moe
from updates import NUM_ROWS, OPTIMIZER, relative, whole_weights

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.dispatch import ExtraBatch
from megatron_rl.records import Batch

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

MICRO_BATCH = "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"
MEGATRON = "actor_rollout_ref__actor__megatron"
PACKED = "actor_rollout_ref__model__use_remove_padding"
COEF = 0.25
DP2 = (2, 1, 1)


def samples(advantage: float) -> Batch:
    """A batch whose advantages are `advantage` times noise, and whose old log-probs are near those of a fresh model."""
    found = random_batch(NUM_ROWS)
    old = -math.log(70) + 0.05 * found.flat("rollout_log_probs")
    found.add(
        old_log_probs=found.per_sampled_token(old),
        advantages=found.per_sampled_token(advantage * found.flat("advantages")),
    )
    return found.read_by(ACTOR_UPDATE)


def one_mix(config, batch: Batch, examples: Batch | None) -> dict:
    """What one rank knows after one update of the actor on its share of both."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    role, where = worker.roles["actor"], worker.coordinates()

    def mine(record):
        rows = torch.arange(len(record)).tensor_split(where.dp_size)[where.dp_rank]
        return record[rows] if len(rows) else record[:1].neutral()

    beside = None if examples is None else ExtraBatch(mine(examples))
    result = {"where": where, "actor": role.update(mine(batch), beside)}
    parameters = named_parameters(role.trainable.models)
    result["actor_weights"] = {key: value.detach().clone() for key, value in parameters.items()}
    result["place"] = worker.groups.grid.place(worker.groups.rank, vocab_multiple=64)
    return result


def run_mix(model_path: str, layout: tuple[int, int, int], batch, examples, **overrides) -> list[dict]:
    world_size, tp_size, pp_size = layout
    optimizer = {f"actor_rollout_ref__actor__optim__{key}": value for key, value in OPTIMIZER.items()}
    keys = {MICRO_BATCH: 4, "ptx__coef": COEF, "actor_rollout_ref__rollout__temperature": 1.3, **overrides}
    config = run_config(model_path, tp_size, pp_size, **optimizer, **keys)
    return run_ranks(world_size, one_mix, config, batch, examples)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


def told(results: list[dict]) -> dict[str, float]:
    return next(one["actor"] for one in results if one["where"].dp_collector)


def test_one_process_equals_a_plain_loop(model_path: str) -> None:
    """Without advantages all that is left is coef * mean cross-entropy, at temperature 1 although samples have 1.3, in
    three passes beside three of samples. Would not catch a sum of both losses in which one disturbs the other."""
    plain, batch = PlainLoop(model_path), token_batch()
    rows = zip(batch["input_ids"].unbind(), batch["sampled"].unbind(), strict=True)
    summed = sum(plain.log_probs(ids, len(ids) - 1)[mask[1:]].sum() for ids, mask in rows)
    loss, norm = plain.step(-COEF * summed / batch.num_sampled.sum())
    found = run_mix(model_path, (1, 1, 1), samples(0.0), batch)
    assert told(found)["actor/ptx_loss"] == pytest.approx(loss / COEF, rel=1e-5)
    assert told(found)["actor/grad_norm"] == pytest.approx(norm, rel=1e-5) and told(found)["actor/pg_loss"] == 0.0
    weights = whole_weights(found, "actor", model_path)
    for name, tensor in plain.weights().items():
        if name in weights:
            assert relative(weights[name], tensor) < 1e-5, name


CASES = {
    **{f"{layout} {how}": (layout, {PACKED: how == "packed"}) for layout in LAYOUTS for how in ("packed", "padded")},
    "one pass": ("TP2xDP2", {MICRO_BATCH: 16}),
    "by tokens": (
        "DP2",
        {
            "actor_rollout_ref__actor__use_dynamic_bsz": True,
            "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 40,
        },
    ),
    "interleaved": ("TP2xPP2", {f"{MEGATRON}__virtual_pipeline_model_parallel_size": 2}),
    "as tries": ("DP2", AS_TRIES),
    "CP2": ("DP2", {f"{MEGATRON}__context_parallel_size": 2}),
    "up to CP4": ("DP4", up_to(4, 12)),
    "interleaved, up to CP2": ("PP2xDP2", {f"{MEGATRON}__virtual_pipeline_model_parallel_size": 2} | up_to(2, 16)),
}


@pytest.fixture(scope="module")
def alone(model_path: str) -> list[dict]:
    return run_mix(model_path, (1, 1, 1), samples(1.0), token_batch())


def assert_same(found: list[dict], expected: list[dict], path: str) -> None:
    assert told(found).keys() == told(expected).keys()
    for name, value in told(expected).items():
        assert told(found)[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    weights, reference = (whole_weights(run, "actor", path) for run in (found, expected))
    for name, tensor in reference.items():
        assert relative(weights[name], tensor) < 1e-5, name


@pytest.mark.parametrize("case", often(CASES, (), weekly=("TP2xPP2 padded", "TP2xDP2 packed")))
def test_layouts_equal_one_process(case: str, model_path: str, alone: list[dict]) -> None:
    """Losses, gradient norm and weights, with samples and examples cut anew. Rows laid out as another layout has them
    are weekly. Would not catch what all layouts share.
    """
    layout, overrides = CASES[case]
    sizes = {**LAYOUTS, "DP2": DP2, "DP4": (4, 1, 1), "PP2xDP2": (4, 1, 2)}[layout]
    assert_same(run_mix(model_path, sizes, samples(1.0), token_batch(), **overrides), alone, model_path)


@pytest.mark.exhaustive
def test_fewer_examples_than_ranks(model_path: str) -> None:
    """One example, two ranks: the other runs a row that counts nothing. And without examples the update is the one
    there always was. Would not catch a rank that waits."""
    one = token_batch()[:1]
    expected = run_mix(model_path, (1, 1, 1), samples(1.0), one)
    assert_same(run_mix(model_path, DP2, samples(1.0), one), expected, model_path)
    without = run_mix(model_path, (1, 1, 1), samples(1.0), None)
    assert "actor/ptx_loss" not in told(without)
    assert told(without)["actor/pg_loss"] == told(expected)["actor/pg_loss"]
    assert told(without)["actor/grad_norm"] != told(expected)["actor/grad_norm"]


@pytest.mark.exhaustive
def test_experts(tmp_path) -> None:
    """EP2 over DP2, whose ranks need each other in every pass. Would not catch losses of the routers, of which there
    are none."""
    path = save_qwen3_moe(tmp_path)
    expert = {"actor_rollout_ref__actor__megatron__expert_model_parallel_size": 2}
    expected = run_mix(path, (1, 1, 1), samples(1.0), token_batch())
    assert_same(run_mix(path, DP2, samples(1.0), token_batch(), **expert), expected, path)
