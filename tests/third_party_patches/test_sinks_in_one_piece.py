"""A single long request of gpt-oss on a real engine: without the patch and with it."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from sliced_checks import largest_difference, plain_log_probs
from tiny_gpt_oss import save_gpt_oss
from tiny_models import run_config

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

PATCH = "third_party_patches.vllm.sinks_in_one_piece"
BOUND = 5e-5


def drawn(config, prompt: tuple[int, ...], is_patched: bool) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The greedy answer to a prompt that runs alone, and its log-probs."""
    import third_party_patches
    from megatron_rl.records import Sampling
    from megatron_rl.roles.host import RankHost
    from megatron_rl.rollout.slices import Slice, Start

    if not is_patched:
        third_party_patches.CPU_PATCHES = tuple(name for name in third_party_patches.CPU_PATCHES if name != PATCH)
    torch.set_num_threads(2)  # one thread shares with nobody
    host = RankHost(config)
    host.build("actor")
    host.build("rollout")
    rollout = host.roles["rollout"]
    rollout.enter()
    start = Start(0, prompt, 1, 12, Sampling(0.0, 1.0, -1, 12, 0))
    answer = rollout.generator.advance(Slice(0, None, (start,)))[0][0]
    return answer.token_ids, answer.log_probs


def test_sinks_of_a_long_request(tmp_path) -> None:
    """The model has windows of 12 in every other layer, and the prompt 150 tokens. Without: log-probs are not those of
    transformers for the same tokens. With: they are.

    Would not catch a request whose keys are shared beside others.
    """
    path = save_gpt_oss(tmp_path)
    prompt = tuple(torch.randint(2, 70, (150,), generator=torch.Generator().manual_seed(1)).tolist())
    for is_patched in (False, True):
        [(tokens, log_probs)] = run_ranks(1, drawn, run_config(path, 1, 1), prompt, is_patched, timeout=60)
        difference = largest_difference(log_probs, plain_log_probs(path, prompt, tokens))
        assert (difference < BOUND) == is_patched, difference
