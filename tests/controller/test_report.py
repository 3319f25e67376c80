"""How far an export's logits may be from the trainer's."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from megatron_rl.controller.report import export_bound, fallen, with_engine_norms


@pytest.mark.parametrize(
    ("logits", "bound"), [([], 1e-4), ([3.0, -9.0], 1e-4), ([3.0, -34.0], 3.4e-4), ([float("nan")], 1e-4)]
)
def test_the_bound_grows_with_the_logits(logits: list[float], bound: float) -> None:
    """A hundred-thousandth of the largest, at least 1e-4. Would not catch a model whose layers lose more digits."""
    assert export_bound(torch.tensor(logits)) == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize(
    ("accuracies", "says"), [([0.4, 0.7, 0.025], True), ([0.4, 0.28], False), ([0.4, 0.5], False), ([0.0, 0.0], False)]
)
def test_a_sharp_fall_names_the_learning_rate(accuracies: list[float], says: bool) -> None:
    """A third of the first number at least. Would not catch a fall that another validation had made up for."""
    lines = fallen({"val_accuracy": accuracies, "val_reward": []}, {"val_accuracy": "held-out accuracy"}, 3e-3)
    text = "held-out accuracy fell from 0.400 to 0.025: a lower learning rate is the first thing to try, such as "
    assert lines == ([f"{text}actor_rollout_ref.actor.optim.lr=0.0003"] if says else [])


def test_all_norms_of_a_latent_model_have_the_epsilon_of_its_config() -> None:
    """transformers makes those of latent vectors with 1e-6. Would not catch norms under other names."""
    sizes = {"hidden_size": 8, "vocab_size": 8, "num_attention_heads": 1, "moe_intermediate_size": 4}
    latent = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2}
    layers = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "intermediate_size": 4, "rms_norm_eps": 1e-5}
    model = with_engine_norms(DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **latent, **layers)))
    epsilons = [norm.variance_epsilon for name, norm in model.named_modules() if name.endswith("norm")]
    assert epsilons == [1e-5] * 5
