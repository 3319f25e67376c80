"""Families: what their parts give, cut along all of their axes.

A part (a kind of attention, of MLP, of norm, of head) is in the long tests once, in the layout that cuts it most;
further families with the same parts are weekly. What goes into a model and comes out is in
`folder_rows.py`.
"""

from __future__ import annotations

from pathlib import Path

from layout_keys import A2A, ALL_GATHER, CP2, CP4, EP2, ETP1, FULL, P2P, PADDED, SELECTIVE, SP, VPP2
from observations import GENERATION, LOGITS, UPDATE, Generation, Gradients, Saved, Update
from safetensors.torch import load_file, save_file
from scenarios import ALONE, ALWAYS, LONG, Row, SaveModel, Scenario
from sweeps import WEEKLY
from tiny_gemma4 import save_gemma4, save_gemma4_with_keys_for_values
from tiny_glm import save_glm4_moe_lite
from tiny_gpt_oss import save_gpt_oss
from tiny_minimax import save_minimax
from tiny_models import (
    save_deepseek_v2,
    save_deepseek_v3,
    save_gemma2,
    save_gemma3,
    save_glm4_moe,
    save_moonlight,
    save_qwen2,
    save_qwen2_moe,
    save_qwen3_moe,
)
from tiny_moonshot import save_kimi_k2
from tiny_qwen3_5 import save_qwen3_5, save_qwen3_5_moe, save_qwen3_next
from tiny_vision import save_qwen3_vl

KEYS_FOR_VALUES = save_gemma4_with_keys_for_values
FOUR = (4, 2, 2)
"""TP2 and PP2; `ALL_AXES` cut experts, too."""
ALL_AXES = SP | EP2 | ETP1
OF_LORA = "actor_rollout_ref__model__lora"
LORA, TARGETS = {f"{OF_LORA}__rank": 8}, f"{OF_LORA}__target_modules"


def save_qwen2_with_copied_head(folder: Path, **changes) -> str:
    """A Qwen2 whose folder has the head, too, as some tools write it."""
    return copy_head(save_qwen2(folder, **changes))


def save_qwen3_vl_with_copied_head(folder: Path, **changes) -> str:
    """A Qwen3-VL with tied embeddings, whose folder has the head, too: vLLM has it inside of the language model."""
    return copy_head(save_qwen3_vl(folder, **changes))


def copy_head(path: str) -> str:
    """Add the embedding to a saved model's weights again, as the head."""
    file = Path(path, "model.safetensors")
    tensors = load_file(file)
    (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    save_file(tensors | {"lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    return path


def gradients(save: SaveModel, bound: float = 1e-4, idle: int = 1, when=LONG, together: float | None = None) -> Row:
    """In one process, with windows shorter than rows. A bias may leave an expert to no token."""
    return Row(Scenario(save, "one process"), Gradients(bound, together, idle), when)


def updates(save: SaveModel, layouts: dict, when=LONG, norms: float = 1e-6) -> tuple[Row, ...]:
    """Rows of one model. layouts: name -> (ranks, sizes)."""
    return tuple(Row(Scenario(save, layout, *cut), Update(norms), when) for layout, cut in layouts.items())


LATENT = {
    "TP2, ETP2": ((2, 2, 1), SP),
    "TP2, PP2, EP2, ETP1": (FOUR, ALL_AXES),
    "DP2, EP2": ((2, 1, 1), EP2),
}
EXPERTS = {"TP2, PP2, EP2, ETP1": (FOUR, ALL_AXES)}
RECOMPUTED = {"TP2, PP2, recomputed": (FOUR, SP | FULL)}
SPLIT_SEQUENCES = {"CP2": ((2, 1, 1), CP2)}
WINDOWS = (
    gradients(save_gemma2),
    gradients(save_gemma3),
    *updates(save_gemma2, {"TP2, PP2, VPP2, SP": (FOUR, SP | VPP2), "PP2, recomputed": ((2, 1, 2), FULL)}),
    *updates(save_gemma3, {"TP2, PP2, VPP2": (FOUR, VPP2), "DP2, PP2": ((4, 1, 2),)}),
    gradients(save_gpt_oss, 1e-5),
    *updates(save_gpt_oss, EXPERTS | RECOMPUTED),
    # Keys that are values, which are new, are in the long tests; the others' parts other rows have.
    gradients(save_gemma4, 1e-5, idle=0, when=WEEKLY),
    gradients(KEYS_FOR_VALUES, 1e-5, idle=0),
    *updates(save_gemma4, {"TP2, PP2, VPP2, SP": (FOUR, SP | VPP2), "PP2, recomputed": ((2, 1, 2), FULL)}, WEEKLY),
    *updates(KEYS_FOR_VALUES, {"TP2, PP2, SP": (FOUR, SP), "DP2, PP2": ((4, 1, 2),)}),
)
SHARED_EXPERTS = (
    gradients(save_qwen2_moe),
    *updates(save_qwen2_moe, LATENT),
    gradients(save_glm4_moe),
    *updates(save_glm4_moe, EXPERTS | SPLIT_SEQUENCES),
    gradients(save_minimax, 1e-5),
    *updates(save_minimax, EXPERTS | RECOMPUTED | SPLIT_SEQUENCES),
)
LATENT_ATTENTION = (
    gradients(save_deepseek_v2),
    gradients(save_deepseek_v3),
    gradients(save_moonlight, when=WEEKLY),
    *updates(save_deepseek_v3, LATENT),
    *updates(save_glm4_moe_lite, EXPERTS, WEEKLY),
)
MANY_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_attention_heads": 8}
CHOSEN = {"dynamic_context_parallel": True}
FEW_TOKENS = {
    f"actor_rollout_ref__actor__{key}": value
    for key, value in {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 12}.items()
}
"""Sequences of 8 to 19 tokens need up to four ranks."""
# From transformers' own in float64, ours of Qwen3.5 are at most 8.8e-6 and those of Qwen3-Next 1.25e-5, transformers'
# in float32 1.05e-5 and 1.0e-5, so both may be 2e-5 apart. transformers ignores where packed rows begin; the rule
# by itself is in tests/model/test_delta_rule.py.
GATED_DELTA = (
    gradients(save_qwen3_next, 2e-5, together=1e-5),
    gradients(save_qwen3_5, 2e-5, together=1e-5, when=WEEKLY),
    gradients(save_qwen3_5_moe, 2e-5, together=1e-5, when=WEEKLY),
    *updates(
        save_qwen3_5,
        {"TP2, PP2, VPP2, SP": (FOUR, SP | VPP2), "TP2, DP2": ((4, 2, 1),), "PP2, recomputed": ((2, 1, 2), FULL)},
        WEEKLY,
        norms=3e-6,
    ),
    *updates(save_qwen3_5_moe, EXPERTS, norms=3e-6),
    *updates(
        save_qwen3_next,
        {"TP2, PP2, VPP2, EP2, ETP1": (FOUR, ALL_AXES | VPP2), "core recomputed": (ALONE, SELECTIVE)},
        WEEKLY,
        norms=3e-6,
    ),
    Row(Scenario(save_qwen3_5, "padded", keys=PADDED), UPDATE, WEEKLY),
    *(
        Row(Scenario(save, f"heads shared: {layout}", *cut, changes=MANY_HEADS), Update(3e-6), when)
        for save, layout, cut, when in (
            (save_qwen3_5, "CP2, p2p", ((2, 1, 1), CP2 | P2P), ALWAYS),
            (save_qwen3_5, "CP2, p2p, padded", ((2, 1, 1), CP2 | P2P, PADDED), LONG),
            (save_qwen3_next, "CP4, a2a, core recomputed", ((4, 1, 1), CP4 | A2A | SELECTIVE), LONG),
            (save_qwen3_5, "TP2, CP2, SP, all_gather", ((4, 2, 1), CP2 | ALL_GATHER | SP), LONG),
            (save_qwen3_5_moe, "PP2, CP2, recomputed", ((4, 1, 2), CP2 | P2P | FULL), LONG),
            (save_qwen3_5, "up to CP4, packs by tokens", ((4, 1, 1), CP4 | P2P | CHOSEN, FEW_TOKENS), LONG),
        )
    ),
)
# Experts after an update are in `transition_rows.py`. vLLM builds a head for some models even where config.json ties
# it to the embedding; the engine's own head is then the embedding.
AROUND_AN_UPDATE = (
    *(
        Row(Scenario(save, "TP2, PP2, SP", FOUR, SP), GENERATION, when)
        for save, when in (
            (save_gemma2, LONG),
            (save_gemma3, WEEKLY),
            (save_glm4_moe, WEEKLY),
            (save_minimax, WEEKLY),
            (save_gpt_oss, WEEKLY),
            (save_kimi_k2, WEEKLY),
            (save_glm4_moe_lite, WEEKLY),
            (save_gemma4, WEEKLY),
            (KEYS_FOR_VALUES, LONG),
        )
    ),
    *(
        Row(Scenario(save, "TP2, PP2, SP", FOUR, SP, changes={"tie_word_embeddings": True}), GENERATION, when)
        for save, when in (
            (save_deepseek_v3, LONG),
            (save_qwen2_with_copied_head, LONG),
            (save_qwen3_vl_with_copied_head, LONG),
            (save_glm4_moe, WEEKLY),
            (save_glm4_moe_lite, WEEKLY),
            (save_deepseek_v2, WEEKLY),
            (save_minimax, WEEKLY),
            (save_gpt_oss, WEEKLY),
        )
    ),
    # Adapters alone, on heads of two sizes.
    Row(
        Scenario(save_gemma4, "TP2, PP2, adapters", FOUR, keys=LORA),
        GENERATION,
        WEEKLY,
    ),
    # States are given back and taken again in between.
    Row(Scenario(save_qwen3_5, "one process"), Generation(0.01), ALWAYS),
    Row(Scenario(save_qwen3_5_moe, "TP2, EP2, ETP1", (2, 2, 1), ALL_AXES), Generation(0.01), WEEKLY),
    Row(Scenario(save_qwen3_next, "TP2, PP2, SP", FOUR, SP), Generation(0.01), LONG),
)
ROLLOUT_TP2 = {"actor_rollout_ref__rollout__tensor_model_parallel_size": 2}
WHOLE_EXPERTS = {"actor_rollout_ref__rollout__expert_parallel_size": 2}
BFLOAT16 = {"actor_rollout_ref__actor__megatron__dtype": "bfloat16"}
# vLLM's kernels for bfloat16 on CPUs want sizes that are multiples of 32.
WIDE_DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 64}
WIDE_EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
# What is cut in training is cut otherwise in generation. Each family is in the long tests once.
OTHER_CUTS = tuple(
    Row(Scenario(save, layout, ranks, sizes, keys), GENERATION, LONG if layout == chosen else WEEKLY)
    for save, chosen in ((save_gpt_oss, "TP2, PP2, SP, rollout TP2"), (save_minimax, "TP2, SP, rollout TP1"))
    for layout, ranks, sizes, keys in (
        ("one process", ALONE, {}, {}),
        ("TP2, PP2, SP, rollout TP2", FOUR, SP, ROLLOUT_TP2),
        ("TP2, SP, rollout TP1", (2, 2, 1), SP, {}),
        ("DP2, rollout TP2", (2, 1, 1), {}, ROLLOUT_TP2),
    )
)
# Experts that ranks have whole in generation, with adapters: of attention beside them, of experts merged into them.
WITH_ADAPTERS = tuple(
    Row(Scenario(save, layout, ranks, sizes, ROLLOUT_TP2 | WHOLE_EXPERTS | LORA | keys), GENERATION, WEEKLY)
    for save, layout, ranks, sizes, keys in (
        (save_qwen3_moe, "TP2, PP2, adapters, rollout EP2", FOUR, SP, {TARGETS: ["linear_qkv", "linear_proj"]}),
        (save_qwen3_moe, "PP2, EP2, merged adapters, rollout EP2", (4, 1, 2), EP2, {f"{OF_LORA}__merge": True}),
    )
)
# As bfloat16 rounds; with experts of the gated delta families rounding may choose another one for a token. Of GLM-4.5
# the engine would keep routers in float32, and reads the trainer's.
IN_BFLOAT16 = tuple(
    Row(
        Scenario(save, "bfloat16", keys=BFLOAT16, changes=changes),
        Generation(rate=None, bound=bound, least=1e-5, is_greedy=False),
        when,
    )
    for save, changes, bound, when in (
        (save_glm4_moe, {"head_dim": 64, "moe_intermediate_size": 64}, 0.3, LONG),
        (save_qwen3_5, WIDE_DELTA, 0.3, LONG),
        (save_qwen3_5_moe, WIDE_DELTA | WIDE_EXPERTS, 1.0, WEEKLY),
        (save_qwen3_next, WIDE_DELTA | WIDE_EXPERTS, 1.0, WEEKLY),
    )
)
# Scales of layers go out, and no values that are keys.
WIDE_HEADS = Row(
    Scenario(KEYS_FOR_VALUES, "TP2, PP2", FOUR),
    Saved(exported="model.layers.1.layer_scalar", left_out="model.layers.1.self_attn.v_proj.weight"),
    WEEKLY,
)
ROWS_LAID_OUT = tuple(
    Row(Scenario(save, layout, keys=keys), LOGITS, when)
    for save, when in ((save_gpt_oss, LONG), (save_minimax, WEEKLY))
    for layout, keys in (("packed", {}), ("padded", PADDED))
)
FAMILIES = (
    *WINDOWS,
    *SHARED_EXPERTS,
    *LATENT_ATTENTION,
    *GATED_DELTA,
    *AROUND_AN_UPDATE,
    *OTHER_CUTS,
    *WITH_ADAPTERS,
    *IN_BFLOAT16,
    *ROWS_LAID_OUT,
    WIDE_HEADS,
)
