"""The configurations that come with the package."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from model_folders import problems
from recipe_table import IN_README, recipe_row
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.config.load import load_config

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted((REPOSITORY / "configs").glob("*_cpu.yaml"))
STAGES_FOLDER = REPOSITORY / "configs/stages"
AGENTS = sorted((REPOSITORY / "configs/agents").glob("*.yaml"))
NEEDS = {"real_cpu": ("assets/real/real.json", "python scripts/make_real_model.py")}
NEEDS["images_cpu"] = ("assets/images/assets.json", "make demo-image")
NEEDS |= {path.stem: (f"assets/{path.stem}/assets.json", "make demo-agent") for path in AGENTS}
LARGE = sorted((REPOSITORY / "configs/recipes").glob("*.yaml"))
LARGE += [REPOSITORY / f"configs/{name}.yaml" for name in ("llama3_70b_ppo", "qwen3_235b_a22b_gspo")]
STAGE_RECIPES = sorted(set(STAGES_FOLDER.glob("*.yaml")) - set(STAGES_FOLDER.glob("*_cpu.yaml")))
NUM_GPUS = {
    **dict.fromkeys(("llama3_8b_grpo", "llama3_8b_ppo", "qwen2.5_7b_grpo", "qwen2.5_7b_ppo"), 8),
    "qwen2.5_7b_lora_grpo": 1,
    "llama3_70b_lora_grpo": 8,
    "qwen3_30b_a3b_grpo": 16,
    "qwen3_30b_a3b_128k_grpo": 32,
    "qwen3_235b_a22b_gspo": 64,
    "qwen3_32b_grpo": 32,
    "gpt_oss_20b_grpo": 8,
    "qwen3.5_35b_a3b_grpo": 16,
    "qwen3.5_35b_a3b_geo3k_grpo": 16,
    "qwen3_vl_8b_geo3k_grpo": 8,
    "llama3_70b_ppo": 64,
    "llama3_70b_distill": 72,
    "deepseek_v3_grpo": 256,
    "kimi_k2_grpo": 512,
}


@pytest.mark.parametrize("recipe", [*RECIPES, *AGENTS], ids=lambda path: path.stem)
def test_recipes_can_start(recipe, monkeypatch, tmp_path):
    """Every key and rule, on the demo's assets. Would not catch a recipe that does not learn."""
    needed, made_by = NEEDS.get(recipe.stem, ("assets/demo/assets.json", "git checkout -- assets/demo"))
    if not (REPOSITORY / needed).exists():
        pytest.skip(f"{needed} is missing: run `{made_by}`")
    monkeypatch.chdir(REPOSITORY)
    # The demo's teacher is what `make demo` leaves.
    teacher = "distillation.teacher_models.carrier.model_path=assets/demo/model"
    given = [teacher] if recipe.stem == "distill_cpu" else []
    assert problems(load_config(recipe, [f"trainer.default_local_dir={tmp_path}", *given])) == []


def test_there_is_one_for_each_algorithm_and_one_with_pools():
    """Would not catch two that are the same."""
    expected = {
        "demo",
        "distill",
        "lora",
        "real",
        "split",
        "async",
        "grpo",
        "rloo",
        "remax",
        "reinforce_pp",
        "gspo",
        "dapo",
        "images",
    }
    assert {path.stem.removesuffix("_cpu") for path in RECIPES} == expected


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, marks=[] if path != LARGE[-1] else pytest.mark.exhaustive, id=path.stem) for path in LARGE],
)
def test_large_recipes_fit_their_gpus(recipe, monkeypatch):
    """As `plan --without-files` says for H100s of 80 GB. Would not catch what the memory plan forgets."""
    monkeypatch.chdir(REPOSITORY)
    ran = CliRunner().invoke(app, ["plan", "--without-files", "--json", "--config", str(recipe)])
    assert ran.exit_code == 0, ran.output
    answer = json.loads(ran.stdout)
    assert answer["valid"] and answer["violations"] == []
    assert answer["plan"]["memory"]["fits"], answer["plan"]["memory"]["peak_bytes"]
    assert answer["plan"]["batch"]["ranks"] == str(NUM_GPUS[recipe.stem])
    page = REPOSITORY / "docs/reference/recipes.md"
    assert recipe_row(recipe, answer["plan"], page.parent) in page.read_text(), "run python scripts/recipe_table.py"


def test_costs_in_readme_are_those_of_the_page():
    """Would not catch a recipe that README should have."""
    page, readme = ((REPOSITORY / name).read_text() for name in ("docs/reference/recipes.md", "README.md"))
    rows = [line for line in readme.splitlines() if line.startswith("| [") and "(configs/" in line]
    assert len(rows) == len(IN_README)
    assert all(row.replace("(configs/", "(../../configs/") in page for row in rows)


@pytest.mark.parametrize("recipe", STAGE_RECIPES, ids=lambda path: path.stem)
def test_large_stages_fit_their_gpus(recipe, monkeypatch):
    """As `plan --without-files` says for H100s of 80 GB, and as docs/train/sft_reward_dpo.md prints it: ranks, memory,
    seconds. Would not catch what the memory plan forgets, nor a sixth more or less of the seconds."""
    monkeypatch.chdir(REPOSITORY)
    page = (REPOSITORY / "docs/train/sft_reward_dpo.md").read_text()
    row = next(line for line in page.splitlines() if f"{recipe.name})" in line)
    ran = CliRunner().invoke(app, ["plan", "--without-files", "--json", "--config", str(recipe)])
    assert ran.exit_code == 0, ran.output
    answer = json.loads(ran.stdout)
    assert answer["valid"] and answer["differs_from_verl"] == {}
    plan = answer["plan"]
    assert plan["memory"]["fits"], plan["memory"]["changes"]
    nodes, per_node, peak, seconds, tokens = (
        float(re.search(pattern, row)[1])
        for pattern in (r"\| (\d+) x \d+ ", r"\d x (\d+) ", r"([\d.]+) GB", r"([\d.]+) s ", r"at (\d+) tokens")
    )
    assert plan["batch"]["ranks"] == str(int(nodes * per_node))
    assert plan["memory"]["peak_bytes"] / 1e9 == pytest.approx(peak, abs=0.06)
    assert plan["time"]["step_seconds"] == pytest.approx(seconds, rel=1 / 6)
    assert plan["time"]["mean_length"] == tokens


def test_there_is_a_large_one_for_each_stage():
    """Would not catch two that are the same."""
    assert {path.stem.rpartition("_")[2] for path in STAGE_RECIPES} == {"sft", "reward", "dpo"}
