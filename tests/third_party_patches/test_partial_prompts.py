"""Seeded prompts that are read in parts, on a real engine: without the patch and with it."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from rollout_checks import RANDOM, round_trip, tokens
from tiny_models import run_config, save_llama

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

PATCH = "third_party_patches.vllm.cpu_partial_prompts"


def sample(config, is_patched: bool) -> list[list[int]] | str:
    """Random answers to prompts of 3 to 150 tokens; the engine's message where it fails."""
    import third_party_patches
    from megatron_rl.roles.host import RankHost

    if not is_patched:
        third_party_patches.CPU_PATCHES = tuple(name for name in third_party_patches.CPU_PATCHES if name != PATCH)
    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    try:
        generations, _ = round_trip(worker, RANDOM)
    except RuntimeError as error:
        return str(error)
    return tokens(generations)


def test_partial_prompts(tmp_path) -> None:
    """Without: the engine fails. With: the tokens are those of prompts read whole.

    Would not catch a request that is preempted between two parts.
    """
    path = save_llama(tmp_path)
    in_parts = run_config(
        path, 1, 1, actor_rollout_ref__rollout__max_num_batched_tokens=40, actor_rollout_ref__rollout__max_num_seqs=4
    )
    [failure] = run_ranks(1, sample, in_parts, False, timeout=60)
    assert "offset" in failure
    [whole] = run_ranks(1, sample, run_config(path, 1, 1), True, timeout=60)
    [found] = run_ranks(1, sample, in_parts, True, timeout=60)
    assert found == whole
