"""Activations that are made again for the backward pass: an update comes out as with activations that were kept.

Why, bit for bit: a layer's forward is run a second time on the same input, with the same weights and the same kernels
in the same order, so it gives the same activations; nothing here is drawn, so no random state has to come back. This
holds on every rank by itself, so a layout changes only which layers and tokens a rank has.

Not exercised: dropout; kernels of CUDA that add up in no fixed order.
"""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from sweeps import often
from tiny_gpt_oss import save_gpt_oss
from tiny_minimax import save_minimax
from tiny_models import random_batch, run_config, save_qwen2, save_qwen3_moe

from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE, SCORING
from megatron_rl.config.megatron import OverrideTransformerConfig

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS = 11
SP = {"sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
UNIFORM, BLOCK = "uniform", "block"
LAYOUTS = {
    "one process, packed": (save_qwen2, (1, 1, 1), {}, True, [(UNIFORM, 1), (UNIFORM, 2), (UNIFORM, 4), (BLOCK, 3)]),
    "TP2, SP, packed": (save_qwen2, (2, 2, 1), SP, True, [(UNIFORM, 2), (BLOCK, 1)]),
    "PP2, padded": (save_qwen2, (2, 1, 2), {}, False, [(UNIFORM, 1), (UNIFORM, 2), (BLOCK, 1)]),
    "PP2, VPP2, packed": (save_qwen2, (2, 1, 2), VPP2, True, [(UNIFORM, 1), (BLOCK, 1)]),
    "experts, DP2, EP2": (save_qwen3_moe, (2, 1, 1), EP2, True, [(UNIFORM, 1), (BLOCK, 2)]),
    "experts, TP2, EP2, SP": (save_qwen3_moe, (2, 2, 1), EP2 | ETP1 | SP, True, [(UNIFORM, 2)]),
    "joint norms, TP2, SP": (save_minimax, (2, 2, 1), SP, True, [(UNIFORM, 1), (BLOCK, 2)]),
    "sinks and biases, TP2, SP": (save_gpt_oss, (2, 2, 1), SP, True, [(UNIFORM, 1), (BLOCK, 2)]),
}
"""Name -> model, (ranks, tp, pp), further sizes, whether rows are packed, and the (method, number of layers) tried."""
OFTEN = ("one process, packed", "experts, TP2, EP2, SP")
"""What `make test` goes through: every method, both models; `tests/parity` has PP2, VPP2.

Joint norms are weekly: the sweeps have another family's attention in the same layout.
"""


def update_both(worker, override: OverrideTransformerConfig) -> dict:
    """Actor and critic built anew and updated once: metrics, gradients, weights, and runs of each layer's forward."""
    from megatron_rl.roles.model_source import named_parameters

    shared, critic = worker.config.actor_rollout_ref, worker.config.critic
    shared.actor.megatron.override_transformer_config = critic.megatron.override_transformer_config = override
    worker.build("actor")
    worker.build("critic")
    where = worker.coordinates()
    mine = random_batch(NUM_ROWS)[torch.arange(NUM_ROWS).tensor_split(where.dp_size)[where.dp_rank]]
    old = worker.roles["actor"].log_probs(mine.read_by(SCORING))
    values = worker.roles["critic"].values(mine.read_by(SCORING))
    found = {"log_probs": None if old is None else old.flat("old_log_probs")}
    found["values"] = None if values is None else values.flat("old_values")
    mine.add(old_log_probs=mine["advantages"].clone())  # stages before the last do not read them
    if old is not None:
        mine.flat("old_log_probs").copy_(old.flat("old_log_probs") - 0.1 * mine.flat("advantages"))
    for role, batch in (("actor", mine.read_by(ACTOR_UPDATE)), ("critic", mine.read_by(CRITIC_UPDATE))):
        trainable = worker.roles[role].trainable
        layers = [layer for chunk in trainable.models for layer in chunk.decoder.layers]
        runs = dict.fromkeys(range(len(layers)), 0)

        def count(layer, inputs, number=0, runs=runs) -> None:
            runs[number] += 1

        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *args, number=number, count=count: count(*args, number=number))
        found[f"{role} metrics"] = worker.roles[role].compute_gradients(batch)
        found[f"{role} runs"] = list(runs.values())
        parameters = named_parameters(trainable.models)
        found |= {f"{role} gradient {name}": p.main_grad.clone() for name, p in parameters.items()}
        found[f"{role} update"] = trainable.step()
        found |= {f"{role} weight {name}": p.detach().clone() for name, p in parameters.items()}
    return found


def compare(config, choices: list[tuple[str, int]]) -> tuple[list, dict[tuple[str, int], tuple[list, list]]]:
    """Runs of the layers without recomputing; for each choice those with it, and what is not equal to the last bit."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    kept = update_both(worker, OverrideTransformerConfig())
    assert all(value.abs().max() > 0 for name, value in kept.items() if " gradient " in name and "experts" not in name)
    told = {}
    for method, number in choices:
        found = update_both(worker, OverrideTransformerConfig("full", method, number))
        assert found.keys() == kept.keys()
        different = [name for name, value in found.items() if not name.endswith("runs") and not same(value, kept[name])]
        told[method, number] = (found["actor runs"], found["critic runs"], different)
    assert kept["actor runs"] == kept["critic runs"]
    worker.build("reference")
    assert worker.roles["reference"].model.pipeline.chunks[0].config.recompute_granularity is None  # it is frozen
    return kept["actor runs"], told


def same(ours: object, theirs: object) -> bool:
    return torch.equal(ours, theirs) if torch.is_tensor(ours) else ours == theirs


@pytest.mark.parametrize("layout", often(LAYOUTS, OFTEN, weekly=("joint norms, TP2, SP",)))
def test_an_update_is_the_same_bit_for_bit(layout, tmp_path):
    """Log-probs, values, metrics, gradients, norms and weights; and the layers that are meant to have run twice.

    Would not catch dropout drawn anew, which no model here has (`test_patches.py` does), nor kernels of CUDA.
    """
    save, (world_size, tp_size, pp_size), sizes, packed, choices = LAYOUTS[layout]
    changes = {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in sizes.items()}
    changes["actor_rollout_ref__model__use_remove_padding"] = packed
    config = run_config(save(tmp_path), tp_size, pp_size, **changes)
    chunk = 4 // pp_size // (2 if sizes == VPP2 else 1)
    for once, told in run_ranks(world_size, compare, config, choices):
        assert len(set(once)) == 1 and once[0] >= 2  # several micro-batches
        for (method, number), (actor_runs, critic_runs, different) in told.items():
            again = [method == UNIFORM or layer % chunk < number for layer in range(len(once))]
            expected = [runs * (1 + twice) for runs, twice in zip(once, again, strict=True)]
            assert actor_runs == critic_runs == expected, (method, number)
            assert not different, (method, number, different)
