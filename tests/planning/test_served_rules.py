"""Configurations that a service refuses."""

from __future__ import annotations

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.planning.served_states import check_served

OPTIM, MEGATRON = "actor_rollout_ref.actor.optim", "actor_rollout_ref.actor.megatron"
OFFLOADED = f"{OPTIM}.override_optimizer_config.optimizer_cpu_offload"
REFUSED = {
    "Muon": ([f"{OPTIM}.optimizer=muon"], "steps with Adam"),
    "overlapped": ([f"{MEGATRON}.override_ddp_config.overlap_grad_reduce=true"], "once, at a step"),
    "masters on the host": ([f"{OFFLOADED}=true", "trainer.device=cuda", f"{MEGATRON}.dtype=bfloat16"], "masters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_what_to_try(case: str) -> None:
    """With it, the same configuration is served. Would not catch a rule that one of these hides."""
    keys, sentence = REFUSED[case]
    base = ["algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", *keys]
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_served(load_config("configs/demo_cpu.yaml", base))
    check_served(load_config("configs/demo_cpu.yaml", [*base, *str(caught.value).split("try: ")[1].split()]))
