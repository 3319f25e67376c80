"""Slots for adapters of versions that are served: their bytes, and what is in them, on ranks that training cuts."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from sweeps import WEEKLY
from tiny_models import run_config, save_llama

from megatron_rl.planning.memory import plan_stages
from megatron_rl.planning.run_models import RunModels

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

SLOTS = 3
LAYOUTS = [
    pytest.param(2, 2, 1, id="TP2, PP2 to TP1", marks=WEEKLY),
    pytest.param(1, 2, 1, id="PP2"),
    pytest.param(2, 1, 2, id="TP2", marks=WEEKLY),
]


def filled(config) -> dict:
    """Bytes that a rank holds, and results of three fillings: with the start, and with other adapters."""
    import torch

    from megatron_rl.records import Sampling
    from megatron_rl.roles.host import RankHost
    from megatron_rl.rollout.slices import Slice, Start

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    actor, rollout = worker.roles["actor"], worker.roles["rollout"]
    buffers = [buffer.param_data for buffer in actor.trainable.param_buffers]
    actor.keep_state("start", ("weights",))
    for buffer in buffers:
        buffer += 1
    actor.keep_state("other", ("weights",))
    before = [buffer.clone() for buffer in buffers]
    rollout.fill_slot(1, "start", "")
    rollout.fill_slot(2, "other", "")
    modules = rollout.generator.llm.llm_engine.model_executor.driver_worker.worker.model_runner.lora_manager
    stacked = [
        tensor
        for layer in modules._adapter_manager.modules.values()
        for tensor in (*layer.lora_a_stacked, *layer.lora_b_stacked)
    ]
    start = Start(0, (5, 6, 7), 1, 2, Sampling(1.0, 1.0, -1, 2, 0))
    rollout.enter()
    with pytest.raises(ValueError, match="slot 0, which has no adapter"):
        rollout.advance({rollout.replica: Slice(1, None, (start,))})
    rollout.exit()
    return {
        "stage": worker.groups.pp_rank,
        "in vLLM": sum(tensor.nbytes for tensor in stacked),
        "memory": rollout.memory(),
        "is there": all(not one[0].any() and torch.allclose(one[2], one[1] + 1) for one in stacked),
        "stays": all(map(torch.equal, before, buffers)),
    }


@pytest.mark.parametrize(("tp_size", "pp_size", "rollout_tp"), LAYOUTS)
def test_slots_are_as_planned_and_training_stays(tp_size, pp_size, rollout_tp, tmp_path):
    """To the byte: vLLM's own tensors of all slots, and the staged adapter. Would not catch scratch of a filling."""
    world_size = tp_size * pp_size
    changes = {"actor_rollout_ref__model__lora__rank": 8, "actor_rollout_ref__rollout__max_loras": SLOTS}
    changes |= {"actor_rollout_ref__rollout__tensor_model_parallel_size": rollout_tp}
    config = run_config(save_llama(tmp_path), tp_size, pp_size, **changes, trainer__n_gpus_per_node=world_size)
    plan = plan_stages(RunModels(config))
    for rank in run_ranks(world_size, filled, config):
        held = plan[rank["stage"]].phases
        assert rank["is there"] and rank["stays"]
        assert rank["in vLLM"] == rank["memory"]["adapter slots"] == held["gen"]["adapter slots"] > 0
        assert rank["memory"]["staged adapter"] == held["update_actor"]["staged adapter"]
