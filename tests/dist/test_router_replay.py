"""Experts chosen in one pass and replayed in another: engine to trainer, old log-probs to update, in every layout.

The models' routers are made to tie: their rows come in threes that differ by less than rounding does, so that which two
of three experts a token goes to is decided by the order in which a library adds up.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from rollout_checks import RANDOM, prompts
from safetensors.torch import load_file, save_file
from tiny_models import random_experience, run_config, save_qwen3_moe

from megatron_rl.records import ragged_from_lengths, row_lengths

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS = 11
NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 6, 2
BOUND = 5e-5
"""What dense models keep in float32, engine against trainer."""
REPLAY = "actor_rollout_ref__actor__router_replay__mode"
MEGATRON = "actor_rollout_ref__actor__megatron__"


def save_tied(folder: Path) -> str:
    """A Qwen3-MoE in which experts 0, 1 and 2 are equally likely, and so are 3, 4 and 5, but for noise of rounding's
    size."""
    path = save_qwen3_moe(folder, initializer_range=0.3)
    file = Path(path, "model.safetensors")
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            for expert in (1, 2, 4, 5):
                noise = 1e-7 * torch.randn(tensor[expert].shape, generator=generator)
                tensor[expert] = tensor[expert - expert % 3] + noise
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> str:
    return save_tied(tmp_path_factory.mktemp("tied"))


def tied_config(path: str, tp_size: int = 1, pp_size: int = 1, **changes):
    return run_config(path, tp_size, pp_size, **{"actor_rollout_ref__rollout__max_num_seqs": 16} | changes)


def differences(config) -> dict | None:
    """Of what the engine sampled: the trainer's log-probs against its own, with replay and without; last stage only."""
    from megatron_rl.experience.assemble import assemble
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    actor, asked = worker.roles["actor"], prompts().repeat(3)
    worker.roles["rollout"].enter()
    found = worker.roles["rollout"].generate(asked, RANDOM, True)
    worker.roles["rollout"].exit()
    lengths = row_lengths(found.routed_experts)
    experience = assemble(asked, found)
    assert torch.equal(lengths, row_lengths(experience.input_ids) - 1)
    told = experience.sequences(with_experts=True)
    with_replay, without = actor.log_probs(told), actor.log_probs_without_replay(told)
    if with_replay is None:
        return None
    by_engine = found.rollout_log_probs.values()
    counts = with_replay.num_other_experts
    return {
        "with": float((with_replay.scores.values() - by_engine).abs().max()),
        "without": float((without.scores.values() - by_engine).abs().max()),
        "others": int(counts.sum()) / found.routed_experts.values().numel(),
    }


def test_the_engines_experts_make_log_probs_agree(tied) -> None:
    """With replay within the dense bound, without far outside. Would not catch an engine whose ties fall as ours do:
    then nothing differs, and the last line fails.
    """
    [found] = run_ranks(1, differences, tied_config(tied, **{REPLAY: "R3"}))
    print(found)
    assert found["with"] < BOUND
    assert found["without"] > 100 * BOUND
    assert 0.01 < found["others"] < 0.9
