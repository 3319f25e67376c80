"""The map between Megatron's parameters and Hugging Face's tensors."""

from dataclasses import replace
from unittest.mock import ANY

import pytest
import torch
import transformers
from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_rl.checkpoint.hf_tensors import hf_tensors
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import (
    FAMILIES,
    REWARD_FAMILIES,
    ModelShape,
    ParamSpec,
    Routing,
    constant_map,
    family_of,
    full_attention,
    is_reward_model,
    num_labels,
    param_map,
    rollout_settings,
    routing_problem,
    shape_of,
    sliding_window,
    text_settings,
    value_param_map,
)
from megatron_rl.model.families.shape import dense_layers
from megatron_rl.parallel.sharding import LogicalTensor, Place, Segment, shard_of

LLAMA, QWEN2 = FAMILIES["LlamaForCausalLM"], FAMILIES["Qwen2ForCausalLM"]
QWEN3_MOE = FAMILIES["Qwen3MoeForCausalLM"]


def shape(num_layers=1, tied=True, num_experts=0):
    """4 query heads and 2 key/value heads of size 8 on a hidden size of 24."""
    return ModelShape(num_layers, 24, 4, 2, 8, 20, 70, tied, num_experts)


def test_one_tied_qwen2_layer_by_hand():
    """Every parameter, with its segments. Would not catch a name that Megatron does not use."""
    mega, hf = "decoder.layers.0.", "model.layers.0."

    def whole(name):
        return ParamSpec(LogicalTensor(name, (Segment("all", (24,), 1),), None), (name,))

    def columns(name, size, units):
        return ParamSpec(LogicalTensor(name, (Segment("columns", (24, size), units),), 1), (name,))

    def qkv(kind, rest):
        parts = tuple(Segment(part, (8 * heads, *rest), heads) for part, heads in (("q", 4), ("k", 2), ("v", 2)))
        names = tuple(f"{hf}self_attn.{part}_proj.{kind}" for part in "qkv")
        return ParamSpec(LogicalTensor(f"{hf}self_attn.qkv_proj.{kind}", parts, 0), names)

    rows = (Segment("rows", (70, 24), 70),)
    embedding = ParamSpec(
        LogicalTensor("model.embed_tokens.weight", rows, 0, is_vocab=True), ("model.embed_tokens.weight",)
    )
    gate_up = tuple(Segment(part, (20, 24), 20) for part in ("gate", "up"))
    assert param_map(QWEN2, shape()) == {
        "embedding.word_embeddings.weight": embedding,
        "output_layer.weight": embedding,
        "decoder.final_layernorm.weight": whole("model.norm.weight"),
        f"{mega}input_layernorm.weight": whole(f"{hf}input_layernorm.weight"),
        f"{mega}pre_mlp_layernorm.weight": whole(f"{hf}post_attention_layernorm.weight"),
        f"{mega}self_attention.linear_qkv.weight": qkv("weight", (24,)),
        f"{mega}self_attention.linear_qkv.bias": qkv("bias", ()),
        f"{mega}self_attention.linear_proj.weight": columns(f"{hf}self_attn.o_proj.weight", 32, 4),
        f"{mega}mlp.linear_fc1.weight": ParamSpec(
            LogicalTensor(f"{hf}mlp.gate_up_proj.weight", gate_up, 0),
            (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight"),
        ),
        f"{mega}mlp.linear_fc2.weight": columns(f"{hf}mlp.down_proj.weight", 20, 20),
    }


def test_a_qwen3_moe_layer_has_stacked_experts():
    """Names and segments of what differs from a dense layer. Would not catch a router that is cut."""
    mega, hf = "decoder.layers.0.mlp.", "model.layers.0.mlp.experts."
    params = param_map(QWEN3_MOE, shape(num_experts=6))
    w13, w2 = params[f"{mega}experts.w13"], params[f"{mega}experts.w2"]
    gate_up = tuple(Segment(part, (6, 20, 24), 20) for part in ("gate", "up"))
    assert w13.tensor == LogicalTensor(f"{hf}routed_experts.w13_weight", gate_up, 1, is_expert=True)
    assert w13.hf_names == (f"{hf}{{expert}}.gate_proj.weight", f"{hf}{{expert}}.up_proj.weight")
    down = (Segment("columns", (6, 24, 20), 20),)
    assert w2.tensor == LogicalTensor(f"{hf}routed_experts.w2_weight", down, 2, is_expert=True)
    assert params[f"{mega}router.weight"].hf_names == ("model.layers.0.mlp.gate.weight",)
    assert params["decoder.layers.0.self_attention.q_layernorm.weight"].tensor.segments[0].shape == (8,)
    assert not any("linear_fc" in name or name.endswith("bias") for name in params)


def test_an_untied_head_is_its_own_tensor():
    """Only the head differs from the tied map. Would not catch an error in both maps."""
    tied, untied = (param_map(LLAMA, shape(2, tied)) for tied in (True, False))
    assert untied["output_layer.weight"].hf_names == ("lm_head.weight",)
    assert {name for name in tied if tied[name] != untied[name]} == {"output_layer.weight"}


def test_layers_are_counted_and_llama_has_no_bias():
    """Two layers give the same names twice. Would not catch a bias that is present and zero."""
    names = set(param_map(LLAMA, shape(2, tied=False)))
    assert len(names) == 3 + 2 * 6
    assert {name.replace("layers.0", "layers.1") for name in names if "layers.0." in name} < names
    assert not any(name.endswith("bias") for name in names)


@pytest.mark.parametrize("tied", [True, False])
def test_hf_tensors_are_used_once(tied):
    """No two parameters claim a tensor, except the tied head. Would not catch a tensor that nobody claims."""
    params = param_map(QWEN2, shape(3, tied))
    claimed = [name for spec in params.values() for name in spec.hf_names]
    assert len(claimed) - len(set(claimed)) == tied
    assert ("lm_head.weight" in claimed) != tied


def test_family_of_takes_the_first_known_and_lists_the_known():
    """An unknown name is not fatal beside a known one. Would not catch a family with wrong traits."""
    assert family_of(["Other", "Qwen2ForCausalLM"]) is QWEN2 and QWEN2.qkv_bias and not LLAMA.qkv_bias
    for architectures in (["GPT2LMHeadModel"], [], None):
        with pytest.raises(
            ConfigError, match="known: DeepseekV2.*LlamaForCausalLM, LlamaForSequence.*Qwen3MoeForCausalLM"
        ) as raised:
            family_of(architectures)
        assert str(architectures) in str(raised.value)


def test_shape_is_read_from_config_json():
    """Explicit and implicit head sizes; an MoE's expert size. Would not catch a config with other key names."""
    llama = LlamaConfig(architectures=["LlamaForCausalLM"], hidden_size=64, num_attention_heads=4, num_hidden_layers=3)
    read = shape_of(llama.to_dict())
    assert (read.num_layers, read.num_heads, read.num_kv_heads, read.head_size) == (3, 4, 4, 16)
    assert (read.ffn_size, read.num_experts, read.tied) == (llama.intermediate_size, 0, False)
    moe = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], moe_intermediate_size=48, num_experts=6, head_dim=10)
    read = shape_of(moe.to_dict())
    assert (read.ffn_size, read.num_experts, read.head_size) == (48, 6, 10)


SIZES = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_experts": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "shared_expert_intermediate_size": 40,
    "n_routed_experts": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}


def shapes_in_a_folder(model, num_experts, stacks):
    """Name -> shape of a transformers model as it saves itself: experts, stacked in memory, one by one.

    stacks: a stack's name -> the tensors of one expert in it.
    """
    shapes = {}
    for name, tensor in model.state_dict().items():
        kind = name.rpartition(".")[2]
        if kind not in stacks:
            shapes[name] = tuple(tensor.shape)
            continue
        rows = tensor.shape[1] // len(stacks[kind])
        for expert in range(num_experts):
            for single in stacks[kind]:
                shapes[name.replace(f"mlp.experts.{kind}", single.format(expert))] = (rows, tensor.shape[2])
    return shapes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "architecture", [*FAMILIES, *(name for name in REWARD_FAMILIES if hasattr(transformers, name))]
)
def test_every_tensor_of_transformers_is_claimed_once(architecture, tied):
    """Names and shapes, for both kinds of head. Would not catch the q of a model in the place of its k."""
    family, is_classifier = family_of([architecture]), architecture in REWARD_FAMILIES
    model_class = getattr(transformers, architecture, transformers.Qwen2ForCausalLM)  # MiMo's is Qwen2's
    assert model_class.config_class.model_type == family.model_type
    known = {name: size for name, size in SIZES.items() if family.experts or "expert" not in name} | family.fixed
    given = {"tie_word_embeddings": tied, "num_labels": 1, "architectures": [architecture]}
    given |= known if family.inside is None else {family.inside.key: known | {"tie_word_embeddings": tied}}
    config = model_class.config_class(**given)
    settings = text_settings(config.to_dict())
    with torch.device("meta"):
        model = model_class(config)
    names = family.experts
    stacks = {}
    if names is not None and names.stacks is None and not names.joined:
        single = f"{names.block}.experts.{{}}."
        stacks["gate_up_proj"] = [f"{single}{names.gate}.weight", f"{single}{names.up}.weight"]
        stacks["down_proj"] = [f"{single}{names.down}.weight"]
    expected = shapes_in_a_folder(model, 3, stacks)
    if names is not None and names.joined:  # folders have the last two dims in the other order
        expected = {
            name: (shape[0], shape[2], shape[1]) if ".mlp.experts." in name else shape
            for name, shape in expected.items()
        }
    if names is not None:
        for own in ("gate.", "e_score_correction_bias"):
            expected = {name.replace(f"mlp.{own}", f"{names.block}.{own}"): shape for name, shape in expected.items()}
    if family.inside is not None:  # test_vision_families.py compares what is left out, and names on the disk
        prefix, own = "model.language_model.", family.inside.folder_prefix
        heads = ("lm_head.", "score.")
        text = {name: shape for name, shape in expected.items() if name.startswith((prefix, *heads))}
        assert len(text) < len(expected) - 50
        expected = {name.replace(prefix, own): shape for name, shape in text.items()}
    if tied and not is_classifier:
        del expected["lm_head.weight"]
    specs = (value_param_map if is_classifier else param_map)(family, shape_of(settings))
    claimed = hf_tensors(specs)
    constants = constant_map(family, shape_of(settings))
    found = {tensor.name: tensor.shape for tensor in claimed}
    assert found | {constant.name: constant.shape for constant in constants.values()} == expected
    assert len(claimed) + len(constants) == len(expected)


def test_mixtral_routes_over_the_chosen_experts_alone():
    """Other keys, and weights that always add up to 1. Would not catch a router that adds noise while training."""
    settings = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 20, "norm_topk_prob": False}
    settings |= {"num_hidden_layers": 2}
    assert Routing.from_hf(FAMILIES["MixtralForCausalLM"], settings) == Routing(8, 2, 20, normalised=True)
    settings |= {"num_experts": 6, "moe_intermediate_size": 10}
    assert Routing.from_hf(QWEN3_MOE, settings) == Routing(6, 2, 10, normalised=False)


@pytest.mark.parametrize(
    ("architecture", "settings", "window"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, None),
        ("MistralForCausalLM", {}, 4096),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MixtralForCausalLM", {}, None),
        ("MixtralForCausalLM", {"sliding_window": 8}, 8),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, 8),
    ],
)
def test_windows_that_are_in_force(architecture, settings, window):
    """And what takes their place. Would not catch a default that transformers changes."""
    family, settings = FAMILIES[architecture], settings | {"num_hidden_layers": 2}
    assert sliding_window(family, settings) == window
    without = full_attention(family, settings)
    assert sliding_window(family, settings | without) is None
    assert without.get("layer_types") == (None if window is None else ["full_attention"] * 2)


@pytest.mark.parametrize(
    ("settings", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, ()),
        ({"mlp_only_layers": [4, 0]}, (0, 4)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2, 3, 4)),
    ],
)
@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_dense_layers_by_hand(architecture, settings, dense):
    """Both of Qwen's keys, of 5 layers. Would not catch a layer that is built otherwise than it is counted."""
    assert dense_layers(FAMILIES[architecture], settings | {"num_hidden_layers": 5}) == dense
    assert dense_layers(LLAMA, settings | {"num_hidden_layers": 5}) == ()


def test_a_latent_layer_by_hand():
    """What TP cuts and what it leaves whole, with and without a latent vector of queries. Would not catch the rows of
    one head in the place of another's.
    """
    sizes = {"num_attention_heads": 4, "hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 20}
    sizes |= {name: SIZES[name] for name in SIZES if name.startswith(("qk_", "v_", "kv_"))}
    sizes |= {"vocab_size": 70, "tie_word_embeddings": False, "architectures": ["DeepseekV2ForCausalLM"]}
    sizes |= {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 2}
    family, attention = FAMILIES["DeepseekV2ForCausalLM"], "decoder.layers.0.self_attention."
    for q_rank, fused, query in ((12, "fused_qkv_a_proj", "linear_q_up"), (None, "kv_a_proj_with_mqa", "linear_q")):
        params = param_map(family, shape_of(sizes | {"q_lora_rank": q_rank}))
        down, up = (params[f"{attention}{name}.weight"].tensor for name in ("linear_down", query))
        assert down.name == f"model.layers.0.self_attn.{fused}.weight" and not down.is_split
        for rank in range(2):
            place = Place(rank, 2, 64)
            assert shard_of(down, place).shape == ((q_rank or 0) + 10 + 4, 24)
            assert shard_of(up, place).shape == (2 * 12, q_rank or 24)
            assert shard_of(params[f"{attention}linear_kv_up.weight"].tensor, place).shape == (2 * (8 + 6), 10)
            assert shard_of(params[f"{attention}linear_proj.weight"].tensor, place).shape == (24, 2 * 6)
        assert params["decoder.layers.0.mlp.shared_experts.linear_fc2.weight"].tensor.segments[0].shape == (24, 16)


def test_groups_and_scales_of_experts():
    """Where one key makes groups of another's numbers. Would not catch a key that transformers renames."""
    settings = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    settings |= {"n_group": 4, "topk_group": 2, "n_shared_experts": None}
    for method, groups in (("greedy", (1, 1)), ("group_limited_greedy", (4, 2))):
        v2 = Routing.from_hf(FAMILIES["DeepseekV2ForCausalLM"], settings | {"topk_method": method})
        assert (v2.num_groups, v2.groups_per_token) == groups and (v2.scale, v2.normalised) == (1.0, False)
        assert v2.shared_size == 0 and v2.dense_layers == ()
        overrides = rollout_settings(FAMILIES["DeepseekV2ForCausalLM"], settings | {"topk_method": method})
        assert (overrides["n_group"], overrides["topk_group"]) == groups
    v3 = Routing.from_hf(FAMILIES["DeepseekV3ForCausalLM"], settings | {"n_shared_experts": 2})
    assert (v3.num_groups, v3.groups_per_token, v3.scale, v3.normalised) == (4, 2, 2.5, True)
    assert v3.shared_size == 16 and v3.dense_layers == (0, 1)
    assert routing_problem(v3) is None
    assert routing_problem(replace(v3, num_groups=3)) == ({"n_group": 3}, ANY)
    assert routing_problem(replace(v3, num_groups=8)) == ({"n_group": 8}, ANY)
    assert routing_problem(replace(v3, groups_per_token=5)) == ({"topk_group": 5}, ANY)


def test_best_groups_by_hand():
    """Two of three groups, by their two largest and by their largest. Would not catch a tie."""
    from megatron_rl.model.grouped_router import in_best_groups

    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.1, 0.6]])
    out = float("-inf")
    assert in_best_groups(scores, 3, 1, 2).tolist() == [[out, out, 0.5, 0.5, out, out]]
    assert in_best_groups(scores, 3, 2, 1)[0, [2, 3]].tolist() == [out, out]
    assert in_best_groups(scores, 3, 3, 1) is scores


def test_a_replayed_choice_gets_its_own_weights():
    """What stands between the router and its top K is asked as Megatron's router asks it, and its choice counts.

    Would not catch a replay of other tokens.
    """
    from megatron_rl.model.grouped_router import GroupedRouter

    class Replay:
        def balance(self):
            return None

        def get_replay_topk(self, scores, topk, num_groups, group_topk, default_compute_topk):
            _, own = default_compute_topk(scores, topk, num_groups, group_topk)
            assert own.sort().values.tolist() == [[0, 3]]
            return None, torch.tensor([[1, 2]])

    settings = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    router = GroupedRouter.__new__(GroupedRouter)
    torch.nn.Module.__init__(router)
    router.groups = Routing.from_hf(FAMILIES["DeepseekV3ForCausalLM"], settings)
    router.scoring, router.topk, router.router_replay = router.groups.scoring, 2, Replay()
    router.register_buffer("correction_bias", torch.tensor([9.0, 0.0, 0.0, 9.0]))
    weights, chosen = router.routing(torch.tensor([[[0.0, 0.0, 100.0, 1.0]]]))
    assert chosen.tolist() == [[False, True, True, False]]
    assert weights[0].tolist() == pytest.approx([0.0, 2.5 / 3, 5 / 3, 0.0])


def test_classifiers_and_their_labels():
    """transformers leaves out the labels when there are two. Would not catch a head with a bias."""
    assert is_reward_model(["LlamaForSequenceClassification"]) and not is_reward_model(["LlamaForCausalLM"])
    assert family_of(["LlamaForSequenceClassification"]) is LLAMA
    assert [num_labels(s) for s in ({}, {"id2label": {"0": "x"}}, {"num_labels": 3})] == [2, 1, 3]


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}},
    ],
)
def test_rotary_frequencies_are_those_of_transformers(rope):
    """Both spellings of config.json, other numbers than Llama 3.1's. Would not catch a use of them elsewhere."""
    from megatron_rl.model.layer_specs import rotary_frequencies

    config = LlamaConfig(hidden_size=128, num_attention_heads=2, **rope)
    expected = LlamaRotaryEmbedding(config).inv_freq
    assert torch.equal(rotary_frequencies(config, 64), expected)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_other_rotary_embeddings_are_refused_by_the_builder(kind):
    """As preflight does. Would not catch a type that is known and meant otherwise."""
    from megatron_rl.model.layer_specs import rotary_frequencies

    config = LlamaConfig(hidden_size=128, num_attention_heads=2)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 500.0}
    with pytest.raises(ConfigError, match=f"rope_type='{kind}' is not supported; known: default, linear, llama3"):
        rotary_frequencies(config, 64)
