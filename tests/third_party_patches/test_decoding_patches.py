"""Tokens reported at the end, and slots within a block, on a real engine: without the patches and with them."""

from __future__ import annotations

import dataclasses

import pytest
from ranks import run_ranks
from sliced_checks import starts
from tiny_models import run_config, save_llama

from megatron_rl.rollout.slices import Slice

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

PATCHES = ("third_party_patches.vllm.reports_at_the_end", "third_party_patches.vllm.slots_in_a_block")
SMALL = {"actor_rollout_ref__rollout__kv_cache_memory_bytes": 1 << 20}


def drawn(config, is_patched: bool) -> tuple[list, dict[str, int]]:
    """Results of slices in their order, and counts: requests that gave up their cache, outputs that vLLM processed."""
    import third_party_patches

    if not is_patched:
        kept = (name for name in third_party_patches.COMMON_PATCHES if name not in PATCHES)
        third_party_patches.COMMON_PATCHES = tuple(kept)
    from test_slices import host_of
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import OutputProcessor

    host, counts = host_of(config), {"given up": 0, "outputs": 0}
    preempt, process = Scheduler._preempt_request, OutputProcessor.process_outputs

    def counted(scheduler, *args, **kwargs):
        counts["given up"] += 1
        return preempt(scheduler, *args, **kwargs)

    def processed(processor, outputs, *args, **kwargs):
        counts["outputs"] += len(outputs)
        return process(processor, outputs, *args, **kwargs)

    Scheduler._preempt_request, OutputProcessor.process_outputs = counted, processed
    host.roles["rollout"].enter()
    advance = host.roles["rollout"].generator.advance
    first = [dataclasses.replace(start, max_tokens=40) for start in starts(config.trainer.seed)]
    more = [dataclasses.replace(start, request=start.request + 10, seed=5) for start in first]
    orders = [Slice(0, 0, tuple(first[:3])), Slice(0, 5), Slice(0, 7, (first[3], *more), (100,)), Slice(0, None)]
    orders += [Slice(0, None, tuple(first)), Slice(0, 9, tuple(more)), Slice(0, 1, (), (110, 112)), Slice(0, None)]
    results = [(list(new.items()), num_steps) for new, num_steps in map(advance, orders)]
    host.roles["rollout"].exit()
    return results, counts


@pytest.mark.parametrize("keys", [{}, SMALL], ids=["a large cache", "a cache that is too small"])
def test_the_same_is_drawn(tmp_path, keys) -> None:
    """Tokens, log-probs, ends and the order of requests are equal bit for bit, with a third of the outputs at most.

    Would not catch a later vLLM that reports more than tokens in a step that has none of what is looked for.
    """
    config = run_config(save_llama(tmp_path), 1, 1, **keys)
    [(usual, before)] = run_ranks(1, drawn, config, False, timeout=60)
    [(found, after)] = run_ranks(1, drawn, config, True, timeout=60)
    assert found == usual
    assert after["given up"] == before["given up"] and (before["given up"] > 0) == bool(keys)
    assert 3 * after["outputs"] <= before["outputs"]
