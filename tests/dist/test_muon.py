"""Muon on the distributed optimizer's shards: torch's on one rank, the same in every layout, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from resumed_training import saved, train
from tiny_models import run_config, save_llama, save_qwen3_moe

from megatron_rl.planning.run_models import RunModels

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

ACTOR, ROLES = "actor_rollout_ref__actor__", ("actor_rollout_ref__actor__", "critic__")
OVERRIDE = "optim__override_optimizer_config__muon_"
MUON = {f"{role}optim__{key}": value for role in ROLES for key, value in {"optimizer": "muon", "lr": 0.01}.items()}
MUON |= {f"{role}optim__eps": 1.0 for role in ROLES}  # Adam's step is proportional to the gradient then
EXACT = {f"{role}{OVERRIDE}fp32_matmul_prec": "highest" for role in ROLES}
BUCKETS = {
    f"{role}megatron__override_ddp_config__{key}": value
    for role in ROLES
    for key, value in {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}.items()
}
SP = {f"{ACTOR}megatron__sequence_parallel": True}
LAYOUTS = {
    "TP2": (save_llama, (2, 2, 1), {}),
    "PP2": (save_llama, (2, 1, 2), {}),
    "DP2": (save_llama, (2, 1, 1), {}),
    "TP2xDP2, in buckets": (save_llama, (4, 2, 1), BUCKETS),
    "EP2": (save_qwen3_moe, (2, 1, 1), {f"{ACTOR}megatron__expert_model_parallel_size": 2}),
    "ETP2xDP2": (save_qwen3_moe, (4, 2, 1), SP),
}
TOLERANCE = 1e-4


def runs(layout: str, folder: Path, **changes):
    """The number of ranks of a layout, its configuration, and that of one rank."""
    save, (world_size, tp_size, pp_size), keys = LAYOUTS[layout]
    path, own = save(folder / "model"), MUON | changes
    return world_size, run_config(path, tp_size, pp_size, **own, **keys), run_config(path, 1, 1, **own)


def differences(ours: Path, theirs: Path) -> dict[str, float]:
    """Tensor of a checkpoint -> largest difference, relative to the largest number."""
    found = {}
    for role in ("actor", "critic"):
        one, other = saved(ours / role), saved(theirs / role)
        assert one.keys() == other.keys() and any("momentum_buffer" in name for name in one)
        found |= {name: ((one[name] - other[name]).abs().max() / other[name].abs().max()).item() for name in one}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_equal_to_one_rank(layout: str, tmp_path: Path) -> None:
    """Weights and moments after three updates; matrices that TP cuts among them. Would not catch CUDA's collectives."""
    world_size, config, alone = runs(layout, tmp_path, **EXACT)
    run_ranks(world_size, train, config, 1, 3, {3: tmp_path / "ours"})
    run_ranks(1, train, alone, 1, 3, {3: tmp_path / "theirs"})
    found = differences(tmp_path / "ours", tmp_path / "theirs")
    assert max(found.values()) < TOLERANCE, {name: value for name, value in found.items() if value >= TOLERANCE}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_resumed_is_uninterrupted(dtype: str, tmp_path: Path) -> None:
    """Bit for bit under TP2xDP2 in buckets; on one rank to rounding. Would not catch a manifest that lies."""
    keys = EXACT | {f"{ACTOR}megatron__dtype": dtype}
    world_size, config, alone = runs("TP2xDP2, in buckets", tmp_path, **keys)
    whole = run_ranks(world_size, train, config, 1, 3, {2: tmp_path / "after 2", 3: tmp_path / "whole"})
    again = run_ranks(world_size, train, config, 3, 3, {}, tmp_path / "after 2")
    for ours, theirs in zip(again, whole, strict=True):
        for role, state in theirs["state"].items():
            assert state.keys() == ours["state"][role].keys()
            assert all(torch.equal(value, ours["state"][role][name]) for name, value in state.items())
    if dtype == "float16":  # gradients of other layouts differ in their third digit
        return
    run_ranks(1, train, alone, 3, 3, {3: tmp_path / "alone"}, tmp_path / "after 2")
    assert max(differences(tmp_path / "alone", tmp_path / "whole").values()) < TOLERANCE


def beside_torch(config, num_steps: int) -> dict[str, float]:
    """Random gradients, here and in torch's optimizers: parameter -> largest relative difference at the end."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    trainable, optim = worker.roles["actor"].trainable, config.actor_rollout_ref.actor.optim
    named = named_parameters(trainable.models)
    copies = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    matrices = [copy for name, copy in copies.items() if ".layers." in name and copy.dim() == 2]
    others = {name: copy for name, copy in copies.items() if not any(copy is each for each in matrices)}
    settings = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    of_torch = [torch.optim.Muon(matrices, **settings)]
    for is_matrix in (True, False):  # norms have no weight decay
        chosen = [copy for copy in others.values() if (copy.dim() == 2) is is_matrix]
        of_torch.append(torch.optim.AdamW(chosen, **settings | ({} if is_matrix else {"weight_decay": 0.0}), eps=1.0))
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in named.items():
            copies[name].grad = torch.randn(parameter.shape, generator=generator)
            parameter.main_grad.copy_(copies[name].grad)
        trainable.optimizer.step()
        for optimizer in of_torch:
            optimizer.step()
    assert len(matrices) > 3
    return {name: ((named[name] - copy).abs().max() / copy.abs().max()).item() for name, copy in copies.items()}


@pytest.mark.parametrize("num_steps", [1, 10])
def test_steps_are_those_of_torch(num_steps: int, tmp_path: Path) -> None:
    """torch.optim.Muon and AdamW on the same gradients, fused matrices whole; 1e-5 relative to the largest weight.

    Would not catch a gradient that never arrives: the layouts' updates do.
    """
    stacked = {f"{ACTOR}{OVERRIDE}split_qkv": False, f"{ACTOR}{OVERRIDE}scale_mode": "shape_scaling"}
    keys = {f"{ACTOR}optim__clip_grad": 0.0, f"{ACTOR}optim__weight_decay": 0.1}
    config = run_config(save_llama(tmp_path), 1, 1, **MUON | stacked | keys)
    (found,) = run_ranks(1, beside_torch, config, num_steps)
    assert max(found.values()) < 1e-5, found


def held(config) -> dict[str, int]:
    """What the actor holds after an update."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.roles["actor"].trainable.adam.create()
    return worker.roles["actor"].trainable.memory()


@pytest.mark.parametrize("layout", ["TP2xDP2, in buckets", "ETP2xDP2"])
def test_memory_is_as_planned(layout: str, tmp_path: Path) -> None:
    """The most that a rank holds of moments, but for the padding at ends of buffers, which has none.

    Would not catch temporaries of a step.
    """
    world_size, config, _ = runs(layout, tmp_path, trainer__n_gpus_per_node=LAYOUTS[layout][1][0])
    found = max(each["moments"] for each in run_ranks(world_size, held, config))
    pool = RunModels(config).pools["global_pool"]
    planned = pool.ledger(next(role for role in pool.spec.roles if role.name == "actor")).held(0).moments
    assert 0 <= planned - found <= 4096, (planned, found)
