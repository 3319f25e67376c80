"""What `trainer.preset` sets, by hand, and that no shipped configuration is refused for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.keys import is_key, value_of
from megatron_rl.config.load import read_run
from megatron_rl.config.presets import PRESETS, WITHOUT_SLICES
from megatron_rl.planning.checked_config import checked, planned_task
from megatron_rl.planning.feature_rows import FEATURES
from megatron_rl.planning.feature_table import partners
from megatron_rl.planning.preset_section import preset_section

REQUIRED = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m"]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ASYNC, OWN_REDUCE = f"{ROLLOUT}.async_scheduling", f"{ROLLOUT}.disable_custom_all_reduce"
DDP, OPTIONS = "megatron.override_ddp_config", "megatron.override_transformer_config"
CONFIGS = sorted([*Path("configs").glob("*.yaml"), *Path("configs/recipes").glob("*.yaml")])


@pytest.fixture
def read(tmp_path):
    (tmp_path / "run.yaml").write_text("{}\n")
    return lambda *overrides: read_run(tmp_path / "run.yaml", [*REQUIRED, *overrides]).config


def changed(read, *overrides: str, preset: str = "fast") -> dict[str, object]:
    """The keys of presets that one changes, with their new values."""
    before, after = read(*overrides), read(*overrides, f"trainer.preset={preset}")
    keys = dict.fromkeys(row.key for rows in PRESETS.values() for row in rows)
    return {key: value_of(after, key) for key in keys if value_of(after, key) != value_of(before, key)}


def test_fast_by_hand(read):
    """On GPUs, on CPUs, and where a user has a word. Would not catch a key that makes a run slow."""
    both = {
        f"{group}.{key}": True
        for group in (ACTOR, "critic")
        for key in (
            f"{DDP}.overlap_grad_reduce",
            f"{DDP}.overlap_param_gather",
            f"{OPTIONS}.gradient_accumulation_fusion",
        )
    }
    everywhere = {ASYNC: True, f"{ACTOR}.use_dynamic_bsz": True} | both
    tp = f"{ACTOR}.megatron.tensor_model_parallel_size=8"
    assert changed(read, tp) == everywhere | {OWN_REDUCE: False}  # transformer-engine is not installed where tests run
    assert changed(read) == changed(read, tp, "trainer.device=cpu") == everywhere
    assert changed(read, f"{ASYNC}=false", f"{ACTOR}.use_dynamic_bsz=false") == both
    one = f"{ACTOR}.{DDP}.overlap_grad_reduce"
    alone = {key: True for key in everywhere if not key.startswith(f"{ACTOR}.{DDP}")}
    assert changed(read, f"{one}=false") == alone
    assert read("trainer.preset=fast").critic.use_dynamic_bsz is True


def test_reproducible_by_hand(read):
    """What differs from defaults: no compiled code on GPUs, and a schedule without clocks. Would not catch a kernel
    with atomics.
    """
    schedule = {"async_training.deterministic": True}
    assert changed(read, preset="reproducible") == schedule | {f"{ROLLOUT}.enforce_eager": True}
    assert changed(read, "trainer.device=cpu", preset="reproducible") == schedule
    assert changed(read, f"{ROLLOUT}.min_replicas=1", f"{ROLLOUT}.enforce_eager=false", preset="reproducible") == {}


def test_the_table_is_whole():
    """Keys exist, no preset has one twice, and asynchronous scheduling is left out where the table of features refuses
    it. Would not catch a rule outside of that table.
    """
    for rows in PRESETS.values():
        keys = [row.key for row in rows]
        assert len(keys) == len(set(keys)) and all(map(is_key, keys)) and all(row.why for row in rows)
        assert all(is_key(key) for row in rows for key in row.only_at)
    refusing = [FEATURES[name] for name in partners(FEATURES["async_scheduling"])]
    turned_on = {(key, value) for row in refusing for key, value in row.turned_on_for().items()}
    turned_on.remove((f"{ROLLOUT}.expert_parallel_size", 2))  # it is refused with data_parallel_size alone
    assert {key for key, _ in turned_on} == WITHOUT_SLICES.keys()
    assert all(value not in WITHOUT_SLICES[key] for key, value in turned_on)


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_configuration_is_refused_for_a_preset(path, preset):
    """On both devices: the same violations as without. Would not catch what only files say."""
    for device in ("cpu", "cuda"):
        found = [
            [str(one) for one in checked(path, [f"trainer.device={device}", *more], without_files=True).violations]
            for more in ([], [f"trainer.preset={preset}"])
        ]
        assert found[0] == found[1]


def test_an_unknown_preset_is_refused():
    """In one sentence, with what there is. Would not catch a preset that is set by a number."""
    (one,) = checked(Path("configs/demo_cpu.yaml"), ["trainer.preset=quick"], without_files=True).violations
    assert str(one).startswith("trainer.preset=quick must be one of fast, reproducible")


def test_a_plan_says_what_was_set_and_left_out():
    """Of the 70B recipe and of a task that generates nothing. Would not catch a line that wraps badly."""
    recipe = checked(Path("configs/llama3_70b_ppo.yaml"), ["trainer.preset=fast"], without_files=True).config
    section = preset_section(recipe)
    preset = section.json["preset"]
    assert preset["sets"][OWN_REDUCE] is False and len(section.notes) == len(preset["sets"]) + 2
    assert preset["leaves_out"] == {
        f"{ACTOR}.ppo_max_token_len_per_gpu": "2048 is set",
        f"{ACTOR}.{OPTIONS}.transformer_impl": "transformer_engine must be installed",
    }
    assert f"preset fast without {ACTOR}.ppo_max_token_len_per_gpu=16384: 2048 is set" in section.notes
    sft = checked(
        Path("configs/demo_cpu.yaml"),
        ["trainer.preset=reproducible"],
        True,
        change=lambda read: planned_task(read, "sft"),
        task="sft",
    )
    assert all(key.startswith(f"{ACTOR}.") for key in preset_section(sft.config).json["preset"]["sets"])
    assert preset_section(checked(Path("configs/demo_cpu.yaml"), [], True).config).notes == ()
