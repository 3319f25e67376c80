"""Qwen3 and its experts: one batch and one update give the same numbers however layers and experts are spread.

Why, on top of what `test_layout_parity.py` says: a router chooses by its token alone, and an expert's answer depends on
its token alone. So it does not matter on which rank an expert lies, nor beside which tokens: EP sends a token to its
experts' ranks and adds up, with the router's weights, what comes back. ETP cuts an expert's two matrices as TP cuts a
dense layer's. SP gives each TP rank a part of the tokens between the matrices, where only norms are taken, a token at a
time. The gradient of an expert is a sum over the tokens of all ranks that send it some, divided as all others.

Not exercised: capacities, with which neighbours decide whether a token is dropped (none are dropped here); losses of
routers (`test_balanced_routers.py`); ties between experts (`test_router_replay.py`); grouped kernels of CUDA.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from test_layout_parity import (
    NUM_ROWS,
    assert_same,
    collected,
    hugging_face_log_probs,
    often,
    relative,
    run_layout,
    whole_weights,
)
from tiny_models import random_batch, run_config, save_qwen3, save_qwen3_moe

from megatron_rl.columns import ACTOR_UPDATE, SCORING
from megatron_rl.model.families import family_of
from megatron_rl.model.parts import Experts

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

SP = {"sequence_parallel": True}
EP2, ETP1 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
MOE_LAYOUTS = {
    "PP2, VPP2, DP2, EP2": ((4, 1, 2), EP2 | VPP2, (3, 96, 128)),
    "TP2, ETP1": ((2, 2, 1), SP | ETP1, (6, 96, 128)),
    "TP2, EP2, ETP1": ((2, 2, 1), SP | EP2 | ETP1, (3, 96, 128)),
    "TP2, DP2, EP2, ETP2": ((4, 2, 1), SP | EP2 | {"micro_batch": 5}, (3, 48, 128)),
}
"""Name -> (ranks, tp, pp), further sizes, and what a rank holds of the 6 experts' [gate; up] of 2 x 48 rows.

Of the last, data-parallel ranks have 6 and 5 rows in blocks of 5: two passes and one, and experts on both.
"""
OFTEN = ("PP2, VPP2, DP2, EP2", "TP2, DP2, EP2, ETP2")
"""What `make test` goes through: every axis, and each pair of them that has a layout. ETP1 is in
`test_balanced_routers.py`.
"""


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory) -> str:
    return save_qwen3_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def moe_reference(moe_path) -> list[dict]:
    return run_layout(moe_path, 1, 1, 1)


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dense_reference(dense_path) -> list[dict]:
    return run_layout(dense_path, 1, 1, 1)


@pytest.mark.parametrize("layout", often(MOE_LAYOUTS, OFTEN))
def test_moe_layouts_equal_one_process(layout, moe_path, moe_reference) -> None:
    """Actor and critic. Would not catch an error in a router weight that moves no token elsewhere and no number."""
    ranks, sizes, shard = MOE_LAYOUTS[layout]
    results = run_layout(moe_path, *ranks, **sizes)
    for rank in results:
        assert {tuple(p.shape) for name, p in rank["actor_weights"].items() if name.endswith("experts.w13")} == {shard}
    assert_same(results, moe_reference, moe_path)


def test_a_dense_model_in_stages_of_chunks_with_sequence_parallelism(dense_path, dense_reference) -> None:
    """TP2xPP2, VPP2, SP: query and key norms, the value head. Would not catch what all layouts share."""
    assert_same(run_layout(dense_path, 4, 2, 2, **SP, **VPP2), dense_reference, dense_path)


def test_update_moves_experts_and_router(moe_path, moe_reference) -> None:
    """Guards the tests above against comparing nothing. Would not catch an update in the wrong direction."""
    before, after = load_file(f"{moe_path}/model.safetensors"), whole_weights(moe_reference, "actor", moe_path)
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if torch.equal(tensor, after[name])] == []
    assert relative(collected(moe_reference, "log_probs_after"), collected(moe_reference, "log_probs")) > 1e-4


@pytest.mark.parametrize("family", ["moe", "dense"])
def test_log_probs_equal_hugging_face(family, request) -> None:
    """One process, against transformers on the same folder. Would not catch what only long rows show."""
    path, run = request.getfixturevalue(f"{family}_path"), request.getfixturevalue(f"{family}_reference")
    for ours in (collected(run, "log_probs"), collected(run, "ref_log_probs")):
        assert (ours - hugging_face_log_probs(path)).abs().max() < 2e-5


def policy_gradients(config) -> dict:
    """One process: log-probs, and gradients of the policy loss where old ones are equal to them."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    experience = random_batch(NUM_ROWS)
    experience.add(old_log_probs=worker.roles["actor"].log_probs(experience.read_by(SCORING))["old_log_probs"])
    worker.roles["actor"].compute_gradients(experience.read_by(ACTOR_UPDATE))
    gradients = {
        name: p.main_grad.clone() for name, p in named_parameters(worker.roles["actor"].trainable.models).items()
    }
    place = worker.groups.grid.place(0, vocab_multiple=64)
    return {"actor_weights": gradients, "place": place, "log_probs": experience["old_log_probs"].values()}


def hugging_face_gradients(path: str) -> dict[str, torch.Tensor]:
    """Gradients of -mean(advantage * log-prob) under transformers' own model, experts as on disk."""
    from megatron_rl.checkpoint.hf_import import HFFolder
    from megatron_rl.controller.report import hf_model

    model, on_disk = hf_model(path), HFFolder(Path(path)).files
    names = family_of(model.config.architectures).experts or Experts()
    advantages = random_batch(NUM_ROWS)["advantages"].values()
    (-hugging_face_log_probs(path, model) * advantages).mean().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        name = name.replace(".mlp.", f".{names.block}.")
        stack, _, kind = name.rpartition(".")
        if name in on_disk:
            gradients[name] = parameter.grad
        elif kind == "gate_up_proj":
            for expert, (gate, up) in enumerate(grad.chunk(2) for grad in parameter.grad):
                single = f"{stack}.{expert}."
                gradients |= {f"{single}{names.gate}.weight": gate, f"{single}{names.up}.weight": up}
        elif kind == "down_proj":
            of_experts = enumerate(parameter.grad)
            gradients |= {f"{stack}.{expert}.{names.down}.weight": grad for expert, grad in of_experts}
        else:
            gradients[name] = parameter.grad
    return gradients


@pytest.mark.parametrize("normalised", [True, False])
def test_log_probs_and_gradients_equal_hugging_face(normalised, tmp_path) -> None:
    """Both rules for the chosen experts' weights: log-probs, and gradients of experts, router, norms and the rest,
    before clipping. Would not catch errors of splitting: layouts do; nor a tie between two experts.
    """
    path = save_qwen3_moe(tmp_path, norm_topk_prob=normalised)
    [found] = run_ranks(1, policy_gradients, run_config(path, 1, 1))
    assert (found["log_probs"] - hugging_face_log_probs(path)).abs().max() < 2e-5
    ours = whole_weights([found], "actor", path)
    expected = hugging_face_gradients(path)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0 and relative(ours[name], gradient) < 1e-4, name
