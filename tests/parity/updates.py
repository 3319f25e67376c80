"""One batch, one update: log-probs, values, losses, gradient norms and new weights are the same in every layout.

Why no number can depend on the layout, but for rounding:

- TP: a column-parallel matrix computes its own outputs from the whole input; a row-parallel one computes its part of a
  sum over inputs, which an all-reduce completes. A token's log-prob is its logit minus a logarithm of a sum over the
  vocabulary, whose maximum and sum are all-reduced.
- PP: a stage applies its layers to what the stage before it sent, so all stages apply the one function in its order.
  Backwards, each gets the gradient of what it sent. Embeddings that two stages share sum both gradients.
- DP: a loss is a sum over the mini-batch's tokens, divided by a number that is counted over the whole mini-batch first.
  So its gradient is a sum over rows, and over ranks.
- The gradient norm is the root of a sum of squares in which every element counts once. Adam treats each element alone,
  and every rank that holds it takes the same step.

So TP2xPP2 against one process proves TP and PP, too: an error of either axis is one of both. Sums are taken in another
order in each layout, hence the bound of 1e-5.

Not exercised: dropout, of which there is none; more than one update, over which rounding grows; long rows; kernels of
CUDA; errors that one process has, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_models import random_batch, run_config

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.columns import ACTOR_SCORES, ACTOR_UPDATE, CRITIC_UPDATE, SCORING
from megatron_rl.config.schema import RunConfig
from megatron_rl.model.families.vision import TOWER
from megatron_rl.records import Batch

NUM_ROWS = 11
# Adam divides by the root of the squared gradient, which blows rounding noise up wherever the true gradient is zero.
# With a large epsilon the step is proportional to the gradient, so comparing new weights compares gradients.
OPTIMIZER = {"lr": 0.05, "eps": 1.0, "weight_decay": 0.0, "clip_grad": 1.0}


def text_rows(worker: Any) -> Batch:
    """The batch of text."""
    return random_batch(NUM_ROWS)


def one_update(
    config,
    rows_of: Callable[[Any], Batch] = text_rows,
    columns_again: Callable[[Any], Batch] = lambda worker: Batch(),
) -> dict:
    """What one rank knows after scoring the batch, one update of actor and critic, and scoring it again.

    rows_of: a rank's host -> the whole batch. columns_again: those that depend on weights, in the whole batch.
    """
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    worker.build("critic")
    worker.build("reference")
    where = worker.coordinates()
    experience = rows_of(worker)
    rows = torch.arange(len(experience)).tensor_split(where.dp_size)[where.dp_rank]
    mine = experience[rows]

    def score(method, *readers: str) -> torch.Tensor | None:
        scores = method(mine.read_by(SCORING, *readers))
        return None if scores is None else scores.flat(scores.names[0])

    result = {
        "where": where,
        "log_probs": score(worker.roles["actor"].log_probs, ACTOR_SCORES),
        "values": score(worker.roles["critic"].values),
    }
    result["ref_log_probs"] = score(worker.roles["reference"].log_probs)
    old = result["log_probs"]
    # Stages before the last never compute log-probs; their loss closures do not run, so any values do.
    shape_only = mine.flat("advantages") * 0
    mine.add(old_log_probs=mine["advantages"].clone())
    mine.flat("old_log_probs").copy_((shape_only if old is None else old) - 0.1 * mine.flat("advantages"))
    result["actor"] = worker.roles["actor"].update(mine.read_by(ACTOR_UPDATE))
    result["critic"] = worker.roles["critic"].update(mine.read_by(CRITIC_UPDATE))
    again = columns_again(worker)
    mine.add(again[rows] if len(again.names) else again)
    result["log_probs_after"] = score(worker.roles["actor"].log_probs, ACTOR_SCORES)
    result["values_after"] = score(worker.roles["critic"].values)
    for role, trainable in (("actor", worker.roles["actor"].trainable), ("critic", worker.roles["critic"].trainable)):
        parameters = named_parameters(trainable.models)
        result[f"{role}_weights"] = {name: p.detach().clone() for name, p in parameters.items()}
    result["place"] = worker.groups.grid.place(worker.groups.rank, vocab_multiple=64)
    return result


def collected(results: list[dict], field: str) -> torch.Tensor:
    """The flat scores of the whole batch from the data-parallel collectors, in row order."""
    parts = sorted((r["where"].dp_rank, r[field]) for r in results if r["where"].dp_collector)
    return torch.cat([part for _, part in parts])


def whole_weights(results: list[dict], role: str, model_path: str) -> dict[str, torch.Tensor]:
    """Unsharded, unfused weights under HF names (the value head as a classifier's)."""
    from megatron_rl.checkpoint.hf_tensors import hf_tensors, pieces, put_together

    held = {rank: r[f"{role}_weights"] for rank, r in enumerate(results)}
    has_mtp = any(name.startswith("mtp_layer.") for weights in held.values() for name in weights)
    model = replace(ModelFolder(model_path).model, has_mtp=has_mtp)
    specs = {"actor": model.specs, "critic": model.value_specs}[role]
    if any(name.startswith(TOWER) for weights in held.values() for name in weights):
        specs = {**specs, **model.tower_specs}
    places = {rank: r["place"] for rank, r in enumerate(results)}
    whole = {}
    for tensor in hf_tensors(specs):
        holders = [rank for rank, weights in held.items() if tensor.parameter in weights]
        parts = pieces(tensor, holders, places)
        of_ranks = ((p, held[p.rank][tensor.parameter][p.source]) for p in parts)
        whole[tensor.name] = put_together(tensor, ((p, tensor.as_in_folder(data)) for p, data in of_ranks))
    return whole


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


def run_layout(
    model_path: str,
    world_size: int,
    tp_size: int,
    pp_size: int,
    micro_batch: int = 4,
    keys: Mapping[str, object] | None = None,
    update: Callable[[RunConfig], dict] = one_update,
    **layout,
) -> list[dict]:
    """`update` on every rank; `layout`: further keys of the actor's group `megatron`, which other roles follow.
    keys: of any group.
    """
    optimizer = {f"actor_rollout_ref__actor__optim__{key}": value for key, value in OPTIMIZER.items()}
    optimizer |= {f"critic__optim__{key}": value for key, value in OPTIMIZER.items()}
    sizes = {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in layout.items()}
    sizes["actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"] = micro_batch
    sizes["actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu"] = micro_batch
    further = optimizer | sizes | dict(keys or {})
    return run_ranks(world_size, update, run_config(model_path, tp_size, pp_size, **further))


SCORES = ("log_probs", "ref_log_probs", "values", "log_probs_after", "values_after")


def assert_same(
    results: list[dict],
    reference: list[dict],
    model_path: str,
    norms: float = 1e-6,
    fields: tuple[str, ...] = SCORES,
    roles: tuple[str, ...] = ("actor", "critic"),
) -> None:
    """Scores, metrics, gradient norms and new weights of a run equal those of one process within 1e-5.

    norms: bound of gradient norms, in which errors of rounding mostly cancel. fields: which scores.
    """
    for field in fields:
        assert relative(collected(results, field), collected(reference, field)) < 1e-5, field
    for role in roles:
        expected = reference[0][role]
        ours = next(r[role] for r in results if r["where"].dp_collector)
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        norm = pytest.approx(expected[f"{role}/grad_norm"], rel=norms)
        assert all(r[role][f"{role}/grad_norm"] == norm for r in results)
        weights, expected_weights = (whole_weights(run, role, model_path) for run in (results, reference))
        assert weights.keys() == expected_weights.keys()
        for name, tensor in expected_weights.items():
            assert relative(weights[name], tensor) < 1e-5, name
