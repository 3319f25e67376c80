"""The configurations that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_folders import problems

from megatron_rl.config.load import load_config

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted((REPOSITORY / "configs").glob("*_cpu.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_can_start(recipe, monkeypatch, tmp_path):
    """Every key and rule, on the demo's assets. Would not catch a recipe that does not learn."""
    if not (REPOSITORY / "assets/demo/assets.json").exists():
        pytest.skip("the demo assets are missing: run `make assets`")
    monkeypatch.chdir(REPOSITORY)
    assert problems(load_config(recipe, [f"trainer.default_local_dir={tmp_path}"])) == []


def test_there_is_one_for_each_algorithm_and_one_with_pools():
    """Would not catch two that are the same."""
    expected = {"demo", "split", "grpo", "rloo", "remax", "reinforce_pp", "gspo", "dapo"}
    assert {path.stem.removesuffix("_cpu") for path in RECIPES} == expected
