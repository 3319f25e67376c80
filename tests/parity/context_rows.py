"""Sequences cut over context-parallel ranks, with sizes that are fixed or that each pass chooses.

All but attention treats a token alone. Attention of a query is a weighted mean over keys, whose numerator and
denominator are sums over keys: p2p adds the parts of keys that pass by, with their maxima, all_gather has all keys, a2a
has all keys of some heads. Rotary positions are those in the sequence, not in the part. The loss is a sum over tokens,
divided by their number in the whole mini-batch; so ranks that share a sequence add up gradients as data-parallel ones.
With dynamic CP every sequence is in one pass, reported once by the ranks that share it, and a rank without a sequence
adds a pass that weighs nothing; so sums over passes and ranks have each token once, whatever the sizes are.

The 11 sequences have 8 to 19 tokens: a limit of 12 tokens on a rank takes packs of one, two and four ranks, and one of
14 on four ranks, of which at most two share a pack, packs of one and two, and a rank that is idle for a pass. That
packs are cut so is in `test_dynamic_context.py`.

Not exercised: sequences that are long; kernels of CUDA; overlap of messages with work; whether time is saved.
"""

from __future__ import annotations

from layout_keys import (
    A2A,
    ALL_GATHER,
    CP2,
    CP4,
    EP2,
    ETP1,
    FULL,
    LOSSES,
    P2P,
    PADDED,
    SELECTIVE,
    SP,
    VPP2,
    of_actor,
    of_both,
)
from observations import UPDATE, Update
from scenarios import ALWAYS, LONG, Row, Scenario
from sweeps import WEEKLY
from tiny_gemma4 import save_gemma4
from tiny_gpt_oss import save_gpt_oss
from tiny_models import save_deepseek_v3, save_gemma2, save_qwen2, save_qwen3_moe

CP2_OF_TWO, CP2_OF_FOUR, CP4_OF_FOUR, TP2_CP2, PP2_CP2 = (2, 1, 1), (4, 1, 1), (4, 1, 1), (4, 2, 1), (4, 1, 2)
# 17 tokens on each of two ranks: two or three of the sequences, of which the longest has 22 tokens, filled up to 24.
DYNAMIC = {"actor_rollout_ref__actor__use_dynamic_bsz": True, "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 17}
CHOOSES = {"dynamic_context_parallel": True}


def limited(tokens: int) -> dict[str, object]:
    """At most so many tokens on a rank."""
    return DYNAMIC | {"actor_rollout_ref__actor__ppo_max_token_len_per_gpu": tokens}


CORE_AGAIN = of_both(SELECTIVE)
TWO_LAYERS_AGAIN = of_both(FULL | {"override_transformer_config__recompute_num_layers": 2})
DENSE = tuple(
    Row(Scenario(save_qwen2, layout, ranks, sizes, keys), UPDATE, when)
    for layout, ranks, sizes, keys, when in (
        ("CP2, p2p, padded, selective", CP2_OF_TWO, CP2 | P2P, PADDED | CORE_AGAIN, LONG),
        ("CP4, p2p, dynamic", CP4_OF_FOUR, CP4 | P2P, DYNAMIC, LONG),
        ("CP4, all_gather, padded", CP4_OF_FOUR, CP4 | ALL_GATHER, PADDED, LONG),
        ("CP4, a2a", CP4_OF_FOUR, CP4 | A2A, {}, LONG),
        ("TP2, CP2, SP, p2p", TP2_CP2, CP2 | P2P | SP, {}, ALWAYS),
        ("TP2, CP2, a2a, selective", TP2_CP2, CP2 | A2A, CORE_AGAIN, LONG),
        ("PP2, CP2, all_gather", PP2_CP2, CP2 | ALL_GATHER, {}, LONG),
        ("PP2, VPP2, CP2, p2p, padded", PP2_CP2, CP2 | P2P | VPP2, PADDED, LONG),
        ("DP2, CP2, a2a, padded, dynamic", CP2_OF_FOUR, CP2 | A2A, PADDED | DYNAMIC, LONG),
        # A way to other ranks' keys next to an axis that it has with more, or that another way has.
        ("PP2, VPP2, CP2, a2a", PP2_CP2, CP2 | A2A | VPP2, {}, WEEKLY),
        ("DP2, CP2, all_gather", CP2_OF_FOUR, CP2 | ALL_GATHER, CORE_AGAIN, WEEKLY),
        ("up to CP4, p2p", CP4_OF_FOUR, CP4 | P2P | CHOOSES, limited(12), LONG),
        ("up to CP2 of 4 ranks, all_gather", CP2_OF_FOUR, CP2 | ALL_GATHER | CHOOSES, limited(14), LONG),
        ("TP2, up to CP2, SP, a2a, selective", TP2_CP2, CP2 | A2A | SP | CHOOSES, CORE_AGAIN | limited(12), LONG),
        ("PP2, up to CP2, p2p, full", PP2_CP2, CP2 | P2P | CHOOSES, TWO_LAYERS_AGAIN | limited(12), LONG),
        ("PP2, VPP2, up to CP2, all_gather", PP2_CP2, CP2 | ALL_GATHER | VPP2 | CHOOSES, limited(12), WEEKLY),
    )
)
# Fewer key/value heads than ranks: a2a, which alone divides heads, sends the one to all.
ONE_KEY_HEAD = Row(Scenario(save_qwen2, "CP4, a2a", CP4_OF_FOUR, CP4 | A2A, changes={"num_key_value_heads": 1}), UPDATE)
# Experts among context-parallel ranks, each of which sends its own tokens; with dynamic CP, of other sequences.
EXPERTS = (
    *(
        Row(Scenario(save_qwen3_moe, layout, ranks, CP2 | sizes), Update(shard=shard), LONG)
        for layout, ranks, sizes, shard in (
            ("DP2, CP2, EP2, a2a", CP2_OF_FOUR, A2A | EP2, (3, 96, 128)),
            ("TP2, CP2, EP2, ETP1, SP, all_gather", TP2_CP2, ALL_GATHER | EP2 | ETP1 | SP, (3, 96, 128)),
            ("TP2, CP2, EP2, ETP2, SP, p2p", TP2_CP2, P2P | EP2 | SP, (3, 48, 128)),
            ("PP2, CP2, EP2, p2p", PP2_CP2, P2P | EP2, (3, 96, 128)),
        )
    ),
    *(
        Row(Scenario(save_qwen3_moe, layout, ranks, CP2 | CHOOSES | sizes, limited(tokens), common), UPDATE, when)
        for layout, ranks, sizes, tokens, common, when in (
            ("up to CP2 of 4 ranks, EP2, p2p", CP2_OF_FOUR, P2P | EP2, 14, {}, LONG),
            ("TP2, up to CP2, EP2, ETP1, SP, all_gather", TP2_CP2, ALL_GATHER | EP2 | ETP1 | SP, 12, {}, WEEKLY),
            ("PP2, up to CP2, EP2, p2p", PP2_CP2, P2P | EP2, 14, {}, ALWAYS),
            # Losses of routers are means over rows of which ranks have different ones.
            ("balanced, up to CP2 of 4 ranks, EP2, p2p", CP2_OF_FOUR, P2P | EP2, 14, of_actor(LOSSES), LONG),
        )
    ),
)
# Kinds of attention: latent, sinks with windows, bounded products with windows, windows with normalised values. The
# windows are shorter than the sequences. Each is swept with one way to other ranks' keys, which do not see the kind.
KINDS = tuple(
    Row(Scenario(save, layout, ranks, sizes, keys, changes=changes), UPDATE, LONG if layout == swept else WEEKLY)
    for save, swept, changes in (
        (save_deepseek_v3, "CP2, p2p", {}),
        (save_gpt_oss, "CP2, a2a", {"sliding_window": 5}),
        (save_gemma2, "CP2, p2p", {"sliding_window": 5}),
        (save_gemma4, "CP2, a2a", {"sliding_window": 5}),
    )
    for layout, ranks, sizes, keys in (
        ("CP2, p2p", CP2_OF_TWO, CP2 | P2P, {}),
        ("CP2, all_gather, padded, selective", CP2_OF_TWO, CP2 | ALL_GATHER, PADDED | CORE_AGAIN),
        ("CP2, a2a", CP2_OF_TWO, CP2 | A2A, {}),
        ("CP4, p2p, full", CP4_OF_FOUR, CP4 | P2P, TWO_LAYERS_AGAIN),
        ("up to CP2 of 4 ranks, p2p", CP2_OF_FOUR, CP2 | P2P | CHOOSES, limited(14)),
        ("TP2, CP2, SP, p2p", TP2_CP2, CP2 | P2P | SP, {}),
    )
)
CONTEXT = (*DENSE, ONE_KEY_HEAD, *EXPERTS, *KINDS)
