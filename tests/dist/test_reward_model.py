"""What a reward model may not be. That its scores are the classifier's of transformers, `tests/parity` has."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from tiny_models import run_config, save_llama

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]


def refusal(config) -> str:
    """What building says."""
    from megatron_rl.errors import ConfigError
    from megatron_rl.roles.host import RankHost

    try:
        RankHost(config).build("reward_model")
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_a_language_model_is_refused(tmp_path) -> None:
    """Instead of a head that is drawn, which a critic has. Preflight says so before."""
    path = save_llama(tmp_path)
    config = run_config(path, 1, 1, reward_model__enable=True, reward_model__model__path=path)
    [said] = run_ranks(1, refusal, config)
    assert "has no head that gives a score" in said
