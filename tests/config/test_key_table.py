"""The table of all keys, from which the reference is generated: nothing is missing, and verl's keys are verl's."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_rl.config.key_table import OUR_KEY, VERLS_KEY, key_table
from megatron_rl.config.keys import LEAVES, NAMED_GROUPS
from megatron_rl.config.verl_compat.default_differences import verl_defaults

ROWS = {row.key: row for row in key_table()}
SCRIPTS = Path(__file__).parents[1] / "port" / "verl_scripts"


def test_every_key_has_a_row_with_a_sentence():
    """Would not catch a text that is wrong."""
    assert ROWS.keys() == LEAVES.keys() | {f"{top}.NAME.{key}" for top, keys in NAMED_GROUPS.items() for key in keys}
    assert [row.key for row in ROWS.values() if not re.fullmatch(r".{12,}\.", row.text)] == []


def test_rows_say_type_default_and_whose():
    """Five rows by hand: bounds with another value, choices, a followed key, a mandatory one, one the user names."""
    assert [(row.type, row.default, row.whose) for row in map(ROWS.__getitem__, ROW_KEYS)] == [
        ("integer >= 1 or -1 (all tokens)", "-1", VERLS_KEY),
        ("held_out | running or null", "null", OUR_KEY),
        ("number > 0", "as actor_rollout_ref.actor.clip_ratio", VERLS_KEY),
        ("path or list of paths", "", VERLS_KEY),
        ("integer >= 1 and <= 100000", "1", OUR_KEY),
    ]
    critics = ROWS["critic.megatron.pipeline_model_parallel_size"]
    assert critics.same_as == "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size"


ROW_KEYS = (
    "actor_rollout_ref.rollout.top_k",
    "reward_model.normalize_reward",
    "actor_rollout_ref.actor.clip_ratio_low",
    "data.train_files",
    "pools.NAME.nnodes",
)


def test_no_key_that_a_script_of_verl_sets_is_ours():
    """Nor one whose default verl has otherwise. Would not catch a key that no script sets."""
    given = {line.lstrip("+~").partition("=")[0] for file in SCRIPTS.rglob("*.args") for line in file.open()}
    theirs = (given | {default.key for default in verl_defaults()}) & ROWS.keys()
    assert len(theirs) > 100 and {ROWS[key].whose for key in theirs} == {VERLS_KEY}
