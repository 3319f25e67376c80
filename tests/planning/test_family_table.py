"""The table of families against preflight: it refuses exactly where the table says no."""

from __future__ import annotations

import json
import sys

import pytest
from model_folders import write_model

from megatron_rl import cli
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.model.families import FAMILIES
from megatron_rl.planning.family_table import (
    CHAT_COLUMNS,
    COLUMNS,
    FamilyRow,
    family_rows,
    refused_rows,
    small_settings,
)
from megatron_rl.planning.preflight import preflight

AXES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
    "CP": "context_parallel_size",
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_preflight_refuses_where_the_table_says_no(architecture, config, tmp_path):
    """Each axis by itself, on six ranks, and generation with them; and adapters of attention. Would not
    catch a feature that is not a column."""
    family = FAMILIES[architecture]
    path = write_model(tmp_path / "family", **small_settings(family))
    shared = config.actor_rollout_ref
    shared.model.path = config.critic.model.path = path
    shared.rollout.tensor_model_parallel_size = 1
    lacks = FamilyRow.of(family).lacks
    for column, key in AXES.items():
        for role in (shared.actor, shared.ref, config.critic):
            role.megatron = MegatronConfig(sequence_parallel=column == "TP", **{key: 2})
        problems = preflight(config, config_only=True)
        assert all(any(name.endswith(key) for name in problem.settings) for problem in problems)
        assert bool(problems) == (column in lacks), (column, list(map(str, problems)))
    for role in (shared.actor, shared.ref, config.critic):
        role.megatron = MegatronConfig()
    shared.model.lora = LoraConfig(rank=8, target_modules=["linear_qkv", "linear_proj"], merge=True)
    assert preflight(config, config_only=True) == [] and lacks.keys() <= {*AXES, "images"}
    config.data.image_key = "images"
    blind = [str(problem) for problem in preflight(config, config_only=True) if "vision tower" in str(problem)]
    assert bool(blind) == ("images" in lacks)


def test_the_command_prints_a_row_for_each_family(monkeypatch, capsys):
    """As lines and as JSON, with what is refused. Would not catch a wrong word in a reason."""

    def printed(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["megatron-rl", "families", *options])
        with pytest.raises(SystemExit):
            cli.main()
        return capsys.readouterr().out

    lines, columns = printed().splitlines(), [*COLUMNS, *CHAT_COLUMNS]
    rows = [line.split() for line in lines if line.split()[0] in FAMILIES]
    assert [row[0] for row in rows] == sorted(FAMILIES) and all(len(row) == 1 + len(columns) for row in rows)
    assert lines[0].split() == columns
    cells = {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows}
    assert [cells["Qwen3ForCausalLM"][column] for column in CHAT_COLUMNS] == ["own", "<think>", "hermes"]
    assert [cells["Gemma2ForCausalLM"][column] for column in CHAT_COLUMNS] == ["append", "-", "-"]
    assert (cells["LlamaForCausalLM"]["EP"], cells["LlamaForCausalLM"]["CP"]) == ("no", "yes")
    assert (cells["DeepseekV3ForCausalLM"]["EP"], cells["DeepseekV3ForCausalLM"]["CP"]) == ("yes", "yes")
    assert (cells["Gemma4ForCausalLM"]["EP"], cells["Gemma4ForCausalLM"]["CP"]) == ("no", "yes")
    assert any(line.startswith("    Gemma3n* needs ") for line in lines)
    told = json.loads(printed("--json"))
    assert {name: row["EP"] is True for name, row in told["families"].items()} == {
        row.architecture: "EP" not in row.lacks for row in family_rows()
    }
    assert told["families"]["Glm4MoeForCausalLM"]["tools"] == ["glm47", "glm45"]
    assert [refusal["pattern"] for refusal in told["refused"]] == [refusal.pattern for refusal in refused_rows()]
