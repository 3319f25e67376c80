"""Sequences cut over context-parallel ranks: one batch and one update give the numbers of one process.

Why: all but attention treats a token alone. Attention of a query is a weighted mean over keys, whose numerator and
denominator are sums over keys: p2p adds the parts of keys that pass by, with their maxima, all_gather has all keys, a2a
has all keys of some heads. Rotary positions are those in the sequence, not in the part. The loss is a sum over tokens,
divided by their number in the whole mini-batch; so ranks that share a sequence add up gradients as data-parallel ones.

Not exercised: sequences that are long; kernels of CUDA; overlap of messages with work.
"""

from __future__ import annotations

import pytest
from ranks import run_ranks
from sweeps import often
from tiny_models import run_config, save_qwen2, save_qwen3_moe
from updates import OPTIMIZER, assert_same, one_update

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

ACTOR = "actor_rollout_ref__actor"
MEGATRON = f"{ACTOR}__megatron"
CP, OVERRIDE = f"{MEGATRON}__context_parallel_size", f"{MEGATRON}__override_transformer_config"
CRITICS = "critic__megatron__override_transformer_config"
P2P, ALL_GATHER, A2A = ({f"{OVERRIDE}__cp_comm_type": way} for way in ("p2p", "all_gather", "a2a"))
SP, VPP2 = {f"{MEGATRON}__sequence_parallel": True}, {f"{MEGATRON}__virtual_pipeline_model_parallel_size": 2}
EP2 = {f"{MEGATRON}__expert_model_parallel_size": 2}
ETP1 = {f"{MEGATRON}__expert_tensor_parallel_size": 1}
PADDED = {"actor_rollout_ref__model__use_remove_padding": False}
# 17 tokens on each of two ranks: two or three of the sequences, of which the longest has 22 tokens, filled up to 24.
DYNAMIC = {f"{ACTOR}__use_dynamic_bsz": True, f"{ACTOR}__ppo_max_token_len_per_gpu": 17}
AGAIN = {
    "full": {"granularity": "full", "method": "uniform", "num_layers": 2},
    "selective": {"granularity": "selective"},
}
FULL, SELECTIVE = (
    {f"{group}__recompute_{key}": value for group in (OVERRIDE, CRITICS) for key, value in keys.items()}
    for keys in AGAIN.values()
)
LAYOUTS = {
    "CP2, p2p, padded, selective": ((2, 1, 1), 2, P2P | PADDED | SELECTIVE),
    "CP4, p2p, dynamic": ((4, 1, 1), 4, P2P | DYNAMIC),
    "CP4, all_gather, padded": ((4, 1, 1), 4, ALL_GATHER | PADDED),
    "CP4, a2a": ((4, 1, 1), 4, A2A),
    "TP2, CP2, SP, p2p": ((4, 2, 1), 2, P2P | SP),
    "TP2, CP2, a2a, selective": ((4, 2, 1), 2, A2A | SELECTIVE),
    "PP2, CP2, all_gather": ((4, 1, 2), 2, ALL_GATHER),
    "PP2, VPP2, CP2, p2p, padded": ((4, 1, 2), 2, P2P | VPP2 | PADDED),
    "PP2, VPP2, CP2, a2a": ((4, 1, 2), 2, A2A | VPP2),
    "DP2, CP2, a2a, padded, dynamic": ((4, 1, 1), 2, A2A | PADDED | DYNAMIC),
    "DP2, CP2, all_gather": ((4, 1, 1), 2, ALL_GATHER | SELECTIVE),
}
"""Name -> (ranks, tp, pp), cp, further keys."""
OFTEN = ("TP2, CP2, SP, p2p",)
"""What `make test` goes through; PP and experts beside CP are in `test_dynamic_context.py`, the other ways in
`test_context_attention.py`.
"""
MOE_LAYOUTS = {
    "DP2, CP2, EP2, a2a": ((4, 1, 1), 2, A2A | EP2, (3, 96, 128)),
    "TP2, CP2, EP2, ETP1, SP, all_gather": ((4, 2, 1), 2, ALL_GATHER | EP2 | ETP1 | SP, (3, 96, 128)),
    "TP2, CP2, EP2, ETP2, SP, p2p": ((4, 2, 1), 2, P2P | EP2 | SP, (3, 48, 128)),
    "PP2, CP2, EP2, p2p": ((4, 1, 2), 2, P2P | EP2, (3, 96, 128)),
}
"""The same, and what a rank holds of the 6 experts' [gate; up] of 2 x 48 rows."""


def run_layout(path: str, ranks: tuple[int, int, int], cp_size: int, changes: dict) -> list[dict]:
    """`one_update` on every rank; changes: by dotted key with `__` for the dots."""
    world_size, tp_size, pp_size = ranks
    keys = {f"{role}__optim__{key}": value for role in (ACTOR, "critic") for key, value in OPTIMIZER.items()}
    results = run_ranks(world_size, one_update, run_config(path, tp_size, pp_size, **keys, **{CP: cp_size}, **changes))
    assert {r["where"].dp_size for r in results} == {world_size // (tp_size * pp_size * cp_size)}
    assert sum(r["where"].dp_collector for r in results) == results[0]["where"].dp_size
    return results


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model_path) -> list[dict]:
    return run_layout(model_path, (1, 1, 1), 1, {})


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory) -> str:
    return save_qwen3_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def moe_reference(moe_path) -> list[dict]:
    return run_layout(moe_path, (1, 1, 1), 1, {})


@pytest.mark.parametrize("layout", often(LAYOUTS, OFTEN, weekly=("PP2, VPP2, CP2, a2a", "DP2, CP2, all_gather")))
def test_layouts_equal_one_process(layout, model_path, reference) -> None:
    """Scores, metrics, norms before clipping and new weights of actor and critic. Weekly is a way to other ranks' keys
    beside an axis that it has with more or that another way has. Would not catch lost time.
    """
    assert_same(run_layout(model_path, *LAYOUTS[layout]), reference, model_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", MOE_LAYOUTS)
def test_moe_layouts_equal_one_process(layout, moe_path, moe_reference) -> None:
    """Experts among context-parallel ranks, each of which sends its own tokens. Would not catch a balancing loss, of
    which there is none.
    """
    *layout_keys, shard = MOE_LAYOUTS[layout]
    results = run_layout(moe_path, *layout_keys)
    for rank in results:
        assert {tuple(p.shape) for name, p in rank["actor_weights"].items() if name.endswith("experts.w13")} == {shard}
    assert_same(results, moe_reference, moe_path)


@pytest.mark.exhaustive
def test_one_key_head_for_all(tmp_path) -> None:
    """Fewer key/value heads than ranks: a2a, which alone divides heads, sends the one to all. Would not catch a number
    that does not divide.
    """
    path = save_qwen2(tmp_path, num_key_value_heads=1)
    assert_same(run_layout(path, (4, 1, 1), 4, A2A), run_layout(path, (1, 1, 1), 1, {}), path)
