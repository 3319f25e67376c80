"""Rows in which tokens that were not drawn lie between drawn ones, and rows of several conversations: scores, losses
and gradients of a plain loop.

The loop goes through transformers' model conversation by conversation and token by token, without padding, packing or
masks. The critic, and experts that are replayed, are compared with rows of which the end counts as sampled and a mask
leaves tokens out.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ranks import run_ranks
from routed_experts import random_choices
from rows_with_holes import (
    CUTS,
    LAYOUTS,
    as_suffix,
    check_layout,
    filled,
    of_holes,
    plain_gradients,
    rows_with_holes,
)
from sweeps import often
from tiny_models import run_config, save_qwen2, save_qwen3_moe

from megatron_rl.columns import ACTOR_SCORES, ACTOR_UPDATE
from megatron_rl.records import conversations, ragged_from_lengths, row_lengths

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[False, True], ids=["holes", "conversations"])
def plain(model_path, request) -> tuple:
    make = partial(rows_with_holes, request.param)
    return make, *plain_gradients(model_path, make)


@pytest.mark.parametrize("layout", often(LAYOUTS, ("one",)))
def test_holes_as_a_plain_loop(layout: str, model_path: str, plain: tuple) -> None:
    """Packed with shared prompts, padded and alone: within 1e-5; also where rows are several conversations, each of
    which is read by itself. Would not catch a column that no loss here reads.
    """
    check_layout(*LAYOUTS[layout], model_path, plain, CUTS)


def replayed(anew: bool, config) -> dict[str, torch.Tensor]:
    """Scores and gradients of rows with holes, and of `as_suffix`, whose tokens go to given experts."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    actor, batch = worker.roles["actor"], rows_with_holes(anew)
    num_read = row_lengths(batch["input_ids"]) - conversations(batch)[0]
    choices = list(random_choices(num_read, seed=2).unbind())
    choices[2][:5] = choices[1][:5]
    batch.add(routed_experts=ragged_from_lengths(torch.cat(choices), num_read))
    scores = actor.log_probs(batch.read_by(ACTOR_SCORES))
    batch = filled(batch, scores.flat("old_log_probs"))
    scores_of_all = actor.log_probs(as_suffix(batch).read_by(ACTOR_SCORES))
    found = {
        "scores": scores.flat("old_log_probs"),
        "scores of all": of_holes(scores_of_all.flat("old_log_probs"), batch),
        "others": scores["num_other_experts"],
        "others of all": scores_of_all["num_other_experts"],
    }
    for end, rows in (("", batch), (" of all", as_suffix(batch))):
        metrics = actor.compute_gradients(rows.read_by(ACTOR_UPDATE))
        found[f"metrics{end}"] = torch.tensor([metrics[name] for name in sorted(metrics)])
        parameters = named_parameters(actor.trainable.models)
        found[f"gradients{end}"] = torch.cat([p.main_grad.flatten() for p in parameters.values()])
    return found


@pytest.mark.parametrize("anew", [False, True], ids=["holes", "conversations"])
def test_replayed_experts_know_no_holes(tmp_path, anew: bool) -> None:
    """One process, packed: every token goes to its experts, sampled or not. Would not catch experts on other ranks."""
    keys = {"actor_rollout_ref__actor__router_replay__mode": "R3"}
    [found] = run_ranks(1, partial(replayed, anew), run_config(save_qwen3_moe(tmp_path), 1, 1, **keys))
    assert found["others"].sum() > 0 and torch.equal(found["others"], found["others of all"])
    for name in ("scores", "metrics"):
        torch.testing.assert_close(found[name], found[f"{name} of all"], atol=1e-5, rtol=1e-5)
    largest = float(found["gradients of all"].abs().max())
    assert float((found["gradients"] - found["gradients of all"]).abs().max()) < 1e-5 * largest
