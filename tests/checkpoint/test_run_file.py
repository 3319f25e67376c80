"""run.json, damaged or changed by hand."""

from __future__ import annotations

import json

import pytest

from megatron_rl.checkpoint.run_file import read_run_file, reading
from megatron_rl.errors import ConfigError

GOOD = {"run": {"step": 3}, "roles": {"actor": {"num_updates": 6, "adam_step": 6}}, "config": {"trainer": {}}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"run": ', "JSONDecodeError"),
        ("[]", "TypeError"),
        ("[" * 100_000, "RecursionError"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        ({"config": None}, "must be objects in braces"),
        ({"run": []}, "must be objects in braces"),
        ({"roles": {"actor": {"num_updates": 6}}}, "the numbers of the actor are {'num_updates': 6}"),
        ({"roles": {"actor": {"num_updates": 6, "adam_step": "6"}}}, "the numbers of the actor are"),
        ({"roles": {"actor": {"num_updates": 6, "adam_step": 6, "scale": 1}}}, "the numbers of the actor are"),
        ({"roles": {"actor": None}}, "AttributeError"),
    ],
)
def test_damaged_files_are_explained(tmp_path, content, said):
    """With the file and a way out. Would not catch a wrong number of the right type."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps(GOOD))
    assert read_run_file(file) == GOOD
    if isinstance(content, dict):
        content = json.dumps(GOOD | content)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        read_run_file(file)
    assert str(error.value).startswith(f"{file} does not have the form that a run writes: ") and said in str(
        error.value
    )
    assert "trainer.resume_mode=disable" in str(error.value)


def test_a_missing_file_and_a_missing_value(tmp_path):
    """Would not catch a value that nobody reads."""
    with pytest.raises(ConfigError, match=r"run\.json cannot be read: No such file"):
        read_run_file(tmp_path / "run.json")
    with pytest.raises(ConfigError, match="KeyError: 'cursor'"), reading(tmp_path / "run.json"):
        {}["cursor"]
