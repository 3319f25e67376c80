"""The default bounds on log-prob differences, on real engines: sound weights pass, wrong ones do not."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from rollout_checks import ask, prompts
from tiny_models import run_config, save_llama

from megatron_rl.columns import SCORING
from megatron_rl.config.load import DIFF_BOUNDS
from megatron_rl.config.rollout_keys import RolloutConfig
from megatron_rl.controller.algorithm import parity_problem
from megatron_rl.observe.batch_metrics import parity_metrics
from megatron_rl.records import Sampling

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

FAULTS = {
    "another layer's": ("layers.1.mlp.linear_fc2.weight", lambda own, other: other),
    "shifted by a row": ("layers.0.self_attention.linear_qkv.weight", lambda own, other: own.roll(1, 0)),
    "a shard twice": (
        "layers.2.self_attention.linear_proj.weight",
        lambda own, other: own[:, : own.shape[1] // 2].repeat(1, 2),
    ),
}
"""A parameter, and what it becomes of its own and of the last layer's content."""


def parity_of_faults(config) -> dict[str, dict[str, float]]:
    """Metrics of parity with sound weights, and with each fault in the weights of one side."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    actor, rollout = worker.roles["actor"], worker.roles["rollout"]
    samples = [Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=24, salt=salt) for salt in range(8)]
    rollout.enter()
    drawn = [ask(rollout, prompts(), sampling) for sampling in samples]
    rollout.exit()
    parameters = dict(actor.trainable.models[0].named_parameters())

    def parity() -> dict[str, float]:
        scores = [actor.log_probs(one.read_by(SCORING)).flat("old_log_probs") for one in drawn]
        return parity_metrics(torch.cat([one.flat("rollout_log_probs") for one in drawn]), torch.cat(scores))

    found = {"sound": parity()}
    for name, (suffix, change) in FAULTS.items():
        (full,) = [key for key in parameters if key.endswith(suffix)]
        weight = parameters[full].data
        last = parameters[full.replace(f"layers.{suffix.split('.')[1]}.", "layers.3.")].data
        before = weight.clone()
        weight.copy_(change(before, last))
        found[name] = parity()
        weight.copy_(before)
    return found


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.exhaustive), "bfloat16"])
def test_bounds_let_rounding_pass_and_stop_a_wrong_weight(tmp_path, dtype) -> None:
    """One matrix of four layers at a time. Rounding has three times and more of room.

    Would not catch a weight that is one small step old, which checksums do, nor rounding in a deeper model.
    """
    bounds = {key.rpartition(".")[2]: by_dtype[dtype] for key, by_dtype in DIFF_BOUNDS.items()}
    config = run_config(save_llama(tmp_path), 1, 1, actor_rollout_ref__actor__megatron__dtype=dtype)
    (found,) = run_ranks(1, parity_of_faults, config, timeout=200)
    assert not parity_problem({name: 3 * value for name, value in found["sound"].items()}, RolloutConfig(**bounds))
    for fault in FAULTS:
        assert "logprob_diff_mean_bound" in parity_problem(found[fault], RolloutConfig(**bounds))
        without_mean = RolloutConfig(**bounds | {"logprob_diff_mean_bound": 1e9})
        assert "logprob_diff_bound" in parity_problem(found[fault], without_mean)
