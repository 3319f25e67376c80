"""The map between Megatron's parameters and Hugging Face's tensors."""

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.model.families import FAMILIES, ParamSpec, family_of, padded_vocab_size, param_map

LLAMA, QWEN2 = FAMILIES["LlamaForCausalLM"], FAMILIES["Qwen2ForCausalLM"]


def test_one_tied_qwen2_layer_by_hand():
    """Every parameter, with its dimension and order of parts. Would not catch a name that Megatron does not use."""
    embedding = ParamSpec("model.embed_tokens.weight", ("model.embed_tokens.weight",), 0, padded_vocab=True)
    mega, hf = "decoder.layers.0.", "model.layers.0."
    qkv = [tuple(f"{hf}self_attn.{part}_proj.{kind}" for part in "qkv") for kind in ("weight", "bias")]
    gate_up = (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight")

    def same(name, tp_dim):
        return ParamSpec(hf + name, (hf + name,), tp_dim)

    assert param_map(QWEN2, num_layers=1, tied=True) == {
        "embedding.word_embeddings.weight": embedding,
        "output_layer.weight": embedding,
        "decoder.final_layernorm.weight": ParamSpec("model.norm.weight", ("model.norm.weight",), None),
        f"{mega}input_layernorm.weight": same("input_layernorm.weight", None),
        f"{mega}pre_mlp_layernorm.weight": same("post_attention_layernorm.weight", None),
        f"{mega}self_attention.linear_qkv.weight": ParamSpec(f"{hf}self_attn.qkv_proj.weight", qkv[0], 0),
        f"{mega}self_attention.linear_qkv.bias": ParamSpec(f"{hf}self_attn.qkv_proj.bias", qkv[1], 0),
        f"{mega}self_attention.linear_proj.weight": same("self_attn.o_proj.weight", 1),
        f"{mega}mlp.linear_fc1.weight": ParamSpec(f"{hf}mlp.gate_up_proj.weight", gate_up, 0),
        f"{mega}mlp.linear_fc2.weight": same("mlp.down_proj.weight", 1),
    }


def test_an_untied_head_is_its_own_tensor():
    """Only the head differs from the tied map. Would not catch an error in both maps."""
    tied, untied = (param_map(LLAMA, 2, tied) for tied in (True, False))
    assert untied["output_layer.weight"] == ParamSpec("lm_head.weight", ("lm_head.weight",), 0, padded_vocab=True)
    assert {name for name in tied if tied[name] != untied[name]} == {"output_layer.weight"}


def test_layers_are_counted_and_llama_has_no_bias():
    """Two layers give the same names twice. Would not catch a bias that is present and zero."""
    names = set(param_map(LLAMA, 2, tied=False))
    assert len(names) == 3 + 2 * 6
    assert {name.replace("layers.0", "layers.1") for name in names if "layers.0." in name} < names
    assert not any(name.endswith("bias") for name in names)


@pytest.mark.parametrize("tied", [True, False])
def test_hf_tensors_are_used_once(tied):
    """No two parameters claim a tensor, except the tied head. Would not catch a tensor that nobody claims."""
    params = param_map(QWEN2, 3, tied)
    claimed = [name for spec in params.values() for name in spec.hf_names]
    assert len(claimed) - len(set(claimed)) == tied
    assert ("lm_head.weight" in claimed) != tied


def test_family_of_takes_the_first_known_and_lists_the_known():
    """An unknown name is not fatal beside a known one. Would not catch a family with wrong traits."""
    assert family_of(["Other", "Qwen2ForCausalLM"]) is QWEN2 and QWEN2.qkv_bias and not LLAMA.qkv_bias
    for architectures in (["GPT2LMHeadModel"], [], None):
        with pytest.raises(ConfigError, match="known: LlamaForCausalLM, Qwen2ForCausalLM") as raised:
            family_of(architectures)
        assert str(architectures) in str(raised.value)


@pytest.mark.parametrize(("vocab", "padded"), [(1, 64), (64, 64), (65, 128), (151_936, 151_936), (32_001, 32_064)])
def test_padded_vocab_size(vocab, padded):
    """Up to a multiple of 64. Would not catch a padding that vLLM changes."""
    assert padded_vocab_size(vocab) == padded
