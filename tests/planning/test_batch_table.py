"""The layout and batch table, against arithmetic done by hand."""

from __future__ import annotations

import pytest

from megatron_rl.config.megatron import OverrideTransformerConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompt_mixture import MixtureCursor, PromptFile
from megatron_rl.experience.batches import mini_batch_rows
from megatron_rl.planning.batch_arithmetic import batch_rows, repeat_notes


def make_config(ranks: int, tp: int, pp: int, rollout_tp: int, prompts: int, n: int, mini: int, micro: int = 16):
    config = RunConfig()
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 1, ranks
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    actor.megatron.tensor_model_parallel_size, actor.megatron.pipeline_model_parallel_size = tp, pp
    actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu = mini, micro
    rollout.tensor_model_parallel_size, rollout.n = rollout_tp, n
    config.data.train_batch_size = prompts
    rollout.pool = actor.pool
    return config


def values(config: RunConfig) -> dict[str, str]:
    return {name: value for name, value, _ in batch_rows(config)}


def test_sixty_prompts_on_six_ranks():
    """3 replicas x 20 prompts x 12 = 720; mini-batch 60 -> 720 -> 120 per rank. Would not catch a wrong meaning."""
    assert values(make_config(ranks=6, tp=1, pp=1, rollout_tp=2, prompts=60, n=12, mini=60)) == {
        "ranks": "6",
        "TP": "1",
        "PP": "1",
        "DP": "6",
        "rollout TP": "2",
        "rollout replicas": "3",
        "prompts per step": "60",
        "samples per step": "720",
        "prompts per replica": "20",
        "samples per replica": "240",
        "mini-batches per epoch": "1",
        "epochs per step": "1",
        "samples per mini-batch": "720",
        "samples per DP rank": "120",
        "micro-batches per rank": "8",
    }


def test_recomputing_roles_are_shown():
    """The critic alone. Would not catch a role that does not do what the table says; `test_recompute.py` does."""
    config = make_config(ranks=6, tp=1, pp=1, rollout_tp=2, prompts=60, n=12, mini=60)
    config.critic.megatron.override_transformer_config = OverrideTransformerConfig("full", "block", 2)
    shown = {name: value for name, value in values(config).items() if "recomputes" in name}
    assert shown == {"critic recomputes": "block 2"}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # (ranks, tp, pp, rollout tp), (dp, replicas, samples per replica, samples per DP rank, micro-batches)
        ((8, 2, 2, 2), ("2", "4", "16", "16", "1")),
        ((8, 1, 1, 1), ("8", "8", "8", "4", "1")),
        ((6, 1, 1, 1), ("6", "6", "10 to 11", "5 to 6", "1")),
        ((1, 1, 1, 1), ("1", "1", "64", "32", "2")),
    ],
)
def test_layouts(layout, expected):
    """16 prompts x 4, mini-batch 8. Would not catch a split the workers do differently from this table."""
    ranks, tp, pp, rollout_tp = layout
    table = values(make_config(ranks, tp, pp, rollout_tp, prompts=16, n=4, mini=8))
    names = ("DP", "rollout replicas", "samples per replica", "samples per DP rank", "micro-batches per rank")
    assert tuple(table[name] for name in names) == expected


@pytest.mark.parametrize(
    ("mini", "expected"),
    [
        (25, ("3", "300", "50", "4")),  # 25, 25 and 10 prompts
        (60, ("1", "720", "120", "8")),
        (64, ("1", "720", "120", "8")),  # more than there are
        (7, ("9", "84", "14", "1")),
    ],
)
def test_a_smaller_last_mini_batch(mini, expected):
    """Of 60 prompts x 12 on 6 ranks, passes of 16. Would not catch a run that counts otherwise; the loop's tests do."""
    config = make_config(ranks=6, tp=1, pp=1, rollout_tp=2, prompts=60, n=12, mini=mini)
    table = values(config)
    names = ("mini-batches per epoch", "samples per mini-batch", "samples per DP rank", "micro-batches per rank")
    assert tuple(table[name] for name in names) == expected
    rows = [len(batch) for batch in mini_batch_rows(60 * 12, mini * 12, 1, seed=None)]
    assert (str(len(rows)), str(rows[0])) == expected[:2]
    notes = {name: note for name, _, note in batch_rows(config)}
    assert ("the last of 10 prompts" in notes["mini-batches per epoch"]) == (mini == 25)


def test_broken_layouts_leave_gaps():
    """Never an exception. Would not catch a gap in the wrong row."""
    table = values(make_config(ranks=4, tp=2, pp=3, rollout_tp=0, prompts=16, n=0, mini=0, micro=0))
    gaps = {name for name, value in table.items() if value == "-"}
    assert gaps == {
        "DP",
        "rollout replicas",
        "prompts per replica",
        "samples per replica",
        "mini-batches per epoch",
        "samples per DP rank",
        "micro-batches per rank",
    }


def test_virtual_pipeline_fills_up_micro_batches():
    """64 samples are 4 micro-batches of 16 or 3 of 24, which PP2 in chunks makes 4. Would not catch what they cost."""
    for micro, vpp, expected in ((16, 2, "4"), (24, 2, "4"), (24, None, "3"), (24, 1, "3")):
        config = make_config(ranks=2, tp=1, pp=2, rollout_tp=1, prompts=16, n=4, mini=16, micro=micro)
        config.actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size = vpp
        assert values(config)["micro-batches per rank"] == expected


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(1024, "up to 16"), (2047, "up to 16"), (4096, "up to 4"), (8, "-")]
)
def test_micro_batches_by_tokens(max_tokens, expected):
    """16 samples per rank of up to 1024 tokens. Would not catch a limit that the packs do not keep."""
    config = make_config(ranks=4, tp=1, pp=1, rollout_tp=1, prompts=16, n=4, mini=16)
    config.data.max_prompt_length = config.data.max_response_length = 512
    config.actor_rollout_ref.actor.use_dynamic_bsz = True
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = max_tokens
    assert values(config)["micro-batches per rank"] == expected


@pytest.mark.parametrize(
    ("sizes", "weights", "expected"),
    [
        ([3], None, ["data.train_files has 3 prompts, and a batch takes 16 of it: each occurs 5.33 times"]),
        ([3, 12], None, ["data.train_files has 15 prompts"]),
        ([3, 13], None, []),
        ([3, 1000], [1.0, 3.0], ["a.parquet has 3 prompts, and a batch takes 4 of it: each occurs 1.33 times"]),
        ([4, 1000], [1.0, 3.0], []),
        ([3, 11], [1.0, 3.0], ["a.parquet has 3", "b.parquet has 11 prompts, and a batch takes 12"]),
    ],
)
def test_prompts_that_come_twice_in_a_batch(sizes, weights, expected):
    """All files together, or each with its share. Would not catch a prompt that is in two files."""
    data = RunConfig().data
    data.train_files = ["a.parquet", "b.parquet"][: len(sizes)]
    data.gen_batch_size, data.train_file_weights = 16, weights
    notes = repeat_notes(data, sizes)
    assert len(notes) == len(expected) and all(part in note for part, note in zip(expected, notes, strict=True))
    cursor = MixtureCursor(
        [PromptFile(path, size, {}) for path, size in zip(data.train_files, sizes, strict=True)], weights, 16, True, 0
    )
    assert any(len(set(cursor.next_indices())) < 16 for _ in range(20)) >= bool(notes)
