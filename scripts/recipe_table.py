"""Put what large recipes cost, as `plan` says, into docs/reference/recipes.md and README.md.

    python scripts/recipe_table.py

Both tables have the rows of `recipe_row`; README has those of IN_README. tests/planning/test_recipes.py compares them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from marked_tables import with_tables

REPOSITORY = Path(__file__).parents[1]
CONFIGS = REPOSITORY / "configs"
RECIPES = sorted((CONFIGS / "recipes").glob("*.yaml")) + [
    CONFIGS / f"{name}.yaml" for name in ("llama3_70b_ppo", "qwen3_235b_a22b_gspo")
]
IN_README = (
    "qwen2.5_7b_lora_grpo",
    "qwen2.5_7b_grpo",
    "llama3_8b_ppo",
    "qwen3_30b_a3b_grpo",
    "llama3_70b_lora_grpo",
    "llama3_70b_ppo",
    "qwen3_235b_a22b_gspo",
)
HEADS = "| recipe | GPUs | fullest GPU | step | a step's samples |\n|---|---|---|---|---|"
TITLE = "planned costs"


def planned(recipe: Path) -> dict[str, Any]:
    """Return the plan of a recipe, from its model's config.json alone. Raises CalledProcessError if it does not fit."""
    command = [sys.executable, "-m", "megatron_rl", "plan", "--without-files", "--json", "--config", str(recipe)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    plan: dict[str, Any] = json.loads(done.stdout)["plan"]
    return plan


def recipe_row(recipe: Path, plan: dict[str, Any], folder: Path = REPOSITORY) -> str:
    """Return a row: file, GPUs, memory of the fullest one, seconds of a step, samples. folder: that of the page."""
    data = yaml.safe_load(recipe.read_text())["data"]
    up = "../" * len(folder.relative_to(REPOSITORY).parts)
    link = f"[{recipe.stem}]({up}{recipe.relative_to(REPOSITORY).as_posix()})"
    memory, seconds = plan["memory"]["peak_bytes"] / 1e9, plan["time"]["step_seconds"]
    longest = data["max_prompt_length"] + data["max_response_length"]
    samples = f"{plan['batch']['samples per step']} of up to {longest:,} tokens"
    return f"| {link} | {plan['batch']['ranks']} | {memory:.0f} GB | {seconds:.0f} s | {samples} |"


def main() -> None:
    """Plan all recipes, and write both tables."""
    plans = {recipe: planned(recipe) for recipe in RECIPES}
    for document, names in (("docs/reference/recipes.md", None), ("README.md", IN_README)):
        page = REPOSITORY / document
        rows = {recipe.stem: recipe_row(recipe, plan, page.parent) for recipe, plan in plans.items()}
        chosen = rows.values() if names is None else [rows[name] for name in names]
        page.write_text(with_tables(page.read_text(), {TITLE: "\n".join([HEADS, *chosen])}, "recipe_table.py"))


if __name__ == "__main__":
    main()
