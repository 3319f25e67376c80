"""Every kind of training layout with a rollout layout and a tiny model: what tests of transitions run through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from sweeps import marks_of
from tiny_gpt_oss import save_gpt_oss
from tiny_minimax import save_minimax
from tiny_models import (
    run_config,
    save_deepseek_v2,
    save_deepseek_v3,
    save_glm4_moe,
    save_llama,
    save_moonlight,
    save_qwen2,
    save_qwen2_moe,
    save_qwen3,
    save_qwen3_moe,
)

LR = 1e-2


@dataclass(frozen=True)
class Case:
    """A training layout, a rollout TP size, and a model; `options` are configuration keys with `__` for dots.

    rollout_ep: 1, or the ranks of a replica, where these generate with whole experts; more than rollout_tp with
    attention DP.
    lacks: whether ranks lack anything of their rollout shards.
    """

    name: str
    tp: int
    pp: int
    rollout_tp: int
    dp: int = 1
    save: Callable = save_qwen2
    model: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    lacks: bool = True
    rollout_ep: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def config(self, path: str):
        rollout = {f"{ROLLOUT}tensor_model_parallel_size": self.rollout_tp}
        rollout[f"{ROLLOUT}expert_parallel_size"] = self.rollout_ep
        rollout[f"{ROLLOUT}data_parallel_size"] = max(1, self.rollout_ep // self.rollout_tp)
        return run_config(path, self.tp, self.pp, actor_rollout_ref__actor__optim__lr=LR, **rollout, **self.options)


MEGATRON = "actor_rollout_ref__actor__megatron__"
ROLLOUT = "actor_rollout_ref__rollout__"
# The vocabulary of 70 has 192 rows at TP3, of which the last rank has padding only, and 128 in vLLM.
THREES = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
FOUR_KV_HEADS = {"num_key_value_heads": 4}
SP = {f"{MEGATRON}sequence_parallel": True}
EP2, ETP1 = {f"{MEGATRON}expert_model_parallel_size": 2}, {f"{MEGATRON}expert_tensor_parallel_size": 1}
CASES = [
    Case("TP2PP2-TP2", 2, 2, 2),
    Case("TP4-TP2", 4, 1, 2, model=FOUR_KV_HEADS),
    Case("TP4-TP1", 4, 1, 1, model=FOUR_KV_HEADS),
    Case("TP2PP2DP2-TP1", 2, 2, 1, dp=2),
    Case("PP4-TP1", 1, 4, 1),
    Case("PP2CP2-TP2", 1, 2, 2, dp=2, options={f"{MEGATRON}context_parallel_size": 2}),
    Case("TP2PP2VPP2-TP1", 2, 2, 1, options={f"{MEGATRON}virtual_pipeline_model_parallel_size": 2}),
    Case("PP2-uneven-TP1", 1, 2, 1, options={f"{MEGATRON}num_layers_in_first_pipeline_stage": 1}),
    Case("PP2-TP2", 1, 2, 2, save=save_llama),
    Case("PP2-TP2-one-kv-head", 1, 2, 2, model={"num_key_value_heads": 1}),
    Case("TP3-TP1-other-padding", 3, 1, 1, model=THREES),
    Case("TP2PP2-TP1-dropping", 2, 2, 1, save=save_llama, options={f"{ROLLOUT}drop_train_weights": True}),
    Case("TP2PP2SP-TP1-qwen3", 2, 2, 1, save=save_qwen3, options=SP),
    Case("TP2ETP2-TP2", 2, 1, 2, save=save_qwen3_moe, options=SP, lacks=False),
    Case("TP2EP2ETP1-TP2", 2, 1, 2, save=save_qwen3_moe, options=SP | EP2 | ETP1),
    Case("TP2DP2EP2ETP2-TP1", 2, 1, 1, dp=2, save=save_qwen3_moe, options=SP | EP2),
    Case("TP2PP2ETP2-TP1-qwen2-moe", 2, 2, 1, save=save_qwen2_moe, options=SP),
    Case("TP2ETP2-TP1-deepseek-v3", 2, 1, 1, save=save_deepseek_v3, options=SP),
    Case("TP2PP2ETP2-TP2-deepseek-v2", 2, 2, 2, save=save_deepseek_v2, options=SP),
    Case("TP2PP2ETP2-TP1-gpt-oss", 2, 2, 1, save=save_gpt_oss, options=SP),
    Case("TP2PP2ETP2-TP1-minimax", 2, 2, 1, save=save_minimax, options=SP),
    Case("DP2EP2-TP2-gpt-oss", 1, 1, 2, dp=2, save=save_gpt_oss, options=EP2),
    # Experts that training cuts over TP, deals out as generation does, and deals out inside of stages.
    Case("TP2PP2ETP2-TP2EP2", 2, 2, 2, save=save_qwen3_moe, options=SP, rollout_ep=2),
    Case("TP2EP2ETP1-TP2EP2", 2, 1, 2, save=save_qwen3_moe, options=SP | EP2 | ETP1, lacks=False, rollout_ep=2),
    Case("PP2DP2EP2-TP2EP2", 1, 2, 2, dp=2, save=save_qwen3_moe, options=EP2, rollout_ep=2),
    Case("TP2PP2ETP2-TP2EP2-deepseek-v3", 2, 2, 2, save=save_deepseek_v3, options=SP, rollout_ep=2),
    Case(
        "TP2EP2ETP1-TP2EP2-deepseek-v3",
        2,
        1,
        2,
        save=save_deepseek_v3,
        options=SP | EP2 | ETP1,
        lacks=False,
        rollout_ep=2,
    ),
    Case("PP2DP2EP2-TP2EP2-deepseek-v3", 1, 2, 2, dp=2, save=save_deepseek_v3, options=EP2, rollout_ep=2),
    Case("TP2ETP2-TP2EP2-gpt-oss", 2, 1, 2, save=save_gpt_oss, options=SP, rollout_ep=2),
    Case("TP2ETP2-TP2EP2-minimax", 2, 1, 2, save=save_minimax, options=SP, rollout_ep=2),
    Case("TP2ETP2-TP2EP2-qwen2-moe", 2, 1, 2, save=save_qwen2_moe, options=SP, rollout_ep=2),
    Case("PP2-TP2EP2-glm4-moe", 1, 2, 2, save=save_glm4_moe, rollout_ep=2),
    Case("PP4-TP4EP4", 1, 4, 4, save=save_qwen3_moe, model={"num_experts": 8}, rollout_ep=4),
    # Attention DP.
    Case("PP2-DP2EP2", 1, 2, 1, save=save_qwen3_moe, rollout_ep=2),
    Case("TP2PP2ETP2-DP2EP2-deepseek-v3", 2, 2, 1, save=save_deepseek_v3, options=SP, rollout_ep=2),
    Case(
        "TP2PP2EP2ETP1-DP4EP4",
        2,
        2,
        1,
        save=save_qwen3_moe,
        model={"num_experts": 8},
        options=SP | EP2 | ETP1,
        rollout_ep=4,
    ),
    Case("PP4-TP2DP2EP4", 1, 4, 2, save=save_qwen3_moe, model={"num_experts": 8}, rollout_ep=4),
    Case("PP2DP2EP2-TP1-moonlight", 1, 2, 1, dp=2, save=save_moonlight, options=EP2),
]
OFTEN = ("TP2EP2ETP1-TP2", "TP2EP2ETP1-TP2EP2")
"""What `make test` goes through: experts on EP and ETP that differ from TP, and whole experts in
generation; `test_hybrid_engine.py` has stages.

The others differ in the size of an axis or combine what is here; plans are checked for all layouts in
tests/hybrid_engine.
"""
WEEKLY_CASES = (
    "TP4-TP1",
    "PP2-TP2",
    "TP2PP2SP-TP1-qwen3",
    "TP2ETP2-TP1-deepseek-v3",
    "TP2PP2ETP2-TP1-minimax",
    "DP2EP2-TP2-gpt-oss",
    "TP2PP2ETP2-TP2EP2",
    "TP2EP2ETP1-TP2EP2-deepseek-v3",
    "PP2DP2EP2-TP2EP2-deepseek-v3",
    "TP2ETP2-TP2EP2-gpt-oss",
    "TP2ETP2-TP2EP2-minimax",
    "TP2ETP2-TP2EP2-qwen2-moe",
    "PP2-TP2EP2-glm4-moe",
    "PP4-TP4EP4",
    "TP2PP2ETP2-DP2EP2-deepseek-v3",
    "TP2PP2EP2ETP1-DP4EP4",
    "PP4-TP2DP2EP4",
)
"""What the sweeps leave to the week: further families in a layout that another model has, or a subset of its axes."""


def when_of(case: Case) -> list[pytest.MarkDecorator]:
    """None of `OFTEN`; the others are exhaustive, and of these some weekly."""
    return marks_of(case.name, OFTEN, WEEKLY_CASES)
