"""Log-probs of the reference: kept in a checkpoint, and given back for the same answers alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.data.reading import Example, Ranking
from megatron_rl.data.row_problems import RowPlace
from megatron_rl.errors import ConfigError
from megatron_rl.tasks.reference_log_probs import digest_of
from megatron_rl.tasks.stored_reference import FILE, StoredReference


def ranking(*answers: list[int]) -> Ranking:
    examples = [
        Example(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool), RowPlace("a", 0), 1) for ids in answers
    ]
    return Ranking(tuple(examples), (0.0,) * (len(answers) - 1), RowPlace("a", 0))


def test_what_was_stored_comes_back_for_the_same_answers(tmp_path: Path) -> None:
    """Prompts of two and three answers, picked out of order; other tokens, or the same in another order, are not
    taken. Would not catch weights that were another model's, which the checkpoint's identity tells."""
    records = [ranking([1, 2], [1, 3]), ranking([4, 5, 6], [4, 7], [4, 8])]
    stored = StoredReference(None)
    assert stored.write(tmp_path, 0) == []
    stored.put("train", [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0, -5.0])], digest_of(records))
    assert stored.write(tmp_path, 2) == [FILE]
    found = StoredReference(tmp_path)
    assert [one.tolist() for one in found.ragged("train", [1, 0]).unbind()] == [[-3.0, -4.0, -5.0], [-1.0, -2.0]]
    assert found.holds("train", digest_of(records))
    changed = [ranking([1, 2], [1, 9]), records[1]]
    assert not found.holds("train", digest_of(changed)) and not found.holds("train", digest_of(records[::-1]))
    assert not found.holds("val", digest_of(records))


def test_a_damaged_file_is_no_traceback(tmp_path: Path) -> None:
    """Would not catch numbers that were changed, which the checkpoint's checksums tell."""
    (tmp_path / FILE).write_bytes(b"torn")
    with pytest.raises(ConfigError, match="reference_log_probs.safetensors cannot be read"):
        StoredReference(tmp_path)
