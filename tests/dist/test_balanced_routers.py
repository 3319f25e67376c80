"""Losses that keep the load of experts even are those of the formula; layouts and cuts are in `tests/parity`."""

from __future__ import annotations

import pytest
import torch
from layout_keys import LOSSES, of_actor
from ranks import run_ranks
from tiny_models import random_batch, run_config, save_qwen3_moe
from updates import relative, whole_weights

from megatron_rl.columns import ACTOR_UPDATE, SCORING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def router_gradients(config) -> dict:
    """One process, one mini-batch with no advantage and so no policy loss: metrics, and every gradient."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    experience = random_batch(5)
    experience.add(old_log_probs=worker.roles["actor"].log_probs(experience.read_by(SCORING))["old_log_probs"])
    experience.add(advantages=experience["advantages"] * 0)
    metrics = worker.roles["actor"].compute_gradients(experience.read_by(ACTOR_UPDATE))
    gradients = {
        name: p.main_grad.clone() for name, p in named_parameters(worker.roles["actor"].trainable.models).items()
    }
    place = worker.groups.grid.place(0, vocab_multiple=64)
    return {"metrics": metrics, "actor_weights": gradients, "place": place}


def written_out(path: str) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """(aux and z loss of every layer, gradients of their weighted sum) with transformers' own router logits."""
    from megatron_rl.controller.report import hf_model

    model, rows = hf_model(path), random_batch(5)["input_ids"].unbind()
    num_tokens = sum(map(len, rows))
    losses = torch.zeros(model.config.num_hidden_layers, 2)
    for ids in rows:
        for layer, logits in enumerate(model(ids[None], output_router_logits=True).router_logits):
            chosen = torch.zeros_like(logits).scatter(1, logits.topk(2).indices, 1.0)
            shares = chosen.mean(0) / 2
            even = 6 * (shares * logits.softmax(-1).mean(0)).sum()
            losses = losses.clone()
            losses[layer, 0] += even / len(rows)
            losses[layer, 1] += logits.logsumexp(-1).square().sum() / num_tokens
    (losses @ torch.tensor([0.7, 0.05])).sum().backward()
    found = {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None and name.endswith("gate.weight")
    }
    return losses.tolist(), found


@pytest.mark.exhaustive
def test_losses_and_gradients_by_the_formula(tmp_path) -> None:
    """Of routers, which see nothing else, beside transformers' logits. Would not catch errors of splitting."""
    path = save_qwen3_moe(tmp_path)
    run = run_ranks(1, router_gradients, run_config(path, 1, 1, **of_actor(LOSSES)))
    expected, gradients = written_out(path)
    for layer, (aux, z) in enumerate(expected):
        assert run[0]["metrics"][f"actor/moe_aux_loss/layer_{layer}"] == pytest.approx(aux, rel=1e-5)
        assert run[0]["metrics"][f"actor/moe_z_loss/layer_{layer}"] == pytest.approx(z, rel=1e-5)
    ours = whole_weights(run, "actor", path)
    assert len(gradients) == 4
    for name, gradient in gradients.items():
        assert relative(ours[name], gradient) < 1e-4, name
