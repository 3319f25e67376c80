"""Experts that vLLM returns, on real engines: without each of the two patches and with both."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ranks import run_ranks
from rollout_checks import RANDOM, ask, prompts
from tiny_models import run_config, save_qwen3_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

ON_CPU = "third_party_patches.vllm.cpu_routed_experts"
EVERYWHERE = "third_party_patches.vllm.routed_experts_everywhere"
ROLLOUT = "actor_rollout_ref__rollout__"


def sample(config, without: str | None) -> str | torch.Tensor:
    """The experts of all tokens of random answers, three to a prompt; the message of an engine that is not built."""
    import third_party_patches
    from megatron_rl.records import repeated
    from megatron_rl.roles.host import RankHost

    for names in ("CPU_PATCHES", "COMMON_PATCHES"):
        kept = tuple(name for name in getattr(third_party_patches, names) if name != without)
        setattr(third_party_patches, names, kept)
    worker = RankHost(config)
    worker.build("actor")
    try:
        worker.build("rollout")
        worker.roles["rollout"].enter()
        found = ask(worker.roles["rollout"], repeated(prompts(), 3), dataclasses.replace(RANDOM, with_experts=True))
    except ValueError as error:
        return str(error)
    return found["routed_experts"].values()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_qwen3_moe(tmp_path_factory.mktemp("model"))


def config_of(path: str, tp: int, **changes):
    sizes = {f"{ROLLOUT}tensor_model_parallel_size": tp, f"{ROLLOUT}enable_rollout_routing_replay": True}
    return run_config(path, 1, 1, **sizes, **changes)


def test_the_runner_on_cpu_returns_experts(path) -> None:
    """Without: the engine's configuration is refused. With: prompts that are read in parts, and found in the prefix
    cache, give the experts of prompts read whole.

    Would not catch an engine that names other experts than it uses: `tests/parity` does.
    """
    [refused] = run_ranks(1, sample, config_of(path, 1), ON_CPU, timeout=90)
    assert "requires Model Runner V2" in refused
    in_parts = config_of(path, 1, **{f"{ROLLOUT}max_num_batched_tokens": 40, f"{ROLLOUT}max_num_seqs": 4})
    [whole], [parts] = (run_ranks(1, sample, config, None, timeout=90) for config in (config_of(path, 1), in_parts))
    assert whole.dtype == torch.uint8 and whole.max() == 5
    assert torch.equal(parts, whole)


@pytest.mark.exhaustive
def test_every_rank_of_a_group_keeps_them(path) -> None:
    """Without: a rank other than the first stops. With: both have the same rows.

    Would not catch an engine whose scheduler is another process.
    """
    with pytest.raises(AssertionError, match="(?s)rank 1 failed:.*auxiliary output worker output is missing"):
        run_ranks(2, sample, config_of(path, 2), EVERYWHERE, timeout=90)
    first, second = run_ranks(2, sample, config_of(path, 2), None, timeout=90)
    assert torch.equal(first, second) and len(first) > 100
