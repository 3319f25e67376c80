"""Losses that keep the load of experts even: by their formula, and the same however a mini-batch is cut and spread.

Why: the auxiliary loss is a mean over rows of a product of two means over the row's tokens, so a row's term needs that
row alone; under CP or SP its tokens' counts are summed over the ranks that share the row. The z-loss is a mean over
tokens. Both are divided by numbers of the whole mini-batch, and a layer's loss is computed by the stage that holds it.

Not exercised: balance over a whole batch instead of a row (`aux_loss` of Megatron), which is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from sweeps import WEEKLY
from test_layout_parity import OPTIMIZER, assert_same, often, one_update, relative, run_layout, whole_weights
from test_moe_parity import EP2, ETP1, SP
from tiny_models import run_config, save_deepseek_v3, save_glm4_moe, save_qwen3_moe

from megatron_rl.columns import ACTOR_UPDATE, SCORING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

OPTIONS = "override_transformer_config__moe_"
LOSSES = {
    f"{OPTIONS}router_load_balancing_type": "seq_aux_loss",
    f"{OPTIONS}aux_loss_coeff": 0.7,
    f"{OPTIONS}z_loss_coeff": 0.05,
}
VPP2, CP2 = {"virtual_pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
FULL = {
    "override_transformer_config__recompute_granularity": "full",
    "override_transformer_config__recompute_method": "uniform",
    "override_transformer_config__recompute_num_layers": 1,
}
LAYOUTS = {
    "TP2, DP2, EP2, ETP1": ((4, 2, 1), SP | EP2 | ETP1),
    "PP2, VPP2, DP2, EP2": ((4, 1, 2), EP2 | VPP2),
    "CP2, EP2": ((2, 1, 1), EP2 | CP2),
    "TP2, CP2": ((4, 2, 1), SP | CP2),
    "PP2, made again": ((2, 1, 2), FULL),
}
OFTEN = ("TP2, DP2, EP2, ETP1",)
CUTS = {"blocks of 2": {"micro_batch": 2}, "one block": {"micro_batch": 11}}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_qwen3_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(path) -> list[dict]:
    return run_layout(path, 1, 1, 1, **LOSSES)


@pytest.mark.parametrize("layout", often(LAYOUTS, OFTEN))
def test_layouts_equal_one_process(layout, path, reference) -> None:
    """Updates, gradient norms and both losses of every layer. Would not catch what one process gets wrong, too."""
    ranks, sizes = LAYOUTS[layout]
    assert_same(run_layout(path, *ranks, **LOSSES, **sizes), reference, path)


@pytest.mark.exhaustive
def test_critics_are_balanced_too(path) -> None:
    """In another layout as in one process. Would not catch a loss that both share, which has the actor's code."""
    keys = {f"critic__megatron__{key}": value for key, value in LOSSES.items()}
    alone = run_layout(path, 1, 1, 1, keys=keys)
    assert alone[0]["critic"]["critic/moe_aux_loss/mean"] > 0 and "actor/moe_aux_loss/mean" not in alone[0]["actor"]
    ranks, sizes = LAYOUTS["TP2, DP2, EP2, ETP1"]
    assert_same(run_layout(path, *ranks, keys=keys, **sizes), alone, path)


@pytest.mark.parametrize("cut", often(CUTS, ("blocks of 2",)))
def test_how_a_mini_batch_is_cut_does_not_matter(cut, path, reference) -> None:
    """Nor does the number of blocks. Would not catch a loss that is too small by the same factor in all."""
    assert_same(run_layout(path, 1, 1, 1, **LOSSES, **CUTS[cut]), reference, path)


@pytest.mark.exhaustive
def test_padded_rows_equal_packed_ones(path, reference) -> None:
    """Filler counts nowhere. Would not catch filler that is a token of its own in both."""
    optimizer = {f"{role}__optim__{key}": value for role in ("actor_rollout_ref__actor", "critic")
                 for key, value in OPTIMIZER.items()}  # fmt: skip
    losses = {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in LOSSES.items()}
    config = run_config(path, 1, 1, **optimizer, **losses, actor_rollout_ref__model__use_remove_padding=False)
    assert_same(run_ranks(1, one_update, config), reference, path)


@pytest.mark.parametrize(
    "save", [pytest.param(save_glm4_moe, marks=WEEKLY), pytest.param(save_deepseek_v3, marks=pytest.mark.exhaustive)]
)
def test_sigmoid_routers_in_layouts(save: Callable[..., str], tmp_path) -> None:
    """Of scores that do not add up to 1 by themselves; in no groups weekly. Would not catch what one process gets
    wrong, too.
    """
    path = save(tmp_path)
    reference = run_layout(path, 1, 1, 1, **LOSSES)
    assert_same(run_layout(path, 4, 2, 2, **LOSSES, **SP, **EP2, **ETP1), reference, path)


def router_gradients(config) -> dict:
    """One process, one mini-batch with no advantage and so no policy loss: metrics, and every gradient."""
    from tiny_models import random_batch

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
    from tiny_models import random_batch

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
def test_losses_and_gradients_by_the_formula(path) -> None:
    """Of routers, which see nothing else, beside transformers' logits. Would not catch errors of splitting."""
    losses = {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in LOSSES.items()}
    run = run_ranks(1, router_gradients, run_config(path, 1, 1, **losses))
    expected, gradients = written_out(path)
    for layer, (aux, z) in enumerate(expected):
        assert run[0]["metrics"][f"actor/moe_aux_loss/layer_{layer}"] == pytest.approx(aux, rel=1e-5)
        assert run[0]["metrics"][f"actor/moe_z_loss/layer_{layer}"] == pytest.approx(z, rel=1e-5)
    ours = whole_weights(run, "actor", path)
    assert len(gradients) == 4
    for name, gradient in gradients.items():
        assert relative(ours[name], gradient) < 1e-4, name
