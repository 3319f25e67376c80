"""The table: each row compares what a model gives in one layout with one process, or with transformers.

A new proof of this kind is a row. `updates.py` says why no number can depend on the layout; observations say what they
would not catch.
"""

from __future__ import annotations

import pytest
from context_rows import CONTEXT
from dense_rows import DENSE
from distillation_rows import DISTILLED
from expert_rows import EXPERTS
from family_rows import FAMILIES
from folder_rows import FOLDERS
from fp8_rows import FP8_TRAINING
from image_rows import IMAGE_TASKS, IMAGES
from replay_rows import REPLAYED
from resumed_rows import RESUMED
from reward_rows import REWARDED
from scenarios import Observation, Runs, Scenario
from task_rows import TASKS
from transition_rows import TRANSITIONS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

TABLE = (
    *DENSE,
    *EXPERTS,
    *FAMILIES,
    *CONTEXT,
    *FP8_TRAINING,
    *TASKS,
    *REPLAYED,
    *RESUMED,
    *FOLDERS,
    *REWARDED,
    *TRANSITIONS,
    *DISTILLED,
    *IMAGES,
    *IMAGE_TASKS,
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("scenario", "observation"), [row.parameter for row in TABLE])
def test_row(scenario: Scenario, observation: Observation, runs: Runs, tmp_path) -> None:
    observation.check(scenario, runs, tmp_path)


def test_rows_have_names_of_their_own() -> None:
    """Would not catch two rows that run the same under two names."""
    names = [row.parameter.id for row in TABLE]
    assert sorted(set(names)) == sorted(names)
