"""What preflight accepts and refuses of the models that a run names."""

from __future__ import annotations

import copy
import json

import pytest
from model_folders import EXPERTS, problems, set_experts, write_model

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.reward_keys import RewardModelModelConfig, ScoringModelConfig
from megatron_rl.model.families import FAMILIES, REWARD_FAMILIES
from megatron_rl.planning.folder_checks import read_model_folder

MEGATRON = "actor_rollout_ref.actor.megatron"
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "topk_group": 2,
    "v_head_dim": 48,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


GEMMA = {"architectures": ["Gemma3ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "head_dim": 32}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"sliding_window": 4}, None),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50"),
        ({"layer_types": ["full_attention"]}, "must name the kind of each of the "),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention must be an object in braces"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
            "of full_attention rope_type='yarn'",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
    ],
)
def test_gemma_folders(config, tmp_path, changes, expected):
    """Windows that cut something off are right here. Would not catch a key that transformers renames."""
    path = write_model(tmp_path / "model", **GEMMA | changes)
    _, found = read_model_folder("model", ModelFolder(path))
    assert [expected in str(one) for one in found] == ([] if expected is None else [True])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mlp_only_layers": [9]}, "mlp_only_layers=[9] of "),
        ({"mlp_only_layers": "0"}, 'mlp_only_layers="0" of '),
        ({"decoder_sparse_step": 99}, "must leave experts to at least one of the "),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 of "),
        ({"num_experts": None}, "num_experts=null of "),
        ({"moe_intermediate_size": "20"}, 'moe_intermediate_size="20" of '),
        ({"num_experts_per_tok": 9}, "must be >= 1 and <= num_experts(8); try: 8"),
        ({"num_experts_per_tok": 1}, "try: norm_topk_prob=false"),
    ],
)
def test_experts_that_cannot_be_trained(moe_config, tmp_path, changes, expected):
    """Would not catch a kind of routing that transformers invents later."""
    write_model(tmp_path / "model", **EXPERTS | changes)
    (problem,) = problems(moe_config)
    assert expected in problem


def test_either_name_of_the_number_of_experts(moe_config, tmp_path):
    """transformers 4 and 5. Would not catch a third name."""
    named = {name: value for name, value in EXPERTS.items() if name != "num_experts"} | {"num_local_experts": 8}
    sizes, problems = read_model_folder("model", ModelFolder(write_model(tmp_path / "model", **named)))
    assert not problems and (sizes.num_experts, sizes.moe_intermediate_size) == (8, 20)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "must be one of DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM,",
        ),
        ({"architectures": None}, "architectures=[]"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2}},
            "rope_type='yarn' is not supported; known: default, linear, llama3",
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type='dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' needs finite numbers > 0 for factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with sliding_attention"),
        ({"use_sliding_window": True, "layer_types": ["chunked_attention"]}, "layer_types with chunked_attention"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu"'),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": None}, "num_hidden_layers=null of "),
    ],
)
def test_models_that_cannot_be_trained(config, tmp_path, changes, expected):
    """Would not catch a setting that transformers invents later."""
    write_model(tmp_path / "model", **changes)
    (problem,) = problems(config)
    assert expected in problem


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": None},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ],
)
def test_scaled_rotary_embeddings(config, tmp_path, rope):
    """Both spellings of config.json. Would not catch frequencies that the trainer computes otherwise."""
    write_model(tmp_path / "model", **rope)
    assert problems(config) == []


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"use_sliding_window": True, "sliding_window": 64}, None),
        ({"use_sliding_window": True, "sliding_window": 63, "layer_types": ["sliding_attention"] * 6}, 63),
        ({"use_sliding_window": False, "sliding_window": 8}, None),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 40}, 40),
    ],
)
def test_a_window_may_not_cut_anything_off(config, tmp_path, changes, limit):
    """16 + 48 tokens. Would not catch a window that config.json hides under another name."""
    path = write_model(tmp_path / "model", **changes)
    expected = []
    if limit is not None:
        rule = f"must be <= sliding_window({limit}) of {path}; try: data.max_response_length={limit - 16}"
        expected = [f"data.max_prompt_length=16 + data.max_response_length=48 {rule}"]
    assert problems(config) == expected


def test_mixtral_has_its_own_names(moe_config, tmp_path):
    """Experts are counted and sized under other keys. Would not catch names of tensors; the families' tests do."""
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    mixtral |= {"sliding_window": None, "intermediate_size": 20}
    path = write_model(tmp_path / "model", **mixtral)
    assert problems(moe_config) == []
    set_experts(moe_config, expert_model_parallel_size=1, expert_tensor_parallel_size=4)
    write_model(tmp_path / "model", **mixtral | {"intermediate_size": 18})
    assert problems(moe_config) == [
        f"etp(4) must divide intermediate_size(18) of {path}; try: {MEGATRON}.expert_tensor_parallel_size=2"
    ]
    write_model(tmp_path / "model", **mixtral | {"num_experts_per_tok": 1})
    (problem,) = problems(moe_config)
    assert problem.endswith("try: 2")


REWARD = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def test_a_critic_may_start_from_a_reward_model(config, tmp_path):
    """Would not catch a head of another shape; loading does."""
    config.critic.model.path = write_model(tmp_path / "critic", **REWARD)
    assert problems(config) == []
    path = write_model(tmp_path / "critic", **REWARD | {"id2label": None})
    assert problems(config) == [
        f"num_labels=2 of {path}/config.json must be 1, because critic.model.path is to give one value; try: 1"
    ]


def with_reward_model(config, path: str) -> None:
    config.reward_model.enable, config.reward_model.model.path = True, path


def test_a_reward_model_is_a_classifier_with_one_label(config, tmp_path):
    """A language model's folder and two labels are refused; a folder that is not there, too; all only where it is used.

    Would not catch a head that was never trained.
    """
    language_model, path = config.actor_rollout_ref.model.path, write_model(tmp_path / "reward", **REWARD)
    with_reward_model(config, path)
    assert problems(config) == []
    with_reward_model(config, language_model)
    (problem,) = problems(config)
    assert problem.startswith('architectures=["Qwen2ForCausalLM"] of') and "must be one of" in problem
    assert problem.endswith('for reward_model.model.path; try: ["Qwen2ForSequenceClassification"]')
    write_model(tmp_path / "reward", **REWARD | {"id2label": None})
    with_reward_model(config, path)
    (problem,) = problems(config)
    assert "must be 1, because reward_model.model.path is to give one value" in problem
    with_reward_model(config, str(tmp_path / "rewart"))
    (problem,) = problems(config)
    assert "it does not exist; did you mean: " in problem
    config.reward_model.enable = False
    assert problems(config) == []


def test_a_reward_model_fits_the_actor(config, tmp_path):
    """Layout keys, heads, positions and vocabulary. Would not catch other merges of the same tokens."""
    sizes = {"num_key_value_heads": 3, "max_position_embeddings": 63, "vocab_size": 101}
    with_reward_model(config, write_model(tmp_path / "reward", **REWARD | sizes))
    config.reward_model.megatron.pipeline_model_parallel_size = 1
    text = "\n".join(problems(config))
    assert "reward_model.megatron.pipeline_model_parallel_size=1 must equal actor_rollout_ref.actor.megatron" in text
    assert "tp(2) must divide num_key_value_heads(3)" in text and "max_position_embeddings(63)" in text
    assert "and the actor's read the same tokens, so their vocab_size must be equal: 100 of" in text


def test_every_reward_model_is_checked(config, tmp_path):
    """A further one by its own key: its folder, heads, length and tokens; a folder that two roles share once.

    Would not catch a folder that two reward models share, which is allowed.
    """
    paths = [write_model(tmp_path / name, **REWARD) for name in ("reward", "helpful")]
    with_reward_model(config, paths[0])
    further = ScoringModelConfig(RewardModelModelConfig(paths[1], None, True), micro_batch_size_per_gpu=128)
    further.use_dynamic_bsz, further.forward_max_token_len_per_gpu = False, 16384
    further.megatron = copy.deepcopy(config.reward_model.megatron)
    config.reward_models["helpful"] = further
    config.critic.model.path = paths[1]
    assert problems(config) == []
    (tmp_path / "helpful" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    (tmp_path / "model" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / "reward" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (problem,) = problems(config)
    assert problem.startswith(f"reward_models.helpful.model.path={paths[1]} must have the actor's tokens, or read text")
    assert "1 of 1 have other ids" in problem
    assert problem.endswith(f"try: reward_models.helpful.model.input_tokenizer={tmp_path / 'model'}")
    (tmp_path / "helpful" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    write_model(tmp_path / "helpful", **REWARD | {"num_hidden_layers": 4})
    (tmp_path / "helpful" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (problem,) = problems(config)
    assert problem.startswith(f"pp(3) must divide num_hidden_layers(4) ({paths[1]})")
    further.model.path = str(tmp_path / "absent")
    config.critic.model.path = config.actor_rollout_ref.model.path
    (problem,) = problems(config)
    assert problem.startswith("reward_models.helpful.model.path=") and "it does not exist" in problem


@pytest.mark.parametrize(
    ("vocabulary", "added", "problem"),
    [
        ({"b": 1, "a": 0}, [], None),
        ({"a": 0}, [{"content": "b", "id": 1}], None),
        ([["a", -1.0], ["b", -2.0]], [], None),
        (
            {"a": 1, "b": 0},
            [],
            "2 of 2 have other ids or are missing in its tokenizer.json, the first is 'a' (0 in",
        ),
        ({"a": 0}, [], "1 of 2 have other ids or are missing in its tokenizer.json, the first is 'b' (1 in"),
    ],
)
def test_a_reward_model_has_the_actors_tokens(config, tmp_path, vocabulary, added, problem):
    """Numbers of tokens, however the file has them. Would not catch another chat template, which is no token."""
    with_reward_model(config, write_model(tmp_path / "reward", **REWARD))
    for folder, tokenizer in (("model", {"a": 0, "b": 1}), ("reward", vocabulary)):
        content = {"model": {"vocab": tokenizer}, "added_tokens": added if folder == "reward" else []}
        (tmp_path / folder / "tokenizer.json").write_text(json.dumps(content))
    found = problems(config)
    assert found == [] if problem is None else problem in found[0] and len(found) == 1


def test_an_actor_may_not_start_from_a_reward_model(config, tmp_path):
    """It has no vocabulary head. Would not catch a classifier's folder that says it is a language model."""
    write_model(tmp_path / "model", **REWARD)
    (problem,) = problems(config)
    assert problem.endswith('for actor_rollout_ref.model.path; try: ["Qwen2ForCausalLM"]')
    assert not set(FAMILIES) & set(REWARD_FAMILIES)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_model_folder_must_be_complete(config, tmp_path, file):
    """Would not catch weights that do not belong to config.json; loading does."""
    (tmp_path / "model" / file).unlink()
    (problem,) = problems(config)
    assert "must hold" in problem and file.partition(".")[2] in problem


def test_another_critic_is_checked_too(config, tmp_path):
    """Its own folder, its own layers, the actor's tokens. Would not catch another tokenizer of the same size."""
    config.critic.model.path = write_model(tmp_path / "critic", num_hidden_layers=4, vocab_size=200)
    layers, vocabulary = problems(config)
    assert layers.startswith("pp(3) must divide num_hidden_layers(4)") and layers.endswith(
        f"try: {MEGATRON}.pipeline_model_parallel_size=1"
    )
    assert "vocab_size must be equal: 100 of" in vocabulary
    config.critic.model.path = str(tmp_path / "absent")
    (problem,) = problems(config)
    assert problem.startswith("critic.model.path=")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank(256) and qk_rope_head_dim(64) of "),
        ({"v_head_dim": None}, "v_head_dim=null of "),
        ({"q_lora_rank": "none"}, 'q_lora_rank="none" of '),
        ({"n_group": 3}, "must cut 8 experts into equal groups of at least 2"),
        ({"topk_group": 8}, "topk_group=8 of "),
        ({"first_k_dense_replace": 6}, "must leave experts to at least one of the 6 layers"),
        ({"scoring_func": "softmax"}, 'scoring_func="softmax" of '),
        ({"rope_interleave": False}, "rope_interleave=false of "),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 of "),
        ({"rope_parameters": YARN | {"mscale": 0.7}}, "both of mscale and mscale_all_dim, or neither"),
        ({"rope_parameters": YARN | {"attention_factor": 1.0}}, "yarn with attention_factor is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "known: default, yarn"),
    ],
)
def test_latent_attention_that_cannot_be_trained(moe_config, tmp_path, changes, expected):
    """Its settings and those of experts in groups. Would not catch one that transformers invents later."""
    write_model(tmp_path / "model", **LATENT | changes)
    (problem,) = problems(moe_config)
    assert expected in problem


def test_latent_attention_that_can_be_trained(moe_config, tmp_path):
    """With and without a latent vector of queries, mscales that differ. Would not catch a missing kernel."""
    for changes in ({}, {"q_lora_rank": None}, {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}):
        write_model(tmp_path / "model", **LATENT | changes)
        assert problems(moe_config) == []
    sizes, _ = read_model_folder("model", ModelFolder(write_model(tmp_path / "model", **LATENT)))
    assert (sizes.parts.shape.head_size, sizes.attention.cached, sizes.num_key_value_heads) == (96, 576, 12)
    assert (
        sizes.tp_divides["n_shared_experts * moe_intermediate_size"] == 40
        and sizes.tp_divides["intermediate_size"] == 192
    )


def test_what_latent_attention_is_not_combined_with(moe_config, tmp_path):
    """On a CPU the engine's experts. Would not catch a GPU on which these fail, too."""
    write_model(tmp_path / "model", **LATENT)
    actor, rollout = moe_config.actor_rollout_ref.actor, moe_config.actor_rollout_ref.rollout
    actor.router_replay.mode, rollout.enable_rollout_routing_replay = "R3", True
    mode, returns = problems(moe_config)
    assert mode.endswith("without which it hands out no experts; try: actor_rollout_ref.actor.router_replay.mode=R2")
    assert returns.endswith("enable_rollout_routing_replay=false")
    actor.router_replay.mode, rollout.enable_rollout_routing_replay = "R2", False
    assert problems(moe_config) == []
