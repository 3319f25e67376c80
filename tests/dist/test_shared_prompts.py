"""Samples of a prompt that share what fills no whole block, on real engines, beside samples that each read it all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from sliced_checks import in_slices, largest_difference
from sweeps import WEEKLY
from tiny_models import run_config, save_gemma3, save_llama

from megatron_rl.records import Sampling
from megatron_rl.rollout.seeds import request_seed
from megatron_rl.rollout.slices import Drawn, Start

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

PATCH = "third_party_patches.vllm.shared_partial_blocks"
UNIT = "actor_rollout_ref__rollout__prefix_match_unit"
LENGTHS = (3, 9, 17, 33, 75)
"""Tokens of prompts: below a block of 32, behind one, and behind two."""
NUM_SAMPLES, NUM_TOKENS = 4, 12
BOUND = 5e-5
WARM = Sampling(0.7, 1.0, -1, NUM_TOKENS, 3)


def asked() -> tuple[Start, ...]:
    """Four samples of each prompt. The second prompt begins with the first, and both are read in the same step."""
    generator = torch.Generator().manual_seed(1)
    rows = [tuple(torch.randint(2, 70, (length,), generator=generator).tolist()) for length in LENGTHS]
    rows[1] = rows[0] + rows[1][len(rows[0]) :]
    return tuple(
        Start(100 + NUM_SAMPLES * row + sample, ids, request_seed(1, 3, row, sample), NUM_TOKENS, WARM)
        for row, ids in enumerate(rows)
        for sample in range(NUM_SAMPLES)
    )


def sample(config) -> tuple[dict[str, dict[int, Drawn]], int]:
    """Answers at once, in slices of three steps, and in slices of one; tokens computed for the first."""
    from megatron_rl.roles.host import RankHost

    host = RankHost(config)
    host.build("actor")
    host.build("rollout")
    host.roles["rollout"].enter()
    generator = host.roles["rollout"].generator
    scheduler = generator.llm.llm_engine.engine_core.engine_core.scheduler
    schedule, computed = scheduler.schedule, list[int]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        computed.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counted
    answers = {"whole": in_slices(generator, asked(), None)}
    num_computed = sum(computed)
    answers |= {f"slices of {steps}": in_slices(generator, asked(), steps) for steps in (3, 1)}
    return answers, num_computed


def refused(config) -> str:
    """The message of an engine without the patch."""
    import third_party_patches
    from megatron_rl.roles.host import RankHost

    third_party_patches.CPU_PATCHES = tuple(name for name in third_party_patches.CPU_PATCHES if name != PATCH)
    host = RankHost(config)
    host.build("actor")
    try:
        host.build("rollout")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("save", [save_llama, pytest.param(save_gemma3, marks=WEEKLY)])
def test_shared_prompts(save, tmp_path) -> None:
    """The tokens are those of samples that read everything, log-probs within 5e-5, in slices as well. Of each prompt
    the engine computes once what the last multiple of the unit covers.

    Would not catch a block that is evicted while it is shared: this cache has room for all.
    """
    path = save(tmp_path)
    [(alone, num_alone)] = run_ranks(1, sample, run_config(path, 1, 1), timeout=120)
    [(shared, num_shared)] = run_ranks(1, sample, run_config(path, 1, 1, **{UNIT: 4}), timeout=120)
    assert shared.keys() == alone.keys()
    for way, answers in alone.items():
        assert answers.keys() == shared[way].keys()
        for request, answer in answers.items():
            found = shared[way][request]
            assert (found.token_ids, found.finish) == (answer.token_ids, answer.finish), (way, request)
            assert largest_difference(found.log_probs, answer.log_probs) < BOUND
    others = NUM_SAMPLES - 1
    saved = sum((length - 1) // 4 * 4 - (length - 1) // 32 * 32 for length in LENGTHS)
    assert num_alone - num_shared == others * saved


def test_without_the_patch_vllm_refuses(tmp_path) -> None:
    """Would not catch a vLLM that ignores the unit: then the saving above is missing."""
    [message] = run_ranks(1, refused, run_config(save_llama(tmp_path), 1, 1, **{UNIT: 4}), timeout=60)
    assert "prefix_match_unit=4" in message and "single KV cache group" in message
