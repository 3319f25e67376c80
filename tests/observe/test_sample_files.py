"""The files of recorded samples: what was written is read, bit for bit, and nothing else is taken for it."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.observe.sample_files import (
    RecordedStep,
    drop_later,
    num_recorded,
    read_step,
    recorded_files,
    write_step,
)

ROWS = [{"output": "\ud83d half of a pair", "tokens": ["a", "b"]}, {"output": "</script>", "tokens": ["c"]}]


def two_rows(step: int) -> RecordedStep:
    columns = {
        "input_ids": np.array([5, 6, 7]),
        "old_log_probs": np.array([-0.1, np.nan], np.float32),
        "scores": np.array([1, 0], np.float32),
    }
    lengths = {"input_ids": np.array([2, 1]), "old_log_probs": np.array([1, 1])}
    return RecordedStep(step, 7, columns, lengths, ROWS, {"loss": 0.5})


def test_a_step_is_read_as_it_was_written(tmp_path):
    """Also what UTF-8 does not have. Would not catch a type of numbers that safetensors has and numpy has not."""
    file = write_step(tmp_path, two_rows(3))
    read, written = read_step(file), two_rows(3)
    assert (read.step, read.num_rows, read.rows, read.totals, read.is_whole) == (3, 7, ROWS, {"loss": 0.5}, False)
    assert read.columns.keys() == written.columns.keys() and read.lengths.keys() == written.lengths.keys()
    for name, values in written.columns.items():
        assert read.columns[name].dtype == values.dtype and read.columns[name].tobytes() == values.tobytes()
    assert read.of("input_ids", 0).tolist() == [5, 6] and read.of("input_ids", 1).tolist() == [7]
    assert read.of("scores", 1).item() == 0.0 and read.of("entropy", 0) is None
    assert num_recorded(file) == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 64])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "1.safetensors").write_bytes(content)
    for read in (read_step, num_recorded):
        with pytest.raises(ConfigError, match=r"1\.safetensors cannot be read as the samples of a step"):
            read(tmp_path / "1.safetensors")


def test_steps_that_are_taken_again_are_dropped(tmp_path):
    """In the order of numbers, not of names. Would not catch a kill between two of them."""
    for step in (2, 10, 9):
        write_step(tmp_path / "samples", two_rows(step))
    (tmp_path / "samples/notes.safetensors").touch()
    assert [*recorded_files(tmp_path)] == [2, 9, 10]
    drop_later(tmp_path, 9)
    assert [*recorded_files(tmp_path)] == [2, 9] and (tmp_path / "samples/notes.safetensors").exists()
