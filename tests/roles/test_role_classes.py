"""Rows of roles against the classes that ranks build of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.role_kinds import KINDS
from megatron_rl.config.roles import roles_of
from megatron_rl.config.task_config import for_task
from megatron_rl.roles.role_classes import CLASSES

DEMO = Path(__file__).parents[2] / "configs" / "demo_cpu.yaml"
DISTILLATION = "distillation.distillation_loss.loss_mode"
TAUGHT = ("distillation.enabled=true", "distillation.teacher_models.large.model_path=m")
JUDGED = ("reward_model.enable=true", "reward_model.model.path=m")


def test_every_kind_has_a_class():
    """Rows and classes are of the same kinds. Would not catch a class of another kind."""
    assert CLASSES.keys() == KINDS.keys()


@pytest.mark.parametrize(
    ("task", "keys"),
    [
        ("ppo", JUDGED),
        *(("ppo", (*TAUGHT, f"{DISTILLATION}={loss}")) for loss in ("k1", "forward_kl_topk", "reverse_kl_topk", "jsd")),
        *((task, ("critic.model.path=m",)) for task in ("sft", "reward", "dpo")),
    ],
)
def test_methods_of_rows_are_those_of_the_class(task: str, keys: tuple[str, ...]):
    """Scores are timed as scores, updates as updates. Would not catch columns that a method does not read."""
    for role in roles_of(for_task(load_config(DEMO, keys), task)):
        for label, spec in (("score", role.score), ("update", role.update)):
            if spec is not None:
                method = getattr(CLASSES[role.kind.name], spec.call.method)
                assert method.remote_method.phase == label, role.name
