"""Steps that train the critic alone, and a run that is told its epochs."""

from __future__ import annotations

import pytest
from lives import LOCAL, SHORT, metrics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


def test_the_actor_waits_for_the_critic(command_line) -> None:
    """Steps before the third update the critic alone; steps and epochs, the smaller counts.

    Would not catch an actor that has moved without an update of its own.
    """
    keys = ("trainer.critic_warmup=3", "trainer.total_epochs=1", "trainer.total_training_steps=4")
    run = command_line(*SHORT, *LOCAL, *keys)
    assert run.wait(200) == 0, run.text()
    logged = metrics(run)
    assert list(logged) == [1, 2, 3, 4]
    assert all(step["critic/grad_norm"] > 0 for step in logged.values())
    assert [number for number, step in logged.items() if "actor/grad_norm" in step] == [3, 4]
