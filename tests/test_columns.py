"""The table of columns, what a batch refuses, and that a pass gets what the table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl import cli
from megatron_rl.columns import COLUMNS, PASSES, Column, ColumnTable
from megatron_rl.config.declarations import READERS, estimator, policy_loss
from megatron_rl.records import Batch, ragged, ragged_from_lengths, row_lengths, single_turn

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5)


def printed(monkeypatch, capsys, *options: str) -> str:
    monkeypatch.setattr(sys, "argv", ["megatron-rl", "columns", *options])
    with pytest.raises(SystemExit):
        cli.main()
    return capsys.readouterr().out


def batch_of(rows: list[list[bool]]) -> Batch:
    """Rows with these masks, but for their first tokens; tokens and values count from 0."""
    masks = [torch.tensor([False, *row]) for row in rows]
    lengths = torch.tensor([len(mask) for mask in masks])
    counts = torch.tensor([int(mask.sum()) for mask in masks])
    return Batch(
        input_ids=ragged_from_lengths(torch.arange(int(lengths.sum())), lengths),
        sampled=ragged(masks),
        advantages=ragged_from_lengths(torch.arange(float(counts.sum())), counts),
        scores=torch.arange(float(len(rows))),
    )


def test_the_command_prints_every_column_with_its_readers(monkeypatch, capsys) -> None:
    """As lines and as JSON. Would not catch a reader in code that the table does not name."""
    lines = printed(monkeypatch, capsys).splitlines()
    assert [line.split(":")[0] for line in lines[::3]] == list(COLUMNS)
    values = lines.index(next(line for line in lines if line.startswith("old_values: float32, one per sampled token")))
    assert lines[values + 1 : values + 3] == [
        "    made by critic.values",
        "    read by critic.update, metrics, estimator gae",
    ]
    told = {column["name"]: column for column in json.loads(printed(monkeypatch, capsys, "--json"))["columns"]}
    assert list(told) == list(COLUMNS)
    assert told["labels"]["readers"] == ["preference loss kto"] and told["labels"]["shape"] == "answer"
    assert told["rollout_weights"]["readers"][-1] == "policy loss geo_mean"
    assert told["greedy_scores"]["readers"] == ["estimator remax"] and told["greedy_scores"]["shape"] == "row"


def test_the_table_needs_no_torch() -> None:
    """The command's module, too. Would not catch what a later command imports."""
    check = "import sys, megatron_rl.columns, megatron_rl.cli.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parents[1], check=False).returncode == 0


def test_what_functions_read_is_made_by_somebody() -> None:
    """Their columns are declared, and a misspelt one is refused where it is declared, with the nearest name."""
    for functions in READERS.values():
        for name, entry in functions.items():
            assert all(COLUMNS[column].maker for column in entry.traits.reads), name
    for declare in (estimator, policy_loss):
        with pytest.raises(ValueError, match="no column old_value is declared; did you mean: old_values"):
            declare("own", reads=("old_value",))


def test_a_user_declares_a_column_of_their_own() -> None:
    """Once; another one of that name is refused. Would not catch two processes that declare different ones."""
    table, mine = (
        ColumnTable(),
        Column("teacher", "sampled token", "float32", "my scorer", (), "the teacher's log-prob"),
    )
    assert table.declare(mine) == table.declare(mine) == table["teacher"]
    with pytest.raises(ValueError, match="a column teacher is declared already: the teacher's log-prob"):
        table.declare(Column("teacher", "row", "float32", "another", (), ""))


def test_what_a_batch_refuses() -> None:
    """A missing column, names, numbers of rows and of tokens, a sampled first token. Would not catch a wrong dtype."""
    batch = batch_of([[True, False, True], [False]])
    for name, column, message in (
        ("advantage", torch.zeros(2), "no column advantage is declared; did you mean: advantages"),
        ("scores", torch.zeros(3), "column scores has 3 rows, the batch 2"),
        ("returns", ragged([torch.zeros(3), torch.zeros(1)]), r"returns .* \[2, 0\] in its rows; it has \[3, 1\]"),
        ("sampled", ragged([torch.ones(2).bool()] * 2), "the first token of a row cannot be sampled"),
    ):
        with pytest.raises(ValueError, match=message):
            batch[:].add(**{name: column})
    with pytest.raises(ValueError, match="column ref_log_probs is needed before it was made, by: reference.log_probs"):
        batch["ref_log_probs"]
    assert batch.get("ref_log_probs") is None and "ref_log_probs" not in batch


@settings(max_examples=40, deadline=None)
@given(rows=masks, data=st.data())
def test_rows_keep_their_sampled_tokens(rows, data) -> None:
    """Chosen, sliced and joined in any order: masks, tokens and values of each row. Would not catch a lost column."""
    batch = batch_of(rows)
    expected = {name: [row.tolist() for row in batch[name].unbind()] for name in ("input_ids", "sampled", "advantages")}
    assert batch.num_sampled.tolist() == [sum(row) for row in rows]
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    start = data.draw(st.integers(0, len(rows) - 1))
    parts = Batch.joined([batch[torch.tensor(chosen)], batch[start:]])
    numbers = [*chosen, *range(start, len(rows))]
    assert parts["scores"].tolist() == numbers and parts.names == batch.names
    for name, of_rows in expected.items():
        assert [row.tolist() for row in parts[name].unbind()] == [of_rows[number] for number in numbers]
    neutral = parts.neutral()
    assert not neutral.num_sampled.any() and neutral.flat("advantages").numel() == 0
    assert row_lengths(neutral["input_ids"]).tolist() == row_lengths(parts["input_ids"]).tolist()


def test_a_single_turn_is_sampled_at_its_end() -> None:
    """By hand, an empty answer too. Would not catch a prompt of several turns."""
    rows = single_turn(ragged([torch.tensor([1, 2, 3]), torch.tensor([4])]), torch.tensor([2, 0]))
    assert [row.tolist() for row in rows["sampled"].unbind()] == [[False, True, True], [False]]


@pytest.mark.parametrize("reader", PASSES)
def test_a_pass_reads_tokens_and_their_mask(reader: str) -> None:
    """Whatever else it reads. Would not catch a role that reads a column which it does not declare."""
    batch = batch_of([[True, False, True], [False]])
    read = batch.read_by(reader)
    assert {"input_ids", "sampled"} <= set(read.names) and "scores" not in read
    assert ("advantages" in read) == (reader == "actor.update")
