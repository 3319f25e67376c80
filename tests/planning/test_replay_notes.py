"""What a plan says of the size of experts that travel with samples."""

from __future__ import annotations

from megatron_rl.config.schema import RunConfig
from megatron_rl.model.families import ModelShape
from megatron_rl.planning.replay_rules import replay_notes

A3B = ModelShape(48, 2048, 32, 4, 128, 768, 151936, tied=False, num_experts=128, experts_per_token=8)


def config_of(mode: str, prompts: int, returns: bool = False) -> RunConfig:
    config = RunConfig()
    config.actor_rollout_ref.actor.router_replay.mode = mode
    config.actor_rollout_ref.rollout.enable_rollout_routing_replay = returns
    config.actor_rollout_ref.rollout.n = 8
    config.data.train_batch_size, config.data.max_prompt_length, config.data.max_response_length = prompts, 1024, 3072
    return config


def test_a_large_step_is_told() -> None:
    """512 x 8 samples of 4096 tokens, 48 x 8 experts each: 6.44e9 bytes. Would not catch samples that are shorter."""
    for config in (config_of("R2", 512), config_of("R3", 512), config_of("disabled", 512, returns=True)):
        [note] = replay_notes(config, A3B)
        assert "384 bytes for each token" in note and "6.4 GB" in note


def test_nothing_is_said_of_little() -> None:
    """A small step, no replay, a dense model. Would not catch a controller with hardly any memory."""
    dense = ModelShape(48, 2048, 32, 4, 128, 768, 151936, tied=False)
    assert not replay_notes(config_of("R3", 8), A3B)
    assert not replay_notes(config_of("disabled", 512), A3B)
    assert not replay_notes(config_of("R3", 512), dense)
