"""Tiny random Hugging Face models and run configurations for tests, with a tokenizer that only exports need."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_rl.config.schema import RunConfig
from megatron_rl.records import Batch, ragged, ragged_from_lengths, single_turn

# 70 tokens are padded to 128 rows, so at TP2 the second rank holds 6 real rows and 58 of padding.
SIZES = {
    "vocab_size": 70,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}


def save_qwen2(folder: Path, **changes) -> str:
    """A Qwen2 with tied embeddings unless changed; biases drawn too, so that forgetting one is noticed."""
    torch.manual_seed(0)
    return save(Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "tie_word_embeddings": True, **changes})), folder)


def save_qwen2_with_windows(folder: Path) -> str:
    """A Qwen2 with a sliding window, longer than any sequence of these tests, in the last two layers only."""
    return save_qwen2(folder, use_sliding_window=True, sliding_window=230, max_window_layers=2)


def save_llama(folder: Path, **changes) -> str:
    """A Llama with its own output head unless changed."""
    torch.manual_seed(0)
    return save(LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **changes})), folder)


# Of the 16 frequencies of a head of 32 some are kept, some divided, and some lie between.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def save_llama31(folder: Path, **changes) -> str:
    """A Llama with Llama 3.1's rotary scaling."""
    return save_llama(folder, **{"rope_parameters": LLAMA3_ROPE, **changes})


def save_mistral(folder: Path, **changes) -> str:
    """A Mistral whose sliding window is longer than any sequence of these tests."""
    torch.manual_seed(0)
    settings = {**SIZES, "tie_word_embeddings": False, "sliding_window": 230, **changes}
    return save(MistralForCausalLM(MistralConfig(**settings)), folder)


def save_mixtral(folder: Path, **changes) -> str:
    """A Mixtral of 4 experts, 2 to a token."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    settings = {**SIZES, **experts, "tie_word_embeddings": False, **changes}
    return save(MixtralForCausalLM(MixtralConfig(**settings)), folder)


# Heads of 48 make attention wider than the hidden state.
QWEN3 = SIZES | {"head_dim": 48}


def save_qwen3(folder: Path, **changes) -> str:
    """A Qwen3 with tied embeddings unless changed."""
    torch.manual_seed(0)
    return save(Qwen3ForCausalLM(Qwen3Config(**{**QWEN3, "tie_word_embeddings": True, **changes})), folder)


def save_qwen3_moe(folder: Path, **changes) -> str:
    """A Qwen3-MoE of 6 experts, 2 to a token, with its own output head unless changed."""
    torch.manual_seed(0)
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    settings = {**QWEN3, **experts, "tie_word_embeddings": False, **changes}
    return save(Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)), folder)


ROUTERS = ("mlp.gate.weight", "moe.gate.weight", "moe.e_score_correction_bias", "router.weight", "router.bias")


def tie_routers(path: str) -> str:
    """Make experts 0, 1 and 2 of a saved model's 6 equally likely, and 3, 4 and 5, but for noise of rounding's size."""
    file = Path(path, "model.safetensors")
    tensors, generator = load_file(file), torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.endswith(ROUTERS):
            for expert in (1, 2, 4, 5):
                noise = 1e-7 * torch.randn(tensor[expert].shape, generator=generator)
                tensor[expert] = tensor[expert - expert % 3] + noise
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def save_qwen3_moe_with_dense_layers(folder: Path) -> str:
    """Experts in layer 3 alone: layer 1 is listed, layers 0 and 2 are not every second."""
    return save_qwen3_moe(folder, mlp_only_layers=[1], decoder_sparse_step=2)


def save_qwen2_moe(folder: Path, **changes) -> str:
    """A Qwen2-MoE of 6 experts, 2 to a token, a gated shared one beside them, and a dense layer in each half."""
    torch.manual_seed(0)
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": False}
    layers = {"shared_expert_intermediate_size": 80, "mlp_only_layers": [0, 3]}
    settings = {**SIZES, **experts, **layers, "tie_word_embeddings": False, **changes}
    return save(Qwen2MoeForCausalLM(Qwen2MoeConfig(**settings)), folder)


# Latent vectors have the only size for which vLLM has a kernel on CPU; of two layers, because they are large.
LATENT = SIZES | {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}


def save_deepseek_v2(folder: Path, **changes) -> str:
    """A DeepSeek-V2: queries from a latent vector, yarn, experts of 2 out of 4 groups by softmax scores."""
    torch.manual_seed(0)
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
    settings = {**LATENT, **groups, "q_lora_rank": 96, "rope_parameters": YARN, **changes}
    return save(DeepseekV2ForCausalLM(DeepseekV2Config(**settings)), folder)


def save_deepseek_v3(folder: Path, **changes) -> str:
    """A DeepSeek-V3: the same attention, experts by sigmoid scores and a bias large enough to change the choice."""
    torch.manual_seed(0)
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
    settings = {**LATENT, **groups, "q_lora_rank": 96, "rope_parameters": YARN, **changes}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**settings))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return save(model, folder)


def save_moonlight(folder: Path, **changes) -> str:
    """The same without a latent vector of queries, without yarn, and with one group, as Moonlight has it."""
    return save_deepseek_v3(
        folder, **{"q_lora_rank": None, "rope_parameters": None, "n_group": 1, "topk_group": 1} | changes
    )


# Windows are shorter than prompts and answers, bounds and scales such that forgetting one is noticed.
GEMMA = SIZES | {
    "head_dim": 48,
    "query_pre_attn_scalar": 40,
    "sliding_window": 12,
    "attn_implementation": "eager",  # which alone bounds products
}


def save_gemma2(folder: Path, **changes) -> str:
    """A Gemma-2: windows in layers 0 and 2, products bounded by 2 and logits by 3."""
    torch.manual_seed(0)
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return save(Gemma2ForCausalLM(Gemma2Config(**{**GEMMA, **caps, **changes})), folder)


def save_gemma3(folder: Path, **changes) -> str:
    """A Gemma-3: windows in all layers but the third, with a base of their own, and scaling in that one."""
    torch.manual_seed(0)
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    settings = {**GEMMA, "rope_parameters": ropes, "sliding_window_pattern": 3, **changes}
    return save(Gemma3ForCausalLM(Gemma3TextConfig(**settings)), folder)


def save_glm4_moe(folder: Path, **changes) -> str:
    """A GLM-4.5: biases, norms of q and k, half of a head turned; layer 0 is dense, and a bias changes choices."""
    torch.manual_seed(0)
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2}
    routing = {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
    attention = {"attention_bias": True, "use_qk_norm": True}
    settings = {**QWEN3, **experts, **routing, **attention, "tie_word_embeddings": False, **changes}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**settings))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return save(model, folder)


def save_reward_model(folder: Path, family: str) -> str:
    """A classifier with one label, of the family whose transformers classes begin with `family`."""
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForSequenceClassification")
    return save(model_class(config_class(**SIZES, num_labels=1)), folder)


def save(model: torch.nn.Module, folder: Path) -> str:
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("norm.weight") and not parameter.any():  # whose weight stands for 1 + w
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    model.float().save_pretrained(folder)
    save_test_tokenizer(folder)
    return str(folder)


def save_test_tokenizer(folder: Path) -> None:
    """The exporter copies the source's tokenizer, so the source needs one; and responses end at its end token, 1 as in
    `SIZES`. A family's class would make one of its own, which the model lacks, where none is named.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(33 + i): i for i in range(70)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    marks = {"unk_token": "!", "pad_token": "!", "eos_token": chr(34)}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder)


def run_config(model_path: str, tp_size: int, pp_size: int, **overrides) -> RunConfig:
    """A CPU configuration for `model_path`; overrides by dotted key with `__` for the dots."""
    megatron = "actor_rollout_ref.actor.megatron"
    dotted = {
        "actor_rollout_ref.model.path": model_path,
        f"{megatron}.tensor_model_parallel_size": tp_size,
        f"{megatron}.pipeline_model_parallel_size": pp_size,
        "actor_rollout_ref.rollout.kv_cache_memory_bytes": 16 << 20,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "data.train_files": "unused",
        "data.val_files": "unused",
        "data.max_prompt_length": 200,
        "data.max_response_length": 24,
        "custom_reward_function.path": "unused",
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.actor.shuffle": True,
        "trainer.device": "cpu",
        "trainer.total_training_steps": 100,
    } | {key.replace("__", "."): value for key, value in overrides.items()}
    config = OmegaConf.structured(RunConfig)
    for key, value in dotted.items():
        OmegaConf.update(config, key, value)
    return OmegaConf.to_object(config)


def random_batch(num_rows: int, seed: int = 0) -> Batch:
    """Ragged random sequences with every field a role reads; row lengths 4 to 24."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    lengths = [(draw(2, 12), draw(1, 12)) for _ in range(num_rows)]
    responses = torch.tensor([response for _, response in lengths])

    def noise(scale: float) -> torch.Tensor:
        return ragged_from_lengths(scale * torch.randn(int(responses.sum()), generator=generator), responses)

    return single_turn(
        ragged([torch.randint(2, 70, (sum(pair),), generator=generator) for pair in lengths]),
        responses,
        rollout_log_probs=noise(1.0),
        old_values=noise(1.0),
        advantages=noise(1.0),
        returns=noise(1.0),
    )
