"""Estimators and losses by name, from a file of the user's too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.config.algorithm_keys import AlgorithmConfig, UserFileConfig
from megatron_rl.config.declarations import ESTIMATORS, POLICY_LOSSES
from megatron_rl.config.schema import ActorConfig, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.losses import policy
from megatron_rl.losses.estimators import Samples, load_estimator
from megatron_rl.losses.group_advantages import estimate_grpo

OWN = """
from dataclasses import dataclass, replace
import torch
from megatron_rl.losses.policy import vanilla_loss

@dataclass
class Scale:
    factor: float = 2.0

def raw(samples, config):
    return samples.rewards * Scale().factor, samples.rewards

def doubled(tokens, config):
    terms = vanilla_loss(tokens, config)
    return replace(terms, loss=2 * terms.loss)

def too_few(tokens):
    return None
"""


@pytest.fixture
def own(tmp_path: Path) -> UserFileConfig:
    (tmp_path / "own.py").write_text(OWN)
    return UserFileConfig(str(tmp_path / "own.py"))


def actor(loss_mode: str, custom: UserFileConfig | None = None) -> ActorConfig:
    return ActorConfig(
        clip_ratio_low=0.2, clip_ratio_high=0.2, policy_loss=PolicyLossConfig(loss_mode, custom or UserFileConfig())
    )


def test_names_and_aliases_are_the_functions():
    """Would not catch a name under which a wrong formula is declared; tests of each formula do."""
    for name in ("grpo", "grpo_vectorized"):
        assert load_estimator(AlgorithmConfig(adv_estimator=name)) is estimate_grpo
    for name in ("gspo", "gspo_token"):
        assert policy.load_policy_loss(actor(name)) is policy.gspo_loss
    assert ESTIMATORS["rloo"] is ESTIMATORS["rloo_vectorized"] and POLICY_LOSSES["bypass_mode"].names[0] == "vanilla"


def test_functions_of_the_users(own):
    """An estimator and a loss from one file. Would not catch a file that workers cannot read."""
    estimate = load_estimator(AlgorithmConfig(adv_estimator="raw", custom_adv_estimator=own))
    samples = Samples(torch.tensor([1.0, 2.0]), torch.tensor([2]), torch.tensor([0]), torch.tensor([3.0]))
    assert estimate(samples, AlgorithmConfig())[0].tolist() == [2.0, 4.0]
    config = actor("doubled", own)
    tokens = policy.PolicyTokens(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.tensor([1]))
    assert policy.load_policy_loss(config)(tokens, config).loss.tolist() == [-2.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("absent", "must define the function absent; it defines raw, doubled"),
        ("too_few", "must be callable as too_few("),
    ],
)
def test_functions_that_do_not_fit(own, name, expected):
    """Would not catch an answer of a wrong shape."""
    with pytest.raises(ConfigError) as error:
        policy.load_policy_loss(actor(name, own))
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise KeyError('here')", "KeyError: 'here'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("class Mute(Exception):\n    def __str__(self): raise self\nraise Mute()", "Mute, which cannot be shown"),
    ],
)
def test_a_file_that_fails_to_run(tmp_path, text, message):
    """Would not catch a file that never ends."""
    (tmp_path / "own.py").write_text(f"def mine(samples, config): ...\n{text}\n")
    custom = UserFileConfig(str(tmp_path / "own.py"))
    with pytest.raises(ConfigError, match=f"fails to run: {message}"):
        load_estimator(AlgorithmConfig(adv_estimator="mine", custom_adv_estimator=custom))


def test_the_configured_clips_reach_the_loss():
    """Asymmetric ranges and c. Would not catch keys that the workers do not get."""
    config = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0)
    log_probs = torch.tensor([1.4, 0.5, 4.0]).log()
    tokens = policy.PolicyTokens(log_probs, torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]), torch.tensor([3]))
    assert policy.vanilla_loss(tokens, config).loss.tolist() == pytest.approx([-1.3, 0.9, 2.0])
    assert policy.gspo_loss(tokens, config).loss.tolist() == pytest.approx([-1.3, 2.8 ** (1 / 3), 2.8 ** (1 / 3)])
